"""Draws the rows of a node for a terminal of any width, or for a pipe. Reads no clock and no terminal.

What a name's author wrote never reaches the terminal as it is: characters that move the cursor or colour are escaped (`printable`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.client import printable
from exporter.commands.top_rows import NONE, UNKNOWN, Amount, Choice, Gpu, Kind, Row, View, add
from exporter.commands.top_text import UNICODE, Glyphs, bar, bytes_text, count_text, cut, duration_text, percent_text, short_uuid

_NEARLY_FULL = 0.9
_SHORTEST_NODE_NAME = 24
_LINES_WITH_GPUS = 12
"""On a lower screen the rows need every line."""
_COMFORTABLE_COLUMNS, _WIDE_COLUMNS, _ROOMY_COLUMNS = 100, 130, 160
"""From these widths on bars are longer, names have columns of their own, and breaches are told in full."""
_SHORT = {"memory": "mem", "compute": "comp", "unallocated": "unalloc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How it is to be drawn."""

    width: int | None
    """In columns; None: as wide as it needs."""
    glyphs: Glyphs = UNICODE
    containers: bool = True


# --- columns ---


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and how it looks."""

    text: str
    look: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    header: str
    right: bool = False
    min_width: int | None = None
    """To so much it may be cut; None: it is not cut."""
    keep_end: bool = False
    """Whether the middle is cut out rather than the end."""
    sacrifice: int = 0
    """Columns with the highest number go first where there is no room."""


def _fit(columns: Sequence[Column], lines: Sequence[Sequence[Cell]], width: int | None) -> dict[int, int]:
    """Answer the width of each column that there is room for, by its number."""
    natural = {
        number: max([cell_len(column.header), *(cell_len(line[number].text) for line in lines)]) for number, column in enumerate(columns)
    }
    if width is None:
        return natural
    while True:
        widths = dict(natural)
        while (excess := sum(widths.values()) + len(widths) - 1 - width) > 0:
            flexible = [number for number in widths if (low := columns[number].min_width) is not None and widths[number] > low]
            if not flexible:
                break
            widest = max(flexible, key=lambda number: widths[number])
            others = [widths[number] for number in flexible if number != widest]
            floor = max(columns[widest].min_width or 0, min(widths[widest] - 1, max(others, default=0)))
            widths[widest] = max(floor, widths[widest] - excess)
        if excess <= 0 or len(natural) == 1:
            return widths
        del natural[max(natural, key=lambda number: columns[number].sacrifice)]


def _table(columns: Sequence[Column], lines: Sequence[Sequence[Cell]], shown: slice, style: Style) -> Table:
    """Answer some lines of a table; its columns are as wide as all of its lines want them, so that they stay where they are."""
    widths = _fit(columns, lines, style.width)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for number, width in widths.items():
        column = columns[number]
        table.add_column(Text(column.header), width=width, no_wrap=True, overflow="crop", justify="right" if column.right else "left")
    for line in lines[shown]:
        table.add_row(*(_fitted(line[number], columns[number], width, style) for number, width in widths.items()))
    return table


def _fitted(cell: Cell, column: Column, width: int, style: Style) -> Text:
    return Text(cut(cell.text, width, style.glyphs.ellipsis, keep_end=column.keep_end), cell.look)


# --- the GPUs ---

_GPU_COLUMNS = (
    Column(header="GPU"),
    Column(header="UUID", sacrifice=5),
    Column(header="MODEL", min_width=9, keep_end=True, sacrifice=6),
    Column(header="MEMORY", sacrifice=7),
    Column(header="USED", right=True, sacrifice=1),
    Column(header="TOTAL", right=True, sacrifice=2),
    Column(header="ALLOC", right=True, sacrifice=3),
    Column(header="BUSY%", right=True, sacrifice=4),
    Column(header="PODS", right=True, sacrifice=8),
    Column(header="UNATTRIBUTED", min_width=18, sacrifice=1),
)


def _gpu_line(gpu: Gpu, style: Style) -> tuple[Cell, ...]:
    model = printable(gpu.model).removeprefix("NVIDIA ")
    return (
        Cell(gpu.label, "bold"),
        Cell(printable(short_uuid(gpu.gpu_uuid))),
        Cell(style.glyphs.branch + printable(gpu.mig_profile or "?") if gpu.parent_gpu_uuid else model),
        Cell(bar(gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.memory_total_bytes, 6, style.glyphs)),
        Cell(bytes_text(gpu.memory_used_bytes)),
        Cell(bytes_text(gpu.memory_total_bytes)),
        Cell(bytes_text(gpu.memory_allocated_bytes)),
        Cell(percent_text(gpu.utilization_ratio)),
        Cell(count_text(gpu.pods)),
        _unattributed(gpu),
    )


def _unattributed(gpu: Gpu) -> Cell:
    if gpu.up is False:
        return Cell("no answer", "bold red")
    if gpu.unattributed_memory_bytes is None:
        return Cell("?")
    parts = [f"{bytes_text(Amount(amount))} {printable(reason)}" for reason, amount in sorted(gpu.unattributed_memory_bytes.items())]
    if gpu.processes_memory_hidden.known:
        parts.append(f"{count_text(gpu.processes_memory_hidden)} hidden")
    return Cell(", ".join(parts) or "0", "yellow" if parts else "")


# --- the rows ---


@dataclass(frozen=True, slots=True)
class _Line:
    """A row and where it stands."""

    row: Row
    depth: int
    """0, or 1 below a sum."""


def _lines(rows: Iterable[Row], style: Style, depth: int = 0) -> Iterable[_Line]:
    for row in rows:
        if row.kind is Kind.POD and len(row.rows) == 1:
            yield from _lines(row.rows, style, depth)
            continue
        yield _Line(row, depth)
        if row.is_sum or (style.containers and len(row.rows) > 1):
            yield from _lines(row.rows, style, depth + row.is_sum)


def _looks(row: Row) -> str:
    return "bold" if row.is_sum else ""


def _mark(line: _Line) -> Cell:
    return Cell("!", "bold red") if line.row.breaches else Cell(" ")


def _gpu_cell(line: _Line, *, uuid: bool) -> Cell:
    gpus = line.row.gpus
    if len(gpus) > 1:
        return Cell(f"{len(gpus)} GPUs" if uuid else f"{len(gpus)}x", _looks(line.row))
    return Cell(f"{gpus[0].label} {printable(short_uuid(gpus[0].gpu_uuid))}" if uuid else gpus[0].label, _looks(line.row))


def _indent(line: _Line, style: Style) -> str:
    return "  " * line.depth + (style.glyphs.branch if line.row.kind is Kind.CONTAINER else "")


def _pods(row: Row) -> str:
    number = len({each.pod_uid for each in row.rows})
    return f"({number} pod{'s' if number > 1 else ''})"


def _name(line: _Line, style: Style) -> Cell:
    row = line.row
    match row.kind:
        case Kind.CONTAINER:
            text = printable(row.container)
        case Kind.GPU:
            text = f"GPU {row.gpus[0].label} {_pods(row)}"
        case Kind.NAMESPACE:
            text = f"{printable(row.namespace)} {_pods(row)}"
        case Kind.POD | Kind.POD_ON_GPU:
            text = f"{printable(row.namespace)}/{printable(row.pod)}"
    return Cell(_indent(line, style) + text, _looks(row))


def _pod_cell(line: _Line, style: Style) -> Cell:
    row = line.row
    if row.kind in (Kind.GPU, Kind.NAMESPACE):
        return Cell(_pods(row), _looks(row))
    return Cell("  " * line.depth + printable(row.pod), _looks(row)) if row.kind is not Kind.CONTAINER or style.width is None else Cell("")


def _container_cell(line: _Line, style: Style) -> Cell:
    row = line.row
    if row.kind is Kind.CONTAINER:
        return Cell(style.glyphs.branch + printable(row.container))
    if row.is_sum or not style.containers:
        return Cell("")
    return Cell(printable(row.rows[0].container) if len(row.rows) == 1 else f"({len(row.rows)} containers)")


def _bar_cell(line: _Line, style: Style, width: int) -> Cell:
    row = line.row
    limit = _limit_of_all(row)
    total = add(gpu.memory_total_bytes for gpu in row.gpus)
    text = bar(row.memory_used_bytes, limit, total if total.whole else UNKNOWN, width, style.glyphs)
    return Cell(text, _fullness(row, limit))


def _limit_of_all(row: Row) -> Amount:
    """Answer what the row's use can be held to: use of pods without a limit is not held to the limits of others."""
    if row.is_sum and any(each.memory_limit_bytes.known is None for each in row.rows):
        return NONE
    return row.memory_limit_bytes


def _fullness(row: Row, held_to: Amount) -> str:
    used, limit = row.memory_used_bytes.known, held_to.known
    if used is None or limit is None:
        return "dim"
    if used > limit or "memory" in row.breaches:
        return "red"
    return "yellow" if used >= _NEARLY_FULL * limit else "green"


def _over_cell(line: _Line, view: View, *, exact: bool) -> Cell:
    row = line.row
    if not row.limit_exceeded:
        return Cell("-")
    unknown = [resource for resource, exceeded in row.limit_exceeded.items() if exceeded is None]
    over = f"{sum(bool(each.breaches) for each in row.rows)} over" if row.is_sum else ""
    if exact:
        parts = [_since(row, resource, view) for resource in row.breaches] + [f"{printable(resource)}?" for resource in unknown]
        counted = f"{over}: " if over and row.breaches else ""
        return Cell(counted + ", ".join(parts) if parts else "no", "bold red" if row.breaches else "")
    if row.breaches:
        names = over or "+".join(_short(resource) for resource in row.breaches)
        since = min(row.exceeded_since_seconds.values(), default=None)
        return Cell(names + _age(since, view, exact=False), "bold red")
    return Cell("+".join(_short(resource) for resource in unknown) + "?" if unknown else "no")


def _short(resource: str) -> str:
    return _SHORT.get(resource) or printable(resource)[:7]


def _since(row: Row, resource: str, view: View) -> str:
    return printable(resource) + _age(row.exceeded_since_seconds.get(resource), view, exact=True)


def _age(since_seconds: float | None, view: View, *, exact: bool) -> str:
    """Answer how long ago it was, by the exporter's clock alone."""
    if since_seconds is None or view.sample_seconds is None:
        return ""
    return " " + duration_text(view.sample_seconds - since_seconds, exact=exact)


def _system_cell(line: _Line) -> Cell:
    row = line.row
    systems = sorted({printable(grant.system) for grant in row.grants})
    return Cell("+".join(systems) or _nothing_granted(row))


def _enforced_cell(line: _Line) -> Cell:
    row = line.row
    if not row.grants:
        return Cell(_nothing_granted(row))
    flags = {grant.enforced for grant in row.grants}
    if None in flags:
        return Cell("?")
    return Cell("part" if len(flags) > 1 else "yes" if True in flags else "no")


def _nothing_granted(row: Row) -> str:
    return "-" if row.memory_limit_bytes.whole else "?"


def _rows_table(view: View, lines: Sequence[_Line], shown: slice, style: Style) -> Table:
    wide = style.width is None or style.width >= _WIDE_COLUMNS
    exact = style.width is None or style.width >= _ROOMY_COLUMNS
    bar_width = 16 if wide else 10 if style.width is not None and style.width >= _COMFORTABLE_COLUMNS else 6
    names: list[tuple[Column, Callable[[_Line], Cell]]] = [
        (Column(header="NAMESPACE", min_width=8), lambda line: Cell(printable(line.row.namespace), _looks(line.row))),
        (Column(header="POD", min_width=14, keep_end=True), lambda line: _pod_cell(line, style)),
        (Column(header="CONTAINER", min_width=9, keep_end=True, sacrifice=9), lambda line: _container_cell(line, style)),
    ]
    if not wide:
        names = [(Column(header="POD", min_width=20, keep_end=True), lambda line: _name(line, style))]
    table: list[tuple[Column, Callable[[_Line], Cell]]] = [
        (Column(header="", sacrifice=0), _mark),
        (Column(header="GPU", sacrifice=2), lambda line: _gpu_cell(line, uuid=wide)),
        *names,
        (Column(header="MEMORY", sacrifice=9), lambda line: _bar_cell(line, style, bar_width)),
        (Column(header="USED", right=True, sacrifice=1), lambda line: Cell(bytes_text(line.row.memory_used_bytes))),
        (Column(header="LIMIT", right=True, sacrifice=3), lambda line: Cell(bytes_text(line.row.memory_limit_bytes))),
        (Column(header="SM%", right=True, sacrifice=4), lambda line: Cell(percent_text(line.row.sm_utilization_ratio))),
        (Column(header="AVG", right=True, sacrifice=7), lambda line: Cell(percent_text(line.row.sm_utilization_mean_ratio))),
        (Column(header="OVER", sacrifice=0), lambda line: _over_cell(line, view, exact=exact)),
        (Column(header="SYSTEM" if wide else "SYS", min_width=4, sacrifice=5), _system_cell),
        (Column(header="ENF", sacrifice=6), _enforced_cell),
        (Column(header="PROCS" if wide else "PR", right=True, sacrifice=8), lambda line: Cell(count_text(line.row.processes))),
    ]
    if wide:
        of_compute = (Column(header="OF", right=True, sacrifice=10), lambda line: Cell(percent_text(line.row.compute_limit_ratio)))
        table.insert(len(table) - 4, of_compute)
    return _table([column for column, _ in table], [[cell(line) for _, cell in table] for line in lines], shown, style)


# --- the whole picture ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn, and how far it can be scrolled."""

    content: RenderableType
    rows: int
    """Lines of the table, of which some may not be shown."""
    room: int
    """How many of them there is room for."""


def draw(view: View, rows: Sequence[Row], style: Style, *, now_seconds: float) -> RenderableType:
    """Answer all of it, one below the other."""
    lines = list(_lines(rows, style))
    parts: list[RenderableType] = [*_title(view, now_seconds, style), _gpus(view, slice(None), style), Text("")]
    parts.append(_rows_table(view, lines, slice(None), style) if lines else Text(_no_rows(view)))
    parts += [Text(note) for note in _notes(view)]
    return Group(*parts)


def draw_screen(view: View, rows: Sequence[Row], style: Style, *, now_seconds: float, height: int, first: int) -> Picture:
    """Answer as much as a screen of so many lines has room for, the rows from `first` on."""
    lines = list(_lines(rows, style))
    title = [_one_line(text) for text in _title(view, now_seconds, style)]
    notes = _few([_one_line(Text(note)) for note in _notes(view)], max(1, height // 6), "more notes: --once shows them")
    gpus, lines_of_gpus = _some_gpus(view, height, style)
    room = max(1, height - len(title) - lines_of_gpus - 1 - len(notes))
    first = max(0, min(first, len(lines) - room))
    table = _rows_table(view, lines, slice(first, first + room), style) if lines else _one_line(Text(_no_rows(view)))
    filling = [Text("")] * max(0, room - len(lines))
    return Picture(content=Group(*title, *gpus, table, *filling, *notes), rows=len(lines), room=room)


def _some_gpus(view: View, height: int, style: Style) -> tuple[list[RenderableType], int]:
    """Answer the table of GPUs, or what a screen of so many lines can spare for it, and how many lines that is."""
    if height < _LINES_WITH_GPUS:
        return [], 0
    most = 2 * height // 5
    shown = len(view.gpus) if len(view.gpus) <= most else most - 1
    parts: list[RenderableType] = [_gpus(view, slice(shown), style)]
    if shown < len(view.gpus):
        parts.append(_one_line(Text(f"and {len(view.gpus) - shown} more GPUs: --once shows them")))
    return [*parts, Text("")], 1 + min(len(view.gpus), most) + 1


def _no_rows(view: View) -> str:
    # Host files only add to what the others say.
    down = [printable(source) for source, _ in view.sources_down if source != "hostfiles"]
    if down:
        return f"which pods are on GPUs is unknown: not read: {', '.join(down)}"
    return "no pod uses or was given a GPU of this node"


def why_no_rows(view: View, choice: Choice) -> str:
    """Answer a sentence for a choice that nothing matches."""
    if choice.namespace is not None and not any(row.namespace == choice.namespace for row in view.rows):
        there = printable(", ".join(sorted({row.namespace for row in view.rows})))
        return f"no pod of namespace {printable(choice.namespace)!r} is on a GPU of this node: take one of {there}"
    wanted = "give a part of a namespace, pod, container or GPU's uuid, or a GPU's index"
    return f"nothing matches the filter {printable(choice.filter)!r}: {wanted}"


def _title(view: View, now_seconds: float, style: Style) -> list[Text]:
    name = printable(view.node) or "a node without a name"
    if style.width is not None:
        name = cut(name, max(_SHORTEST_NODE_NAME, style.width // 3), style.glyphs.ellipsis)
    parts = [name, f"fgpu-exporter {printable(view.version)}"]
    if view.simulated:
        parts.append("simulated node")
    if view.sample_seconds is None:
        parts.append("never sampled")
    else:
        age = now_seconds - view.sample_seconds
        when = f"{duration_text(age, exact=True)} ago" if age > -1 else f"{duration_text(-age, exact=True)} ahead of this clock"
        parts.append(f"sampled {when}, every {view.sample_interval_seconds:g}s")
    lines = [Text(", ".join(parts), "bold")]
    lines += [Text(f"! {printable(source)} is down: {printable(reason)}", "bold red") for source, reason in view.sources_down]
    if view.gpus_unidentified:
        lines.append(Text(f"! {view.gpus_unidentified} GPUs of this node do not even tell their uuid", "bold red"))
    return lines


def _gpus(view: View, shown: slice, style: Style) -> Table:
    return _table(_GPU_COLUMNS, [_gpu_line(gpu, style) for gpu in view.gpus], shown, style)


def _notes(view: View) -> list[str]:
    notes = [f"cannot be read: {printable(error)}" for error in view.claim_errors]
    if view.pods_dropped:
        notes.append(f"{view.pods_dropped} pods are left out: their series are beyond the exporter's --max-series")
    return notes


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _few(lines: list[Text], most: int, rest: str) -> list[Text]:
    return lines if len(lines) <= most else [*lines[: most - 1], _one_line(Text(f"and {len(lines) - most + 1} {rest}"))]
