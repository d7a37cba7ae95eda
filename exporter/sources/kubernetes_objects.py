"""What an exporter needs of Pod, Node, ResourceSlice and ResourceClaim objects: decoded JSON to facts.

Pure. Anyone who may make a pod writes much of this, and old API servers leave fields out: a field that is absent or of another type
counts as not said. Only an object without the names that identify it is a ValueError.

Format: https://kubernetes.io/docs/reference/kubernetes-api/ (Pod v1, Node v1; ResourceSlice and ResourceClaim of resource.k8s.io/v1,
v1beta2 and v1beta1).
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exporter.snapshot import (
    ClaimConfig,
    ClaimResult,
    Container,
    ContainerKind,
    ContainerState,
    EnvVar,
    ExtendedResourceRequest,
    NodeFacts,
    Pod,
    PodPhase,
    ResourceClaim,
    SliceDevice,
)

Json = Mapping[str, object]

# The whole manifest once more, as kubectl apply left it: often the largest part of an object, and nobody's contract.
_DROPPED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"

_CONTAINER_ID = re.compile(r"(?:[^:/]+://)?([0-9a-f]{64})")

_NOTHING: Json = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSlice:
    """One ResourceSlice. Of a pool only the slices of its highest generation are valid."""

    name: str
    driver_name: str
    pool_name: str
    generation: int
    devices: tuple[SliceDevice, ...] = ()


def parse_pod(pod: Json) -> Pod:
    """Answer the facts of a Pod object. Raises ValueError where it has no uid, namespace or name."""
    metadata, spec, status = _mapping(pod.get("metadata")), _mapping(pod.get("spec")), _mapping(pod.get("status"))
    phase = _parse_phase(status)
    over = phase in (PodPhase.SUCCEEDED, PodPhase.FAILED) or "deletionTimestamp" in metadata
    restart_policy = _text(spec.get("restartPolicy"))
    extended = _mapping(status.get("extendedResourceClaimStatus"))
    owner = _owner(metadata)
    return Pod(
        uid=_identity(metadata, "uid", "Pod"),
        namespace=sys.intern(_identity(metadata, "namespace", "Pod")),
        name=_identity(metadata, "name", "Pod"),
        phase=phase,
        labels=_texts(metadata.get("labels")),
        annotations=_parse_annotations(metadata),
        owner_kind=_text(owner.get("kind")),
        owner_name=_text(owner.get("name")),
        scheduler_name=_text(spec.get("schedulerName")),
        containers=tuple(
            _parse_container(container, kind, _statuses(status.get(statuses)), restart_policy, over=over)
            for containers, statuses, kind in _CONTAINER_LISTS
            for container in _mappings(spec.get(containers))
        ),
        resource_claims=_parse_pod_claims(spec, status),
        extended_resource_claim=_text(extended.get("resourceClaimName")),
        extended_resource_requests=tuple(
            ExtendedResourceRequest(container=container, resource_name=resource_name, request=request)
            for mapping in _mappings(extended.get("requestMappings"))
            if (container := _text(mapping.get("containerName")))
            and (resource_name := _text(mapping.get("resourceName")))
            and (request := _text(mapping.get("requestName")))
        ),
    )


_CONTAINER_LISTS = (
    ("initContainers", "initContainerStatuses", ContainerKind.INIT),
    ("containers", "containerStatuses", ContainerKind.REGULAR),
    ("ephemeralContainers", "ephemeralContainerStatuses", ContainerKind.EPHEMERAL),
)


def _parse_phase(status: Json) -> PodPhase:
    try:
        return PodPhase(_text(status.get("phase")) or "")
    except ValueError:
        return PodPhase.UNKNOWN


def _owner(metadata: Json) -> Json:
    owners = _mappings(metadata.get("ownerReferences"))
    return next((owner for owner in owners if owner.get("controller") is True), owners[0] if owners else _NOTHING)


def _statuses(value: object) -> dict[str, Json]:
    return {name: status for status in _mappings(value) if (name := _text(status.get("name")))}


def _parse_container(
    container: Json, kind: ContainerKind, statuses: Mapping[str, Json], pod_policy: str | None, *, over: bool
) -> Container:
    name = _text(container.get("name")) or ""
    status, resources = statuses.get(name, _NOTHING), _mapping(container.get("resources"))
    # Since 1.28 an init container, and since 1.34 any container, may have a policy of its own.
    own_policy = _text(container.get("restartPolicy"))
    state, exit_code = _parse_state(status)
    return Container(
        name=sys.intern(name),
        kind=kind,
        restartable=kind is ContainerKind.INIT and own_policy == "Always",
        container_id=_parse_container_id(status),
        state=state,
        will_restart=state is ContainerState.TERMINATED and not over and _restarts(kind, own_policy, pod_policy, exit_code),
        env=tuple(_parse_env_var(entry) for entry in _mappings(container.get("env")) if _is_limit_variable(entry.get("name"))),
        resource_limits=_quantities(resources.get("limits")),
        volume_mounts=tuple(path for mount in _mappings(container.get("volumeMounts")) if (path := _text(mount.get("mountPath")))),
        claim_requests=tuple(
            (claim, _text(entry.get("request")) or None)
            for entry in _mappings(resources.get("claims"))
            if (claim := _text(entry.get("name")))
        ),
        allocated_resources=tuple(
            (resource, resource_id)
            for entry in _mappings(status.get("allocatedResourcesStatus"))
            if (resource := _text(entry.get("name"))) and resource.startswith("claim:")
            for device in _mappings(entry.get("resources"))
            if (resource_id := _text(device.get("resourceID")))
        ),
    )


def _parse_state(status: Json) -> tuple[ContainerState | None, int]:
    state = _mapping(status.get("state"))
    for kind in ContainerState:
        if isinstance(state.get(kind.value), Mapping):
            exit_code = _mapping(state[kind.value]).get("exitCode")
            return kind, exit_code if isinstance(exit_code, int) else 0
    return None, 0


def _restarts(kind: ContainerKind, own_policy: str | None, pod_policy: str | None, exit_code: int) -> bool:
    policy = own_policy or pod_policy
    match kind:
        case ContainerKind.INIT:
            return own_policy == "Always" or (policy != "Never" and exit_code != 0)
        case ContainerKind.REGULAR:
            return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
        case ContainerKind.EPHEMERAL:
            return False


def _parse_container_id(status: Json) -> str | None:
    match = _CONTAINER_ID.fullmatch(_text(status.get("containerID")) or "")
    return match[1] if match else None


def _is_limit_variable(name: object) -> bool:
    """Whether a sharing system's limit may stand there. The rest of an environment is no one's business, and may hold secrets."""
    return isinstance(name, str) and (name == "GPU_MEMORY_LIMIT" or name.startswith("CUDA_"))


def _parse_env_var(entry: Json) -> EnvVar:
    name, source = sys.intern(_text(entry.get("name")) or ""), _mapping(entry.get("valueFrom"))
    if source:
        return EnvVar(
            name=name,
            field_path=_text(_mapping(source.get("fieldRef")).get("fieldPath")),
            config_map_key=_text(_mapping(source.get("configMapKeyRef")).get("key")),
        )
    # The API leaves an empty value out.
    return EnvVar(name=name, value=_text(entry.get("value", "")))


def _parse_pod_claims(spec: Json, status: Json) -> dict[str, str]:
    """Map the pod's names for its claims to ResourceClaims: named in the spec, or made from a template and named in the status."""
    claims = {}
    for entry in _mappings(spec.get("resourceClaims")):
        # Before v1beta1 the reference stood one level deeper.
        claim = _text(entry.get("resourceClaimName")) or _text(_mapping(entry.get("source")).get("resourceClaimName"))
        if claim and (name := _text(entry.get("name"))):
            claims[name] = claim
    for entry in _mappings(status.get("resourceClaimStatuses")):
        if (name := _text(entry.get("name"))) and (claim := _text(entry.get("resourceClaimName"))):
            claims[name] = claim
    return claims


def parse_node(node: Json) -> NodeFacts:
    """Answer the facts of a Node object. Raises ValueError where it has no name."""
    metadata = _mapping(node.get("metadata"))
    return NodeFacts(
        name=_identity(metadata, "name", "Node"),
        labels=_texts(metadata.get("labels")),
        annotations=_parse_annotations(metadata),
        allocatable=_quantities(_mapping(node.get("status")).get("allocatable")),
    )


def parse_slice(resource_slice: Json) -> ResourceSlice:
    """Answer the devices of a ResourceSlice object. Raises ValueError where it has no name, driver or pool."""
    spec = _mapping(resource_slice.get("spec"))
    pool = _mapping(spec.get("pool"))
    driver_name, pool_name = _identity(spec, "driver", "ResourceSlice"), _identity(pool, "name", "ResourceSlice")
    generation = pool.get("generation")
    return ResourceSlice(
        name=_identity(_mapping(resource_slice.get("metadata")), "name", "ResourceSlice"),
        driver_name=driver_name,
        pool_name=pool_name,
        generation=generation if isinstance(generation, int) else 0,
        devices=tuple(
            SliceDevice(
                driver_name=driver_name,
                pool_name=pool_name,
                device_name=device_name,
                gpu_uuid=_attribute(device, driver_name, "uuid"),
                device_type=_attribute(device, driver_name, "type"),
            )
            for device in _mappings(spec.get("devices"))
            if (device_name := _text(device.get("name")))
        ),
    )


def _attribute(device: Json, driver_name: str, name: str) -> str | None:
    # v1beta1 has the attributes below `basic`. A name without a domain is in the driver's.
    attributes = _mapping(device.get("attributes")) or _mapping(_mapping(device.get("basic")).get("attributes"))
    value = attributes.get(name, attributes.get(f"{driver_name}/{name}"))
    return _text(_mapping(value).get("string")) or None


def current_devices(slices: Iterable[ResourceSlice]) -> tuple[SliceDevice, ...]:
    """Answer the devices of the valid slices, sorted: while a driver replaces the slices of a pool, older generations do not count."""
    slices = tuple(slices)
    generations: dict[tuple[str, str], int] = {}
    for one in slices:
        pool = (one.driver_name, one.pool_name)
        generations[pool] = max(one.generation, generations.get(pool, one.generation))
    devices = {
        (device.driver_name, device.pool_name, device.device_name): device
        for one in sorted(slices, key=lambda one: one.name)
        if one.generation == generations[one.driver_name, one.pool_name]
        for device in one.devices
    }
    return tuple(device for _, device in sorted(devices.items(), key=lambda item: item[0]))


def parse_claim(claim: Json) -> ResourceClaim:
    """Answer what a ResourceClaim object was allocated. Raises ValueError where it has no namespace or name."""
    metadata, status = _mapping(claim.get("metadata")), _mapping(claim.get("status"))
    devices = _mapping(_mapping(status.get("allocation")).get("devices"))
    return ResourceClaim(
        uid=_text(metadata.get("uid")) or "",
        namespace=sys.intern(_identity(metadata, "namespace", "ResourceClaim")),
        name=_identity(metadata, "name", "ResourceClaim"),
        results=tuple(
            ClaimResult(
                request=_text(result.get("request")) or "",
                driver_name=driver_name,
                pool_name=pool_name,
                device_name=device_name,
                admin_access=result.get("adminAccess") is True,
                share_id=_text(result.get("shareID")) or None,
                consumed_capacity=_quantities(result.get("consumedCapacity")),
            )
            for result in _mappings(devices.get("results"))
            if (driver_name := _text(result.get("driver")))
            and (pool_name := _text(result.get("pool")))
            and (device_name := _text(result.get("device")))
        ),
        configs=tuple(
            ClaimConfig(
                driver_name=driver_name,
                requests=tuple(request for request in _sequence(config.get("requests")) if isinstance(request, str)),
                parameters=_mapping(opaque.get("parameters")),
            )
            for config in _mappings(devices.get("config"))
            if (opaque := _mapping(config.get("opaque"))) and (driver_name := _text(opaque.get("driver")))
        ),
        reserved_for_pod_uids=tuple(
            uid
            for consumer in _mappings(status.get("reservedFor"))
            if consumer.get("resource") == "pods" and (uid := _text(consumer.get("uid")))
        ),
    )


def may_be_used_on(claim: Json, node_name: str) -> bool:
    """Answer whether a ResourceClaim object is allocated, and not for other nodes only.

    Claims know no field selector, so that a watch brings those of the whole cluster. Devices that belong to a node make the scheduler
    write that node's name into the allocation.
    """
    allocation = _mapping(_mapping(claim.get("status")).get("allocation"))
    if not allocation:
        return False
    terms = _mappings(_mapping(allocation.get("nodeSelector")).get("nodeSelectorTerms"))
    return not terms or any(
        not any(
            requirement.get("key") == "metadata.name"
            and requirement.get("operator") == "In"
            and node_name not in _sequence(requirement.get("values"))
            for requirement in _mappings(term.get("matchFields"))
        )
        for term in terms
    )


def _parse_annotations(metadata: Json) -> dict[str, str]:
    annotations = _texts(metadata.get("annotations"))
    annotations.pop(_DROPPED_ANNOTATION, None)
    return annotations


def _identity(mapping: Json, key: str, kind: str) -> str:
    value = _text(mapping.get(key))
    if not value:
        raise ValueError(f"a {kind} without {key}")
    return value


def _text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    # JSON can spell half a surrogate pair, which cannot be written out again.
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def _texts(value: object) -> dict[str, str]:
    # Keys recur from pod to pod.
    return {
        sys.intern(key): text for raw, content in _mapping(value).items() if (key := _text(raw)) and (text := _text(content)) is not None
    }


def _quantities(value: object) -> dict[str, str]:
    """Read quantities as text: the API writes strings, people write numbers."""
    quantities = {}
    for raw, content in _mapping(value).items():
        quantity = str(content) if isinstance(content, int | float) and not isinstance(content, bool) else _text(content)
        if (key := _text(raw)) and quantity is not None:
            quantities[sys.intern(key)] = quantity
    return quantities


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else _NOTHING


def _sequence(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _mappings(value: object) -> list[Json]:
    return [item for item in _sequence(value) if isinstance(item, Mapping)]
