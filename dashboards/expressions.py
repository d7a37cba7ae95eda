"""What the boards ask, in PromQL, of the exporter's own series: no recording rule is needed to see them.

Every expression first drops what the scrape added (job, instance), so that a node that is scraped twice is counted once.
"""

from dashboards.variables import GPU, NODE, POD, POD_ON_GPU

OF_POD = "cluster, node, namespace, pod"
OF_POD_ON_GPU = f"{OF_POD}, gpu_uuid"
OF_GPU = "cluster, node, gpu_uuid"


def pod_on_gpu(metric: str, selector: str = POD_ON_GPU) -> str:
    """Answer a gauge of pods, once for each pod and GPU."""
    return f"max by ({OF_POD_ON_GPU}) ({metric}{{{selector}}})"


def pod_rate(metric: str, window: str, selector: str = POD_ON_GPU) -> str:
    """Answer the rate of a counter of pods, once for each pod and GPU."""
    return f"max by ({OF_POD_ON_GPU}) (rate({metric}{{{selector}}}[{window}]))"


def gpu(metric: str, selector: str = GPU) -> str:
    """Answer a gauge of GPUs, once for each GPU."""
    return f"max by ({OF_GPU}) ({metric}{{{selector}}})"


def in_queue(expr: str) -> str:
    """Answer those of an expression's pods that are in the queue of the board, with their queue's name."""
    info = f'max by ({OF_POD}, queue) (topk by ({OF_POD}) (1, fgpu_pod_info{{{POD},queue=~"$queue"}}))'
    return f"{expr} * on ({OF_POD}) group_left (queue) {info}"


def or_zero(expr: str) -> str:
    """Answer 0 where there is nothing to count."""
    return f"({expr}) or vector(0)"


# Whole devices: those without a parent. A MIG device's memory is its parent's too.
DEVICES = f'max by ({OF_GPU}) (fgpu_gpu_info{{{NODE},parent_gpu_uuid=""}})'

_DEVICE_OF_GPU = (
    f"max by ({OF_GPU}, device_uuid) (label_replace(label_replace(fgpu_gpu_info{{{NODE}}}, "
    '"device_uuid", "$1", "gpu_uuid", "(.+)"), "device_uuid", "$1", "parent_gpu_uuid", "(.+)"))'
)
_DEVICE_MEMORY = (
    f"sum by ({OF_GPU}) ({_DEVICE_OF_GPU} * on (cluster, node, device_uuid) group_left () "
    f'max by (cluster, node, device_uuid) (label_replace(fgpu_gpu_memory_total_bytes{{{NODE}}}, "device_uuid", "$1", "gpu_uuid", "(.+)")))'
)


def granted_gpus(selector: str) -> str:
    """Answer how many whole devices each pod's memory limit amounts to."""
    return f"{pod_on_gpu('fgpu_pod_memory_limit_bytes', selector)} / on ({OF_GPU}) group_left () ({_DEVICE_MEMORY} > 0)"


def used_gpus(selector: str, window: str = "$__rate_interval") -> str:
    """Answer how many whole devices each pod's kernels kept busy; absent on MIG devices."""
    return pod_rate("fgpu_pod_sm_busy_seconds_total", window, selector)


def wasted_gpus(selector: str, window: str = "$__rate_interval") -> str:
    """Answer how many whole devices each pod was granted and did not keep busy."""
    return f"clamp_min({granted_gpus(selector)} - on ({OF_POD_ON_GPU}) {used_gpus(selector, window)}, 0)"


def hours(expr: str) -> str:
    """Answer GPU-hours over the board's range: minutes counted."""
    return f"sum_over_time(({expr})[$__range:1m]) / 60"
