"""What is kept of Kubernetes objects: captured ones, odd ones and hostile ones."""

import copy
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from exporter.sources.kubernetes_objects import (
    ResourceSlice,
    current_devices,
    may_be_used_on,
    parse_claim,
    parse_node,
    parse_pod,
    parse_slice,
)

CAPTURES = Path(__file__).parents[1] / "captures"


def items(name):
    return json.loads((CAPTURES / name).read_text())["items"]


def by_name(name, parse):
    return {found.name: found for found in map(parse, items(name))}


# --- pods ---


def test_a_captured_pod_is_read_with_all_its_containers():
    assert by_name("pods-list.json", parse_pod)["memory-gpu"] == Pod(
        uid="7d5784c5-b380-4f75-933c-0c8d2fb50ed2",
        namespace="team-b",
        name="memory-gpu",
        phase=PodPhase.RUNNING,
        labels={"kai.scheduler/queue": "team-b", "runai-gpu-group": "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10"},
        annotations={"gpu-fraction-container-name": "server", "gpu-memory": "2000", "received-resource-type": "Fraction"},
        scheduler_name="default-scheduler",
        containers=(
            Container(
                name="setup",
                kind=ContainerKind.INIT,
                container_id="5923ca1862b8b523545fe86cd743c8897cf4217fa748d9fb01d3752809005a47",
                state=ContainerState.TERMINATED,
            ),
            Container(
                name="proxy",
                kind=ContainerKind.INIT,
                restartable=True,
                container_id="54d0bea9912fdd0541a51f0ed249bdec36523cdce0d4f8e084e813caf2a17be4",
                state=ContainerState.RUNNING,
            ),
            Container(
                name="log-sidecar",
                container_id="101549b58eb6077c77c1da386412f0c67d3aa83a8cfd29df725f123f16b80fbc",
                state=ContainerState.RUNNING,
            ),
            Container(
                name="server",
                container_id="0e5afba5246c458b01f54c3d3b6339a943a60de5620f5094877a42faf0a38ca1",
                state=ContainerState.RUNNING,
                resource_limits={"memory": "64Mi"},
            ),
        ),
    )


def test_a_captured_static_pod_is_known_by_its_hash_and_its_node():
    pod = by_name("pods-list.json", parse_pod)["node-agent-node-a"]
    assert (pod.static_hash, pod.owner_kind, pod.owner_name) == ("06cde0272c06412680f870e8a3602ffe", "Node", "node-a")


def test_a_captured_finished_pod_is_over_and_its_container_holds_nothing():
    pod = by_name("pods-list.json", parse_pod)["done"]
    assert pod.ended
    assert [(container.state, container.holds_claims) for container in pod.containers] == [(ContainerState.TERMINATED, False)]


def test_of_a_captured_environment_only_limits_are_kept():
    assert by_name("pods-list.json", parse_pod)["half-gpu"].containers[0].env == ()


def test_a_secret_in_the_environment_is_not_kept():
    container = {"name": "main", "env": [{"name": "DB_PASSWORD", "value": "hunter2"}, {"name": "CUDA_DEVICE_SM_LIMIT", "value": "30"}]}
    assert minimal(containers=[container]).containers[0].env == (EnvVar(name="CUDA_DEVICE_SM_LIMIT", value="30"),)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"name": "CUDA_A", "value": "8589934592"}, EnvVar(name="CUDA_A", value="8589934592")),
        ({"name": "CUDA_A", "value": ""}, EnvVar(name="CUDA_A", value="")),
        ({"name": "CUDA_A"}, EnvVar(name="CUDA_A", value="")),
        ({"name": "CUDA_A", "value": 5}, EnvVar(name="CUDA_A", value=None)),
        (
            {"name": "CUDA_A", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['limit']"}}},
            EnvVar(name="CUDA_A", field_path="metadata.annotations['limit']"),
        ),
        ({"name": "CUDA_A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, EnvVar(name="CUDA_A")),
        ({"name": "CUDA_A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}, EnvVar(name="CUDA_A")),
    ],
)
def test_an_environment_variable_is_a_literal_or_names_its_source(entry, expected):
    assert minimal(containers=[{"name": "main", "env": [entry]}]).containers[0].env == (expected,)


def minimal(status=None, metadata=None, **spec):
    identity = {"uid": "u", "namespace": "n", "name": "p"}
    return parse_pod({"metadata": identity | (metadata or {}), "spec": spec, "status": status or {}})


def terminated(exit_code=0):
    return {"terminated": {"exitCode": exit_code}}


@pytest.mark.parametrize(
    ("policy", "exit_code", "regular", "init"),
    [
        ("Always", 0, True, False),
        ("Always", 1, True, True),
        ("OnFailure", 0, False, False),
        ("OnFailure", 137, True, True),
        ("Never", 0, False, False),
        ("Never", 1, False, False),
        (None, 0, False, False),
        (None, 1, False, True),
        (7, 0, False, False),
    ],
)
def test_the_restart_policy_says_which_ended_containers_come_back(policy, exit_code, regular, init):
    pod = minimal(
        restartPolicy=policy,
        initContainers=[{"name": "init"}, {"name": "sidecar", "restartPolicy": "Always"}],
        containers=[{"name": "main"}],
        ephemeralContainers=[{"name": "debug"}],
        status={
            "initContainerStatuses": [{"name": name, "state": terminated(exit_code)} for name in ("init", "sidecar")],
            "containerStatuses": [{"name": "main", "state": terminated(exit_code)}],
            "ephemeralContainerStatuses": [{"name": "debug", "state": terminated(exit_code)}],
        },
    )
    assert {container.name: container.will_restart for container in pod.containers} == {
        "init": init,
        "sidecar": True,
        "main": regular,
        "debug": False,
    }


def test_a_policy_of_the_container_itself_goes_before_that_of_the_pod():
    pod = minimal(
        restartPolicy="Never",
        containers=[{"name": "main", "restartPolicy": "OnFailure"}],
        status={"containerStatuses": [{"name": "main", "state": terminated(1)}]},
    )
    assert pod.containers[0].will_restart


@pytest.mark.parametrize(("status", "metadata"), [({"phase": "Failed"}, {}), ({}, {"deletionTimestamp": "2026-12-01T00:00:00Z"})])
def test_nothing_comes_back_in_a_pod_that_is_over_or_being_deleted(status, metadata):
    pod = minimal(
        restartPolicy="Always",
        initContainers=[{"name": "sidecar", "restartPolicy": "Always"}],
        containers=[{"name": "main"}],
        metadata=metadata,
        status=status
        | {
            "initContainerStatuses": [{"name": "sidecar", "state": terminated()}],
            "containerStatuses": [{"name": "main", "state": terminated()}],
        },
    )
    assert [container.will_restart for container in pod.containers] == [False, False]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"waiting": {}}, ContainerState.WAITING),
        ({"running": {"startedAt": "2026-12-01T00:00:00Z"}}, ContainerState.RUNNING),
        ({"terminated": {}}, ContainerState.TERMINATED),
        ({}, None),
        (None, None),
        ({"running": None}, None),
    ],
)
def test_the_state_is_the_one_that_is_given(state, expected):
    pod = minimal(containers=[{"name": "main"}], status={"containerStatuses": [{"name": "main", "state": state}]})
    assert pod.containers[0].state is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("containerd://" + "a" * 64, "a" * 64),
        ("cri-o://" + "0" * 64, "0" * 64),
        ("a" * 64, "a" * 64),
        ("containerd://" + "a" * 63, None),
        ("containerd://" + "A" * 64, None),
        ("containerd://" + "a" * 64 + "\n", None),
        ("", None),
        (7, None),
    ],
)
def test_a_container_id_is_64_hex_digits_without_the_name_of_the_runtime(text, expected):
    pod = minimal(containers=[{"name": "main"}], status={"containerStatuses": [{"name": "main", "containerID": text}]})
    assert pod.containers[0].container_id == expected


def test_the_controller_is_the_owner_else_the_first_one():
    owners = [{"kind": "A", "name": "a"}, {"kind": "B", "name": "b", "controller": True}]
    pods = [minimal(metadata={"ownerReferences": found}) for found in (owners, owners[:1], [])]
    assert [(pod.owner_kind, pod.owner_name) for pod in pods] == [("B", "b"), ("A", "a"), (None, None)]


def test_limits_are_text_whether_they_were_written_so_or_not():
    limits = {"nvidia.com/gpu": 2, "memory": "1Gi", "cpu": 0.5, "odd": True, "null": None, "list": []}
    pod = minimal(containers=[{"name": "main", "resources": {"limits": limits}}])
    assert pod.containers[0].resource_limits == {"nvidia.com/gpu": "2", "memory": "1Gi", "cpu": "0.5"}


def test_mount_paths_are_kept():
    mounts = [{"name": "v", "mountPath": "/etc/ld.so.preload"}, {"name": "w"}, {"mountPath": "/usr/local/vgpu"}]
    assert minimal(containers=[{"name": "main", "volumeMounts": mounts}]).containers[0].volume_mounts == (
        "/etc/ld.so.preload",
        "/usr/local/vgpu",
    )


@pytest.mark.parametrize("missing", ["uid", "namespace", "name"])
@pytest.mark.parametrize("value", [None, "", 7, [], {}])
def test_a_pod_that_does_not_say_which_it_is_is_none(missing, value):
    with pytest.raises(ValueError, match=f"a Pod without {missing}"):
        minimal(metadata={missing: value})


def test_what_kubectl_applied_is_not_kept():
    pod = minimal(metadata={"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "gpu-memory": "2000", "odd": 7}})
    assert pod.annotations == {"gpu-memory": "2000"}


def test_half_a_surrogate_pair_can_be_written_out_again():
    pod = parse_pod(
        json.loads(r'{"metadata": {"uid": "u", "namespace": "n", "name": "\ud800", "labels": {"\udfff": "\ud83d\ude00\ud83d"}}}')
    )
    assert (pod.name, pod.labels) == ("?", {"?": "😀?"})


# --- dynamic resources of a pod ---


@pytest.mark.parametrize("case", ["5-per-request", "5c-per-request-cdi"])
def test_a_captured_pod_says_which_request_each_container_was_given(case):
    pod = by_name(f"dra/{case}/pods.json", parse_pod)["per-request"]
    assert list(pod.resource_claims) == ["both"]
    assert {container.name: container.claim_requests for container in pod.containers} == {
        "wants-full": (("both", "full"),),
        "wants-slice": (("both", "slice"),),
        "wants-all": (("both", None),),
    }
    assert all(len(container.allocated_resources) == (2 if container.name == "wants-all" else 1) for container in pod.containers)


def test_a_captured_status_narrows_a_claim_to_the_devices_of_a_request():
    pod = by_name("dra/5-per-request/pods.json", parse_pod)["per-request"]
    assert pod.resource_claims == {"both": "per-request-both-gjql5"}
    assert {container.name: container.allocated_resources for container in pod.containers} == {
        "wants-full": (("claim:both/full", "gpu.nvidia.com/node-a/gpu-0"),),
        "wants-slice": (("claim:both/slice", "gpu.nvidia.com/node-a/gpu-2-mig-3g40gb-9-0"),),
        "wants-all": (("claim:both", "gpu.nvidia.com/node-a/gpu-0"), ("claim:both", "gpu.nvidia.com/node-a/gpu-2-mig-3g40gb-9-0")),
    }


def test_a_captured_extended_resource_names_its_claim_and_its_requests():
    pod = by_name("dra/4-extended-resource/pods.json", parse_pod)["ext-explicit"]
    assert pod.extended_resource_claim == "ext-explicit-extended-resources-vbmbc"
    assert pod.extended_resource_requests == (
        ExtendedResourceRequest(container="main", resource_name="example.com/gpu", request="container-0-request-0"),
    )


def test_a_captured_claim_that_two_pods_name_is_the_same_claim():
    pods = by_name("dra/2-shared-mps/pods.json", parse_pod)
    claims = {tuple(pod.resource_claims.items()) for pod in pods.values()}
    assert len(pods) == 2
    assert len(claims) == 1


def test_a_status_of_a_plain_resource_is_none_of_a_claim():
    statuses = [{"name": "main", "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-1"}]}]}]
    assert minimal(containers=[{"name": "main"}], status={"containerStatuses": statuses}).containers[0].allocated_resources == ()


def test_the_claim_of_a_template_is_named_by_the_status_and_a_named_one_by_the_spec():
    pod = minimal(
        resourceClaims=[
            {"name": "a", "resourceClaimName": "shared"},
            {"name": "b", "resourceClaimTemplateName": "t"},
            {"name": "c", "source": {"resourceClaimName": "old"}},
            {"name": "d", "resourceClaimTemplateName": "not made yet"},
        ],
        status={"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x7k2m"}, {"name": "e"}]},
    )
    assert pod.resource_claims == {"a": "shared", "b": "p-b-x7k2m", "c": "old"}


# --- node ---


def test_the_captured_node_is_read():
    node = parse_node(json.loads((CAPTURES / "node.json").read_text()))
    assert node == NodeFacts(
        name="node-a",
        labels={
            "beta.kubernetes.io/arch": "amd64",
            "beta.kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "kubernetes.io/hostname": "node-a",
            "kubernetes.io/os": "linux",
            "nvidia.com/gpu.memory": "81559",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED",
            "nvidia.com/gpu.replicas": "4",
            "nvidia.com/gpu.sharing-strategy": "time-slicing",
        },
        annotations={"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
        allocatable={
            "cpu": "2",
            "ephemeral-storage": "267847642337",
            "hugepages-1Gi": "0",
            "hugepages-2Mi": "0",
            "memory": "24581696Ki",
            "nvidia.com/gpu": "2",
            "nvidia.com/gpu.shared": "4",
            "nvidia.com/mig-3g.40gb": "2",
            "pods": "110",
        },
    )


# --- slices ---


def test_the_captured_slices_name_gpus_and_mig_devices():
    devices = current_devices(map(parse_slice, items("dra/1-exclusive/resourceslices.json")))
    assert {device.device_name: (device.device_type, device.gpu_uuid) for device in devices} == {
        "gpu-0": ("gpu", "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22"),
        "gpu-1": ("gpu", "GPU-c81f64d2-97be-4e0c-b1a8-6f25e90d4417"),
        "gpu-2-mig-3g40gb-9-0": ("mig", "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"),
    }
    assert {(device.driver_name, device.pool_name) for device in devices} == {("gpu.nvidia.com", "node-a")}


def test_the_captured_slices_of_a_driver_that_is_gone_are_none():
    assert items("dra/12-driver-gone/resourceslices.json") == []


@pytest.mark.parametrize(
    "device",
    [
        {"attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-1"}}},
        {"basic": {"attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-1"}}}},
        {"attributes": {"gpu.nvidia.com/type": {"string": "gpu"}, "gpu.nvidia.com/uuid": {"string": "GPU-1"}}},
    ],
    ids=["v1", "v1beta1", "with the driver's domain"],
)
def test_attributes_are_found_in_every_form(device):
    assert device_slice(device={"name": "gpu-0", **device}).devices == (
        SliceDevice(driver_name="gpu.nvidia.com", pool_name="n", device_name="gpu-0", gpu_uuid="GPU-1", device_type="gpu"),
    )


@pytest.mark.parametrize(
    "attributes",
    [{}, {"uuid": {"int": 5}}, {"uuid": "GPU-1"}, {"uuid": {"string": ""}}, {"other.example/uuid": {"string": "GPU-1"}}],
)
def test_a_device_without_a_uuid_is_a_device_without_a_uuid(attributes):
    assert device_slice(device={"name": "gpu-0", "attributes": attributes}).devices[0].gpu_uuid is None


def device_slice(name="s", generation=1, device=None, pool="n"):
    pool = {"name": pool, "generation": generation, "resourceSliceCount": 1}
    devices = [device or {"name": name}]
    return parse_slice({"metadata": {"name": name}, "spec": {"driver": "gpu.nvidia.com", "pool": pool, "devices": devices}})


def test_only_the_newest_generation_of_a_pool_counts():
    slices = [device_slice("old", 1), device_slice("new-b", 2), device_slice("new-a", 2), device_slice("other", 1, pool="m")]
    assert [device.device_name for device in current_devices(slices)] == ["other", "new-a", "new-b"]


def test_a_slice_without_a_pool_or_a_driver_is_none():
    for spec in ({"driver": "d"}, {"pool": {"name": "n"}}, {}, None, []):
        with pytest.raises(ValueError, match="a ResourceSlice without"):
            parse_slice({"metadata": {"name": "s"}, "spec": spec})
    assert parse_slice({"metadata": {"name": "s"}, "spec": {"driver": "d", "pool": {"name": "n"}, "devices": [None, {}, {"name": 5}]}}) == (
        ResourceSlice(name="s", driver_name="d", pool_name="n", generation=0)
    )


# --- claims ---


def test_the_captured_claim_of_two_pods_carries_its_mps_configuration():
    (claim,) = map(parse_claim, items("dra/2-shared-mps/resourceclaims.json"))
    assert claim.reserved_for_pod_uids == ("95de7277-3e69-4107-afa7-fcfb9573c29c", "c8ded1f6-ea09-45e4-bc53-f7beddba8896")
    assert [(result.request, result.device_name) for result in claim.results] == [("mps-gpu", "gpu-0")]
    (config,) = claim.configs
    assert (config.driver_name, config.requests) == ("gpu.nvidia.com", ("mps-gpu",))
    assert config.parameters["sharing"] == {
        "strategy": "MPS",
        "mpsConfig": {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"},
    }


def test_the_captured_claim_of_a_monitor_has_admin_access():
    claims = by_name("dra/7-admin-access/resourceclaims.json", parse_claim)
    assert {name: {result.admin_access for result in claim.results} for name, claim in claims.items()} == {
        "monitor-all-xp98h": {True},
        "user-gpu-gjl56": {False},
    }


def test_captured_shares_of_a_device_say_how_much_they_take():
    claims = by_name("dra/10b-consumable-no-share-id/resourceclaims.json", parse_claim)
    assert claims["share-a-gpu-c64lm"].results == (
        ClaimResult(
            request="gpu",
            driver_name="gpu.nvidia.com",
            pool_name="node-a",
            device_name="gpu-0",
            share_id="4c3a3b95-e100-4ffe-9310-d770bd5da16c",
            consumed_capacity={"memory": "20Gi"},
        ),
    )


def test_a_claim_is_read_whole():
    claim = {
        "metadata": {"uid": "c", "namespace": "n", "name": "shared"},
        "status": {
            "allocation": {
                "devices": {
                    "results": [{"request": "gpu", "driver": "d", "pool": "p", "device": "gpu-0"}, {"driver": "d", "pool": "p"}, None],
                    "config": [
                        {"source": "FromClass", "opaque": {"driver": "d", "parameters": {"kind": "GpuConfig"}}},
                        {"source": "FromClaim", "requests": ["gpu", 5], "opaque": {"driver": "d"}},
                        {"source": "FromClaim"},
                    ],
                }
            },
            "reservedFor": [
                {"resource": "pods", "name": "a", "uid": "1"},
                {"resource": "jobs", "name": "b", "uid": "2"},
                {"resource": "pods"},
            ],
        },
    }
    assert parse_claim(claim) == ResourceClaim(
        uid="c",
        namespace="n",
        name="shared",
        results=(ClaimResult(request="gpu", driver_name="d", pool_name="p", device_name="gpu-0"),),
        configs=(
            ClaimConfig(driver_name="d", requests=(), parameters={"kind": "GpuConfig"}),
            ClaimConfig(driver_name="d", requests=("gpu",), parameters={}),
        ),
        reserved_for_pod_uids=("1",),
    )


def allocated(*terms):
    selector = {"nodeSelector": {"nodeSelectorTerms": list(terms)}} if terms else {}
    return {"status": {"allocation": {"devices": {}, **selector}}}


def on(*nodes, operator="In"):
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": list(nodes)}]}


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ({}, False),
        ({"status": {}}, False),
        (allocated(), True),
        (allocated(on("here")), True),
        (allocated(on("there")), False),
        (allocated(on("there"), on("here")), True),
        (allocated(on("there", operator="NotIn")), True),
        (allocated({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}), True),
        (allocated({"matchFields": 7}), True),
    ],
)
def test_a_claim_that_is_not_allocated_or_only_elsewhere_is_not_of_this_node(claim, expected):
    assert may_be_used_on(claim, "here") is expected


def test_the_captured_claims_are_of_the_node_they_were_captured_on():
    claims = items("dra/5-per-request/resourceclaims.json")
    assert [may_be_used_on(claim, "node-a") for claim in claims] == [True]
    assert [may_be_used_on(claim, "node-b") for claim in claims] == [False]


# --- anything at all ---

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
SAMPLES = {
    parse_pod: [*items("pods-list.json"), *items("dra/5-per-request/pods.json"), *items("dra/4-extended-resource/pods.json")],
    parse_node: [json.loads((CAPTURES / "node.json").read_text())],
    parse_slice: items("dra/1-exclusive/resourceslices.json"),
    parse_claim: items("dra/2-shared-mps/resourceclaims.json"),
}


def _places(found, path=()):
    yield path
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield from _places(value, (*path, key))


@given(st.data())
@settings(max_examples=300)
def test_an_object_with_anything_anywhere_is_read_or_refused_as_a_value_error(data):
    parse = data.draw(st.sampled_from(list(SAMPLES)))
    candidate = copy.deepcopy(data.draw(st.sampled_from(SAMPLES[parse])))
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from([path for path in _places(candidate) if path]))
        parent = candidate
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = data.draw(ANYTHING)
    try:
        facts = parse(candidate)
    except ValueError as error:
        assert "without" in str(error)  # noqa: PT017 - either outcome is right
    else:
        # Whatever came in, all that is kept can be written out and held for long.
        json.dumps(repr(facts)).encode()
        assert pickle.loads(pickle.dumps(facts)) == facts or "nan" in repr(facts)  # noqa: S301 - written a moment ago


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), ANYTHING))
def test_any_json_object_is_read_or_refused_as_a_value_error(candidate):
    for parse in SAMPLES:
        with pytest.raises(ValueError, match="without"):
            parse(candidate)
    assert may_be_used_on(candidate, "here") in (True, False)
