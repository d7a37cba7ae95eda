"""The kinds of panels that the boards are made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders.bargauge import Panel as BarGauge
from grafana_foundation_sdk.builders.common import (
    LineStyle,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, FieldColor, ThresholdsConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.statetimeline import Panel as StateTimeline
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.colours import BAD, BY_LAST_CHARACTER, GOOD, VERMILLION
from dashboards.variables import PROMETHEUS, datasource, variable

POD_LINK = "/d/fgpu-pod?${cluster:queryparam}&var-namespace=${__data.fields.Namespace}&var-pod=${__data.fields.Pod}&${__url_time_range}"
POD_SERIES_LINK = (
    "/d/fgpu-pod?${cluster:queryparam}&var-namespace=${__field.labels.namespace}&var-pod=${__field.labels.pod}&${__url_time_range}"
)
NODE_LINK = "/d/fgpu-node?${cluster:queryparam}&var-node=${__data.fields.Node}&${__url_time_range}"

OFF_AND_ON = ("0", "1")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: a label, or the value of one of the table's queries."""

    title: str
    label: str = ""
    expr: str = ""
    unit: str = "none"
    thresholds: tuple[tuple[float | None, str], ...] = ()
    bar: bool = False
    words: tuple[str, str] | None = None
    """What stands for 0 and 1."""


def board(title: str, uid: str, description: str, variables: Iterable[str]) -> Dashboard:
    """Answer an empty board with its variables and the links to the others, which keep the variables and the time."""
    built = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["fgpu", "gpu"])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(datasource())
        .link(
            DashboardLink("Shared GPUs")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["fgpu"])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    for name in variables:
        built.with_variable(variable(name))
    return built


def steps(*pairs: tuple[float | None, str]) -> ThresholdsConfig:
    """Answer thresholds; the first pair is of None and the colour below all others."""
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([Threshold(value=value, color=colour) for value, colour in pairs])


NEUTRAL = ((None, GOOD),)
NONE_IS_GOOD = ((None, GOOD), (1, BAD))


def stat(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "none",
    thresholds: Sequence[tuple[float | None, str]] = NEUTRAL,
    width: int = 4,
) -> Stat:
    """Answer one number and its colour."""
    return (
        Stat()
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .no_value("unknown")
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .thresholds(steps(*thresholds))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
        .height(4)
        .span(width)
        .with_target(_target("A", Query(expr), instant=True))
    )


def graph(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    stacked: bool = False,
    fixed: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    width: int = 12,
) -> TimeSeries:
    """Answer series over time. `fixed` gives colours by what a name matches, `dashed` are lines that are no part of a stack."""
    panel = (
        TimeSeries()
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .min(0)
        .no_value("no data")
        .line_width(1)
        .fill_opacity(55 if stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(span_nulls=False)
        .stacking(StackingConfig().mode(StackingMode.NORMAL if stacked else StackingMode.NONE).group("A"))
        .color_scheme(FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .data_links([DashboardLink("Team and pod").url(POD_SERIES_LINK)] if any("{{pod}}" in query.legend for query in queries) else [])
        .height(9)
        .span(width)
    )
    for pattern, colour in BY_LAST_CHARACTER.items():
        panel.override_by_regexp(f"/{pattern}( \\(.*\\))?$/", [_colour(colour)])
    for pattern, colour in (fixed or {}).items():
        panel.override_by_regexp(f"/{pattern}/", [_colour(colour)])
    for pattern in dashed:
        panel.override_by_regexp(
            f"/{pattern}/",
            [
                DynamicConfigValue(id_val="custom.stacking", value={"group": "B", "mode": "none"}),
                DynamicConfigValue(id_val="custom.lineStyle", value=LineStyle().fill("dash").dash([10, 6]).build().to_json()),
                DynamicConfigValue(id_val="custom.lineWidth", value=2),
                DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            ],
        )
    for ref_id, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_target(ref_id, query))
    return panel


def states(
    title: str, description: str, query: Query, words: tuple[str, str], colours: tuple[str, str], *, width: int = 12
) -> StateTimeline:
    """Answer what was 0 and what was 1 over time, in words."""
    return (
        StateTimeline()
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit("none")
        .no_value("no data")
        .mappings([_words(words, colours)])
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .thresholds(steps((None, colours[0]), (1, colours[1])))
        .show_value(VisibilityMode.NEVER)
        .merge_values(merge_values=True)
        .row_height(0.8)
        .legend(VizLegendOptions().show_legend(show_legend=True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .height(9)
        .span(width)
        .with_target(_target("A", query))
    )


def breaches(flags: str) -> StateTimeline:
    """Answer when which pod was over a limit, from flags by pod and resource."""
    return states(
        "Breaches",
        "When which pod was above a limit, by resource; unallocated is use of a GPU that nobody gave it. A gap is unknown.",
        Query(f"max by (namespace, pod, resource) ({flags})", "{{namespace}}/{{pod}} {{resource}}"),
        ("within", "over"),
        (GOOD, VERMILLION),
    )


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    thresholds: Sequence[tuple[float | None, str]] = NEUTRAL,
    maximum: float | None = None,
    width: int = 12,
) -> BarGauge:
    """Answer a bar for each series, as it is now."""
    panel = (
        BarGauge()
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .unit(unit)
        .min(0)
        .no_value("none")
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .thresholds(steps(*thresholds))
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
        .height(9)
        .span(width)
        .with_target(_target("A", query, instant=True))
    )
    return panel if maximum is None else panel.max(maximum)


def table(title: str, description: str, columns: Sequence[Column], *, link: str = "", width: int = 24) -> Table:
    """Answer a row for each set of labels, and what each of the columns' expressions says of it."""
    values = [column for column in columns if column.expr]
    ref_ids = {column.title: ref_id for ref_id, column in zip("ABCDEFGH", values, strict=False)}
    # With a single query Grafana's column is called Value, without the query's letter.
    fields = {column.title: f"Value #{ref_ids[column.title]}" if len(values) > 1 else "Value" for column in values}
    names = {column.label or fields[column.title]: column.title for column in columns}
    panel = (
        Table()
        .title(title)
        .description(description)
        .datasource(PROMETHEUS)
        .no_value("unknown")
        .filterable(filterable=True)
        .transformations(
            [
                DataTransformerConfig(id_val="merge", options={}),
                DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": [*names]}}),
                DataTransformerConfig(
                    id_val="organize",
                    options={
                        "indexByName": {field: index for index, field in enumerate(names)},
                        "renameByName": names,
                        "excludeByName": {},
                    },
                ),
            ]
        )
        .height(9)
        .span(width)
    )
    for column in values:
        panel.with_target(_target(ref_ids[column.title], Query(column.expr), instant=True, as_table=True))
        panel.override_by_name(column.title, _cell(column))
    if link:
        title_of_link = "Pod" if link == POD_LINK else "Node"
        panel.override_by_name(title_of_link, [DynamicConfigValue(id_val="links", value=[{"title": "Show", "url": link}])])
    return panel


def _cell(column: Column) -> list[DynamicConfigValue]:
    properties = [DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.thresholds:
        properties.append(DynamicConfigValue(id_val="thresholds", value=steps(*column.thresholds).build().to_json()))
        kind = {"type": "gauge", "mode": "basic"} if column.bar else {"type": "color-text"}
        properties.append(DynamicConfigValue(id_val="custom.cellOptions", value=kind))
    if column.bar:
        properties += [DynamicConfigValue(id_val="min", value=0), DynamicConfigValue(id_val="max", value=1)]
    if column.words:
        colours = (column.thresholds[0][1], column.thresholds[-1][1])
        properties.append(DynamicConfigValue(id_val="mappings", value=[_words(column.words, colours).to_json()]))
    return properties


def _words(words: tuple[str, str], colours: tuple[str, str]) -> ValueMap:
    pairs = enumerate(zip(OFF_AND_ON, words, colours, strict=True))
    return ValueMap(options={key: ValueMappingResult(text=word, color=colour, index=index) for index, (key, word, colour) in pairs})


def _colour(colour: str) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _target(ref_id: str, query: Query, *, instant: bool = False, as_table: bool = False) -> Dataquery:
    target = Dataquery().ref_id(ref_id).datasource(PROMETHEUS).expr(query.expr).legend_format(query.legend or "__auto")
    if as_table:
        target.format(PromQueryFormat.TABLE)
    return target.instant() if instant else target.range()
