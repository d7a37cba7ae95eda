"""What a Prometheus remembers of pods on shared GPUs over a range: how much they used, what they may use, whose they are.

Each query groups by what identifies a pod or GPU and drops the scrape's own labels (job, instance), so that a node that is scraped twice,
a pair of Prometheis behind one querier, or an exporter that was restarted and has a new address counts once. `cluster` is kept where
Prometheus attaches it.

Use is read in steps, by the highest use in each (`max_over_time`): so no sample is passed over, a step without any sample is unknown
rather than what it was before, and each part of the time weighs the same, however often it was scraped.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from exporter.advice import Device, PodFacts, PodKey, PodUse
from exporter.commands.client import printable
from exporter.commands.prometheus_api import Prometheus, PrometheusError, Sample
from exporter.duration import show_duration

_POD = ("cluster", "namespace", "pod")
_POD_GPU = (*_POD, "gpu_uuid")
_OWNER = ("owner_kind", "owner_name", "role")
_USED, _LIMIT = "fgpu_pod_memory_used_bytes", "fgpu_pod_memory_limit_bytes"
_HONOR_LABELS = "scrape the exporter with honor_labels: true (docs/install.md)"

Ask = Callable[[str], tuple[Sample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which part of a Prometheus is looked at."""

    end_seconds: float
    range_seconds: int
    step_seconds: int
    selector: str = ""
    """Label matchers that every series has to meet, as PromQL writes them, with or without the braces."""
    namespaces: tuple[str, ...] = ()
    """Of pods; empty for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodHistory:
    """What is remembered."""

    uses: tuple[PodUse, ...]
    pods: Mapping[PodKey, PodFacts]
    devices: Mapping[str, Device]
    """By gpu_uuid."""


def read_pod_history(prometheus: Prometheus, window: Window) -> PodHistory:
    """Answer what is remembered. Raises PrometheusError, also where there is nothing or where it cannot be told whose it is."""
    queries = Queries(window)

    def ask(expression: str) -> tuple[Sample, ...]:
        return prometheus.query(expression, window.end_seconds)

    known = _by_labels(_POD_GPU, ask(queries.over_steps("count_over_time")))
    _refuse_renamed_labels(ask, queries, prometheus.url)
    if not known:
        raise PrometheusError(_why_nothing(ask, queries, prometheus.url, window))
    return PodHistory(
        uses=_read_uses(ask, queries, known), pods=_read_pods(ask, queries, prometheus.url), devices=_read_devices(ask, queries)
    )


class Queries:
    """The expressions for one window."""

    def __init__(self, window: Window) -> None:
        self._range = f"[{window.range_seconds}s]"
        self._step = f"[{window.step_seconds}s]"
        self._steps = f"[{window.range_seconds}s:{window.step_seconds}s]"
        self._selector = window.selector.strip(" {},")
        self._namespaces = f'namespace=~"{"|".join(window.namespaces)}"' if window.namespaces else ""

    def over_steps(self, function: str, parameter: str = "", *, moments: bool = False) -> str:
        """Answer a function over the highest use in each step, by pod and GPU; with `moments`, over when those steps ended."""
        inner = f"max by ({', '.join(_POD_GPU)}) (max_over_time({self._pods(_USED)}{self._step}))"
        return f"{function}({parameter}({inner}{' * 0 + time()' if moments else ''}){self._steps})"

    def seen_steps(self) -> str:
        """Answer in how many steps each pod was seen at all."""
        return (
            f"count_over_time((group by ({', '.join(_POD)}) (present_over_time({self._pods('fgpu_pod_info')}{self._step}))){self._steps})"
        )

    def owners(self) -> str:
        """Answer how many samples each pod has under each owner and role."""
        return f"sum by ({', '.join((*_POD, *_OWNER))}) (count_over_time({self._pods('fgpu_pod_info')}{self._range}))"

    def systems(self) -> str:
        """Answer which sharing systems claimed memory for each pod and GPU."""
        return f"group by ({', '.join((*_POD_GPU, 'system'))}) (present_over_time({self._pods('fgpu_claim_memory_bytes')}{self._range}))"

    def now(self, metric: str) -> str:
        """Answer a metric of each pod and GPU at the end of the range."""
        return f"max by ({', '.join(_POD_GPU)}) ({self._pods(metric)})"

    def last(self, metric: str) -> str:
        """Answer its last value in the range, of pods that are gone too."""
        return f"max by ({', '.join(_POD_GPU)}) (last_over_time({self._pods(metric)}{self._range}))"

    def gpu_memory(self) -> str:
        """Answer the memory of each GPU."""
        return f"max by (gpu_uuid) (last_over_time({self._all('fgpu_gpu_memory_total_bytes')}{self._range}))"

    def gpu_info(self) -> str:
        """Answer which models and MIG profiles each GPU had in the range."""
        labels = "gpu_uuid, model, mig_profile, parent_gpu_uuid"
        return f"sum by ({labels}) (count_over_time({self._all('fgpu_gpu_info')}{self._range}))"

    def renamed(self) -> str:
        """Answer how many series of the range had their labels renamed by a scrape that does not honour them; nothing where none had."""
        return "count(present_over_time(" + self._all(_USED, 'exported_pod!=""') + self._range + "))"

    def versions(self) -> str:
        """Answer which versions of the exporter there were in the range."""
        return f"group by (version) (present_over_time({self._all('fgpu_build_info')}{self._range}))"

    def _pods(self, metric: str) -> str:
        return self._all(metric, self._namespaces)

    def _all(self, metric: str, matcher: str = "") -> str:
        matchers = ",".join(part for part in (self._selector, matcher) if part)
        return f"{metric}{{{matchers}}}" if matchers else metric


def _key(names: Iterable[str], sample: Sample) -> tuple[str, ...]:
    return tuple(sample.labels.get(name, "") for name in names)


def _by_labels(names: Iterable[str], samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    names = tuple(names)
    return {_key(names, sample): sample.value for sample in samples}


def _read_uses(ask: Ask, queries: Queries, known: Mapping[tuple[str, ...], float]) -> tuple[PodUse, ...]:
    p99 = _by_labels(_POD_GPU, ask(queries.over_steps("quantile_over_time", "0.99, ")))
    highest = _by_labels(_POD_GPU, ask(queries.over_steps("max_over_time")))
    first = _by_labels(_POD_GPU, ask(queries.over_steps("min_over_time", moments=True)))
    last = _by_labels(_POD_GPU, ask(queries.over_steps("max_over_time", moments=True)))
    limits_now, used_now = (_by_labels(_POD_GPU, ask(queries.now(metric))) for metric in (_LIMIT, _USED))
    limits_last = _by_labels(_POD_GPU, ask(queries.last(_LIMIT)))
    systems: dict[tuple[str, ...], set[str]] = {}
    for sample in ask(queries.systems()):
        systems.setdefault(_key(_POD_GPU, sample), set()).add(sample.labels.get("system", ""))
    uses = []
    # Series that came between two of the queries are in some of them only.
    for key in sorted(known.keys() & p99.keys() & highest.keys() & first.keys() & last.keys()):
        cluster, namespace, pod, gpu_uuid = key
        is_running = key in limits_now or key in used_now
        limit = limits_now.get(key) if is_running else limits_last.get(key)
        uses.append(
            PodUse(
                pod=(cluster, namespace, pod),
                gpu_uuid=gpu_uuid,
                known_steps=int(known[key]),
                first_seconds=first[key],
                last_seconds=last[key],
                memory_used_p99_bytes=p99[key],
                memory_used_max_bytes=highest[key],
                is_running=is_running,
                memory_limit_bytes=None if limit is None else int(limit),
                systems=frozenset(systems.get(key, ())),
            )
        )
    return tuple(uses)


def _read_pods(ask: Ask, queries: Queries, url: str) -> dict[PodKey, PodFacts]:
    """Answer the facts of each pod. A name that had several owners in the range is counted for the one under which it was seen most."""
    owners = ask(queries.owners())
    if not any(sample.labels.get("role") for sample in owners):
        versions = ", ".join(sorted(printable(sample.labels.get("version", "?")) for sample in ask(queries.versions()))) or "unknown"
        raise PrometheusError(
            f"the series at {url} do not say whose pods they are: fgpu_pod_info is missing or lacks owner_kind, owner_name and role "
            f"(exporter of version {versions}); use this program in the version of the exporters, or scrape that metric too"
        )
    seen = _by_labels(_POD, ask(queries.seen_steps()))
    most: dict[PodKey, tuple[float, tuple[str, ...]]] = {}
    for sample in owners:
        cluster, namespace, pod = _key(_POD, sample)
        candidate = (sample.value, _key(_OWNER, sample))
        most[cluster, namespace, pod] = max(candidate, most.get((cluster, namespace, pod), candidate))
    return {
        pod: PodFacts(owner_kind=kind, owner_name=name, is_system=role == "system", seen_steps=int(seen.get(pod, 0)))
        for pod, (_, (kind, name, role)) in most.items()
    }


def _read_devices(ask: Ask, queries: Queries) -> dict[str, Device]:
    memory = {sample.labels.get("gpu_uuid", ""): int(sample.value) for sample in ask(queries.gpu_memory())}
    facts: dict[str, tuple[float, tuple[str, str, str]]] = {}
    for sample in ask(queries.gpu_info()):
        uuid, model, profile, parent = _key(("gpu_uuid", "model", "mig_profile", "parent_gpu_uuid"), sample)
        candidate = (sample.value, (model, profile, parent))
        facts[uuid] = max(candidate, facts.get(uuid, candidate))
    nothing = (0.0, ("", "", ""))
    return {
        uuid: Device(model=model, mig_profile=profile, is_mig=bool(parent or profile), memory_total_bytes=memory.get(uuid))
        for uuid in {*memory, *facts}
        for _, (model, profile, parent) in [facts.get(uuid, nothing)]
    }


# --- what stands in the way ---


def _refuse_renamed_labels(ask: Ask, queries: Queries, url: str) -> None:
    if renamed := ask(queries.renamed()):
        raise PrometheusError(
            f"at {url} {renamed[0].value:g} series have the exporter's labels namespace and pod as exported_namespace and exported_pod: "
            f"{_HONOR_LABELS}, and leave out what came before by a shorter --range or a --selector"
        )


def _why_nothing(ask: Ask, queries: Queries, url: str, window: Window) -> str:
    period = f"in the {show_duration(window.range_seconds)} looked at"
    if not ask(queries.versions()):
        where = f" with {printable(window.selector)}" if window.selector else ""
        return f"{url} has no series of fgpu-exporter{where} {period}: is that the Prometheus that scrapes it, and is --time right?"
    if window.namespaces:
        return f"{url} knows no pod of {', '.join(window.namespaces)} on a GPU {period}: is --namespace right?"
    return (
        f"{url} has series of fgpu-exporter and no pod's memory {period}: has any pod used a GPU, and for longer than --step "
        f"{show_duration(window.step_seconds)}? docs/troubleshooting.md helps"
    )
