"""What a pod's author wrote is held against the pod: a grant may be tightened by an edit, never loosened. Pure.

Labels and annotations can be edited while a pod runs. Whoever may edit a pod could raise its own limit and hide a breach. So the first
readable form of a placed pod is pinned: a later one that claims more, leaves out what was claimed or cannot be read is an error and changes
nothing; one that claims less takes its place. Pins live as long as the pod and are lost with the exporter's process, which then believes
what it finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from exporter.claims.claim import Answer, Claim, Resolver
from exporter.snapshot import Gpu, Pod


@dataclass(frozen=True, slots=True)
class Pin:
    """What one system's contract on a pod is held against."""

    pod: Pod
    """As it was when the contract was pinned. Only its labels and annotations are used."""
    gpus_by_container: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The GPUs that each container had when its limits by a device's number were first read; of `container_env` only."""


Pins = Mapping[str, Pin]
"""System -> its pin."""


def resolve_pinned(resolver: Resolver, pod: Pod, pin: Pin | None, gpus: Mapping[str, Gpu]) -> tuple[Answer, Pin | None]:
    """Answer what the system says of the pod, its author's later words not loosening the earlier ones, and the pin to keep."""
    answer = resolver(pod)
    if pin is None:
        return answer, Pin(pod) if answer.claims and not answer.errors and not answer.not_placed else None
    pinned = pin.pod
    if pinned is pod or (pinned.labels == pod.labels and pinned.annotations == pod.annotations):
        return answer, pin
    # Only the author's words are those of then: containers end, GPUs appear and the node's labels change by right.
    held = resolver(replace(pod, labels=pinned.labels, annotations=pinned.annotations))
    if answer.errors and not held.errors:
        errors = tuple(f"{error}; what stood there before holds" for error in answer.errors)
        return replace(held, errors=errors, holds_despite_errors=True), pin
    if _is_looser(answer, held, gpus):
        errors = (*held.errors, "edited to claim more than before, or something else; what stood there before holds")
        return replace(held, errors=errors, holds_despite_errors=not held.errors), pin
    return answer, replace(pin, pod=pod) if answer.claims else pin


def _is_looser(answer: Answer, held: Answer, gpus: Mapping[str, Gpu]) -> bool:
    limits = {(claim.container, claim.scope, claim.gpu_uuid): claim for claim in held.claims}
    kept = set()
    for claim in answer.claims:
        # A claim on a GPU may become one on a MIG device of it, when the sharing system has made the device.
        parent = gpus[claim.gpu_uuid].parent_gpu_uuid if claim.gpu_uuid in gpus else None
        keys = [(claim.container, claim.scope, uuid) for uuid in (claim.gpu_uuid, parent) if uuid]
        key = next((key for key in keys if key in limits), None)
        if key is None or _claims_more(claim, limits[key]):
            return True
        kept.add(key)
    return kept != limits.keys()  # Another system may give that GPU: where a claim is gone, so is its limit.


def _claims_more(claim: Claim, held: Claim) -> bool:
    return _above(claim.memory_bytes, held.memory_bytes) or _above(claim.compute_ratio, held.compute_ratio)


def _above(value: float | None, held: float | None) -> bool:
    return held is not None and (value is None or value > held)
