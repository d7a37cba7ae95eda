"""Koordinator: annotation `scheduling.koordinator.sh/device-allocated`, JSON, for the pod as a whole and for each GPU of its list.

GPU: `id`, where it is missing `minor` (N of /dev/nvidiaN). Memory: `koordinator.sh/gpu-memory`, a Kubernetes quantity. Compute:
`koordinator.sh/gpu-core` in percent. Every container of the pod sees the GPUs. Enforced by HAMi-core only with the pod's label
`koordinator.sh/gpu-isolation-provider: HAMi-core` and a `koordinator.sh/gpu-memory-ratio` below 100. https://koordinator.sh/docs
"""

import json
from collections.abc import Mapping
from typing import Any

from exporter.claims.claim import NOT_MINE, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.quantity import parse_keyed, parse_quantity, parse_unsigned, shown
from exporter.snapshot import Gpu, Pod

ALLOCATED = "scheduling.koordinator.sh/device-allocated"
ISOLATION_LABEL = "koordinator.sh/gpu-isolation-provider"
_MEMORY = "koordinator.sh/gpu-memory"
_CORE = "koordinator.sh/gpu-core"
_RATIO = "koordinator.sh/gpu-memory-ratio"
_WHOLE_PERCENT = 100
_MOST_GPUS = 256
"""No node has that many; a tenant's annotation could name thousands, and each would be a series."""


def is_placed(pod: Pod) -> bool:
    """Answer whether Koordinator placed the pod, so that the kubelet's device ids are none."""
    return bool(pod.annotations.get(ALLOCATED, "").strip())


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod was given by Koordinator."""
    by_minor = node.gpus_by_minor

    def resolve(pod: Pod) -> Answer:
        if not is_placed(pod) or not any(container.holds_claims for container in pod.containers):
            return NOT_MINE
        isolated = pod.labels.get(ISOLATION_LABEL) == "HAMi-core"
        try:
            return Answer(claims=_parse_claims(pod.annotations[ALLOCATED], by_minor, isolated=isolated))
        except ValueError as error:
            return Answer(errors=(f"{ALLOCATED}: {error}",))

    return resolve


def _parse_claims(text: str, by_minor: Mapping[int, Gpu], *, isolated: bool) -> tuple[Claim, ...]:
    claims: dict[str, Claim] = {}
    for entry in _parse_gpus(text):
        claim = _parse_gpu(entry, by_minor, isolated=isolated)
        if claim.gpu_uuid in claims:
            raise ValueError(f"{shown(claim.gpu_uuid)} stands there twice")
        claims[claim.gpu_uuid] = claim
    return tuple(claims.values())


def _parse_gpus(text: str) -> list[Any]:
    try:
        allocated: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(text)} is no JSON") from error
    if not isinstance(allocated, dict):
        raise ValueError(f"{shown(text)} is no JSON object")
    gpus = allocated.get("gpu")
    if gpus is None:
        return []  # The pod was given other devices only.
    if not isinstance(gpus, list) or len(gpus) > _MOST_GPUS:
        raise ValueError(f"{shown(text)} has no list of up to {_MOST_GPUS} GPUs")
    return gpus


def _parse_gpu(entry: object, by_minor: Mapping[int, Gpu], *, isolated: bool) -> Claim:
    resources = entry.get("resources") or {} if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(resources, dict):
        raise ValueError("a GPU or its resources that are no JSON object")
    memory, core, ratio = (_text(resources, key) for key in (_MEMORY, _CORE, _RATIO))
    memory_bytes = None if memory is None else parse_keyed(_MEMORY, memory, parse_quantity)
    core_percent = None if core is None else parse_keyed(_CORE, core, parse_quantity)
    ratio_percent = None if ratio is None else parse_keyed(_RATIO, ratio, parse_unsigned)
    return Claim(
        system="koordinator",
        gpu_uuid=_gpu_uuid(entry, by_minor),
        container="",
        scope=Scope.POD,
        memory_bytes=memory_bytes or None,
        compute_ratio=core_percent / 100 if core_percent else None,
        enforced=isolated and ratio_percent is not None and ratio_percent < _WHOLE_PERCENT,
        derivation=Derivation(
            contract=Phrase(f"annotation {ALLOCATED}, its entry for this GPU"),
            memory=Phrase(f"{{}} bytes ({_MEMORY}: {{}})", (memory_bytes, memory or "")) if memory_bytes else None,
            compute=Phrase(f"{{}} / 100 ({_CORE}, percent)", (core_percent,)) if core_percent else None,
        ),
    )


def _gpu_uuid(entry: Mapping[str, Any], by_minor: Mapping[int, Gpu]) -> str:
    uuid, minor = entry.get("id"), entry.get("minor")
    if isinstance(uuid, str) and uuid:
        return uuid
    if uuid in (None, "") and isinstance(minor, int) and minor in by_minor:
        return by_minor[minor].gpu_uuid
    raise ValueError("neither an id nor the minor number of a GPU here")


def _text(resources: Mapping[str, Any], key: str) -> str | None:
    value = resources.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise ValueError(f"{key} is no quantity")
    return None if value is None else str(value)  # A quantity may be written as a bare number.


SYSTEM = System(name="koordinator", resolver=resolver, places_by_annotation=is_placed, author_writable=True)
