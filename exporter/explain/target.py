"""What is asked about: a pod by `NAMESPACE/POD` (or its name alone, where it is the only one), or a GPU by its uuid."""

from collections.abc import Iterable
from difflib import get_close_matches

from exporter.claims.quantity import shown
from exporter.report import Evidence, Report
from exporter.snapshot import Pod

_SHOWN_CHARACTERS = 80
_SHOWN_NAMES = 3
# Comparing names takes time with the square of their length, and authors of pods choose them.
_COMPARED_CHARACTERS = 40


class NotFoundError(Exception):
    """There is no such pod or GPU. The text is one sentence that says what there is."""


def find_pod(report: Report, evidence: Evidence, name: str, node: str) -> Pod:
    """Answer the pod. Raises NotFoundError, with the names nearest to the one that was asked for."""
    where = f"node {node}" if node else "this node"
    kubernetes = evidence.snapshot.kubernetes
    if kubernetes is None:
        raise NotFoundError(f"no pod of {where} is known yet: the pods were not read, or too long ago")
    # Of two pods of one name the older one has ended, or is about to.
    pods = sorted(kubernetes.pods.values(), key=lambda pod: (pod.ended, pod.namespace, pod.name, pod.uid))
    named = [pod for pod in pods if name in (f"{pod.namespace}/{pod.name}", pod.name)]
    full_names = list(dict.fromkeys(f"{pod.namespace}/{pod.name}" for pod in named))
    if len(full_names) == 1:
        return named[0]
    if full_names:
        exact = next((pod for pod in named if f"{pod.namespace}/{pod.name}" == name), None)
        if exact is not None:
            return exact
        raise NotFoundError(f"{len(full_names)} pods of {where} are called {_shown(name)}: name one as {_some(full_names)}")
    with_gpus = {(row.namespace, row.pod) for row in report.pod_infos}
    known = f"{where} has {len(pods)} {'pod' if len(pods) == 1 else 'pods'}, {len(with_gpus)} of them with GPUs"
    nearest = _nearest(name, (f"{pod.namespace}/{pod.name}" for pod in pods))
    hint = f"did you mean {_some(nearest)}?" if nearest else "is it on another node?"
    raise NotFoundError(f"no pod {_shown(name)} is known here: {known}; {hint}")


def find_gpu(report: Report, uuid: str, node: str) -> str:
    """Answer the GPU's uuid as it is written; its beginning is enough where no other one begins so. Raises NotFoundError."""
    uuids = [row.gpu.gpu_uuid for row in report.gpus]
    begun = [each for each in uuids if each.lower().startswith(uuid.lower())]
    if len(begun) == 1:
        return begun[0]
    where = f"node {node}" if node else "this node"
    if not uuids:
        raise NotFoundError(f"no GPU of {where} is known now: see why at /api/v1/node, under sources")
    nearest = _nearest(uuid, uuids) or uuids
    raise NotFoundError(f"no GPU {_shown(uuid)} is known here: {where} has {len(uuids)}; did you mean {_some(nearest)}?")


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """Answer a few names like this one: first those that have the same last part, then those of which it is the beginning."""
    names = list(dict.fromkeys(names))
    wanted = name.rpartition("/")[2]
    same = [each for each in names if wanted and each.rpartition("/")[2] == wanted]
    begun = [each for each in names if wanted and each.rpartition("/")[2].lower().startswith(wanted.lower())]
    by_start = {each[:_COMPARED_CHARACTERS]: each for each in names}
    close = [by_start[start] for start in get_close_matches(name[:_COMPARED_CHARACTERS], by_start, _SHOWN_NAMES)]
    return list(dict.fromkeys((*same, *begun, *close)))[:_SHOWN_NAMES]


def _shown(name: str) -> str:
    return shown(name, _SHOWN_CHARACTERS)


def _some(names: list[str]) -> str:
    shown_names = ", ".join(_shown(name)[1:-1] if len(name) <= _SHOWN_CHARACTERS else _shown(name) for name in names[:_SHOWN_NAMES])
    return f"{shown_names} or another" if len(names) > _SHOWN_NAMES else shown_names
