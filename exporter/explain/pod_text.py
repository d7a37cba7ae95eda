"""The chain of evidence of a pod in sentences: its processes, its claims with their arithmetic, its limits, what is not known."""

from collections.abc import Iterator, Sequence

from exporter.breach import Verdict
from exporter.claims.claim import Allocation, Claim, Scope
from exporter.claims.quantity import shown
from exporter.explain import reasons, words
from exporter.explain.pod import ClaimEvidence, ContainerEvidence, LimitEvidence, PodEvidence, PodOnGpu, Standing
from exporter.explain.pod_summary import describe_cause, hold, why_no_mean, why_unknown
from exporter.explain.process import known_bytes
from exporter.explain.process_text import describe_process
from exporter.explain.section import Section
from exporter.health import Health
from exporter.judge import Resource
from exporter.limits import NO_CONTAINER_LIMITS


def tell_pod(evidence: PodEvidence, health: Health) -> tuple[Section, ...]:
    """Answer the evidence: use, claims and limits on each GPU, and what is not known."""
    sections = []
    for on_gpu in evidence.on_gpus:
        sections.append(Section(f"Use of {on_gpu.gpu_uuid}", tuple(_tell_use(evidence, on_gpu))))
        sections.append(Section(f"Given on {on_gpu.gpu_uuid}", tuple(_tell_claims(evidence, on_gpu))))
        sections.append(Section(f"Limits on {on_gpu.gpu_uuid}", tuple(_tell_limits(evidence, on_gpu))))
    sections.append(Section("Not known", tuple(dict.fromkeys(_tell_unknown(evidence, health)))))
    return tuple(section for section in sections if section.sentences)


def _tell_use(evidence: PodEvidence, on_gpu: PodOnGpu) -> Iterator[str]:
    for container in on_gpu.containers:
        yield _tell_container(container)
        for process in container.processes:
            yield describe_process(process, f"which is container {container.name} of {evidence.name}")
    row = on_gpu.report
    if row is not None and row.sm_utilization_mean_ratio is not None:
        window = words.span(evidence.compute_window_seconds)
        yield f"Its kernels ran in {words.share(row.sm_utilization_mean_ratio)} of the time, over the last {window}."


def _tell_container(container: ContainerEvidence) -> str:
    processes = container.processes
    if not processes:
        known = container.report is not None and container.report.memory_used_bytes is not None
        return (
            f"Container {container.name} has no process there, so it uses 0."
            if known
            else f"Container {container.name}: its use is not known."
        )
    if container.report is not None and container.report.memory_used_bytes is None:
        count = words.count(len(processes), "process", "processes")
        return f"Container {container.name} has {count} there; their sum is not known, because the driver hides the memory of one."
    total = words.memory(known_bytes(processes))
    if len(processes) == 1:
        return f"Container {container.name} uses {total}, which is the memory of its one process there."
    return f"Container {container.name} uses {total}, the sum over its {len(processes)} processes there."


def _tell_claims(evidence: PodEvidence, on_gpu: PodOnGpu) -> Iterator[str]:
    for claim in on_gpu.claims:
        yield from _tell_claim(claim)
    for group in on_gpu.gpu_groups:
        name = f"{group.reservation_namespace}/{group.reservation_pod}"
        yield f"Reservation pod {name} stands for group {shown(group.group)}, and tells that it holds this GPU."
    for allocation in on_gpu.allocations:
        yield from _tell_allocation(allocation)
    if on_gpu.given_with_gpu_uuid and not (on_gpu.claims or on_gpu.allocations):
        yield f"It was given {on_gpu.given_with_gpu_uuid}, of which this MIG device is a part."
    if not on_gpu.is_given:
        if on_gpu.processes:
            yield "No one gave it this GPU: no sharing system claims anything for it here, and the kubelet lists no device here for it."
        else:
            yield "It was given nothing here; it used this GPU before, and its counters stand."
    if evidence.pod.ended:
        yield f"The pod has ended ({evidence.pod.phase.value}), so whatever it was given is given back."


def _tell_claim(evidence: ClaimEvidence) -> Iterator[str]:
    claim = evidence.claim
    amounts = [words.memory(claim.memory_bytes) + " of memory"] if claim.memory_bytes is not None else []
    amounts += [words.share(claim.compute_ratio) + " of compute"] if claim.compute_ratio is not None else []
    amount = " and ".join(amounts) if amounts else "no amount"
    wall = "something on the node enforces it" if claim.enforced else "nothing enforces it"
    source = f", read from: {claim.derivation.contract}" if claim.derivation else ""
    yield f"{claim.system} grants {_whom(claim)} {amount} ({wall}){source}."
    if claim.derivation is not None and claim.derivation.memory is not None:
        memory = "Its memory:" if claim.memory_bytes is None else f"{words.memory(claim.memory_bytes)} of memory ="
        yield f"{memory} {claim.derivation.memory}."
    if claim.derivation is not None and claim.derivation.compute is not None:
        compute = "Its compute:" if claim.compute_ratio is None else f"{words.share(claim.compute_ratio)} of compute ="
        yield f"{compute} {claim.derivation.compute}."


def _whom(claim: Claim) -> str:
    if claim.scope is Scope.POD:
        return "the pod"
    return f"each process of container {claim.container}" if claim.scope is Scope.PROCESS else f"container {claim.container}"


def _tell_allocation(allocation: Allocation) -> Iterator[str]:
    whom = f"Container {allocation.container}" if allocation.container else "The pod"
    derivation = allocation.derivation
    source = f", by {derivation.contract}" if derivation else ""
    why = f": {derivation.memory}" if derivation and derivation.memory else ""
    yield f"{whom} was handed this GPU{source}, and no amount goes with it{why}."


def _tell_limits(evidence: PodEvidence, on_gpu: PodOnGpu) -> Iterator[str]:
    row = on_gpu.report
    for container in on_gpu.containers:
        if container.report is not None:
            yield from _tell_container_limits(container, on_gpu)
    if row is not None:
        if row.limits.memory_bytes is not None:
            yield f"The pod's memory limit is {words.memory(row.limits.memory_bytes)}: {_made_of(on_gpu, Resource.MEMORY)}."
        if row.limits.compute_ratio is not None:
            yield f"The pod's compute limit is {words.share(row.limits.compute_ratio)}: {_made_of(on_gpu, Resource.COMPUTE)}."
    for limit in on_gpu.limits:
        yield from _tell_breach(evidence, on_gpu, limit)


def _tell_container_limits(container: ContainerEvidence, on_gpu: PodOnGpu) -> Iterator[str]:
    theirs = [each for each in on_gpu.claims if each.claim.container == container.name]
    for resource in (Resource.MEMORY, Resource.COMPUTE):
        for scope in (Scope.CONTAINER, Scope.PROCESS):
            yield from _tell_tightest([each for each in theirs if each.claim.scope is scope], resource)
    for each in theirs:
        if each.superseded_by is not None:
            yield f"{each.claim.system}'s claim of memory does not count there: {each.superseded_by}'s takes its place."
    if container.report is not None and container.report.limits.compute_unlimited:
        yield f"Container {container.name} is not limited in compute, in so many words, so the pod has no sum of compute limits."


def _tell_tightest(claims: Sequence[ClaimEvidence], resource: Resource) -> Iterator[str]:
    """Answer which claim of one scope is the limit."""
    if resource is Resource.MEMORY:
        counted = [each for each in claims if each.claim.memory_bytes is not None and each.superseded_by is None]
        chosen = next((each.claim for each in counted if each.is_memory_limit), None)
    else:
        counted = [each for each in claims if each.claim.compute_ratio is not None]
        chosen = next((each.claim for each in counted if each.is_compute_limit), None)
    if chosen is None:
        return
    amount = _amount(chosen, resource) or 0
    said = words.memory(int(amount)) if resource is Resource.MEMORY else words.share(amount)
    whose = f"the tightest of {len(counted)} claims, {chosen.system}'s" if len(counted) > 1 else f"{chosen.system}'s claim"
    # Threads of a process are space on the GPU, and what is measured is time.
    told_only = ", told and never judged" if resource is Resource.COMPUTE and chosen.scope is Scope.PROCESS else ""
    yield f"The {resource} limit of {_whom(chosen)} is {said}: {whose}{told_only}."


def _amount(claim: Claim, resource: Resource) -> float | None:
    return claim.memory_bytes if resource is Resource.MEMORY else claim.compute_ratio


def _made_of(on_gpu: PodOnGpu, resource: Resource) -> str:
    own = [each.claim for each in on_gpu.claims if each.claim.scope is Scope.POD and _amount(each.claim, resource) is not None]
    if own:
        system = min(own, key=lambda claim: (_amount(claim, resource) or 0, claim.system)).system
        return f"the tightest of its own {len(own)} claims, {system}'s" if len(own) > 1 else f"its own claim, {system}'s"
    amounts = []
    for container in on_gpu.containers:
        limits = container.report.limits if container.report else NO_CONTAINER_LIMITS
        amount = limits.container_memory_bytes if resource is Resource.MEMORY else limits.container_compute_ratio
        if amount is not None:
            said = words.memory(int(amount)) if resource is Resource.MEMORY else words.share(amount)
            amounts.append((container.name, said))
    if len(amounts) == 1:
        return f"that of container {amounts[0][0]}"
    return f"the sum of its containers' limits, {' + '.join(f'{said} of {name}' for name, said in amounts)}"


def _tell_breach(evidence: PodEvidence, on_gpu: PodOnGpu, limit: LimitEvidence) -> Iterator[str]:
    breach = limit.breach
    of_resource = "use of a GPU that no one gave" if limit.resource is Resource.UNALLOCATED else limit.resource.value
    for cause in {(cause.used, cause.limit): cause for cause in reversed(limit.causes)}.values():
        yield f"At this moment it is above: {describe_cause(evidence, on_gpu, cause).rstrip(',')}."
    if limit.standing is Standing.RISING:
        yield f"Above for {words.span(breach.held_seconds)} of the {hold(evidence)} after which it is a breach of {of_resource}."
    if breach.is_on and breach.since_seconds is not None:
        yield f"The breach of {of_resource} began at {words.moment(breach.since_seconds)}, the first sample above."
    if breach.breaches_total:
        total = words.span(breach.exceeded_seconds_total)
        times = words.count(breach.breaches_total, "time")
        yield f"Since the exporter first saw it, it was in breach of {of_resource} {times}, for {total} together."


def _tell_unknown(evidence: PodEvidence, health: Health) -> Iterator[str]:
    for on_gpu in evidence.on_gpus:
        if on_gpu.unknown_use is not None:
            yield f"What it uses of {on_gpu.gpu_uuid}: {reasons.unknown_use(on_gpu.unknown_use, health)}."
        elif on_gpu.is_given and not _judges_compute(on_gpu) and (why := why_no_mean(evidence, on_gpu)):
            yield f"Its mean compute use of {on_gpu.gpu_uuid}: {why}."
        for limit in on_gpu.limits:
            if limit.breach.verdict is Verdict.UNKNOWN:
                what = (
                    "Whether it has a right to"
                    if limit.resource is Resource.UNALLOCATED
                    else f"Whether it is over its {limit.resource} limit on"
                )
                yield f"{what} {on_gpu.gpu_uuid}: {why_unknown(evidence, on_gpu, limit, health)}."
    if evidence.missing:
        yield f"Whether there are further limits: {words.join([reasons.missing(each, health) for each in evidence.missing])}."
    for source, what in (("kubelet", "What the kubelet handed out since"), ("kubernetes", "What changed about pods since")):
        if reason := reasons.down(source, health):
            yield f"{what}: {reason}."


def _judges_compute(on_gpu: PodOnGpu) -> bool:
    return any(limit.resource is Resource.COMPUTE and limit.breach.verdict is not Verdict.NO_LIMIT for limit in on_gpu.limits)
