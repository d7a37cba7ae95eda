"""A whole MIG device by the kubelet's device id: `MIG-<uuid>`, before driver R470 `MIG-GPU-<uuid>/<gi>/<ci>`.

Memory: what the driver says of the MIG device (a profile's name is rounded). Compute: 1, of that MIG device. Enforced by the hardware.
"""

from exporter.claims.claim import NOT_MINE, Answer, Node, Resolver, System
from exporter.claims.device_ids import DeviceIds, held_phrase
from exporter.claims.whole_gpu import whole_claim
from exporter.snapshot import Pod


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of MIG devices."""
    ids = DeviceIds(node)

    def resolve(pod: Pod) -> Answer:
        claims = tuple(
            whole_claim("mig", held.container.name, held.gpu, held_phrase(held))
            for held in ids.held(pod)
            if held.shares == 0 and held.gpu.parent_gpu_uuid is not None
        )
        return Answer(claims=claims) if claims else NOT_MINE

    return resolve


SYSTEM = System(name="mig", resolver=resolver)
