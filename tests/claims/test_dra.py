"""Dynamic resource allocation: what real API servers and kubelets answered, and what they might answer next."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.claims.claim import Allocation, Answer, Claim, Node, Scope
from exporter.claims.dra import SYSTEM, held_devices
from exporter.snapshot import (
    ClaimConfig,
    ClaimResult,
    Container,
    ContainerAllocation,
    ContainerKind,
    ContainerState,
    DynamicDevice,
    ExtendedResourceRequest,
    Gpu,
    Pod,
    PodAllocation,
    PodPhase,
    ResourceClaim,
    SliceDevice,
)
from exporter.sources.kubelet import parse_list
from exporter.sources.kubernetes_objects import current_devices, parse_claim, parse_pod, parse_slice
from exporter.sources.podresources_pb2 import ListPodResourcesResponse

CAPTURES = Path(__file__).parents[1] / "captures" / "dra"

MIB, GIB = 1 << 20, 1 << 30
TOTAL, MIG_TOTAL = 81559 * MIB, 40192 * MIB
# Minor numbers are crossed with the driver's device names, so that a slice and a guess give different GPUs.
GPU_0 = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"
GPU_1 = "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"
GPU_2 = "GPU-77c0b1de-52a4-4b7b-8f0e-6c2d9b1e4a33"
MIG = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
GPUS = {
    GPU_0: Gpu(gpu_uuid=GPU_0, index=0, minor=1, memory_total_bytes=TOTAL),
    GPU_1: Gpu(gpu_uuid=GPU_1, index=1, minor=0, memory_total_bytes=TOTAL),
    GPU_2: Gpu(gpu_uuid=GPU_2, index=2, minor=2, memory_total_bytes=TOTAL),
    MIG: Gpu(gpu_uuid=MIG, index=0, minor=2, parent_gpu_uuid=GPU_2, memory_total_bytes=MIG_TOTAL),
}
DRIVER = "gpu.nvidia.com"
WHOLE = {"memory_bytes": TOTAL, "compute_ratio": 1.0, "enforced": True}
WHOLE_MIG = {"memory_bytes": MIG_TOTAL, "compute_ratio": 1.0, "enforced": True}


def claim(container, gpu_uuid, *, scope=None, **more):
    scope = scope or (Scope.CONTAINER if container else Scope.POD)
    return Claim(system="dra", gpu_uuid=gpu_uuid, container=container, scope=scope, **more)


def answers(node):
    """Answer by pod name, those that are not mine left out."""
    resolve = SYSTEM.resolver(node)
    return {pod.name: answer for pod in node.pods if not pod.ended and (answer := resolve(pod)) != Answer()}


def claims(node):
    """Claims by pod name; no answer has an error."""
    found = answers(node)
    assert not any(answer.errors for answer in found.values())
    return {name: answer.claims for name, answer in found.items()}


# --- captured ---


def capture(folder):
    def items(name):
        return json.loads((CAPTURES / folder / f"{name}.json").read_text())["items"]

    listed = ListPodResourcesResponse.FromString((CAPTURES / folder / "podresources-list.bin").read_bytes())
    return Node(
        facts=None,
        gpus=GPUS,
        pods=tuple(parse_pod(each) for each in items("pods")),
        allocations={(pod.namespace, pod.name): pod for pod in parse_list(listed)},
        slice_devices=current_devices(parse_slice(each) for each in items("resourceslices")),
        resource_claims=tuple(parse_claim(each) for each in items("resourceclaims")),
    )


def without_kubelet(node):
    """What a kubelet before 1.34 leaves: it lists no devices of claims."""
    return replace(node, allocations={})


def without_claims(node):
    """What is left without the right to read ResourceClaims."""
    return replace(node, resource_claims=())


FOLDERS = sorted(path.name for path in CAPTURES.iterdir() if path.is_dir())


def test_the_only_consumer_of_a_claim_has_all_of_the_device():
    assert claims(capture("1-exclusive")) == {"exclusive": (claim("main", GPU_0, **WHOLE),)}


def test_mps_limits_hold_for_each_process_of_each_consumer():
    mps = claim("main", GPU_0, scope=Scope.PROCESS, memory_bytes=10 * GIB, compute_ratio=0.5, enforced=True)
    assert claims(capture("2-shared-mps")) == {"mps-a": (mps,), "mps-b": (mps,)}


def test_a_claim_that_several_containers_name_is_the_pods():
    (answer,) = answers(capture("3-two-containers")).values()
    assert answer.claims == (claim("", GPU_0, **WHOLE),)
    assert answer.allocations == (Allocation("helper", GPU_0), Allocation("ctr0", GPU_0), Allocation("ctr1", GPU_0))


def test_an_extended_resource_is_a_claim_behind_the_scenes():
    assert claims(capture("4-extended-resource")) == {
        "ext-explicit": (claim("main", GPU_0, **WHOLE),),
        "ext-implicit": (claim("main", GPU_1, **WHOLE),),
    }


def test_two_containers_of_one_extended_gpu_each_hold_one_each_although_the_kubelet_lists_both():
    (answer,) = answers(capture("4b-extended-two-containers")).values()
    assert answer.claims == (claim("a", GPU_0, **WHOLE), claim("b", GPU_1, **WHOLE))
    assert answer.allocations == (Allocation("a", GPU_0), Allocation("b", GPU_1))


@pytest.mark.parametrize("folder", ["5-per-request", "5c-per-request-cdi"])
@pytest.mark.parametrize("leave", [lambda node: node, without_kubelet, without_claims])
def test_containers_hold_the_devices_of_the_requests_that_they_name(folder, leave):
    (answer,) = answers(leave(capture(folder))).values()
    assert set(answer.allocations) == {
        Allocation("wants-full", GPU_0),
        Allocation("wants-slice", MIG),
        Allocation("wants-all", GPU_0),
        Allocation("wants-all", MIG),
    }
    assert answer.claims == (claim("", GPU_0, **WHOLE), claim("", MIG, **WHOLE_MIG))


def test_a_monitor_with_admin_access_holds_nothing_and_shares_nothing():
    found = answers(capture("7-admin-access"))
    assert found["monitor"] == Answer(plumbing=True)
    assert found["user"].claims == (claim("main", GPU_0, **WHOLE),)


def test_without_the_right_to_read_claims_a_monitor_looks_like_a_sharer_and_nobody_is_given_all():
    found = answers(without_claims(capture("7-admin-access")))
    assert found["user"] == Answer(allocations=(Allocation("main", GPU_0),))
    assert not found["monitor"].plumbing


def test_shares_of_one_device_by_two_claims_are_their_consumed_capacity():
    share = claim("main", GPU_0, memory_bytes=20 * GIB, enforced=False)
    assert claims(capture("10b-consumable-no-share-id")) == {"share-a": (share,), "share-b": (share,)}


def test_without_the_right_to_read_claims_a_device_of_two_claims_is_nobodys_alone():
    found = answers(without_claims(capture("10b-consumable-no-share-id")))
    assert set(found.values()) == {Answer(allocations=(Allocation("main", GPU_0),))}


def test_a_held_device_outlives_the_slices_of_a_driver_that_stops():
    before, after = capture("1-exclusive"), capture("12-driver-gone")
    assert after.slice_devices == ()
    held = held_devices(replace(after, slice_devices=before.slice_devices))
    assert [(device.device_name, device.gpu_uuid) for device in held] == [("gpu-0", GPU_0)]
    assert claims(replace(after, slice_devices=held)) == {"exclusive": (claim("main", GPU_0, **WHOLE),)}


def test_what_the_kubelet_alone_still_names_is_held_too():
    before, after = capture("1-exclusive"), without_claims(capture("12-driver-gone"))
    assert [device.device_name for device in held_devices(replace(after, slice_devices=before.slice_devices))] == ["gpu-0"]


def test_nothing_is_held_on_a_node_without_consumers():
    node = capture("1-exclusive")
    assert held_devices(replace(node, allocations={}, resource_claims=())) == ()


def test_a_device_in_no_slice_is_the_gpu_of_that_minor_number():
    assert claims(capture("12-driver-gone")) == {"exclusive": (claim("main", GPU_1, **WHOLE),)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_kubelet_that_lists_no_claims_changes_no_amount(folder):
    node = capture(folder)
    assert claims(without_kubelet(node)) == claims(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_without_the_right_to_read_claims_nobody_is_said_to_have_less_than_before(folder):
    node = capture(folder)
    with_claims = answers(node)
    for name, answer in answers(without_claims(node)).items():
        assert answer.errors == ()
        for each in answer.claims:
            assert each.enforced
            if each.gpu_uuid in {before.gpu_uuid for before in with_claims[name].claims}:
                assert each.memory_bytes == (MIG_TOTAL if each.gpu_uuid == MIG else TOTAL)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_that_ended_is_no_consumer(folder):
    node = capture(folder)
    node = replace(node, pods=tuple(replace(pod, phase=PodPhase.SUCCEEDED) for pod in node.pods))
    assert answers(node) == {}


# --- made up ---


def result(device="gpu-0", request="gpu", **more):
    return ClaimResult(request=request, driver_name=DRIVER, pool_name="node-a", device_name=device, **more)


def mps(requests=(), kind="GpuConfig", **config):
    names = {
        "percent": "defaultActiveThreadPercentage",
        "memory": "defaultPinnedDeviceMemoryLimit",
        "by_device": "defaultPerDevicePinnedMemoryLimit",
    }
    parameters = {"kind": kind, "sharing": {"strategy": "MPS", "mpsConfig": {names[key]: value for key, value in config.items()}}}
    return ClaimConfig(driver_name=DRIVER, requests=requests, parameters=parameters)


def resource_claim(*results, name="shared", configs=(), pods=("a",), **more):
    return ResourceClaim(
        uid=f"uid-{name}",
        namespace="team-a",
        name=name,
        results=results or (result(),),
        configs=tuple(configs),
        reserved_for_pod_uids=pods,
        **more,
    )


def container(name="main", *, requests=(("gpu", None),), state=ContainerState.RUNNING, **more):
    return Container(name=name, state=state, claim_requests=requests, **more)


def pod(name="a", *containers, claims=("shared",), **more):
    """A pod whose claims it calls gpu, gpu1, ..."""
    own = {f"gpu{number or ''}": each for number, each in enumerate(claims)}
    return Pod(uid=name, namespace="team-a", name=name, containers=containers or (container(),), resource_claims=own, **more)


def dynamic(device="gpu-0", name="shared", **more):
    defaults = {"claim_namespace": "team-a", "claim_name": name, "driver_name": DRIVER, "pool_name": "node-a", "device_name": device}
    return DynamicDevice(**(defaults | more))


def listed(pods):
    """The kubelet's list: pod name -> container -> devices."""
    return {
        ("team-a", name): PodAllocation(
            "team-a", name, tuple(ContainerAllocation(each, (), tuple(devices)) for each, devices in of_pod.items())
        )
        for name, of_pod in pods.items()
    }


SLICES = tuple(
    SliceDevice(driver_name=DRIVER, pool_name="node-a", device_name=name, gpu_uuid=uuid)
    for name, uuid in {"gpu-0": GPU_0, "gpu-1": GPU_1, "gpu-2-mig-3g40gb-9-0": MIG, "gpu-1-mig-new": None}.items()
)


def node(*pods, claims=(), kubelet=None, slices=SLICES, gpus=None):
    return Node(
        facts=None,
        gpus=GPUS if gpus is None else gpus,
        pods=pods or (pod(),),
        allocations=listed(kubelet or {}),
        slice_devices=slices,
        resource_claims=tuple(claims),
    )


def test_sharers_without_mps_have_an_allocation_and_no_claim():
    shared = node(pod("a"), pod("b"), claims=[resource_claim(pods=("a", "b"))])
    assert answers(shared) == dict.fromkeys(("a", "b"), Answer(allocations=(Allocation("main", GPU_0),)))


def test_a_sharer_that_ended_shares_no_longer():
    shared = node(pod("a"), pod("b", phase=PodPhase.SUCCEEDED), claims=[resource_claim(pods=("a", "b"))])
    assert claims(shared) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_a_sharer_that_only_the_kubelet_knows_counts():
    kubelet = {"a": {"main": [dynamic()]}, "b": {"main": [dynamic()]}}
    assert claims(node(pod("a"), kubelet=kubelet)) == {"a": ()}
    assert claims(node(pod("a"), kubelet={"a": kubelet["a"]})) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_a_claim_of_the_same_name_in_another_namespace_is_another_claim():
    kubelet = {"a": {"main": [dynamic()]}, "b": {"main": [dynamic("gpu-1", claim_namespace="team-b")]}}
    assert claims(node(pod("a"), kubelet=kubelet)) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_devices_of_other_drivers_are_no_gpus():
    assert answers(node(kubelet={"a": {"main": [dynamic("channel-0", driver_name="compute-domain.nvidia.com")]}})) == {}


def test_two_devices_of_one_claim_are_two_claims():
    assert claims(node(claims=[resource_claim(result("gpu-0"), result("gpu-1"))])) == {
        "a": (claim("main", GPU_0, **WHOLE), claim("main", GPU_1, **WHOLE))
    }


def test_a_container_that_ended_holds_nothing_and_does_not_make_a_claim_the_pods():
    ended = container("warm", kind=ContainerKind.INIT, state=ContainerState.TERMINATED)
    assert claims(node(pod("a", ended, container()), claims=[resource_claim()])) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_a_request_with_alternatives_is_named_without_the_alternative():
    asks = (container("x", requests=(("gpu", "accel"),)), container("y", requests=(("gpu", "other"),)))
    of_node = node(pod("a", *asks), claims=[resource_claim(result("gpu-0", "accel/full"), result("gpu-1", "other"))])
    assert claims(of_node) == {"a": (claim("x", GPU_0, **WHOLE), claim("y", GPU_1, **WHOLE))}


@pytest.mark.parametrize("requests", [(), (("gpu", "x"), ("gpu", "y"))])
def test_a_containers_status_tells_its_devices_where_its_requests_do_not(requests):
    kubelet = {"a": {name: [dynamic("gpu-0"), dynamic("gpu-1")] for name in "xy"}}
    asks = (
        container("x", requests=requests[:1], allocated_resources=(("claim:gpu/x", "gpu.nvidia.com/node-a/gpu-0"),)),
        container("y", requests=requests[1:], allocated_resources=(("claim:gpu/y", "gpu.nvidia.com/node-a/gpu-1"),)),
    )
    assert claims(node(pod("a", *asks), kubelet=kubelet)) == {"a": (claim("x", GPU_0, **WHOLE), claim("y", GPU_1, **WHOLE))}


def test_an_extended_resource_without_the_kubelets_list_is_told_by_the_request_mappings():
    mappings = tuple(ExtendedResourceRequest(container=name, resource_name="nvidia.com/gpu", request=f"r-{name}") for name in "xy")
    of_pod = pod(
        "a",
        container("x", requests=()),
        container("y", requests=()),
        claims=(),
        extended_resource_claim="shared",
        extended_resource_requests=mappings,
    )
    assert claims(node(of_pod, claims=[resource_claim(result("gpu-0", "r-x"), result("gpu-1", "r-y"))])) == {
        "a": (claim("x", GPU_0, **WHOLE), claim("y", GPU_1, **WHOLE))
    }


def test_a_pod_that_holds_a_device_beside_its_admin_access_holds_that_device_only():
    both = resource_claim(result("gpu-0", "own"), result("gpu-1", "all", admin_access=True))
    assert claims(node(claims=[both])) == {"a": (claim("main", GPU_0, **WHOLE),)}


# --- which GPU ---


def test_the_slice_names_the_gpu_and_the_devices_name_does_not():
    assert claims(node(claims=[resource_claim(result("gpu-1"))])) == {"a": (claim("main", GPU_1, **WHOLE),)}
    assert claims(node(claims=[resource_claim(result("gpu-1"))], slices=())) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_a_gpu_that_the_driver_does_not_list_is_shown_without_an_amount_of_memory():
    (found,) = claims(node(claims=[resource_claim()], gpus={}))["a"]
    assert (found.gpu_uuid, found.memory_bytes, found.compute_ratio) == (GPU_0, None, 1.0)


@pytest.mark.parametrize("device", ["gpu-7", "gpu-1-mig-new", "gpu-0-mig-1g10gb-19-0", "gpu-", "gpu-0 ", "something"])
def test_an_unknown_device_is_an_error_and_the_others_stay(device):
    (answer,) = answers(node(claims=[resource_claim(result(device), result("gpu-0"))])).values()
    assert answer.claims == (claim("main", GPU_0, **WHOLE),)
    (error,) = answer.errors
    assert error == f"claim 'shared': device '{device}' is in no ResourceSlice of this node and names no GPU here"


def test_a_gpu_passed_through_to_a_virtual_machine_is_not_mine():
    (answer,) = answers(node(claims=[resource_claim(result("gpu-vfio-0"), result("gpu-0"))])).values()
    assert (answer.errors, answer.claims) == ((), (claim("main", GPU_0, **WHOLE),))


# --- MPS ---


def process(gpu_uuid=GPU_0, **more):
    return claim("main", gpu_uuid, scope=Scope.PROCESS, enforced=True, **more)


@pytest.mark.parametrize(
    ("limit", "mebibytes"),
    [("10Gi", 10240), ("8500M", 8106), ("1Mi", 1), (8 * GIB, 8192), ("1048577", 1)],
)
def test_a_limit_is_a_quantity_in_whole_mebibytes_rounded_down(limit, mebibytes):
    assert claims(node(claims=[resource_claim(configs=[mps(memory=limit)])])) == {"a": (process(memory_bytes=mebibytes * MIB),)}


@pytest.mark.parametrize("key", [GPU_0, "0"])
def test_the_limit_of_a_device_beats_the_default(key):
    config = mps(memory="10Gi", by_device={key: "8Gi", GPU_1: "1Gi"}, percent=50)
    assert claims(node(claims=[resource_claim(configs=[config])])) == {"a": (process(memory_bytes=8 * GIB, compute_ratio=0.5),)}


def test_a_number_is_the_position_among_the_claims_devices():
    config = mps(memory="10Gi", by_device={"1": "8Gi"})
    assert claims(node(claims=[resource_claim(result("gpu-0"), result("gpu-1"), configs=[config])])) == {
        "a": (process(GPU_0, memory_bytes=10 * GIB), process(GPU_1, memory_bytes=8 * GIB))
    }


def test_a_uuid_beats_a_position_and_devices_of_other_drivers_take_no_position():
    config = mps(by_device={"0": "8Gi", GPU_0: "6Gi"})
    network = replace(result("nic-0"), driver_name="other.example")
    assert claims(node(claims=[resource_claim(network, result("gpu-0"), configs=[config])])) == {"a": (process(memory_bytes=6 * GIB),)}
    positions = mps(by_device={"0": "8Gi", "1": "6Gi"})
    assert claims(node(claims=[resource_claim(network, result("gpu-0"), configs=[positions])])) == {"a": (process(memory_bytes=8 * GIB),)}


def test_what_the_claim_says_stands_later_and_beats_what_its_class_says():
    configs = [mps(memory="10Gi"), mps(("gpu",), memory="8Gi")]
    assert claims(node(claims=[resource_claim(configs=configs)])) == {"a": (process(memory_bytes=8 * GIB),)}
    time_slicing = ClaimConfig(driver_name=DRIVER, requests=(), parameters={"kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}})
    assert claims(node(claims=[resource_claim(configs=[mps(memory="10Gi"), time_slicing])])) == {"a": (claim("main", GPU_0, **WHOLE),)}


@pytest.mark.parametrize(
    "config",
    [
        mps(("other",), memory="8Gi"),
        replace(mps(memory="8Gi"), driver_name="other.example"),
        mps(memory="8Gi", kind="MigDeviceConfig"),
        mps(memory="8Gi", kind="ComputeDomainConfig"),
        ClaimConfig(driver_name=DRIVER, requests=(), parameters={}),
        ClaimConfig(driver_name=DRIVER, requests=(), parameters={"kind": "GpuConfig", "sharing": 3}),
    ],
)
def test_a_configuration_of_something_else_changes_nothing(config):
    assert claims(node(claims=[resource_claim(configs=[config])])) == {"a": (claim("main", GPU_0, **WHOLE),)}


def test_each_kind_of_configuration_is_for_its_kind_of_device():
    both = resource_claim(
        result("gpu-0"), result("gpu-2-mig-3g40gb-9-0"), configs=[mps(memory="8Gi"), mps(memory="2Gi", kind="MigDeviceConfig")]
    )
    assert claims(node(claims=[both])) == {"a": (process(GPU_0, memory_bytes=8 * GIB), process(MIG, memory_bytes=2 * GIB))}


def test_a_percentage_without_a_memory_limit_leaves_the_only_consumer_all_the_memory():
    limited = resource_claim(configs=[mps(percent=30)])
    assert claims(node(claims=[limited])) == {
        "a": (process(compute_ratio=0.3), claim("main", GPU_0, memory_bytes=TOTAL, enforced=True)),
    }
    assert claims(node(claims=[replace(limited, reserved_for_pod_uids=("a", "b"))])) == {"a": (process(compute_ratio=0.3),)}


def test_mps_without_limits_is_plain_sharing():
    assert claims(node(claims=[resource_claim(configs=[mps()])])) == {"a": (claim("main", GPU_0, **WHOLE),)}
    assert claims(node(claims=[resource_claim(configs=[mps()], pods=("a", "b"))])) == {"a": ()}


@pytest.mark.parametrize(
    "config",
    [
        mps(memory="8GiB"),
        mps(memory="-1"),
        mps(memory=True),
        mps(memory=["8Gi"]),
        mps(memory="1023Ki"),
        mps(percent=0),
        mps(percent=101),
        mps(percent="many"),
        mps(percent=True),
        mps(by_device=["8Gi"]),
        mps(by_device={GPU_0: {}}),
        ClaimConfig(driver_name=DRIVER, requests=(), parameters={"kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": "x"}}),
    ],
)
def test_a_limit_that_cannot_be_read_is_an_error_and_the_device_stays_allocated(config):
    (answer,) = answers(node(claims=[resource_claim(configs=[config])])).values()
    assert (answer.claims, answer.allocations, len(answer.errors)) == ((), (Allocation("main", GPU_0),), 1)


# --- consumable capacity ---


def share(memory="20Gi", request="gpu", share_id="s1"):
    return result(request=request, share_id=share_id, consumed_capacity={} if memory is None else {"memory": memory})


def test_two_shares_of_one_device_in_one_claim_add_up():
    assert claims(node(claims=[resource_claim(share(), share("10Gi", share_id="s2"))])) == {
        "a": (claim("main", GPU_0, memory_bytes=30 * GIB, enforced=False),)
    }


def test_a_container_that_names_one_of_two_shares_has_that_one():
    of_pod = pod("a", container(requests=(("gpu", "big"),)), container("side", requests=()))
    shares = resource_claim(share("20Gi", "big"), share("10Gi", "small", "s2"))
    assert claims(node(of_pod, claims=[shares])) == {"a": (claim("main", GPU_0, memory_bytes=20 * GIB, enforced=False),)}


def test_a_share_of_an_unknown_amount_is_an_allocation_and_not_the_whole_device():
    known_and_unknown = resource_claim(share(), share(None, share_id="s2"))
    assert answers(node(claims=[known_and_unknown])) == {"a": Answer(allocations=(Allocation("main", GPU_0),))}
    assert answers(node(claims=[resource_claim(share(None))])) == {"a": Answer(allocations=(Allocation("main", GPU_0),))}


def test_a_capacity_that_cannot_be_read_is_an_error():
    (answer,) = answers(node(claims=[resource_claim(share("lots"))])).values()
    assert (answer.claims, answer.allocations, len(answer.errors)) == ((), (Allocation("main", GPU_0),), 1)


# --- anything ---

WORDS = st.sampled_from(["gpu-0", "gpu-1", "gpu-2-mig-3g40gb-9-0", "gpu", "main", "shared", "8Gi", "0", GPU_0, ""]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
    max_leaves=8,
)
SHARING = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["MPS", "TimeSlicing"]) | JSON,
        "mpsConfig": st.dictionaries(
            st.sampled_from(["defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"]),
            JSON | st.dictionaries(WORDS, JSON),
        )
        | JSON,
    }
)
RESULTS = st.builds(
    ClaimResult,
    request=WORDS,
    driver_name=st.just(DRIVER),
    pool_name=st.just("node-a"),
    device_name=WORDS,
    admin_access=st.booleans(),
    share_id=st.none() | WORDS,
    consumed_capacity=st.dictionaries(st.sampled_from(["memory", "gpu.nvidia.com/memory", "cores"]), WORDS),
)


@given(
    st.lists(RESULTS, max_size=4),
    st.lists(
        st.builds(
            lambda sharing, requests: ClaimConfig(
                driver_name=DRIVER, requests=tuple(requests), parameters={"kind": "GpuConfig", "sharing": sharing}
            ),
            SHARING | JSON,
            st.lists(WORDS),
        ),
        max_size=2,
    ),
    st.lists(WORDS, max_size=3),
    st.lists(st.tuples(st.just("gpu"), st.none() | WORDS), max_size=2),
    st.lists(st.tuples(WORDS, WORDS), max_size=2),
)
def test_anything_the_api_server_may_say_gives_an_answer_and_never_an_exception(results, configs, kubelet, requests, resources):
    of_container = container(requests=tuple(requests), allocated_resources=tuple(resources))
    of_node = node(
        pod("a", of_container),
        claims=[resource_claim(*results, configs=configs)],
        kubelet={"a": {"main": [dynamic(name) for name in kubelet]}},
    )
    for answer in answers(of_node).values():
        assert {each.gpu_uuid for each in answer.claims} <= {each.gpu_uuid for each in answer.allocations} <= set(GPUS)
        assert all(each.memory_bytes is None or each.memory_bytes >= 0 for each in answer.claims)
    assert set(held_devices(of_node)) <= set(SLICES)
