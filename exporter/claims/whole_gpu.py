"""A whole GPU by the kubelet's plain device id: `GPU-<uuid>` of NVIDIA's device plugin, `nvidia<minor>` of GKE's.

Memory: the GPU's total, absent where the driver does not tell it. Compute: 1. Enforced, because nobody else was given it.
"""

from exporter.claims.claim import NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.device_ids import DeviceIds, held_phrase
from exporter.snapshot import Gpu, Pod


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of whole GPUs."""
    ids = DeviceIds(node)

    def resolve(pod: Pod) -> Answer:
        claims = tuple(
            whole_claim("whole_gpu", held.container.name, held.gpu, held_phrase(held))
            for held in ids.held(pod)
            if held.shares == 0 and held.gpu.parent_gpu_uuid is None
        )
        return Answer(claims=claims) if claims else NOT_MINE

    return resolve


def whole_claim(system: str, container: str, gpu: Gpu, contract: Phrase) -> Claim:
    """Answer the claim of a container that was given all of a GPU or MIG device."""
    total = gpu.memory_total_bytes
    return Claim(
        system=system,
        gpu_uuid=gpu.gpu_uuid,
        container=container,
        scope=Scope.CONTAINER,
        memory_bytes=total,
        compute_ratio=1.0,
        enforced=True,
        derivation=Derivation(contract=contract, memory=whole_memory_phrase(total), compute=Phrase("1 (all of it)")),
    )


def whole_memory_phrase(total_bytes: int | None) -> Phrase:
    """Answer how the memory of a whole GPU or MIG device follows."""
    if total_bytes is None:
        return Phrase("not known, because the driver does not tell the memory of this GPU")
    return Phrase("{} bytes (all of it, as the driver tells it)", (total_bytes,))


SYSTEM = System(name="whole_gpu", resolver=resolver)
