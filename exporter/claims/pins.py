"""What a pod's author wrote is held against the pod: a grant may be tightened by an edit, never loosened. Pure.

Labels and annotations can be edited while a pod runs. Whoever may edit a pod could raise its own limit and hide a breach. So the first
readable form of a placed pod is pinned: a later one that claims more, or that cannot be read, is an error and changes nothing; one that
claims less takes its place. Pins live as long as the pod and are lost with the exporter's process, which then believes what it finds.
"""

from collections.abc import Mapping
from dataclasses import replace

from exporter.claims.claim import Answer, Claim, Resolver
from exporter.snapshot import Gpu, Pod

Pins = Mapping[str, Pod]
"""System -> the pod as it was when that system's contract on it was pinned. Only its labels and annotations are used."""


def resolve_pinned(resolver: Resolver, pod: Pod, pinned: Pod | None, gpus: Mapping[str, Gpu]) -> tuple[Answer, Pod | None]:
    """Answer what the system says of the pod, its author's later words not loosening the earlier ones, and the pin to keep."""
    answer = resolver(pod)
    if pinned is None:
        return answer, pod if answer.claims and not answer.errors and not answer.not_placed else None
    if pinned is pod or (pinned.labels == pod.labels and pinned.annotations == pod.annotations):
        return answer, pinned
    # Only the author's words are those of then: containers end, GPUs appear and the node's labels change by right.
    held = resolver(replace(pod, labels=pinned.labels, annotations=pinned.annotations))
    if answer.errors and not held.errors:
        errors = tuple(f"{error}; what stood there before holds" for error in answer.errors)
        return replace(held, errors=errors, holds_despite_errors=True), pinned
    if _is_looser(answer, held, gpus):
        errors = (*held.errors, "edited to claim more than before; what stood there before holds")
        return replace(held, errors=errors, holds_despite_errors=not held.errors), pinned
    return answer, pod if answer.claims else pinned


def _is_looser(answer: Answer, held: Answer, gpus: Mapping[str, Gpu]) -> bool:
    if held.claims and not answer.claims:
        return True
    limits = {(claim.container, claim.scope, claim.gpu_uuid): claim for claim in held.claims}

    def held_for(claim: Claim) -> Claim | None:
        # A claim on a GPU may become one on a MIG device of it, when the sharing system has made the device.
        parent = gpus[claim.gpu_uuid].parent_gpu_uuid if claim.gpu_uuid in gpus else None
        candidates = (limits.get((claim.container, claim.scope, uuid)) for uuid in (claim.gpu_uuid, parent) if uuid)
        return next((candidate for candidate in candidates if candidate), None)

    return any(_claims_more(claim, held_for(claim)) for claim in answer.claims)


def _claims_more(claim: Claim, held: Claim | None) -> bool:
    if held is None:
        return True
    return _above(claim.memory_bytes, held.memory_bytes) or _above(claim.compute_ratio, held.compute_ratio)


def _above(value: float | None, held: float | None) -> bool:
    return held is not None and (value is None or value > held)
