"""The board of a team or a pod: use beside what was granted, and what could be given back."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.colours import BAD, GOOD, WARNING
from dashboards.expressions import OF_POD_ON_GPU, granted_gpus, hours, in_queue, or_zero, pod_on_gpu, pod_rate, used_gpus
from dashboards.panels import NODE_LINK, NONE_IS_GOOD, Column, Query, board, breaches, graph, stat, table
from dashboards.variables import POD_ON_GPU

LIMIT = pod_on_gpu("fgpu_pod_memory_limit_bytes")
USED = pod_on_gpu("fgpu_pod_memory_used_bytes")
EXCEEDED = f"max by ({OF_POD_ON_GPU}, resource) (fgpu_pod_limit_exceeded{{{POD_ON_GPU}}})"
IDLE_BELOW = "0.01"
CONTAINER = "cluster, node, namespace, pod, container, gpu_uuid"


def build() -> Dashboard:
    """Answer the board."""
    built = board(
        "Shared GPUs: team and pod",
        "fgpu-pod",
        "What a namespace, a queue or a pod was granted of GPUs, what it uses, when it took more, and what it could give back.",
        ("cluster", "node", "namespace", "queue", "pod", "gpu"),
    )
    _overview(built)
    _memory(built)
    _time(built)
    _right_size(built)
    _contracts(built)
    return built


def _overview(built: Dashboard) -> None:
    built.with_row(Row("Now"))
    built.with_panel(
        stat("Pods", "Pods with GPU memory or a claim to it.", f"count(count by (namespace, pod) ({in_queue(USED)}))", width=3)
    )
    built.with_panel(stat("Memory used", "GPU memory of the pods' processes.", f"sum({in_queue(USED)})", unit="bytes", width=3))
    built.with_panel(stat("Memory granted", "Sum of the pods' limits.", f"sum({in_queue(LIMIT)})", unit="bytes", width=3))
    built.with_panel(
        stat(
            "Granted memory in use",
            "Memory in use as a share of what was granted, over all pods that have a limit.",
            f"sum({in_queue(f'({USED} and {LIMIT})')}) / sum({in_queue(LIMIT)})",
            unit="percentunit",
            width=3,
        )
    )
    built.with_panel(
        stat(
            "Over their limit",
            "Pods that are above a limit now, or use a GPU that nobody gave them.",
            or_zero(f"count(max by (namespace, pod) ({in_queue(pod_on_gpu('fgpu_pod_limit_exceeded'))}) == 1)"),
            thresholds=NONE_IS_GOOD,
            width=3,
        )
    )
    built.with_panel(
        stat(
            "Contracts unreadable",
            "Annotations, labels or claims of the pods that cannot be read: their limit may be missing.",
            or_zero('sum(max by (cluster, node, namespace, pod, system) (fgpu_claim_errors{namespace=~"$namespace",pod=~"$pod"}))'),
            thresholds=NONE_IS_GOOD,
            width=3,
        )
    )
    built.with_panel(
        stat(
            "GPU-hours granted",
            "Whole devices that the pods held, over the board's time range. A quarter of one for an hour is 0.25.",
            f"sum({hours(in_queue(granted_gpus(POD_ON_GPU)))})",
            unit="h",
            width=3,
        )
    )
    built.with_panel(
        stat(
            "GPU-hours used",
            "Hours in which the pods' kernels ran, over the board's time range; MIG devices are not in it, their time cannot be told.",
            f"sum({hours(in_queue(used_gpus(POD_ON_GPU, '5m')))})",
            unit="h",
            width=3,
        )
    )


def _memory(built: Dashboard) -> None:
    built.with_row(Row("Memory"))
    built.with_panel(
        graph(
            "Memory use beside limit",
            "Memory that each pod uses, over all its GPUs, and, dashed, its limit.",
            (
                Query(f"sum by (namespace, pod) ({in_queue(USED)})", "{{namespace}}/{{pod}}"),
                Query(f"sum by (namespace, pod) ({in_queue(LIMIT)})", "{{namespace}}/{{pod}} (limit)"),
            ),
            unit="bytes",
            dashed=(r"\(limit\)$",),
        )
    )
    built.with_panel(breaches(in_queue(EXCEEDED)))
    labels = (
        Column(title="Node", label="node"),
        Column(title="Namespace", label="namespace"),
        Column(title="Pod", label="pod"),
        Column(title="GPU", label="gpu_uuid"),
        Column(title="Resource", label="resource"),
    )
    by = f"max by ({OF_POD_ON_GPU}, resource)"
    exceeded_seconds = f"{by} (increase(fgpu_pod_limit_exceeded_seconds_total{{{POD_ON_GPU}}}[$__range])) > 0"
    built.with_panel(
        table(
            "Breaches now and in this time range",
            "Pods that were over a limit: since when, if they still are; how often it began so far, and for how long in this time range.",
            (
                *labels,
                Column(
                    title="Over since",
                    expr=in_queue(f"{by} (fgpu_pod_limit_exceeded_since_timestamp_seconds{{{POD_ON_GPU}}})") + " * 1000",
                    unit="dateTimeFromNow",
                ),
                Column(
                    title="Breaches so far",
                    expr=in_queue(f"({by} (fgpu_pod_limit_breaches_total{{{POD_ON_GPU}}}) > 0)"),
                    unit="none",
                ),
                Column(title="Time over", expr=in_queue(f"({exceeded_seconds})"), unit="s"),
            ),
            link=NODE_LINK,
        )
    )


def _time(built: Dashboard) -> None:
    built.with_row(Row("Time"))
    built.with_panel(
        graph(
            "SM time against share",
            "Share of time in which each pod's kernels ran, over all its GPUs, and, dashed, its share. "
            "The driver tells no time on MIG devices.",
            (
                Query(
                    f"sum by (namespace, pod) ({in_queue(pod_rate('fgpu_pod_sm_busy_seconds_total', '$__rate_interval'))})",
                    "{{namespace}}/{{pod}}",
                ),
                Query(f"sum by (namespace, pod) ({in_queue(pod_on_gpu('fgpu_pod_compute_limit_ratio'))})", "{{namespace}}/{{pod}} (limit)"),
            ),
            unit="percentunit",
            dashed=(r"\(limit\)$",),
        )
    )
    for title, metric, what in (
        ("Memory bandwidth", "fgpu_container_memory_bandwidth_busy_seconds_total", "read or wrote GPU memory"),
        ("Video decoding", "fgpu_container_decoder_busy_seconds_total", "decoded video"),
    ):
        rate = f"max by ({CONTAINER}) (rate({metric}{{{POD_ON_GPU}}}[$__rate_interval]))"
        built.with_panel(
            graph(
                title,
                f"Share of time in which each pod {what}.",
                (Query(f"sum by (namespace, pod) ({in_queue(f'sum by ({OF_POD_ON_GPU}) ({rate})')})", "{{namespace}}/{{pod}}"),),
                unit="percentunit",
                width=6,
            )
        )


def _right_size(built: Dashboard) -> None:
    built.with_row(Row("Right-size"))
    labels = (
        Column(title="Node", label="node"),
        Column(title="Namespace", label="namespace"),
        Column(title="Pod", label="pod"),
    )
    limit = f"max by ({CONTAINER}) (fgpu_container_memory_limit_bytes{{{POD_ON_GPU}}})"
    peak = f"max by ({CONTAINER}) (max_over_time(fgpu_container_memory_used_peak_bytes{{{POD_ON_GPU}}}[$__range]))"
    now = f"max by ({CONTAINER}) (fgpu_container_memory_used_bytes{{{POD_ON_GPU}}})"
    built.with_panel(
        table(
            "Peak against request",
            "The highest memory use of each container since it started, beside what it asked for. "
            "A low share can be given back; one near 100 % needs more.",
            (
                *labels,
                Column(title="Container", label="container"),
                Column(title="GPU", label="gpu_uuid"),
                Column(title="Limit", expr=in_queue(limit), unit="bytes"),
                Column(title="Peak", expr=in_queue(peak), unit="bytes"),
                Column(
                    title="Peak of limit",
                    expr=in_queue(f"({peak} / {limit})"),
                    unit="percentunit",
                    thresholds=((None, WARNING), (0.5, GOOD), (1.0001, BAD)),
                    bar=True,
                ),
                Column(title="Now", expr=in_queue(now), unit="bytes"),
            ),
            link=NODE_LINK,
            width=14,
        )
    )
    idle = f"({pod_rate('fgpu_pod_sm_busy_seconds_total', '$__range')} < {IDLE_BELOW} and on ({OF_POD_ON_GPU}) {LIMIT})"
    built.with_panel(
        table(
            "Idle allocations",
            "Pods whose kernels ran for less than 1 % of the board's time range, and the memory that they hold meanwhile.",
            (
                *labels,
                Column(title="SM time", expr=in_queue(idle), unit="percentunit"),
                Column(title="Memory granted", expr=in_queue(f"({LIMIT} and on ({OF_POD_ON_GPU}) {idle})"), unit="bytes"),
            ),
            link=NODE_LINK,
            width=10,
        )
    )


def _contracts(built: Dashboard) -> None:
    built.with_row(Row("Contracts"))
    labels = (
        Column(title="Namespace", label="namespace"),
        Column(title="Pod", label="pod"),
        Column(title="Container", label="container"),
        Column(title="GPU", label="gpu_uuid"),
        Column(title="System", label="system"),
        Column(title="Scope", label="scope"),
    )
    by = f"max by ({CONTAINER}, system, scope)"
    built.with_panel(
        table(
            "What each sharing system grants",
            "Every claim as its system states it. The tightest is the limit. A claim without a container is the pod's.",
            (
                *labels,
                Column(title="Memory", expr=in_queue(f"{by} (fgpu_claim_memory_bytes{{{POD_ON_GPU}}})"), unit="bytes"),
                Column(title="Time", expr=in_queue(f"{by} (fgpu_claim_compute_ratio{{{POD_ON_GPU}}})"), unit="percentunit"),
            ),
        )
    )
