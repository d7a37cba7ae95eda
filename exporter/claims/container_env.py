"""Limits in a container's own environment: the neutral contract of KAI's isolation design, written by users, webhooks or isolators.

GPU_MEMORY_LIMIT is in bytes. CUDA_DEVICE_MEMORY_LIMIT takes k, m and g as powers of 1024, CUDA_DEVICE_SM_LIMIT is a percentage. A value is
a literal or a fieldRef to an annotation or label of the pod; one from a ConfigMap is KAI's (`hami_core`). It holds on each GPU that the
container has a claim, an allocation or processes on, and gives the container no GPU. Nothing here says that the limit is enforced.

As HAMi-core reads them, 0 is no limit, and a form with an index (`..._0`) beats the plain one on the container's device of that number.
Which GPU has which number is not known here: with more than one, there is a limit only where all of them have the same.
"""

from collections.abc import Callable, Mapping

from exporter.claims.claim import NOT_MINE, Answer, Claim, Scope
from exporter.claims.environment import text_of
from exporter.claims.quantity import MAX_BYTES, parse_cuda_limit, parse_cuda_percent, parse_keyed, parse_unsigned
from exporter.snapshot import Container, Pod

NAME = "container_env"

_BYTES = "GPU_MEMORY_LIMIT"
_MEMORY = "CUDA_DEVICE_MEMORY_LIMIT"
_COMPUTE = "CUDA_DEVICE_SM_LIMIT"


def _parse_bytes(text: str) -> int:
    return parse_unsigned(text, maximum=MAX_BYTES)


# Name, grammar, and whether forms with an index exist.
_VARIABLES = ((_BYTES, _parse_bytes, False), (_MEMORY, parse_cuda_limit, True), (_COMPUTE, parse_cuda_percent, True))


def resolve(pod: Pod, gpus_by_container: Mapping[str, frozenset[str]]) -> Answer:
    """Answer the limits that the containers carry, on the GPUs that each of them has."""
    claims: list[Claim] = []
    errors: list[str] = []
    for container in pod.containers:
        gpu_uuids = gpus_by_container.get(container.name)
        if not gpu_uuids or not container.holds_claims:
            continue
        memory_bytes, compute_ratio, unreadable = _limits(pod, container, len(gpu_uuids))
        errors += unreadable
        if memory_bytes is None and compute_ratio is None:
            continue
        claims += (
            Claim(
                system=NAME,
                gpu_uuid=gpu_uuid,
                container=container.name,
                scope=Scope.CONTAINER,
                memory_bytes=memory_bytes,
                compute_ratio=compute_ratio,
                enforced=False,
            )
            for gpu_uuid in sorted(gpu_uuids)
        )
    return Answer(claims=tuple(claims), errors=tuple(errors)) if claims or errors else NOT_MINE


def _limits(pod: Pod, container: Container, gpus: int) -> tuple[int | None, float | None, list[str]]:
    """Answer memory in bytes, compute as a ratio, and what could not be read: such a variable gives no limit, the others do."""
    limits: dict[str, int] = {}
    errors = []
    for name, parse, is_indexed in _VARIABLES:
        try:
            limits[name] = _limit_on_each(pod, container, name, parse, gpus if is_indexed else 0)
        except ValueError as error:
            errors.append(f"container {container.name}: {error}")
    memory_bytes = min((limit for name in (_BYTES, _MEMORY) if (limit := limits.get(name))), default=None)
    percent = limits.get(_COMPUTE)
    return memory_bytes, percent / 100 if percent else None, errors


def _limit_on_each(pod: Pod, container: Container, name: str, parse: Callable[[str], int], gpus: int) -> int:
    """Answer the limit that all of the container's GPUs have; 0 where they differ or have none. Raises ValueError."""

    def value(name: str) -> int:
        return parse_keyed(name, text_of(pod, container, name) or "0", parse)

    plain = value(name)
    limits = {value(f"{name}_{index}") or plain for index in range(gpus)} or {plain}
    return limits.pop() if len(limits) == 1 else 0
