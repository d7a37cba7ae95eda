"""HAMi-core under KAI Scheduler: the memory limit that KAI hands to the library in the container, and that the library enforces.

It is there when KAI's fraction container has the variable CUDA_DEVICE_MEMORY_LIMIT from a ConfigMap (KAI v0.16.0 and later, opt-in). The
value in that ConfigMap follows from what the pod and the node say: int(label x portion) MiB for each device, with the label as it stands
and the portion in two decimals. It is KAI's own request after KAI's rounding, so where it is enforced it takes the place of KAI's number.

Enforced only where the KAI-resource-isolator mounted the library, and not with CUDA_DISABLE_CONTROL=true.
https://github.com/Project-HAMi/KAI-resource-isolator
"""

from exporter.claims.claim import MIB, NOT_MINE, Answer, Claim, Node, Resolver, Scope, System
from exporter.claims.environment import variable_of
from exporter.claims.kai import (
    Groups,
    compute_share,
    fraction_container,
    has_nvfractions,
    label_mib,
    parse_request,
    scheduler_mib,
    wants_fraction,
)
from exporter.snapshot import Container, Pod

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
        enforced = is_enforced(container)
        return Answer(
            claims=tuple(
                Claim(
                    system="hami_core",
                    gpu_uuid=gpu_uuid,
                    container=container.name,
                    scope=Scope.CONTAINER,
                    memory_bytes=int(label * portion) * MIB,
                    enforced=enforced,
                    supersedes=frozenset({"kai"}) if enforced else frozenset(),
                )
                for gpu_uuid in dict.fromkeys(gpu_uuids)
            )
        )

    return resolve


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


SYSTEM = System(name="hami_core", resolver=resolver, author_writable=True)
