import pytest

from exporter.simulation.cgroup import container_cgroup, qos_class

UID = "ee913e27-37a4-4d14-901f-c8f79dda8094"
ID = "e60b622b93ac627f4f27f8ea6043dd2f61eefd549d0b58089c79ad767ae89fb7"


def pod(resources=None, **metadata):
    return {
        "metadata": {"name": "p", "namespace": "a", "uid": UID, **metadata},
        "spec": {"containers": [{"name": "main", "resources": resources or {}}, {"name": "new"}]},
        "status": {"containerStatuses": [{"name": "main", "containerID": f"containerd://{ID}"}]},
    }


SLICE = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podee913e27_37a4_4d14_901f_c8f79dda8094.slice"


@pytest.mark.parametrize(
    ("driver", "runtime", "path"),
    [
        ("systemd", "containerd", f"/{SLICE}/cri-containerd-{ID}.scope"),
        ("systemd", "crio", f"/{SLICE}/crio-{ID}.scope"),
        ("systemd", "docker", f"/{SLICE}/docker-{ID}.scope"),
        ("cgroupfs", "containerd", f"/kubepods/besteffort/pod{UID}/{ID}"),
        ("cgroupfs", "crio", f"/kubepods/besteffort/pod{UID}/crio-{ID}"),
        ("cgroupfs", "docker", f"/kubepods/besteffort/pod{UID}/{ID}"),
    ],
)
def test_each_driver_and_runtime_names_a_container_in_its_own_way(driver, runtime, path):
    assert container_cgroup(pod(), "main", driver, runtime) == f"0::{path}\n"


CPU_AND_MEMORY = {"cpu": "2", "memory": "8Gi"}


@pytest.mark.parametrize(
    ("resources", "level"),
    [
        ({}, "BestEffort"),
        ({"limits": {"nvidia.com/gpu": "1"}}, "BestEffort"),
        ({"requests": {"cpu": "0"}}, "BestEffort"),
        ({"requests": {"cpu": "100m"}}, "Burstable"),
        ({"limits": {"memory": "1Gi"}}, "Burstable"),
        ({"limits": CPU_AND_MEMORY, "requests": {"cpu": "1", "memory": "8Gi"}}, "Burstable"),
        ({"limits": CPU_AND_MEMORY}, "Guaranteed"),
        ({"limits": CPU_AND_MEMORY, "requests": {"cpu": "2000m", "memory": "8192Mi"}}, "Guaranteed"),
    ],
)
def test_the_class_of_a_pod_follows_from_its_resources(resources, level):
    assert qos_class({"spec": {"containers": [{"name": "main", "resources": resources}]}}) == level


def test_one_container_without_limits_keeps_a_pod_from_being_guaranteed():
    assert qos_class(pod({"limits": CPU_AND_MEMORY})) == "Burstable"


def test_the_status_knows_the_class_better():
    assert qos_class({"spec": {}, "status": {"qosClass": "Guaranteed"}}) == "Guaranteed"


def test_a_guaranteed_pod_has_no_level_in_its_path():
    guaranteed = {**pod(), "status": {**pod()["status"], "qosClass": "Guaranteed"}}
    assert container_cgroup(guaranteed, "main", "systemd", "containerd") == (
        f"0::/kubepods.slice/kubepods-podee913e27_37a4_4d14_901f_c8f79dda8094.slice/cri-containerd-{ID}.scope\n"
    )
    assert container_cgroup(guaranteed, "main", "cgroupfs", "containerd") == f"0::/kubepods/pod{UID}/{ID}\n"


def test_a_static_pod_stands_under_the_hash_of_its_manifest():
    static = pod(annotations={"kubernetes.io/config.hash": "9aac5b5c8815def09a2ef9e37b89da55"})
    assert "kubepods-besteffort-pod9aac5b5c8815def09a2ef9e37b89da55.slice" in container_cgroup(static, "main", "systemd", "containerd")


@pytest.mark.parametrize(
    ("containers", "statuses"),
    [("initContainers", "initContainerStatuses"), ("ephemeralContainers", "ephemeralContainerStatuses")],
)
def test_init_and_ephemeral_containers_are_containers(containers, statuses):
    other = {
        "metadata": {"uid": UID},
        "spec": {containers: [{"name": "x"}]},
        "status": {statuses: [{"name": "x", "containerID": f"cri-o://{ID}"}]},
    }
    assert ID in container_cgroup(other, "x", "systemd", "crio")


def test_a_container_that_the_status_does_not_know_yet_has_an_id_all_the_same():
    path = container_cgroup(pod(), "new", "cgroupfs", "containerd")
    assert path == container_cgroup(pod(), "new", "cgroupfs", "containerd")
    assert len(path.strip().rpartition("/")[2]) == 64
    assert ID not in path


def test_a_pod_without_that_container_has_no_cgroup_for_it():
    assert container_cgroup(pod(), "sidecar", "systemd", "containerd") is None
