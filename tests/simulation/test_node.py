import pytest

from exporter.simulation.node import GpuUse, NodeState, Withheld, apply


@pytest.fixture
def after(load):
    """Answer a function from a scenario to the node after all of its steps."""

    def play(text):
        state = NodeState()
        for step in load(text).steps:
            state = apply(state, step)
        return state

    return play


def test_values_that_are_not_said_have_defaults(after):
    state = after("""
        node: {name: n}
        gpus: [{uuid: G, mig: [{uuid: M}, {uuid: N, profile: 3g.40gb}]}]
        processes: [{pid: 7, gpus: [{gpu: M}]}]
    """)
    assert (state.machine.cgroup_driver, state.machine.runtime, state.machine.host_pid) == ("systemd", "containerd", True)
    gpu = state.gpus["G"]
    assert (gpu.memory_reserved_bytes, gpu.memory_used_bytes, gpu.utilization_percent, gpu.fault) == (0, None, None, "none")
    assert [(device.gpu_instance_id, device.memory_total_bytes) for device in gpu.mig.values()] == [(1, 9728 << 20), (2, 40448 << 20)]
    process = state.processes[7]
    assert (process.cgroup, process.start_time_ticks, process.state, process.command) == (
        "0::/system.slice/host.service\n",
        100,
        "S",
        "python",
    )
    assert process.gpus["M"] == GpuUse(gpu="M", kinds=("compute",), memory_bytes=0, sm_percent=0)
    assert (state.sources.nvml, state.sources.kubelet, state.sources.kubernetes) == ("up", "up", "up")


def test_a_process_keeps_what_a_step_does_not_say(after):
    state = after("""
        node: {name: n}
        gpus: [{uuid: G}, {uuid: H}]
        processes:
          - {pid: 7, command: train, gpus: [{gpu: G, memory: 1Gi, sm: 40, encoder: 3}, {gpu: H, memory: 2Gi}]}
          - {pid: 8}
        timeline:
          - {at: 5s, processes: [{pid: 7, gpus: [{gpu: G, memory: 3Gi}]}, {pid: 9}]}
    """)
    assert list(state.processes) == [7, 8, 9]
    assert state.processes[7].command == "train"
    assert state.processes[7].gpus == {
        "G": GpuUse(gpu="G", memory_bytes=3 << 30, sm_percent=40, encoder_percent=3),
        "H": GpuUse(gpu="H", memory_bytes=2 << 30),
    }


def test_gpus_and_mig_devices_merge_by_uuid(after):
    state = after("""
        node: {name: n}
        gpus: [{uuid: G, model: A, mig: [{uuid: M, profile: 1g.10gb}]}, {uuid: H}]
        timeline:
          - {at: 5s, gpus: [{uuid: G, fault: lost, mig: [{uuid: M, memory_total: unsupported}, {uuid: N}]}]}
          - {at: 6s, gpus: [{uuid: G, fault: none}]}
          - {at: 7s, remove: {gpus: [H, N]}}
    """)
    assert list(state.gpus) == ["G"]
    gpu = state.gpus["G"]
    assert (gpu.model, gpu.fault, list(gpu.mig)) == ("A", "none", ["M"])
    assert (gpu.mig["M"].profile, gpu.mig["M"].memory_total_bytes) == ("1g.10gb", Withheld.UNSUPPORTED)


def test_mappings_of_a_pod_merge_key_by_key_and_its_lists_are_replaced(after):
    state = after("""
        node: {name: n}
        pods:
          - metadata: {name: p, namespace: a, labels: {x: "1", y: "1"}}
            spec: {nodeName: n, containers: [{name: c}, {name: d}]}
        timeline:
          - at: 5s
            pods:
              - metadata: {name: p, namespace: a, labels: {y: "2"}}
                spec: {containers: [{name: e}]}
                status: {phase: Running}
    """)
    pod = state.pods["a/p"]
    assert pod["metadata"]["labels"] == {"x": "1", "y": "2"}
    assert pod["spec"] == {"nodeName": "n", "containers": [{"name": "e"}]}
    assert pod["status"] == {"phase": "Running"}


def test_a_pod_that_is_removed_and_said_again_in_one_step_is_another_pod(after):
    text = """
        node: {name: n}
        pods: [{metadata: {name: p, labels: {x: "1"}}}]
        timeline:
          - {at: 5s, remove: {pods: [default/p]}, pods: [{metadata: {name: p}}]}
    """
    before, pod = after(text.partition("timeline")[0]).pods["default/p"], after(text).pods["default/p"]
    assert "labels" not in pod["metadata"]
    assert pod["metadata"]["uid"] != before["metadata"]["uid"]
    assert pod["metadata"]["namespace"] == "default"


def test_every_other_list_is_replaced_whole(after):
    state = after("""
        node: {name: n, labels: {x: "1"}}
        allocatable: [{resource_name: r, device_ids: [a]}]
        resource_claims: [{metadata: {name: c, namespace: a}}]
        pod_resources: [{namespace: a, name: p, containers: [{name: c}]}, {namespace: a, name: q}]
        files: {/a: {text: x}, /b: {text: x}}
        timeline:
          - at: 5s
            node: {labels: {y: "2"}}
            allocatable: []
            resource_claims: [{metadata: {name: d, namespace: a}}]
            pod_resources: [{namespace: a, name: p, containers: [{name: d}]}]
            files: {/b: {text: y}}
            remove: {pod_resources: [a/q]}
    """)
    assert state.machine.labels == {"x": "1", "y": "2"}
    assert state.allocatable == ()
    assert [claim["metadata"]["name"] for claim in state.resource_claims] == ["d"]
    assert {key: [container.name for container in pod.containers] for key, pod in state.pod_resources.items()} == {"a/p": ["d"]}
    assert state.files == {"/a": b"x", "/b": b"y"}


def test_restart_and_gone_are_over_at_once(after):
    sources = after("""
        node: {name: n}
        sources: {kubelet: down, kubernetes: hang}
        timeline:
          - {at: 5s, sources: {kubelet: restart, kubernetes: gone}}
    """).sources
    assert (sources.kubelet, sources.kubelet_restarts) == ("up", 1)
    assert (sources.kubernetes, sources.kubernetes_expirations) == ("up", 1)


def test_a_container_is_looked_up_when_the_step_acts(after):
    state = after("""
        node: {name: n}
        pods:
          - metadata: {name: p, uid: 11111111-1111-1111-1111-111111111111}
            status: {containerStatuses: [{name: c, containerID: containerd://aaa}]}
        processes: [{pid: 7, container: default/p/c}]
        timeline:
          - at: 5s
            pods: [{metadata: {name: p}, status: {containerStatuses: [{name: c, containerID: containerd://bbb}]}}]
            processes: [{pid: 7, command: old}, {pid: 8, container: default/p/c}]
    """)
    slice_path = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod11111111_1111_1111_1111_111111111111.slice"
    assert state.processes[7].cgroup == f"0::{slice_path}/cri-containerd-aaa.scope\n"
    assert state.processes[8].cgroup == f"0::{slice_path}/cri-containerd-bbb.scope\n"


def test_a_reused_pid_can_go_to_another_container(after):
    state = after("""
        node: {name: n}
        processes: [{pid: 7, cgroup: "0::/one", start_time: 5}]
        timeline:
          - {at: 5s, processes: [{pid: 7, cgroup: "0::/two", start_time: 9}]}
    """)
    assert (state.processes[7].cgroup, state.processes[7].start_time_ticks) == ("0::/two\n", 9)


def test_what_a_step_leaves_alone_stays_the_same_object(load):
    scenario = load("""
        node: {name: n}
        gpus: [{uuid: G}]
        pods: [{metadata: {name: p}}]
        pod_resources: [{name: p}]
        timeline: [{at: 5s, sources: {nvml: down}}]
    """)
    before = apply(NodeState(), scenario.steps[0])
    after = apply(before, scenario.steps[1])
    for name in ("machine", "gpus", "pods", "pod_resources", "allocatable", "files"):
        assert getattr(after, name) is getattr(before, name)
