"""KAI Scheduler's NvFractions: annotations `nvidia.com/container.<name>.gpu-memory.request` and `.limit` of the pod, enforced by MPS.

The limit counts, else the request: a Kubernetes quantity for each device, rounded up to whole MiB. The GPUs stand in `.gpus.devices`, bare
or as CDI names; where that is missing the group labels tell, as for the older fractions. `.gpu-compute.portion` is a share of compute.

https://github.com/kai-scheduler/KAI-Scheduler (docs/gpu-sharing)
"""

import re

from exporter.claims.claim import MIB, NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.kai import NVFRACTIONS_PREFIX, Groups, Placement, requesting_containers
from exporter.claims.quantity import MAX_BYTES, parse_keyed, parse_quantity, parse_share, shown
from exporter.snapshot import ContainerKind, Pod

_REQUEST = ".gpu-memory.request"
_LIMIT = ".gpu-memory.limit"
_DEVICES = ".gpus.devices"
_PORTION = ".gpu-compute.portion"
_CDI_PREFIX = "k8s.device-plugin.nvidia.com/gpu="
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}")


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by NvFractions."""
    groups = Groups(node)

    def resolve(pod: Pod) -> Answer:
        answers = [_resolve_container(pod, name, groups) for name in requesting_containers(pod)]
        return Answer(
            claims=tuple(claim for answer in answers for claim in answer.claims),
            errors=tuple(error for answer in answers for error in answer.errors),
            not_placed=any(answer.not_placed for answer in answers),
        )

    return resolve


def _resolve_container(pod: Pod, name: str, groups: Groups) -> Answer:
    prefix = f"{NVFRACTIONS_PREFIX}{name}"
    container = next((each for each in pod.containers if each.name == name and each.kind is not ContainerKind.EPHEMERAL), None)
    if container is None:
        return Answer(errors=(f"{shown(prefix)}: the pod has no container of that name",))
    if not container.holds_claims:
        return NOT_MINE
    try:
        memory_bytes, of_memory = _memory_bytes(pod, prefix)
        portion = pod.annotations.get(prefix + _PORTION)
        compute_ratio = None if portion is None else parse_keyed(prefix + _PORTION, portion, parse_share)
        gpu_uuids = _parse_devices(prefix + _DEVICES, pod.annotations.get(prefix + _DEVICES, ""))
    except ValueError as error:
        return Answer(errors=(str(error),))
    placement = Placement(gpu_uuids) if gpu_uuids else groups.placement(pod)
    claims = tuple(
        Claim(
            system="kai_nvfractions",
            gpu_uuid=gpu_uuid,
            container=name,
            scope=Scope.CONTAINER,
            memory_bytes=memory_bytes,
            compute_ratio=compute_ratio,
            enforced=True,
            derivation=Derivation(
                contract=_explain_contract(pod, prefix),
                memory=of_memory,
                compute=None if compute_ratio is None else Phrase("{}", (compute_ratio,)),
            ),
        )
        for gpu_uuid in dict.fromkeys(placement.gpu_uuids)
    )
    return Answer(claims=claims, errors=(placement.error,) if placement.error else (), not_placed=not claims and not placement.error)


def _explain_contract(pod: Pod, prefix: str) -> Phrase:
    """Answer where the amount and the GPU stand."""
    if devices := pod.annotations.get(prefix + _DEVICES):
        return Phrase("annotations {}, on the GPUs {}", (f"{prefix}.*", devices))
    return Phrase("annotations {}, on the GPUs that the reservation pods of the pod's groups tell", (f"{prefix}.*",))


def _memory_bytes(pod: Pod, prefix: str) -> tuple[int, Phrase]:
    key = prefix + (_LIMIT if prefix + _LIMIT in pod.annotations else _REQUEST)
    amount = parse_keyed(key, pod.annotations[key], parse_quantity)
    whole_mib = -(-amount // MIB) * MIB
    if not 0 < whole_mib <= MAX_BYTES:
        raise ValueError(f"{key}: {shown(pod.annotations[key])} is no amount of memory")
    request = pod.annotations.get(prefix + _REQUEST)
    if request is not None and parse_keyed(prefix + _REQUEST, request, parse_quantity) > amount:
        raise ValueError(f"{key}: {shown(pod.annotations[key])} is below the request {shown(request)}")
    return whole_mib, Phrase("ceil({} / 1048576) MiB (annotation {}: {}, rounded up to whole MiB)", (amount, key, pod.annotations[key]))


def _parse_devices(key: str, text: str) -> tuple[str, ...]:
    """Answer the GPUs of a comma list of UUIDs or CDI names; none where the list is empty. Raises ValueError."""
    names = tuple(name for piece in text.split(",") if (name := piece.strip().removeprefix(_CDI_PREFIX)))
    for name in names:
        if not _UUID.fullmatch(name):
            raise ValueError(f"{key}: {shown(text)} is no list of GPU UUIDs")
    return names


SYSTEM = System(name="kai_nvfractions", resolver=resolver, author_writable=True)
