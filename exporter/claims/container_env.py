"""Limits in a container's own environment: the neutral contract of KAI's isolation design, written by users, webhooks or isolators.

GPU_MEMORY_LIMIT is in bytes. CUDA_DEVICE_MEMORY_LIMIT takes k, m and g as powers of 1024, CUDA_DEVICE_SM_LIMIT is a percentage. A value is
a literal or a fieldRef to an annotation or label of the pod; one from a ConfigMap is KAI's (`hami_core`). It holds on each GPU that the
container has a claim, an allocation or processes on, and gives the container no GPU. Nothing here says that the limit is enforced.

As HAMi-core reads them, 0 is no limit, and a form with an index (`..._0`) beats the plain one on the container's device of that number.
Which GPU has which number is not known here: with more than one, there is a limit only where all of them have the same. A GPU that
comes later, by an edit of the pod or by a process there, must not take a limit away from those that had it: numbers count the first ones.
"""

from collections.abc import Callable, Mapping

from exporter.claims.claim import NOT_MINE, Answer, Claim, Derivation, Phrase, Scope
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

_ALL_NUMBERED: Mapping[str, frozenset[str]] = {}


def resolve(
    pod: Pod, gpus_by_container: Mapping[str, frozenset[str]], numbered_by_container: Mapping[str, frozenset[str]] = _ALL_NUMBERED
) -> Answer:
    """Answer the limits that the containers carry, on the GPUs that each of them has.

    `numbered_by_container` names the GPUs among which the forms with an index count, where they are not all that the container has.
    """
    claims: list[Claim] = []
    errors: list[str] = []
    for container in pod.containers:
        gpu_uuids = gpus_by_container.get(container.name)
        if not gpu_uuids or not container.holds_claims:
            continue
        numbered = numbered_by_container.get(container.name, gpu_uuids)
        for among, counted in ((gpu_uuids & numbered, numbered), (gpu_uuids - numbered, gpu_uuids)):
            if among:
                limits, unreadable = _limits(pod, container, len(counted))
                errors += unreadable
                claims += _claims(container, among, limits)
    return Answer(claims=tuple(claims), errors=tuple(dict.fromkeys(errors))) if claims or errors else NOT_MINE


def _claims(container: Container, gpu_uuids: frozenset[str], limits: Mapping[str, int]) -> list[Claim]:
    if not limits:
        return []
    memory = {name: limit for name, limit in limits.items() if name != _COMPUTE}
    percent = limits.get(_COMPUTE)
    derivation = _explain(memory, percent)
    return [
        Claim(
            system=NAME,
            gpu_uuid=gpu_uuid,
            container=container.name,
            scope=Scope.CONTAINER,
            memory_bytes=min(memory.values(), default=None),
            compute_ratio=None if percent is None else percent / 100,
            enforced=False,
            derivation=derivation,
        )
        for gpu_uuid in sorted(gpu_uuids)
    ]


def _explain(memory: Mapping[str, int], percent: int | None) -> Derivation:
    amounts = ", ".join(["{} bytes"] * len(memory))
    rule = f"min({amounts})" if len(memory) > 1 else amounts
    return Derivation(
        contract=Phrase(f"the container's environment: {', '.join((*memory, *(() if percent is None else (_COMPUTE,))))}"),
        memory=Phrase(f"{rule} ({' and '.join(memory)})", tuple(memory.values())) if memory else None,
        compute=None if percent is None else Phrase(f"{{}} / 100 ({_COMPUTE}, percent)", (percent,)),
    )


def _limits(pod: Pod, container: Container, gpus: int) -> tuple[dict[str, int], list[str]]:
    """Answer the limits by variable, bytes and percent, and what could not be read: such a variable gives no limit, the others do."""
    limits: dict[str, int] = {}
    errors = []
    for name, parse, is_indexed in _VARIABLES:
        try:
            limits[name] = _limit_on_each(pod, container, name, parse, gpus if is_indexed else 0)
        except ValueError as error:
            errors.append(f"container {container.name}: {error}")
    return {name: limit for name, limit in limits.items() if limit}, errors


def _limit_on_each(pod: Pod, container: Container, name: str, parse: Callable[[str], int], gpus: int) -> int:
    """Answer the limit that all of the container's GPUs have; 0 where they differ or have none. Raises ValueError."""

    def value(name: str) -> int:
        return parse_keyed(name, text_of(pod, container, name) or "0", parse)

    plain = value(name)
    limits = {value(f"{name}_{index}") or plain for index in range(gpus)} or {plain}
    return limits.pop() if len(limits) == 1 else 0
