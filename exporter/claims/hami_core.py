"""HAMi-core under KAI Scheduler: the memory limit that KAI hands to the library in the container, and that the library enforces.

It is there when KAI's fraction container has the variable CUDA_DEVICE_MEMORY_LIMIT from a ConfigMap (KAI v0.16.0 and later, opt-in). The
value in that ConfigMap follows from what the pod and the node say: int(label x portion) MiB for each device, with the label as it stands
and the portion in two decimals. It is KAI's own request after KAI's rounding, so where it is enforced it takes the place of KAI's number.

Enforced only where the KAI-resource-isolator mounted the library, and not with CUDA_DISABLE_CONTROL=true.
https://github.com/Project-HAMi/KAI-resource-isolator

Under every system that uses the library, the region that it keeps for a container says the limit that it works with. The container can
write there: so that limit may tighten what contracts say and never loosens it, it gives no GPU, and where it repeats them it is no claim.
"""

from collections.abc import Mapping
from dataclasses import replace

from exporter.claims.claim import MIB, NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.environment import variable_of
from exporter.claims.kai import (
    Groups,
    compute_share,
    fraction_container,
    has_nvfractions,
    label_mib,
    parse_request,
    request_phrase,
    scheduler_mib,
    wants_fraction,
)
from exporter.snapshot import Container, Pod

NAME = "hami_core"

VARIABLE = "CUDA_DEVICE_MEMORY_LIMIT"
_PRELOAD = "/etc/ld.so.preload"
_LIBRARY = "/usr/local/vgpu"
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})  # as Go's ParseBool, by which HAMi's device plugin reads it


def resolver(node: Node) -> Resolver:
    """Answer the function that says what HAMi-core lets a KAI pod have."""
    groups = Groups(node)

    def resolve(pod: Pod) -> Answer:
        if not wants_fraction(pod) or has_nvfractions(pod):
            return NOT_MINE
        try:
            request, container = parse_request(pod), fraction_container(pod)
        except ValueError:
            return NOT_MINE  # KAI's own contract is unreadable: that is one error, and `kai` says it.
        label, share = label_mib(node), compute_share(request, scheduler_mib(node))
        gpu_uuids = groups.placement(pod).gpu_uuids
        if not container.holds_claims or not _is_limited(container) or label is None or share is None:
            return NOT_MINE
        portion = float(f"{share:.2f}")
        memory_mib = int(label * portion)
        if memory_mib == 0:
            return NOT_MINE  # to the library 0m is no limit
        asked = request_phrase(pod)
        enforced = is_enforced(container)
        return Answer(
            claims=tuple(
                Claim(
                    system=NAME,
                    gpu_uuid=gpu_uuid,
                    container=container.name,
                    scope=Scope.CONTAINER,
                    memory_bytes=memory_mib * MIB,
                    enforced=enforced,
                    supersedes=frozenset({"kai"}) if enforced else frozenset(),
                    derivation=Derivation(
                        contract=Phrase(f"variable {VARIABLE} from KAI's ConfigMap, by {asked.template}", asked.operands),
                        memory=Phrase("floor({} x {}) MiB (the node's label in MiB, and the share in two decimals)", (label, portion)),
                    ),
                )
                for gpu_uuid in dict.fromkeys(gpu_uuids)
            )
        )

    return resolve


def with_region_limits(
    pod: Pod, claims: tuple[Claim, ...], limits: Mapping[tuple[str, str], int], gpus_by_container: Mapping[str, frozenset[str]]
) -> tuple[Claim, ...]:
    """Answer the pod's claims, tightened by the limits that the library's regions tell.

    `limits` are bytes by (container, GPU); `gpus_by_container` names the GPUs that each container was given or uses.
    """
    containers = {container.name: container for container in pod.containers if container.holds_claims}
    for (name, gpu_uuid), limit_bytes in sorted(limits.items()):
        if name not in containers or gpu_uuid not in gpus_by_container.get(name, ()):
            continue
        told = [claim for claim in claims if claim.container == name and claim.gpu_uuid == gpu_uuid and claim.scope is Scope.CONTAINER]
        if own := next((claim for claim in told if claim.system == NAME), None):
            if own.memory_bytes is None or limit_bytes < own.memory_bytes:
                tightened = replace(own, memory_bytes=limit_bytes, derivation=_region_derivation(limit_bytes))
                claims = tuple(tightened if claim is own else claim for claim in claims)
        elif all(claim.memory_bytes is None or limit_bytes < claim.memory_bytes for claim in told):
            enforced = not is_switched_off(containers[name])
            region = Claim(
                system=NAME,
                gpu_uuid=gpu_uuid,
                container=name,
                scope=Scope.CONTAINER,
                memory_bytes=limit_bytes,
                enforced=enforced,
                derivation=_region_derivation(limit_bytes),
            )
            claims = (*claims, region)
    return claims


def _region_derivation(limit_bytes: int) -> Derivation:
    contract = Phrase("the region that HAMi-core keeps for the container, which may tighten what contracts say and never loosens it")
    return Derivation(contract=contract, memory=Phrase("{} bytes (the limit that the library works with)", (limit_bytes,)))


def _is_limited(container: Container) -> bool:
    variable = variable_of(container, VARIABLE)
    return variable is not None and variable.config_map_key is not None


def is_enforced(container: Container) -> bool:
    """Answer whether the library is mounted in the container and switched on."""
    return {_PRELOAD, _LIBRARY} <= set(container.volume_mounts) and not is_switched_off(container)


def is_switched_off(container: Container) -> bool:
    """Answer whether the container's own environment switches HAMi-core off."""
    variable = variable_of(container, "CUDA_DISABLE_CONTROL")
    return variable is not None and variable.value in _TRUE


SYSTEM = System(name=NAME, resolver=resolver, author_writable=True)
