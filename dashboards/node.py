"""The board of one node: who holds what of each GPU, and whether the exporter sees all of it."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.colours import BAD, BY_SOURCE, GOOD, GREY, SKY, VERMILLION, WARNING, YELLOW
from dashboards.expressions import DEVICES, OF_GPU, gpu, or_zero, pod_on_gpu, pod_rate
from dashboards.panels import NONE_IS_GOOD, POD_LINK, Column, Query, bars, board, breaches, graph, stat, states, table
from dashboards.variables import GPU, NODE

TOTAL = gpu("fgpu_gpu_memory_total_bytes")
USED = gpu("fgpu_gpu_memory_used_bytes")
RESERVED = f"({gpu('fgpu_gpu_memory_reserved_bytes')} or 0 * {TOTAL})"
ALLOCATED = gpu("fgpu_gpu_memory_allocated_bytes")
PODS = pod_on_gpu("fgpu_pod_memory_used_bytes", GPU)
LIMITS = pod_on_gpu("fgpu_pod_memory_limit_bytes", GPU)
UNATTRIBUTED = f"max by ({OF_GPU}, reason) (fgpu_gpu_unattributed_memory_bytes{{{GPU}}})"


def build() -> Dashboard:
    """Answer the board."""
    built = board(
        "Shared GPUs: node",
        "fgpu-node",
        "What each pod holds of each GPU of a node, what it was granted, and how well the exporter sees it.",
        ("cluster", "node", "gpu"),
    )
    _overview(built)
    _gpus(built)
    _pods(built)
    _exporter(built)
    return built


def _overview(built: Dashboard) -> None:
    built.with_row(Row("Now"))
    built.with_panel(stat("Devices", "Whole GPUs that the driver lists; MIG devices are part of theirs.", f"count({DEVICES})", width=3))
    built.with_panel(
        stat(
            "GPUs lost",
            "GPUs for which the driver answers with an error, or not at all.",
            or_zero(f"count({gpu('fgpu_gpu_up')} == 0)"),
            thresholds=NONE_IS_GOOD,
            width=3,
        )
    )
    built.with_panel(
        stat(
            "Over their limit",
            "Pods above a limit, or on a GPU that nobody gave them, on this node now.",
            or_zero(f"count(max by (namespace, pod) ({pod_on_gpu('fgpu_pod_limit_exceeded', GPU)}) == 1)"),
            thresholds=NONE_IS_GOOD,
            width=3,
        )
    )
    built.with_panel(
        stat(
            "Over-subscribed",
            "GPUs of whose memory or time more was granted than there is.",
            or_zero(f"count({ALLOCATED} > {TOTAL} or {gpu('fgpu_gpu_compute_allocated_ratio')} > 1)"),
            thresholds=((None, GOOD), (1, WARNING)),
            width=3,
        )
    )
    built.with_panel(
        stat(
            "Granted memory in use",
            "Memory that the pods use, as a share of what they were granted. Low: pods asked for too much.",
            f"sum({PODS} and {LIMITS}) / sum({LIMITS})",
            unit="percentunit",
        )
    )
    built.with_panel(
        stat(
            "Memory nobody owns",
            "Memory of processes that belong to no container that can be shown. By reason below.",
            f"sum({UNATTRIBUTED})",
            unit="bytes",
        )
    )
    built.with_panel(
        stat(
            "Last sample",
            "How long ago the node was last sampled. Numbers older than three intervals are not served.",
            f"time() - min(fgpu_last_sample_timestamp_seconds{{{NODE}}})",
            unit="s",
            thresholds=((None, GOOD), (30, WARNING), (60, BAD)),
        )
    )


def _gpus(built: Dashboard) -> None:
    built.with_row(Row("GPU $gpu").repeat("gpu"))
    built.with_panel(
        graph(
            "Memory by pod",
            "The GPU's memory as a stack: each pod, what belongs to nobody, what the driver counts beyond its processes, what it "
            "reserves, and what is free. The dashed line is the sum of what its pods were granted; above the top it is over-subscribed.",
            (
                Query(f"sum by (namespace, pod) ({PODS})", "{{namespace}}/{{pod}}"),
                Query(
                    f"sum by (reason) ({UNATTRIBUTED})",
                    "unattributed: {{reason}}",
                ),
                Query(f"clamp_min(sum({USED}) - (sum({PODS}) or vector(0)) - sum({UNATTRIBUTED}), 0)", "beyond the processes"),
                Query(f"sum({RESERVED})", "reserved by the driver"),
                Query(f"clamp_min(sum({TOTAL} - {USED} - {RESERVED}), 0)", "free"),
                Query(f"sum({ALLOCATED})", "granted in total"),
            ),
            unit="bytes",
            stacked=True,
            fixed={"^unattributed": YELLOW, "^beyond": SKY, "^reserved": GREY, "^free$": "#E5E5E5", "^granted in total$": VERMILLION},
            dashed=("^granted in total$",),
        )
    )
    built.with_panel(
        graph(
            "SM time by pod",
            "Share of time in which each pod's kernels ran, and, dashed, in which any kernel ran, as the driver says. "
            "The driver tells no time of pods on MIG devices.",
            (
                Query(
                    f"sum by (namespace, pod) ({pod_rate('fgpu_pod_sm_busy_seconds_total', '$__rate_interval', GPU)})",
                    "{{namespace}}/{{pod}}",
                ),
                Query(f"max({gpu('fgpu_gpu_utilization_ratio')})", "the GPU"),
            ),
            unit="percentunit",
            stacked=True,
            fixed={"^the GPU$": VERMILLION},
            dashed=("^the GPU$",),
        )
    )
    built.with_panel(
        graph(
            "Use beside limit",
            "Memory that each pod uses and, dashed, the limit that it has on this GPU.",
            (
                Query(f"sum by (namespace, pod) ({PODS})", "{{namespace}}/{{pod}}"),
                Query(f"sum by (namespace, pod) ({LIMITS})", "{{namespace}}/{{pod}} (limit)"),
            ),
            unit="bytes",
            dashed=(r"\(limit\)$",),
        )
    )
    built.with_panel(breaches(f"fgpu_pod_limit_exceeded{{{GPU}}}"))


def _pods(built: Dashboard) -> None:
    built.with_row(Row("All GPUs"))
    built.with_panel(
        bars(
            "Memory granted of each GPU",
            "Sum of the pods' limits as a share of the GPU's memory. Above 100 % not everyone can have what was promised.",
            Query(f"{ALLOCATED} / {TOTAL}", "{{gpu_uuid}}"),
            unit="percentunit",
            thresholds=((None, GOOD), (1.0001, WARNING), (1.5, BAD)),
            width=8,
        )
    )
    built.with_panel(
        bars(
            "Time granted of each GPU",
            "Sum of the pods' compute limits. Above 100 % they wait for each other when all are busy.",
            Query(gpu("fgpu_gpu_compute_allocated_ratio"), "{{gpu_uuid}}"),
            unit="percentunit",
            thresholds=((None, GOOD), (1.0001, WARNING), (1.5, BAD)),
            width=8,
        )
    )
    built.with_panel(
        bars(
            "Pods on each GPU",
            "Pods with a claim or an allocation, those of the plumbing left out.",
            Query(gpu("fgpu_gpu_pods"), "{{gpu_uuid}}"),
            unit="none",
            width=8,
        )
    )
    built.with_panel(
        table(
            "Pods",
            "Every pod on every GPU of the node: memory in use, limit, and the share of the limit in use; SM time beside its share.",
            (
                Column(title="GPU", label="gpu_uuid"),
                Column(title="Namespace", label="namespace"),
                Column(title="Pod", label="pod"),
                Column(title="Memory used", expr=PODS, unit="bytes"),
                Column(title="Memory limit", expr=LIMITS, unit="bytes"),
                Column(
                    title="Used of limit",
                    expr=f"{PODS} / {LIMITS}",
                    unit="percentunit",
                    thresholds=((None, GOOD), (0.9, WARNING), (1.0001, BAD)),
                    bar=True,
                ),
                Column(title="SM time", expr=pod_on_gpu("fgpu_pod_sm_utilization_ratio", GPU), unit="percentunit"),
                Column(title="SM share", expr=pod_on_gpu("fgpu_pod_compute_limit_ratio", GPU), unit="percentunit"),
            ),
            link=POD_LINK,
        )
    )


def _exporter(built: Dashboard) -> None:
    built.with_row(Row("The exporter"))
    built.with_panel(
        states(
            "Sources",
            "What the exporter reads, and when that failed. While one is down, what only it tells is missing and everything else stands.",
            Query(f"min by (node, source) (fgpu_source_up{{{NODE}}})", "{{source}}"),
            ("down", "up"),
            (VERMILLION, GOOD),
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Failed readings",
            "Readings that failed, per second, by source.",
            (Query(f"sum by (source) (rate(fgpu_source_errors_total{{{NODE}}}[$__rate_interval]))", "{{source}}"),),
            unit="cps",
            fixed=BY_SOURCE,
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Time to read",
            "How long the last reading of each source took, and, dashed, the slowest sample in twenty.",
            (
                Query(f"max by (source) (fgpu_source_read_duration_seconds{{{NODE}}})", "{{source}}"),
                Query(
                    f"histogram_quantile(0.95, sum by (le) (rate(fgpu_sample_duration_seconds_bucket{{{NODE}}}[$__rate_interval])))",
                    "a whole sample",
                ),
            ),
            unit="s",
            fixed={**BY_SOURCE, "^a whole sample$": VERMILLION},
            dashed=("^a whole sample$",),
            width=8,
        )
    )
