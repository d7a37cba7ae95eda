"""Aliyun's gpushare: a container's limit `aliyun.com/gpu-mem`, on the GPU that annotation `ALIYUN_COM_GPU_MEM_IDX` names.

The unit is GiB or MiB by a flag of the device plugin that does not stand on the pod: more than 100 units for each GPU means MiB. Units for
each GPU are counted from the kubelet's ids `<uuid>-_-<n>`, failing that from annotation `ALIYUN_COM_GPU_MEM_DEV` or the Node's status. The
index is N of /dev/nvidiaN and counts once `ALIYUN_COM_GPU_MEM_ASSIGNED` is "true". Nothing is enforced and compute is not claimed.
https://github.com/AliyunContainerService/gpushare-scheduler-extender
"""

from collections import defaultdict

from exporter.claims.claim import MIB, NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.device_tuples import asks_for
from exporter.claims.quantity import MAX_BYTES, parse_keyed, parse_quantity, parse_unsigned, shown
from exporter.snapshot import Container, Gpu, Pod

RESOURCE = "aliyun.com/gpu-mem"
COUNT_RESOURCE = "aliyun.com/gpu-count"
INDEX = "ALIYUN_COM_GPU_MEM_IDX"
ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
UNITS_OF_DEVICE = "ALIYUN_COM_GPU_MEM_DEV"

_ID_SEPARATOR = "-_-"
_MOST_GIB_UNITS = 100
_GIB = 1 << 30


def is_placed(pod: Pod) -> bool:
    """Answer whether this system places the pod, so that the kubelet's device ids are none."""
    return any(asks_for(container, RESOURCE) for container in pod.containers)


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by gpushare."""
    by_minor = node.gpus_by_minor
    units_listed = _count_units(node)

    def resolve(pod: Pod) -> Answer:
        if INDEX not in pod.annotations or not is_placed(pod):
            return NOT_MINE
        if pod.annotations.get(ASSIGNED) != "true":
            return Answer(not_placed=True)
        try:
            minor = parse_keyed(INDEX, pod.annotations[INDEX], parse_unsigned)
            if minor not in by_minor:
                raise ValueError(f"{INDEX}: no GPU here has minor number {minor}")  # noqa: TRY301 - one error for all
            unit_bytes = _unit_bytes(node, units_listed, pod)
            return Answer(
                claims=tuple(
                    _claim(container, by_minor[minor], unit_bytes)
                    for container in pod.containers
                    if asks_for(container, RESOURCE) and container.holds_claims
                )
            )
        except ValueError as error:
            return Answer(errors=(str(error),))

    return resolve


def _claim(container: Container, gpu: Gpu, unit_bytes: int) -> Claim:
    units = parse_keyed(RESOURCE, container.resource_limits[RESOURCE], parse_quantity)
    memory_bytes = units * unit_bytes
    if memory_bytes > MAX_BYTES:
        raise ValueError(f"{RESOURCE}: {shown(container.resource_limits[RESOURCE])} is no amount of memory")
    return Claim(
        system="aliyun",
        gpu_uuid=gpu.gpu_uuid,
        container=container.name,
        scope=Scope.CONTAINER,
        memory_bytes=memory_bytes,
        enforced=False,
        derivation=Derivation(
            contract=Phrase(
                f"limit {RESOURCE} of the container: {{}}, on the GPU of minor number {{}} by annotation {INDEX}",
                (container.resource_limits[RESOURCE], str(gpu.minor)),
            ),
            memory=Phrase(
                f"{{}} x {{}} MiB (a unit is 1 MiB where a GPU has more than {_MOST_GIB_UNITS} of them, else 1 GiB)",
                (units, unit_bytes // MIB),
            ),
        ),
    )


def _count_units(node: Node) -> float | None:
    """Answer the units of one GPU as the kubelet lists them, an id for each; None where it lists none. All GPUs are taken as equal."""
    ids: dict[str, set[str]] = defaultdict(set)
    for entry in node.allocatable:
        if entry.resource_name == RESOURCE:
            for device_id in entry.device_ids:
                ids[device_id.partition(_ID_SEPARATOR)[0]].add(device_id)
    return sum(len(distinct) for distinct in ids.values()) / len(ids) if ids else None


def _unit_bytes(node: Node, units_listed: float | None, pod: Pod) -> int:
    """Answer the bytes of one unit. Raises ValueError where nothing tells them."""
    units = units_listed
    if units is None and UNITS_OF_DEVICE in pod.annotations:
        units = parse_keyed(UNITS_OF_DEVICE, pod.annotations[UNITS_OF_DEVICE], parse_unsigned)
    if units is None:
        allocatable = node.facts.allocatable if node.facts else {}
        all_units, gpus = (
            parse_keyed(f"allocatable {key}", allocatable.get(key, ""), parse_quantity) for key in (RESOURCE, COUNT_RESOURCE)
        )
        units = all_units / max(gpus, 1)
    return MIB if units > _MOST_GIB_UNITS else _GIB


SYSTEM = System(name="aliyun", resolver=resolver, places_by_annotation=is_placed, author_writable=True)
