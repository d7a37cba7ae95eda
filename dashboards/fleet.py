"""The board of all nodes: where GPUs are wasted, who takes more than was granted, and which nodes cannot be seen."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.colours import BAD, BY_RESOURCE, GOOD, ORANGE, VERMILLION, WARNING
from dashboards.expressions import (
    DEVICES,
    OF_GPU,
    OF_POD_ON_GPU,
    granted_gpus,
    hours,
    in_queue,
    or_zero,
    pod_on_gpu,
    used_gpus,
    wasted_gpus,
)
from dashboards.panels import NODE_LINK, NONE_IS_GOOD, POD_LINK, Column, Query, bars, board, graph, stat, table
from dashboards.variables import NODE, POD

LIMIT = pod_on_gpu("fgpu_pod_memory_limit_bytes", POD)
USED = pod_on_gpu("fgpu_pod_memory_used_bytes", POD)
EXPORTERS = f"up{{{NODE}}} and on (cluster, job) group by (cluster, job) (last_over_time(fgpu_build_info[$__range]))"


def build() -> Dashboard:
    """Answer the board."""
    built = board(
        "Shared GPUs: fleet",
        "fgpu-fleet",
        "All nodes: GPUs by waste, pods that take more than they were granted, and nodes that cannot be seen.",
        ("cluster", "node", "namespace", "queue", "pod"),
    )
    _overview(built)
    _health(built)
    _waste(built)
    _breaches(built)
    _hours(built)
    return built


def _overview(built: Dashboard) -> None:
    built.with_row(Row("Now"))
    built.with_panel(
        stat("Nodes", "Nodes whose exporter is scraped.", f"count(count by (cluster, node) (fgpu_build_info{{{NODE}}}))", width=3)
    )
    built.with_panel(stat("Devices", "Whole GPUs; MIG devices are part of theirs.", f"count({DEVICES})", width=3))
    built.with_panel(
        stat("GPUs granted", "Whole devices that pods' memory limits amount to.", f"sum({in_queue(granted_gpus(POD))})", width=3).decimals(
            2
        )
    )
    built.with_panel(
        stat(
            "GPUs busy", "Whole devices that pods' kernels kept busy, MIG devices left out.", f"sum({in_queue(used_gpus(POD))})", width=3
        ).decimals(2)
    )
    built.with_panel(
        stat(
            "Granted memory in use",
            "Memory in use as a share of what was granted, over all pods that have a limit.",
            f"sum({in_queue(f'({USED} and {LIMIT})')}) / sum({in_queue(LIMIT)})",
            unit="percentunit",
        )
    )
    built.with_panel(
        stat(
            "Over their limit",
            "Pods that are above a limit now, or use a GPU that nobody gave them.",
            or_zero(f"count(max by (namespace, pod) ({in_queue(pod_on_gpu('fgpu_pod_limit_exceeded', POD))}) == 1)"),
            thresholds=NONE_IS_GOOD,
        )
    )
    built.with_panel(
        stat(
            "Labels not honoured",
            "Pods that stand under exported_pod or exported_namespace, because a scrape does not honour labels. Above 0 no other panel can "
            "name pods: set honor_labels in the scrape, or honorLabels in the PodMonitor.",
            or_zero(f'count(fgpu_pod_info{{{NODE},exported_pod!=""}} or fgpu_pod_info{{{NODE},exported_namespace!=""}})'),
            thresholds=NONE_IS_GOOD,
        )
    )


def _health(built: Dashboard) -> None:
    built.with_row(Row("Nodes that cannot be seen"))
    built.with_panel(
        stat(
            "Exporters down",
            "Exporters that Prometheus knows and cannot scrape.",
            or_zero(f"count(({EXPORTERS}) == 0)"),
            thresholds=NONE_IS_GOOD,
        )
    )
    built.with_panel(
        stat(
            "Sources down",
            "What exporters read and cannot read now, counted once for each node and source.",
            or_zero(f"count(min by (cluster, node, source) (fgpu_source_up{{{NODE}}}) == 0)"),
            thresholds=NONE_IS_GOOD,
        )
    )
    built.with_panel(
        stat(
            "GPUs lost",
            "GPUs for which the driver answers with an error, or that do not even give their uuid.",
            f"({or_zero(f'count(max by ({OF_GPU}) (fgpu_gpu_up{{{NODE}}}) == 0)')}) + "
            f"({or_zero(f'sum(max by (cluster, node) (fgpu_gpus_unidentified{{{NODE}}}))')})",
            thresholds=NONE_IS_GOOD,
        )
    )
    built.with_panel(
        table(
            "Exporters",
            "Every exporter that Prometheus knows.",
            (
                Column(title="Instance", label="instance"),
                Column(title="Node", label="node"),
                Column(
                    title="Scraped",
                    expr=f"max by (node, instance) ({EXPORTERS})",
                    thresholds=((None, VERMILLION), (1, GOOD)),
                    words=("down", "up"),
                ),
            ),
            link=NODE_LINK,
            width=6,
        )
    )
    built.with_panel(
        table(
            "Sources",
            "What each node's exporter reads, and readings that failed in the board's time range.",
            (
                Column(title="Source", label="source"),
                Column(title="Node", label="node"),
                Column(
                    title="State",
                    expr=f"min by (node, source) (fgpu_source_up{{{NODE}}})",
                    thresholds=((None, VERMILLION), (1, GOOD)),
                    words=("down", "up"),
                ),
                Column(
                    title="Failed readings",
                    expr=f"sum by (node, source) (increase(fgpu_source_errors_total{{{NODE}}}[$__range]))",
                    unit="short",
                    thresholds=((None, GOOD), (1, WARNING)),
                ),
            ),
            link=NODE_LINK,
            width=6,
        )
    )


def _waste(built: Dashboard) -> None:
    built.with_row(Row("Waste"))
    built.with_panel(
        bars(
            "GPUs by waste",
            "The twenty GPUs of which most was granted to pods that did not keep it busy, as a share of the device. "
            "MIG devices are not in it.",
            Query(f"topk(20, sum by (node, gpu_uuid) ({in_queue(wasted_gpus(POD))}))", "{{node}} {{gpu_uuid}}"),
            unit="percentunit",
            thresholds=((None, GOOD), (0.5, WARNING)),
            maximum=1,
        )
    )
    built.with_panel(
        table(
            "Pods by waste",
            "The twenty pods that were granted most of GPUs that they did not keep busy.",
            (
                Column(title="Queue", label="queue"),
                Column(title="Namespace", label="namespace"),
                Column(title="Pod", label="pod"),
                Column(title="GPUs wasted", expr=f"topk(20, sum by (queue, namespace, pod) ({in_queue(wasted_gpus(POD))}))", unit="short"),
            ),
            link=POD_LINK,
            width=12,
        )
    )


def _breaches(built: Dashboard) -> None:
    built.with_row(Row("Breaches"))
    built.with_panel(
        table(
            "Top over-users",
            "Pods that hold more memory than they were granted, and all that is held on a GPU that nobody gave.",
            (
                Column(title="Queue", label="queue"),
                Column(title="Namespace", label="namespace"),
                Column(title="Pod", label="pod"),
                Column(
                    title="Memory above limit",
                    expr="topk(20, sum by (queue, namespace, pod) ("
                    + in_queue(
                        f"(({USED} - {LIMIT}) > 0 or {USED} and on ({OF_POD_ON_GPU}) "
                        f'fgpu_pod_limit_exceeded{{{POD},resource="unallocated"}} == 1)'
                    )
                    + "))",
                    unit="bytes",
                    thresholds=((None, BAD),),
                ),
            ),
            link=POD_LINK,
            width=12,
        )
    )
    breach = f"max by ({OF_POD_ON_GPU}, resource) (fgpu_pod_limit_exceeded{{{POD}}})"
    built.with_panel(
        graph(
            "Breaches by queue",
            "Pods over a limit at once, by queue and resource.",
            (Query(f"sum by (queue, resource) ({in_queue(breach)})", "{{resource}} {{queue}}"),),
            unit="none",
            stacked=True,
            fixed=BY_RESOURCE,
        )
    )


def _hours(built: Dashboard) -> None:
    built.with_row(Row("GPU-hours"))
    for by, title in (("queue", "Queue"), ("namespace", "Namespace")):
        built.with_panel(
            table(
                f"GPU-hours by {by}",
                "Whole devices that were granted, kept busy and wasted over the board's time range, in hours. "
                "MIG devices are in what was granted only.",
                (
                    Column(title=title, label=by),
                    Column(title="Granted", expr=f"sum by ({by}) ({hours(in_queue(granted_gpus(POD)))})", unit="h"),
                    Column(title="Used", expr=f"sum by ({by}) ({hours(in_queue(used_gpus(POD, '5m')))})", unit="h"),
                    Column(title="Wasted", expr=f"sum by ({by}) ({hours(in_queue(wasted_gpus(POD, '5m')))})", unit="h"),
                ),
                width=6,
            )
        )
    built.with_panel(
        graph(
            "GPUs granted and busy",
            "Whole devices that all pods together were granted and kept busy, and, dashed, how many there are.",
            (
                Query(f"sum({in_queue(granted_gpus(POD))})", "granted"),
                Query(f"sum({in_queue(used_gpus(POD))})", "busy"),
                Query(f"count({DEVICES})", "devices"),
            ),
            unit="none",
            fixed={"^granted$": ORANGE, "^busy$": GOOD, "^devices$": VERMILLION},
            dashed=("^devices$",),
        )
    )
