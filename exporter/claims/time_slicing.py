"""A share of a GPU's time: a replica id `<id>::<n>` of NVIDIA's device plugin, on a node whose sharing strategy is not MPS.

Nothing limits a container here: the claim is its fair share. Memory: floor(total / replicas) in whole MiB, for each replica it holds.
Compute: replicas held / replicas. Where the number of replicas is unknown there is an allocation without an amount.
"""

from exporter.claims.claim import MIB, NOT_MINE, Allocation, Answer, Claim, Node, Resolver, Scope, System
from exporter.claims.device_ids import DeviceIds, Held, is_mps
from exporter.snapshot import Pod


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of shared GPUs."""
    ids = DeviceIds(node)

    def resolve(pod: Pod) -> Answer:
        # MPS serves full GPUs only: replicas of a MIG device are shares of time on any node.
        of_time = (held for held in ids.held(pod) if not (is_mps(node) and held.gpu.parent_gpu_uuid is None))
        shares = [held for held in of_time if held.shares and not held.is_gke]
        if not shares:
            return NOT_MINE
        # Without the node's labels these may as well be shares under MPS: no amount then.
        numbered = shares if node.facts is not None else ()
        return Answer(
            claims=tuple(claim for held in numbered if (claim := share_claim("time_slicing", held, ids.replicas_of(held.gpu)))),
            allocations=tuple(Allocation(held.container.name, held.gpu.gpu_uuid) for held in shares),
        )

    return resolve


def share_claim(system: str, held: Held, replicas: int | None) -> Claim | None:
    """Answer the fair share of a container that holds replicas of a GPU; None where their number is unknown.

    A container that holds more than there are held them before the plugin was set up anew: what a share is then cannot be told.
    """
    if replicas is None or held.shares > replicas:
        return None
    total = held.gpu.memory_total_bytes
    return Claim(
        system=system,
        gpu_uuid=held.gpu.gpu_uuid,
        container=held.container.name,
        scope=Scope.CONTAINER,
        memory_bytes=None if total is None else share_bytes(total, replicas) * held.shares,
        compute_ratio=held.shares / replicas,
        enforced=False,
        shares=held.shares,
    )


def share_bytes(total_bytes: int, replicas: int) -> int:
    """Answer one share of the memory in bytes, a whole number of MiB."""
    return total_bytes // replicas // MIB * MIB


SYSTEM = System(name="time_slicing", resolver=resolver)
