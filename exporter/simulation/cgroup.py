"""Where a container's processes stand in the cgroup tree, as kubelets and runtimes name it. Pure.

https://github.com/kubernetes/kubernetes/blob/master/pkg/kubelet/cm/cgroup_manager_linux.go and
https://kubernetes.io/docs/concepts/workloads/pods/pod-qos/
"""

import hashlib
from collections.abc import Iterator, Mapping
from fractions import Fraction

from exporter.claims.quantity import parse_exact_quantity
from exporter.simulation.document import Json

HOST_PROCESS = "0::/system.slice/host.service\n"

_CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")
_STATUS_LISTS = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
_SCOPES = {"containerd": "cri-containerd-{}.scope", "crio": "crio-{}.scope", "docker": "docker-{}.scope"}
_DIRECTORIES = {"containerd": "{}", "crio": "crio-{}", "docker": "{}"}
_QOS_RESOURCES = ("cpu", "memory")


def container_cgroup(pod: Json, container: str, driver: str, runtime: str) -> str | None:
    """Answer the text of /proc/PID/cgroup for a process of a container; None: the pod has no such container.

    `driver` is `systemd` or `cgroupfs`, `runtime` is `containerd`, `crio` or `docker`. A static pod stands under the hash of its manifest.
    The id of a container whose status the kubelet has not reported yet is made up: the runtime knows it before the API server does.
    """
    container_id = _container_id(pod, container)
    if container_id is None:
        return None
    metadata = _mapping(pod.get("metadata"))
    uid = str(_mapping(metadata.get("annotations")).get("kubernetes.io/config.hash") or metadata.get("uid"))
    level = qos_class(pod).lower()
    if driver == "systemd":
        parent = "/kubepods.slice" if level == "guaranteed" else f"/kubepods.slice/kubepods-{level}.slice"
        prefix = "kubepods" if level == "guaranteed" else f"kubepods-{level}"
        return f"0::{parent}/{prefix}-pod{uid.replace('-', '_')}.slice/{_SCOPES[runtime].format(container_id)}\n"
    parent = "/kubepods" if level == "guaranteed" else f"/kubepods/{level}"
    return f"0::{parent}/pod{uid}/{_DIRECTORIES[runtime].format(container_id)}\n"


def _container_id(pod: Json, container: str) -> str | None:
    status, spec = _mapping(pod.get("status")), _mapping(pod.get("spec"))
    for entry in _entries(status, _STATUS_LISTS):
        if entry.get("name") == container and entry.get("containerID"):
            return str(entry["containerID"]).rpartition("//")[2]
    if any(entry.get("name") == container for entry in (*_entries(spec, _CONTAINER_LISTS), *_entries(status, _STATUS_LISTS))):
        return hashlib.sha256(f"{_mapping(pod.get('metadata')).get('uid')}/{container}".encode()).hexdigest()
    return None


def qos_class(pod: Json) -> str:
    """Answer `Guaranteed`, `Burstable` or `BestEffort`: the status's word, else what follows from the resources of the containers."""
    if said := _mapping(pod.get("status")).get("qosClass"):
        return str(said)
    spec = _mapping(pod.get("spec"))
    whole_pod = _amounts(spec)
    holders = [whole_pod] if any(whole_pod) else [_amounts(entry) for entry in _entries(spec, ("initContainers", "containers"))]
    if not any(requests or limits for requests, limits in holders):
        return "BestEffort"
    guaranteed = all(limits.keys() == set(_QOS_RESOURCES) and requests == limits for requests, limits in holders)
    return "Guaranteed" if guaranteed else "Burstable"


def _amounts(holder: Json) -> tuple[Mapping[str, Fraction], Mapping[str, Fraction]]:
    resources = _mapping(holder.get("resources"))
    limits = _nonzero(_mapping(resources.get("limits")))
    # The API server fills in a missing request from the limit.
    return {**limits, **_nonzero(_mapping(resources.get("requests")))}, limits


def _nonzero(amounts: Json) -> Mapping[str, Fraction]:
    read = {}
    for resource in _QOS_RESOURCES:
        try:
            read[resource] = parse_exact_quantity(str(amounts.get(resource, 0)))
        except ValueError:
            continue
    return {resource: amount for resource, amount in read.items() if amount > 0}


def _entries(holder: Json, lists: tuple[str, ...]) -> Iterator[Json]:
    for name in lists:
        entries = holder.get(name)
        if isinstance(entries, list):
            yield from (entry for entry in entries if isinstance(entry, Mapping))


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}
