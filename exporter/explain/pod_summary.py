"""How a pod stands, in one sentence that names the cause."""

from exporter.breach import State
from exporter.claims.claim import Scope
from exporter.explain import reasons, words
from exporter.explain.pod import Cause, LimitEvidence, PodEvidence, PodOnGpu, Standing
from exporter.explain.process import UnknownUse
from exporter.explain.process_text import held_memory
from exporter.health import Health
from exporter.judge import Resource
from exporter.report import Missing


def summarize_pod(evidence: PodEvidence, health: Health) -> str:
    """Answer the sentence that names the cause: every breach, contracts that cannot be read, or how the pod stands otherwise."""
    clauses = [
        _breach(evidence, on_gpu, limit, health)
        for standing in (Standing.EXCEEDED, Standing.FROZEN)
        for on_gpu in evidence.on_gpus
        for limit in on_gpu.limits
        if limit.standing is standing
    ]
    clauses += [
        f"has a {system} contract that cannot be read: {'; '.join(errors)}" for system, errors in sorted(evidence.claim_errors.items())
    ]
    return f"{evidence.name} {'; it '.join(clauses or [_calm(evidence, health)])}."


def _breach(evidence: PodEvidence, on_gpu: PodOnGpu, limit: LimitEvidence, health: Health) -> str:
    gpu, since = on_gpu.gpu_uuid, _since(evidence, limit)
    if limit.standing is Standing.FROZEN:
        used = f"used {gpu}, which no one gave it (unallocated)," if limit.resource is Resource.UNALLOCATED else _over("was", gpu, limit)
        return f"{used}{since}; whether that goes on cannot be known: {why_unknown(evidence, on_gpu, limit, health)}"
    ending = ""
    if limit.breach.state is State.FALLING:
        ending = f"; it has been below for {words.span(limit.breach.held_seconds)} of the {hold(evidence)} that end a breach"
    if limit.resource is Resource.UNALLOCATED:
        return f"uses {gpu}, which no one gave it (unallocated): {_holding(on_gpu)}{since}{ending}"
    cause = describe_cause(evidence, on_gpu, limit.causes[0]) if limit.causes else f"now {_use_of_limit(on_gpu, limit)}, and it was above"
    return f"{_over('is', gpu, limit)}: {cause}{since}{ending}"


def _over(verb: str, gpu_uuid: str, limit: LimitEvidence) -> str:
    return f"{verb} over its {limit.resource} limit on {gpu_uuid}"


def _since(evidence: PodEvidence, limit: LimitEvidence) -> str:
    since_seconds = limit.breach.since_seconds
    if since_seconds is None:
        return ""
    return f" since {words.moment(since_seconds)} ({words.span(evidence.time_seconds - since_seconds)})"


def hold(evidence: PodEvidence) -> str:
    """Answer for how long use must be above for a breach."""
    return words.span(evidence.breach_hold_seconds)


def describe_cause(evidence: PodEvidence, on_gpu: PodOnGpu, cause: Cause) -> str:
    """Answer what is above which limit; an addition to it is set off by a comma."""
    if cause.resource is Resource.COMPUTE:
        who = f"the kernels of its container {cause.container}" if cause.scope is Scope.CONTAINER else "its kernels"
        used, limit = words.shares(cause.used, cause.limit)
        window = words.span(evidence.compute_window_seconds)
        return f"{who} ran in {used} of the time over the last {window}, and may in {limit},"
    amount = words.memory_of(int(cause.used), int(cause.limit))
    if cause.scope is Scope.POD:
        return f"it uses {amount}"
    if cause.scope is Scope.CONTAINER:
        return f"its container {cause.container} uses {amount}"
    comm = next((process.comm for process in on_gpu.processes if process.pid == cause.pid), None)
    return f"its process {cause.pid} ({comm}) uses {amount}, which each process of container {cause.container} may have,"


def _holding(on_gpu: PodOnGpu) -> str:
    processes = on_gpu.processes
    if not processes:
        return "it had processes there, and has none now,"
    hold = "holds" if len(processes) == 1 else "hold"
    return f"{words.count(len(processes), 'process', 'processes')} of it {hold} {held_memory(processes)} there,"


def _calm(evidence: PodEvidence, health: Health) -> str:
    """Answer how a pod stands that is in no breach."""
    phase = evidence.pod.phase.value
    if evidence.is_left_out:
        return "is left out of the metrics, with all of its series, because there would be more than --max-series"
    if evidence.is_plumbing:
        return "is a part of a sharing system, or watches GPUs for one: it holds no claim, and is never flagged"
    if evidence.pod.ended:
        uses = [f"{held_memory(each.processes)} on {each.gpu_uuid}" for each in evidence.on_gpus if each.processes]
        left = f"; processes of it still hold {words.join(uses)}" if uses else ""
        return f"has ended ({phase}), so it holds no claim and is not flagged{left}"
    if not evidence.on_gpus:
        return _without_gpu(evidence, health)
    _, on_gpu, limit = min(
        (((_rank(limit), -_use(on_gpu)), on_gpu, limit) for on_gpu in evidence.on_gpus for limit in (*on_gpu.limits, None)),
        key=lambda each: each[0],
    )
    of_several = f" (of its {len(evidence.on_gpus)} GPUs the one to look at first)" if len(evidence.on_gpus) > 1 else ""
    return _stands(evidence, on_gpu, limit, health) + of_several


def _rank(limit: LimitEvidence | None) -> int:
    """Answer how much a limit says of how a pod stands; the lowest is told."""
    order = (
        (Resource.MEMORY, Standing.RISING),
        (Resource.COMPUTE, Standing.RISING),
        (Resource.UNALLOCATED, Standing.RISING),
        (Resource.MEMORY, Standing.UNKNOWN),
        (Resource.UNALLOCATED, Standing.UNKNOWN),
        (Resource.MEMORY, Standing.WITHIN),
        (Resource.COMPUTE, Standing.WITHIN),
        (Resource.COMPUTE, Standing.UNKNOWN),
    )
    key = (limit.resource, limit.standing) if limit else None
    return order.index(key) if key in order else len(order)


def _use(on_gpu: PodOnGpu) -> float:
    """Answer the share of its memory limit that the pod uses; 0 where that is not known."""
    row = on_gpu.report
    return row.memory_used_bytes / row.limits.memory_bytes if row and row.memory_used_bytes and row.limits.memory_bytes else 0.0


def _without_gpu(evidence: PodEvidence, health: Health) -> str:
    if Missing.NOT_PLACED in evidence.missing:
        return "waits for its GPU: its contract can be read and names no GPU yet"
    unknown = [reasons.missing(each, health) for each in evidence.missing]
    unknown += [f"the driver cannot be read ({why})" for why in [reasons.down("nvml", health)] if why]
    unknown += [f"processes have no owners ({why})" for why in [reasons.down("procfs", health)] if why]
    if unknown:
        return f"has nothing to do with a GPU as far as is known; what is not known: {words.join(unknown)}"
    return "has nothing to do with a GPU: no sharing system claims anything for it, and the driver lists no process of it"


def _stands(evidence: PodEvidence, on_gpu: PodOnGpu, limit: LimitEvidence | None, health: Health) -> str:
    gpu, row = on_gpu.gpu_uuid, on_gpu.report
    if not on_gpu.containers and not on_gpu.is_given and on_gpu.unknown_use is None:
        return f"has nothing on {gpu} now; it used it before, so its counters stand"
    if limit is None or row is None or limit.standing is Standing.NO_LIMIT or limit.resource is Resource.UNALLOCATED:
        if limit is not None and limit.standing is Standing.RISING:
            return f"uses {gpu}, which no one gave it: {_holding(on_gpu)}{_since(evidence, limit)}; it is flagged after {hold(evidence)}"
        if limit is not None and limit.standing is Standing.UNKNOWN:
            return f"may have no right to {gpu}, which cannot be told now: {why_unknown(evidence, on_gpu, limit, health)}"
        used = (
            "what it uses is not known"
            if row is None or row.memory_used_bytes is None
            else f"it uses {words.memory(row.memory_used_bytes)}"
        )
        return f"has no limit on {gpu}: {used}, and {_why_no_limit(on_gpu)}"
    if limit.standing is Standing.RISING:
        cause = describe_cause(evidence, on_gpu, limit.causes[0]) if limit.causes else "it uses more"
        return f"is above its {limit.resource} limit on {gpu}: {cause}{_since(evidence, limit)}; it counts as over after {hold(evidence)}"
    if limit.standing is Standing.UNKNOWN:
        return f"is not judged by its {limit.resource} limit on {gpu} now: {why_unknown(evidence, on_gpu, limit, health)}"
    return f"is within its {limit.resource} limit on {gpu}: {_use_of_limit(on_gpu, limit)}"


def _use_of_limit(on_gpu: PodOnGpu, limit: LimitEvidence) -> str:
    row = on_gpu.report
    if row is None:
        return "what it uses is not told"
    if limit.resource is Resource.COMPUTE:
        if row.sm_utilization_mean_ratio is None or row.limits.compute_ratio is None:
            return "each of its containers is"
        used, most = words.shares(row.sm_utilization_mean_ratio, row.limits.compute_ratio)
        return f"its kernels ran in {used} of the time, and may in {most}"
    if row.memory_used_bytes is not None and row.limits.memory_bytes is not None:
        return f"it uses {words.memory_of(row.memory_used_bytes, row.limits.memory_bytes)}"
    return _nearest_process(on_gpu)


def _nearest_process(on_gpu: PodOnGpu) -> str:
    """Answer the process that is nearest to what each may have."""
    nearest: tuple[float, int, int, int] | None = None
    for container in on_gpu.containers:
        most = container.report.limits.process_memory_bytes if container.report else None
        for process in container.processes:
            if most and process.memory_used_bytes is not None:
                of_this = (process.memory_used_bytes / most, process.memory_used_bytes, most, process.pid)
                nearest = max(nearest or of_this, of_this)
    if nearest is None:
        return "it has no process there"
    _, used_bytes, limit_bytes, pid = nearest
    return f"its process {pid}, the nearest to what each may have, uses {words.memory_of(used_bytes, limit_bytes)}"


def _why_no_limit(on_gpu: PodOnGpu) -> str:
    if on_gpu.claims:
        return "no claim on it tells an amount"
    return "it was handed the GPU without an amount" if on_gpu.is_given else "no sharing system claims anything for it there"


def why_unknown(evidence: PodEvidence, on_gpu: PodOnGpu, limit: LimitEvidence, health: Health) -> str:
    """Answer why a look at this limit says nothing now."""
    # Hidden memory leaves open how much is used, and neither whose it is nor for how long.
    if on_gpu.unknown_use is not None and (limit.resource is Resource.MEMORY or on_gpu.unknown_use is not UnknownUse.MEMORY_HIDDEN):
        return reasons.unknown_use(on_gpu.unknown_use, health)
    if limit.resource is Resource.COMPUTE and (why := why_no_mean(evidence, on_gpu)):
        return why
    if evidence.missing:
        return f"there may be limits that are not known, because {words.join([reasons.missing(each, health) for each in evidence.missing])}"
    if limit.resource is Resource.UNALLOCATED:
        return f"the kubelet's last word is older than the pod{reasons.because('kubelet', health)}"
    return "a container has been there for less than the window" if limit.resource is Resource.COMPUTE else "its use cannot be told"


def why_no_mean(evidence: PodEvidence, on_gpu: PodOnGpu) -> str | None:
    """Answer why the mean that compute is judged by is not known; None where it is."""
    if not on_gpu.busy_is_known:
        return (
            "the driver tells no busy time of processes on MIG devices"
            if on_gpu.is_mig
            else "the driver did not tell the processes' busy time"
        )
    if on_gpu.report is not None and on_gpu.report.sm_utilization_mean_ratio is None:
        known, window = words.span(on_gpu.window_known_seconds), words.span(evidence.compute_window_seconds)
        return f"compute is judged by the mean over {window}, of which {known} are known so far"
    return None
