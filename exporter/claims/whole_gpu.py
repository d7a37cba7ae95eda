"""A whole GPU by the kubelet's plain device id: `GPU-<uuid>` of NVIDIA's device plugin, `nvidia<minor>` of GKE's.

Memory: the GPU's total, absent where the driver does not tell it. Compute: 1. Enforced, because nobody else was given it.
"""

from exporter.claims.claim import NOT_MINE, Answer, Claim, Node, Resolver, Scope, System
from exporter.claims.device_ids import DeviceIds
from exporter.snapshot import Gpu, Pod


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of whole GPUs."""
    ids = DeviceIds(node)

    def resolve(pod: Pod) -> Answer:
        claims = tuple(
            whole_claim("whole_gpu", held.container.name, held.gpu)
            for held in ids.held(pod)
            if held.shares == 0 and held.gpu.parent_gpu_uuid is None
        )
        return Answer(claims=claims) if claims else NOT_MINE

    return resolve


def whole_claim(system: str, container: str, gpu: Gpu) -> Claim:
    """Answer the claim of a container that was given all of a GPU or MIG device."""
    return Claim(
        system=system,
        gpu_uuid=gpu.gpu_uuid,
        container=container,
        scope=Scope.CONTAINER,
        memory_bytes=gpu.memory_total_bytes,
        compute_ratio=1.0,
        enforced=True,
    )


SYSTEM = System(name="whole_gpu", resolver=resolver)
