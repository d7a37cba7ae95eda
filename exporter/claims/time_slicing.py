"""A share of a GPU's time: a replica id `<id>::<n>` of NVIDIA's device plugin, on a node whose sharing strategy is not MPS.

Nothing limits a container here: the claim is its fair share. Memory: floor(total / replicas) in whole MiB, for each replica it holds.
Compute: replicas held / replicas. Where the number of replicas is unknown there is an allocation without an amount.
"""

from collections.abc import Iterable

from exporter.claims.claim import MIB, NOT_MINE, Allocation, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.device_ids import DeviceIds, Held, held_phrase, is_mps
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
        return resolve_shares("time_slicing", node, ((held, ids.replicas_of(held.gpu)) for held in shares))

    return resolve


def resolve_shares(system: str, node: Node, shares: Iterable[tuple[Held, int | None]]) -> Answer:
    """Answer the fair shares of containers that hold replicas of GPUs, each with the number of replicas that its GPU is cut into."""
    claims: list[Claim] = []
    allocations: list[Allocation] = []
    for held, replicas in shares:
        unknown: Phrase | None
        if node.facts is None:
            # Without the node's labels these may as well be shares under MPS: no amount then.
            unknown = Phrase("not known, because the Node object, whose labels tell how the GPU is shared, was never read")
        elif (unknown := no_share_phrase(held, replicas)) is None and replicas is not None:
            claims.append(_share_claim(system, held, replicas))
        allocations.append(share_allocation(held, unknown))
    return Answer(claims=tuple(claims), allocations=tuple(allocations))


def share_allocation(held: Held, unknown: Phrase | None) -> Allocation:
    """Answer the allocation of a container that holds shares, with why no amount goes with it, if none does."""
    derivation = Derivation(contract=held_phrase(held), memory=unknown, compute=unknown) if unknown else None
    return Allocation(held.container.name, held.gpu.gpu_uuid, derivation)


def no_share_phrase(held: Held, replicas: int | None) -> Phrase | None:
    """Answer why no amount follows from the shares that a container holds; None where one does.

    A container that holds more than there are held them before the plugin was set up anew: what a share is then cannot be told.
    """
    if replicas is None:
        return Phrase("not known, because neither the kubelet nor a label of the node tells into how many shares the GPU is cut")
    if held.shares > replicas:
        return Phrase(
            "not known, because it holds {} shares and the GPU is cut into {}, so it was given them before that", (held.shares, replicas)
        )
    return None


def share_memory_phrase(held: Held, replicas: int, in_cap: int, times: int) -> Phrase:
    """Answer how the memory of `times` x `in_cap` shares of a GPU follows."""
    total_bytes = held.gpu.memory_total_bytes
    if total_bytes is None:
        return Phrase("not known, because the driver does not tell the memory of this GPU")
    remark = f"(the GPU's memory in MiB over its shares, {told_by(held)})"
    product = " x ".join(["{}"] * (1 + (in_cap > 1)))
    operands = (total_bytes / MIB, *((in_cap,) if in_cap > 1 else ()), replicas, *((times,) if times > 1 else ()))
    return Phrase(f"floor({product} / {{}}) MiB{' x {}' if times > 1 else ''} {remark}", operands)


def told_by(held: Held) -> str:
    """Answer who says into how many shares the GPU is cut, as the end of a remark."""
    return "which the kubelet lists" if held.shares_are_listed else "whose number a label of the node tells"


def _share_claim(system: str, held: Held, replicas: int) -> Claim:
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
        derivation=Derivation(
            contract=held_phrase(held),
            memory=share_memory_phrase(held, replicas, 1, held.shares),
            compute=Phrase(f"{{}} / {{}} (shares held of all, {told_by(held)})", (held.shares, replicas)),
        ),
    )


def share_bytes(total_bytes: int, replicas: int) -> int:
    """Answer one share of the memory in bytes, a whole number of MiB."""
    return total_bytes // replicas // MIB * MIB


SYSTEM = System(name="time_slicing", resolver=resolver)
