"""What `/api/v1/node` says, as the rows of a table: parsed, filtered, sorted, grouped with sums. Pure.

The answer may come from an exporter of another version, so that nothing in it is believed before it was looked at.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Json = dict[str, Any]


class AnswerError(Exception):
    """The answer is not what this program reads. The text names the place: `pods[0].gpus: no list`."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number, or a sum that may lack a part."""

    known: float | None
    """What is known of it; None: nothing is."""
    whole: bool = True
    """False: there is an unknown part, so that the number is `known` or more."""


NONE = Amount(None)
"""There is no such number: a limit that no one set."""
UNKNOWN = Amount(None, whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: a device, or a MIG device, which has a parent."""

    gpu_uuid: str
    label: str
    """NVML's index; of a MIG device its parent's and its own, `3:0`; `?` where it is not known."""
    order: tuple[float, float, str]
    """Devices by index, each followed by its MIG devices."""
    model: str
    parent_gpu_uuid: str | None
    mig_profile: str | None
    index: int | None
    up: bool | None
    memory_total_bytes: Amount
    memory_used_bytes: Amount
    memory_allocated_bytes: Amount
    utilization_ratio: Amount
    """Share of time in which any kernel ran; of a MIG device the mean share of multiprocessors that were busy."""
    pods: Amount
    unattributed_memory_bytes: Mapping[str, float] | None
    """Reason -> memory, without those that have none; None: unknown."""
    processes_memory_hidden: Amount


@dataclass(frozen=True, slots=True)
class Grant:
    """A sharing system that governs a limit."""

    system: str
    enforced: bool | None


class Kind(StrEnum):
    """What a row is about."""

    POD_ON_GPU = "pod_on_gpu"
    CONTAINER = "container"
    GPU = "gpu"
    """A sum over the pods on a GPU."""
    NAMESPACE = "namespace"
    """A sum over the pods of a namespace on all GPUs."""
    POD = "pod"
    """A sum over the GPUs of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table; what it is a sum of, or consists of, stands in `rows`."""

    kind: Kind
    gpus: tuple[Gpu, ...]
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    memory_used_bytes: Amount
    memory_limit_bytes: Amount
    compute_limit_ratio: Amount
    sm_utilization_ratio: Amount
    sm_utilization_mean_ratio: Amount
    processes: Amount
    limit_exceeded: Mapping[str, bool | None]
    """Resource -> whether more is taken than was given; None: unknown. Of a sum: whether any of its rows does."""
    exceeded_since_seconds: Mapping[str, float]
    """Resource -> when the present breach began, seconds since the epoch. Of a sum: the first of them."""
    grants: tuple[Grant, ...]
    rows: tuple["Row", ...] = ()

    @property
    def is_sum(self) -> bool:
        """Whether it is made of other rows."""
        return self.kind in (Kind.GPU, Kind.NAMESPACE, Kind.POD)

    @property
    def breaches(self) -> tuple[str, ...]:
        """Answer the resources of which more is taken than was given."""
        return tuple(resource for resource, exceeded in self.limit_exceeded.items() if exceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One answer of an exporter."""

    node: str
    version: str
    simulated: bool
    sample_interval_seconds: float
    sample_seconds: float | None
    """When the node was last sampled, seconds since the epoch by the exporter's clock."""
    sources_down: tuple[tuple[str, str], ...]
    """(Source, reason)."""
    gpus: tuple[Gpu, ...]
    gpus_unidentified: int
    pods_dropped: int
    claim_errors: tuple[str, ...]
    rows: tuple[Row, ...]
    """Each pod on each of its GPUs, with its containers."""


# --- parsing ---


def parse_node(answer: Json) -> View:
    """Answer what the JSON of a node says. Raises AnswerError."""
    gpus = _parse_gpus(_Place("", answer))
    top = _Place("", answer)
    unreadable = {(error.text("namespace"), error.text("pod")) for error in top.entries("claim_errors")}
    return View(
        node=top.text("node"),
        version=top.text("version"),
        simulated=top.flag("simulated") is True,
        sample_interval_seconds=top.amount("sample_interval_seconds").known or 0.0,
        sample_seconds=top.amount("last_sample_timestamp_seconds").known,
        sources_down=parse_sources_down(answer),
        gpus=tuple(sorted(gpus.values(), key=lambda gpu: gpu.order)),
        gpus_unidentified=int(top.amount("gpus_unidentified").known or 0),
        pods_dropped=int(top.amount("pods_dropped").known or 0),
        claim_errors=tuple(
            f"{error.text('namespace')}/{error.text('pod')} ({error.text('system')}): {sentence}"
            for error in top.entries("claim_errors")
            for sentence in error.texts("errors")
        ),
        rows=tuple(_parse_pods(top, gpus, unreadable)),
    )


def parse_sources_down(answer: Json) -> tuple[tuple[str, str], ...]:
    """Answer the sources that are down, each with its reason. Raises AnswerError."""
    sources = _Place("", answer).entries("sources")
    return tuple((source.text("source"), source.text_or_none("reason") or "?") for source in sources if not source.flag("up"))


class _Place:
    """An object of the answer that knows where it stands."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise AnswerError(f"{path or 'the answer'}: no object")
        self._path = path
        self._value: Json = value

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _get(self, key: str) -> object:
        try:
            value: object = self._value[key]
        except KeyError:
            raise AnswerError(f"{self._at(key)}: is not there") from None
        return value

    def text_or_none(self, key: str) -> str | None:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise AnswerError(f"{self._at(key)}: no text")
        return value

    def text(self, key: str) -> str:
        value = self.text_or_none(key)
        if value is None:
            raise AnswerError(f"{self._at(key)}: no text")
        return value

    def flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            raise AnswerError(f"{self._at(key)}: neither true nor false")
        return value

    def amount(self, key: str, missing: Amount = UNKNOWN) -> Amount:
        """Answer a number; `missing` is what null stands for."""
        value = self._get(key)
        if value is None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise AnswerError(f"{self._at(key)}: no number")
        return Amount(value)

    def entries(self, key: str) -> list["_Place"]:
        value = self._get(key)
        if not isinstance(value, list):
            raise AnswerError(f"{self._at(key)}: no list")
        return [_Place(f"{self._at(key)}[{number}]", entry) for number, entry in enumerate(value)]

    def texts(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise AnswerError(f"{self._at(key)}: no list of texts")
        return value

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def at(self, key: str) -> "_Place":
        return _Place(self._at(key), self._get(key))

    def names(self) -> Iterable[str]:
        return self._value.keys()


def _parse_gpus(top: _Place) -> dict[str, Gpu]:
    places = {place.text("gpu_uuid"): place for place in top.entries("gpus")}
    gpus = {}
    for uuid, place in places.items():
        index = place.amount("gpu").known
        parent_uuid = place.text_or_none("parent_gpu_uuid")
        parent = places.get(parent_uuid) if parent_uuid else None
        parent_index = parent.amount("gpu").known if parent else None
        unattributed = place.at("unattributed_memory_bytes") if place.has("unattributed_memory_bytes") else None
        busy = place.amount("utilization_ratio")
        gpus[uuid] = Gpu(
            gpu_uuid=uuid,
            label=f"{_index(parent_index)}:{_index(index)}" if parent_uuid else _index(index),
            order=_order(parent_index, index, uuid) if parent_uuid else _order(index, None, uuid),
            model=place.text_or_none("model") or "?",
            parent_gpu_uuid=parent_uuid,
            mig_profile=place.text_or_none("mig_profile"),
            index=None if index is None else int(index),
            up=place.flag("up"),
            memory_total_bytes=place.amount("memory_total_bytes"),
            memory_used_bytes=place.amount("memory_used_bytes"),
            memory_allocated_bytes=place.amount("memory_allocated_bytes"),
            utilization_ratio=busy if busy.whole else place.amount("sm_utilization_ratio"),
            pods=place.amount("pods"),
            unattributed_memory_bytes=(
                {reason: amount for reason in unattributed.names() if (amount := unattributed.amount(reason).known)}
                if unattributed
                else None
            ),
            processes_memory_hidden=place.amount("processes_memory_hidden"),
        )
    return gpus


def _index(index: float | None) -> str:
    return "?" if index is None else f"{index:.0f}"


def _order(index: float | None, mig_index: float | None, uuid: str) -> tuple[float, float, str]:
    # A device whose index is not known comes last; a device comes before its MIG devices.
    return (math.inf if index is None else index, -1.0 if mig_index is None else mig_index, uuid)


def _parse_pods(top: _Place, gpus: Mapping[str, Gpu], unreadable: set[tuple[str, str]]) -> Iterable[Row]:
    for pod in top.entries("pods"):
        namespace, name, uid = pod.text("namespace"), pod.text("pod"), pod.text("pod_uid")
        for place in pod.entries("gpus"):
            uuid = place.text("gpu_uuid")
            gpu = gpus.get(uuid) or _unlisted(uuid)
            exceeded = {resource: place.at("limit_exceeded").flag(resource) for resource in place.at("limit_exceeded").names()}
            since = place.at("limit_exceeded_since_timestamp_seconds")
            # No limit is known: either there is none, or no one can tell.
            no_limit = UNKNOWN if (namespace, name) in unreadable or exceeded.get("unallocated", False) is None else NONE
            containers = tuple(_parse_container(each, gpu, (namespace, name, uid), no_limit) for each in place.entries("containers"))
            of_pod = [
                Grant(claim.text("system"), claim.flag("enforced")) for claim in place.entries("claims") if not claim.text("container")
            ]
            yield Row(
                kind=Kind.POD_ON_GPU,
                gpus=(gpu,),
                namespace=namespace,
                pod=name,
                pod_uid=uid,
                memory_used_bytes=place.amount("memory_used_bytes"),
                memory_limit_bytes=place.amount("memory_limit_bytes", no_limit),
                compute_limit_ratio=place.amount("compute_limit_ratio", no_limit),
                sm_utilization_ratio=place.amount("sm_utilization_ratio"),
                sm_utilization_mean_ratio=place.amount("sm_utilization_mean_ratio"),
                processes=add(row.processes for row in containers),
                limit_exceeded=exceeded,
                exceeded_since_seconds={key: value for key in since.names() if (value := since.amount(key).known) is not None},
                grants=_distinct([*of_pod, *(grant for row in containers for grant in row.grants)]),
                rows=containers,
            )


def _unlisted(uuid: str) -> Gpu:
    """A GPU that a pod was given and that the driver has never listed."""
    return Gpu(
        gpu_uuid=uuid,
        label="?",
        order=_order(None, None, uuid),
        model="?",
        parent_gpu_uuid=None,
        mig_profile=None,
        index=None,
        up=None,
        memory_total_bytes=UNKNOWN,
        memory_used_bytes=UNKNOWN,
        memory_allocated_bytes=UNKNOWN,
        utilization_ratio=UNKNOWN,
        pods=UNKNOWN,
        unattributed_memory_bytes=None,
        processes_memory_hidden=UNKNOWN,
    )


def _parse_container(place: _Place, gpu: Gpu, pod: tuple[str, str, str], no_limit: Amount) -> Row:
    system = place.text_or_none("system")
    return Row(
        kind=Kind.CONTAINER,
        gpus=(gpu,),
        namespace=pod[0],
        pod=pod[1],
        pod_uid=pod[2],
        container=place.text("container"),
        memory_used_bytes=place.amount("memory_used_bytes"),
        memory_limit_bytes=place.amount("memory_limit_bytes", no_limit),
        compute_limit_ratio=place.amount("compute_limit_ratio", no_limit),
        sm_utilization_ratio=place.amount("sm_utilization_ratio"),
        sm_utilization_mean_ratio=place.amount("sm_utilization_mean_ratio"),
        processes=place.amount("processes"),
        limit_exceeded={resource: place.at("limit_exceeded").flag(resource) for resource in place.at("limit_exceeded").names()},
        exceeded_since_seconds={},
        grants=(Grant(system, place.flag("enforced")),) if system is not None else (),
    )


def _distinct(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    return tuple(sorted(set(grants), key=lambda grant: (grant.system, str(grant.enforced))))


def add(amounts: Iterable[Amount]) -> Amount:
    """Answer the sum: of what is known, and whether that is all."""
    amounts = tuple(amounts)
    known = [amount.known for amount in amounts if amount.known is not None]
    return Amount(sum(known) if known else None, whole=all(amount.whole for amount in amounts))


# --- choosing ---


class Sort(StrEnum):
    """What stands first."""

    OVER = "over"
    """Breaches, the oldest first; then who is nearest to its limit."""
    MEMORY = "memory"
    SM = "sm"
    NAME = "name"
    GPU = "gpu"


class By(StrEnum):
    """What rows are added up by."""

    NONE = "none"
    GPU = "gpu"
    NAMESPACE = "namespace"
    POD = "pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a person wants to see of a view."""

    sort: Sort = Sort.OVER
    by: By = By.NONE
    filter: str = ""
    namespace: str | None = None


def choose(view: View, choice: Choice) -> tuple[Row, ...]:
    """Answer the rows in their order; a sum has the rows that it is made of in it, in the same order."""
    wanted = (row for row in view.rows if choice.namespace in (None, row.namespace) and _matches(row, choice.filter))
    key = _SORT_KEYS[choice.sort]
    rows = sorted(wanted, key=key)
    if choice.by is By.NONE:
        return tuple(rows)
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(_GROUP_KEYS[choice.by](row), []).append(row)
    return tuple(sorted((_sum(Kind(choice.by.value), members) for members in groups.values()), key=key))


def _matches(row: Row, text: str) -> bool:
    wanted = text.strip().lower()
    containers = row.rows or (row,)
    names = [f"{row.namespace}/{row.pod}/{each.container}" for each in containers]
    # Indices are short: as a part of something they would match too much.
    return any(wanted in name.lower() for name in [*names, row.gpus[0].gpu_uuid]) or wanted == row.gpus[0].label


def _name(row: Row) -> tuple[str, str, tuple[float, float, str]]:
    return row.namespace, row.pod, row.gpus[0].order


def _falling(amount: Amount) -> float:
    """Large amounts first; those of which nothing is known last."""
    return math.inf if amount.known is None else -amount.known


def _over(row: Row) -> tuple[float, float]:
    if row.is_sum:
        return min(_over(member) for member in row.rows)
    if row.breaches:
        return (0.0, min(row.exceeded_since_seconds.values(), default=math.inf))
    used, limit = row.memory_used_bytes.known, row.memory_limit_bytes.known
    return (1.0, -used / limit if used is not None and limit else 0.0)


_SORT_KEYS: Mapping[Sort, Callable[[Row], Any]] = {
    Sort.OVER: lambda row: (_over(row), _name(row)),
    Sort.MEMORY: lambda row: (_falling(row.memory_used_bytes), _name(row)),
    Sort.SM: lambda row: (_falling(row.sm_utilization_ratio), _name(row)),
    Sort.NAME: _name,
    Sort.GPU: lambda row: (row.gpus[0].order, _name(row)),
}

_GROUP_KEYS: Mapping[By, Callable[[Row], object]] = {
    By.GPU: lambda row: row.gpus[0].gpu_uuid,
    By.NAMESPACE: lambda row: row.namespace,
    By.POD: lambda row: row.pod_uid,
}


def _sum(kind: Kind, rows: list[Row]) -> Row:
    first = rows[0]
    resources = dict.fromkeys(resource for row in rows for resource in row.limit_exceeded)
    since: dict[str, float] = {}
    for row in rows:
        for resource, seconds in row.exceeded_since_seconds.items():
            since[resource] = min(seconds, since.get(resource, math.inf))
    return Row(
        kind=kind,
        gpus=tuple(sorted({gpu.gpu_uuid: gpu for row in rows for gpu in row.gpus}.values(), key=lambda gpu: gpu.order)),
        namespace="" if kind is Kind.GPU else first.namespace,
        pod=first.pod if kind is Kind.POD else "",
        pod_uid=first.pod_uid if kind is Kind.POD else "",
        memory_used_bytes=add(row.memory_used_bytes for row in rows),
        memory_limit_bytes=add(row.memory_limit_bytes for row in rows),
        compute_limit_ratio=add(row.compute_limit_ratio for row in rows),
        sm_utilization_ratio=add(row.sm_utilization_ratio for row in rows),
        sm_utilization_mean_ratio=add(row.sm_utilization_mean_ratio for row in rows),
        processes=add(row.processes for row in rows),
        limit_exceeded={
            resource: _any(row.limit_exceeded[resource] for row in rows if resource in row.limit_exceeded) for resource in resources
        },
        exceeded_since_seconds=since,
        grants=_distinct(grant for row in rows for grant in row.grants),
        rows=tuple(rows),
    )


def _any(flags: Iterable[bool | None]) -> bool | None:
    flags = tuple(flags)
    if any(flags):
        return True
    return None if None in flags else False


# --- JSON ---

_AMOUNTS = (
    "processes",
    "memory_used_bytes",
    "memory_limit_bytes",
    "compute_limit_ratio",
    "sm_utilization_ratio",
    "sm_utilization_mean_ratio",
)


def build_json(view: View, rows: Iterable[Row], *, containers: bool) -> Json:
    """Answer the rows for scripts, in the words of the metrics: unknown is null, and what is known of a sum stands under `at_least`."""
    return {
        "node": view.node,
        "version": view.version,
        "simulated": view.simulated,
        "last_sample_timestamp_seconds": view.sample_seconds,
        "rows": [_row_json(row, containers=containers) for row in rows],
    }


def _row_json(row: Row, *, containers: bool) -> Json:
    amounts = {name: getattr(row, name) for name in _AMOUNTS}
    answer: Json = {"kind": row.kind.value, **_identity_json(row)}
    answer |= {name: amount.known if amount.whole else None for name, amount in amounts.items()}
    answer["at_least"] = {name: amount.known for name, amount in amounts.items() if not amount.whole and amount.known is not None}
    answer["limit_exceeded"] = dict(row.limit_exceeded)
    if row.kind is not Kind.CONTAINER:
        answer["limit_exceeded_since_timestamp_seconds"] = {name: row.exceeded_since_seconds.get(name) for name in row.limit_exceeded}
    answer["systems"] = [{"system": grant.system, "enforced": grant.enforced} for grant in row.grants]
    if row.is_sum or (row.kind is Kind.POD_ON_GPU and containers):
        answer["rows"] = [_row_json(each, containers=containers) for each in row.rows]
    return answer


def _identity_json(row: Row) -> Json:
    answer: Json = {}
    if len(row.gpus) == 1 and row.kind in (Kind.GPU, Kind.POD_ON_GPU):
        (gpu,) = row.gpus
        answer |= {"gpu_uuid": gpu.gpu_uuid, "gpu": gpu.index, "parent_gpu_uuid": gpu.parent_gpu_uuid, "mig_profile": gpu.mig_profile}
    if row.kind in (Kind.NAMESPACE, Kind.POD, Kind.POD_ON_GPU):
        answer["namespace"] = row.namespace
    if row.kind in (Kind.POD, Kind.POD_ON_GPU):
        answer |= {"pod": row.pod, "pod_uid": row.pod_uid}
    if row.kind is Kind.CONTAINER:
        answer["container"] = row.container
    return answer
