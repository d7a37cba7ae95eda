"""All systems together, as the registry has them: what holds whatever stands on a pod.

`make fuzz-long` runs these with many more examples.
"""

import json
import math
from dataclasses import replace

from arithmetic import shows_its_amounts
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.claims import SYSTEMS, Granter
from exporter.claims.claim import Answer, Claim, Node, Scope, System
from exporter.limits import NO_CONTAINER_LIMITS, build_container_limits, build_pod_limits, group_by_gpu_and_container
from exporter.snapshot import (
    ClaimConfig,
    ClaimResult,
    Container,
    ContainerAllocation,
    ContainerKind,
    ContainerState,
    Devices,
    DynamicDevice,
    EnvVar,
    ExtendedResourceRequest,
    Gpu,
    NodeFacts,
    Pod,
    PodAllocation,
    PodPhase,
    ResourceClaim,
    SliceDevice,
)

MIB = 1 << 20
GPU_A = "GPU-0c2f7a51-6f0d-4f0e-8a52-2f3b6d1f9c01"
GPU_B = "GPU-1d3e8b62-7a1e-4a1f-9b63-3a4c7e2a0d12"
MIG = "MIG-2e4f9c73-8b2f-5b20-8c74-4b5d8f3b1e23"
GPUS = {
    GPU_A: Gpu(gpu_uuid=GPU_A, minor=0, memory_total_bytes=81559 * MIB),
    GPU_B: Gpu(gpu_uuid=GPU_B, minor=1, memory_total_bytes=81559 * MIB),
    MIG: Gpu(gpu_uuid=MIG, minor=1, parent_gpu_uuid=GPU_B, gpu_instance_id=2, compute_instance_id=0, memory_total_bytes=40192 * MIB),
}
GROUP = "5f1a0c84-9c3f-4c31-9d85-5c6e9a4c2f34"
NAMES = ("main", "side")

# --- text: what no one would write, and what one would, sound and with a mistake ---

SOUND = (
    *(GPU_A, GPU_B, MIG, f"{GPU_A},{GPU_B}", f"k8s.device-plugin.nvidia.com/gpu={GPU_A}", "0", "1", "0,1", "50", "100", "0.5", "0.25"),
    *("4096", "1000M", "8Gi", "12g", "true", "false", "success", "allocating", "failed", "MPS", "mps", "time-sharing", "time-slicing"),
    *("4", "81559", "main", GROUP, "HAMi-core", f"{GPU_A},NVIDIA,4096,25:;", f"{GPU_A},NVIDIA,4096,25:;{GPU_B},NVIDIA,8192,0:;"),
    *(f"{GPU_B}[0-1],NVIDIA,9728,0:;", f"{GPU_A},NVIDIA,4096,25:{GPU_B},NVIDIA,4096,25:", "metadata.annotations['gpu-memory']"),
    json.dumps({"gpu": [{"minor": 0, "id": GPU_A, "resources": {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory": "8Gi"}}]}),
    json.dumps({"0": {"0": 4}}),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(SOUND),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.sampled_from(SOUND), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spoilt(draw):
    text = draw(st.sampled_from(SOUND))
    at = draw(st.integers(0, len(text)))
    return (
        text[:at] + draw(st.sampled_from(["", ",", ":", ";", "-", "é", "\x00", "٣", "1" * 30, " "]) | st.text(max_size=4)) + text[at + 1 :]
    )


TEXT = st.sampled_from(SOUND) | st.text(max_size=40) | spoilt() | JSON.map(json.dumps)
KEYS = (
    *("gpu-fraction", "gpu-memory", "gpu-fraction-num-devices", "gpu-fraction-container-name", "received-resource-type"),
    *("runai/shared-gpu-configmap", "run.ai/reserve_for_gpu_index", "runai-gpu-group", f"runai-gpu-group/{GROUP}"),
    *("nvidia.com/container.main.gpu-memory.limit", "nvidia.com/container.main.gpu-memory.request"),
    *("nvidia.com/container.main.gpus.devices", "nvidia.com/container.main.gpu-compute.portion"),
    *("hami.io/vgpu-devices-allocated", "hami.io/bind-phase", "hami.io/vgpu-mig-allocations"),
    *("4pd.io/vgpu-ids-new", "4pd.io/bind-phase", "4pd.io/vgpu-devices-allocated"),
    *("volcano.sh/vgpu-ids-new", "volcano.sh/bind-phase", "volcano.sh/gpu-index", "volcano.sh/gpu-assigned"),
    *("scheduling.koordinator.sh/device-allocated", "koordinator.sh/gpu-isolation-provider"),
    *("ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_ASSIGNED", "ALIYUN_COM_GPU_MEM_DEV", "scheduler.framework.gpushare.allocation"),
)
LABELS = (
    *("nvidia.com/gpu.memory", "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy", "nvidia.com/mig-3g.40gb.replicas"),
    *("cloud.google.com/gke-gpu-sharing-strategy", "cloud.google.com/gke-max-shared-clients-per-gpu"),
)
ENV = (
    *("GPU_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_SM_LIMIT", "CUDA_DISABLE_CONTROL"),
    *("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NVIDIA_VISIBLE_DEVICES", "RUNAI_NUM_OF_GPUS"),
)
RESOURCES = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpumem", "nvidia.com/mig-3g.40gb", "volcano.sh/vgpu-number"),
    *("volcano.sh/gpu-memory", "volcano.sh/gpu-number", "aliyun.com/gpu-mem", "koordinator.sh/gpu"),
)
DEVICE_IDS = st.sampled_from(
    [
        GPU_A,
        GPU_B,
        MIG,
        f"{GPU_A}::1",
        f"{GPU_A}::2",
        f"{MIG}::0",
        "nvidia0",
        "nvidia0/vgpu1",
        "nvidia1/gi2",
        "nvidia1/gi2/vgpu0",
        f"{GPU_A}-_-3",
    ]
)
DRA_DEVICES = st.sampled_from(["gpu-0", "gpu-1", "gpu-7", "gpu-vfio-0", "gpu-1-mig-9-0-1"]) | st.text(max_size=8)


CONTRACTS = (
    ({}, {}, {}),
    ({"gpu-fraction": "0.5"}, {"runai-gpu-group": GROUP}, {}),
    ({"gpu-memory": "4096"}, {"runai-gpu-group": GROUP}, {}),
    ({"nvidia.com/container.main.gpu-memory.limit": "8Gi", "nvidia.com/container.main.gpus.devices": GPU_B}, {}, {}),
    ({"hami.io/vgpu-devices-allocated": f"{GPU_A},NVIDIA,4096,25:;"}, {}, {"nvidia.com/gpu": "1"}),
    ({"hami.io/vgpu-devices-allocated": f"{GPU_A},NVIDIA,4096,25:;{GPU_B},NVIDIA,8192,0:;"}, {}, {"nvidia.com/gpu": "1"}),
    ({"volcano.sh/vgpu-ids-new": f"{GPU_B},NVIDIA,4096,25:"}, {}, {"volcano.sh/vgpu-number": "1"}),
    ({"volcano.sh/gpu-index": "0"}, {}, {"volcano.sh/gpu-memory": "4096"}),
    ({"scheduling.koordinator.sh/device-allocated": SOUND[-2]}, {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}, {}),
    (
        {"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_DEV": "79"},
        {},
        {"aliyun.com/gpu-mem": "3"},
    ),
)
"""Annotations and labels of the pod, and limits of its containers, that a system can read."""


def mapping(keys, values=TEXT, *, most=2):
    return st.dictionaries(st.sampled_from(keys), values, max_size=most)


# --- nodes ---


@st.composite
def containers(draw, name, resource_limits):
    if draw(st.booleans()):
        return Container(name=name, state=ContainerState.RUNNING, resource_limits=resource_limits)
    return Container(
        name=name,
        kind=draw(st.sampled_from(ContainerKind)),
        restartable=draw(st.booleans()),
        state=draw(st.sampled_from([None, *ContainerState])),
        env=tuple(
            EnvVar(name=key, value=value) if draw(st.booleans()) else EnvVar(name=key, field_path=value)
            for key, value in draw(mapping(ENV)).items()
        ),
        resource_limits=resource_limits | draw(mapping(RESOURCES, most=1)),
        volume_mounts=draw(st.sampled_from([(), ("/etc/ld.so.preload", "/usr/local/vgpu")])),
        claim_requests=draw(st.sampled_from([(), (("gpu", None),), (("gpu", "one"),)])),
        allocated_resources=draw(st.sampled_from([(), (("claim:gpu", "gpu.nvidia.com/node/gpu-0"),)])),
    )


@st.composite
def pods(draw, name):
    contracts = draw(st.lists(st.sampled_from(CONTRACTS), min_size=1, max_size=2))
    annotations, labels, limits = ({key: value for each in contracts for key, value in each[part].items()} for part in range(3))
    is_spoilt = draw(st.booleans())
    return Pod(
        uid=f"uid-of-{name}",
        namespace="team-a",
        name=name,
        phase=draw(st.sampled_from([PodPhase.PENDING, PodPhase.RUNNING, PodPhase.UNKNOWN])),
        labels=labels | (draw(mapping(KEYS, most=1)) if is_spoilt else {}),
        annotations=annotations | (draw(mapping(KEYS)) if is_spoilt else {}),
        containers=tuple(draw(containers(each, limits)) for each in NAMES[: draw(st.integers(0 if is_spoilt else 1, 2))]),
        resource_claims=draw(st.sampled_from([{}, {"gpu": "claim"}])),
        extended_resource_claim=draw(st.sampled_from([None, None, "claim"])),
        extended_resource_requests=draw(
            st.sampled_from([(), (ExtendedResourceRequest(container="main", resource_name="nvidia.com/gpu", request="one"),)])
        ),
    )


RESERVATION = Pod(
    uid="uid-of-reservation",
    namespace="kai-resource-reservation",
    name="gpu-reservation-1",
    phase=PodPhase.RUNNING,
    labels={"runai-gpu-group": GROUP},
    annotations={"run.ai/reserve_for_gpu_index": GPU_A},
    containers=(Container(name="resource-reservation", state=ContainerState.RUNNING),),
)


def dynamic_device(device_name):
    return DynamicDevice(
        claim_namespace="team-a", claim_name="claim", driver_name="gpu.nvidia.com", pool_name="node", device_name=device_name
    )


@st.composite
def allocations(draw, pod):
    handed = st.builds(
        ContainerAllocation,
        st.sampled_from(NAMES),
        st.builds(Devices, st.sampled_from(RESOURCES), st.lists(DEVICE_IDS | st.text(max_size=12), max_size=2).map(tuple)).map(
            lambda each: (each,)
        ),
        st.lists(DRA_DEVICES.map(dynamic_device), max_size=1).map(tuple),
    )
    return PodAllocation(pod.namespace, pod.name, tuple(draw(st.lists(handed, max_size=2, unique_by=lambda each: each.container))))


@st.composite
def resource_claims(draw):
    parameters = st.fixed_dictionaries(
        {"kind": st.sampled_from(["GpuConfig", "MigDeviceConfig"]) | JSON},
        optional={
            "sharing": JSON
            | st.fixed_dictionaries(
                {"strategy": st.just("MPS")},
                optional={
                    "mpsConfig": JSON
                    | st.dictionaries(
                        st.sampled_from(
                            ["defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"]
                        ),
                        JSON,
                    )
                },
            )
        },
    )
    return ResourceClaim(
        uid="claim-uid",
        namespace="team-a",
        name="claim",
        results=tuple(
            draw(
                st.lists(
                    st.builds(
                        ClaimResult,
                        request=st.sampled_from(["one", "one/alternative", "two"]),
                        driver_name=st.just("gpu.nvidia.com"),
                        pool_name=st.just("node"),
                        device_name=DRA_DEVICES,
                        admin_access=st.booleans(),
                        share_id=st.sampled_from([None, "share"]),
                        consumed_capacity=st.dictionaries(st.sampled_from(["memory", "cores"]), TEXT, max_size=1),
                    ),
                    max_size=2,
                )
            )
        ),
        configs=tuple(
            draw(
                st.lists(
                    st.builds(ClaimConfig, driver_name=st.just("gpu.nvidia.com"), requests=st.just(()), parameters=parameters), max_size=1
                )
            )
        ),
        reserved_for_pod_uids=draw(st.sampled_from([(), ("uid-of-first",), ("uid-of-first", "uid-of-second")])),
    )


@st.composite
def nodes(draw):
    both = (draw(pods("first")), draw(pods("second")))
    reservations = draw(st.sampled_from([(), (RESERVATION,), (replace(RESERVATION, annotations={}),)]))
    allocated = (draw(allocations(pod)) for pod in both)
    return Node(
        facts=NodeFacts(
            name="node",
            labels=draw(
                st.sampled_from(
                    [
                        {"nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.replicas": "4"},
                        {"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.replicas": "4"},
                        {"cloud.google.com/gke-gpu-sharing-strategy": "mps", "cloud.google.com/gke-max-shared-clients-per-gpu": "4"},
                    ]
                )
                | mapping(LABELS)
            ),
        ),
        gpus=draw(st.sampled_from([GPUS, GPUS, {}])),
        pods=(*both, *reservations),
        allocations={(each.namespace, each.name): each for each in allocated},
        allocatable=draw(
            st.lists(st.builds(Devices, st.sampled_from(RESOURCES), st.lists(DEVICE_IDS, max_size=4).map(tuple)), max_size=2).map(tuple)
        ),
        slice_devices=draw(
            st.sampled_from(
                [(), (SliceDevice(driver_name="gpu.nvidia.com", pool_name="node", device_name="gpu-0", gpu_uuid=GPU_A, device_type="gpu"),)]
            )
        ),
        resource_claims=tuple(draw(st.lists(resource_claims(), max_size=1))),
    )


# A node takes long to make up: a few in every run, as many as the profile says in a long one.
AS_MANY = settings(max_examples=30 if settings.default.max_examples <= 100 else settings.default.max_examples)


def grants(node, systems=SYSTEMS):
    granter = Granter(node, systems=systems)
    return [granter.grant(pod, {}, {"main": frozenset({GPU_A})})[0] for pod in node.pods]


def container_limits(grant):
    return {key: build_container_limits(claims) for key, claims in group_by_gpu_and_container(grant.claims).items() if key[1]}


def pod_limits(grant):
    claims, containers = group_by_gpu_and_container(grant.claims), container_limits(grant)
    uuids = {uuid for uuid, _ in claims}
    return {
        uuid: build_pod_limits(claims.get((uuid, ""), ()), [limits for (on, _), limits in sorted(containers.items()) if on == uuid])
        for uuid in uuids
    }


@AS_MANY
@given(nodes(), st.permutations(SYSTEMS))
def test_the_order_of_systems_changes_no_limit(node, permuted):
    for grant, other in zip(grants(node), grants(node, tuple(permuted)), strict=True):
        assert set(grant.claims) == set(other.claims)
        assert container_limits(grant) == container_limits(other)
        assert pod_limits(grant) == pod_limits(other)
        assert (grant.allocations, grant.errors, grant.not_placed, grant.plumbing) == (
            *(other.allocations, other.errors, other.not_placed, other.plumbing),
        )


AMOUNTS = st.none() | st.integers(1, 1 << 40)
RATIOS = st.none() | st.floats(0.01, 1)


@AS_MANY
@given(nodes(), st.sampled_from([Scope.CONTAINER, Scope.PROCESS]), AMOUNTS, RATIOS)
def test_a_claim_more_on_its_gpus_never_raises_what_a_container_is_judged_by(node, scope, memory_bytes, compute_ratio):
    # On its GPUs: one GPU more would leave open which of them a limit with an index in the container's environment means.
    held = {pod.uid: grant.allocations for pod, grant in zip(node.pods, grants(node), strict=True)}

    def added(pod):
        return Answer(
            claims=tuple(
                Claim(
                    system="added",
                    gpu_uuid=each.gpu_uuid,
                    container=each.container,
                    scope=scope,
                    memory_bytes=memory_bytes,
                    compute_ratio=compute_ratio,
                    enforced=False,
                )
                for each in held[pod.uid]
                if each.container
            )
        )

    more = grants(node, (*SYSTEMS, System(name="added", resolver=lambda _node: added)))
    for grant, other in zip(grants(node), more, strict=True):
        before, after = container_limits(grant), container_limits(other)
        assert before.keys() <= after.keys()
        for key, limits in after.items():
            was = before.get(key, NO_CONTAINER_LIMITS)
            for now, then in (
                (limits.container_memory_bytes, was.container_memory_bytes),
                (limits.process_memory_bytes, was.process_memory_bytes),
                (limits.container_compute_ratio, was.container_compute_ratio),
            ):
                assert (math.inf if now is None else now) <= (math.inf if then is None else then)


@AS_MANY
@given(nodes())
def test_whatever_stands_on_pods_gives_claims_that_can_be_or_errors_that_can_be_read(node):
    for pod, grant in zip(node.pods, grants(node), strict=True):
        for claim in grant.claims:
            assert claim.memory_bytes is None or (type(claim.memory_bytes) is int and claim.memory_bytes > 0)
            assert claim.compute_ratio is None or 0 < claim.compute_ratio <= 1
            assert claim.gpu_uuid
            assert claim.container in {"", *(container.name for container in pod.containers)}
        for errors in grant.errors.values():
            assert errors
            assert all(0 < len(error) < 600 and error.isprintable() for error in errors)


@AS_MANY
@given(nodes())
def test_each_claim_shows_the_arithmetic_that_gives_its_amounts_and_whatever_gives_none_can_be_read(node):
    for grant in grants(node):
        for claim in grant.claims:
            derivation = claim.derivation
            assert shows_its_amounts(claim.memory_bytes, claim.compute_ratio, str(derivation.memory), str(derivation.compute)), claim
        for derivation in [each.derivation for each in (*grant.claims, *grant.allocations) if each.derivation]:
            for phrase in (derivation.contract, derivation.memory, derivation.compute):
                assert phrase is None or (0 < len(str(phrase)) < 4000 and str(phrase).isprintable())
