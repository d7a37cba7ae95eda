"""What a tenant may try, played through the whole program: whoever may write a pod makes it say nothing untrue of itself or of others."""

import json
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter import simulated
from exporter.config import parse_config
from exporter.simulation import SimulatedClock, SimulatedNode, load_scenario
from exporter.text_format import Format

GPU_0, GPU_1 = "GPU-5a1e7c0e-3b0d-4a59-9e57-0d6a5c7f1b22", "GPU-6b2f8d1f-4c1e-4b6a-8f68-1e7b6d802c33"
GROUP, OTHER_GROUP = "3f6f0b5e-8d0e-4d5b-9f0e-2a4d5c1b7a10", "8a1c2e3f-0b4d-4c5e-9f6a-7b8c9d0e1f2a"
GIB = 1 << 30
QUARTER = 20375 << 20  # of 81500 MiB
STATIC_HASH = "9aac5b5c8815def09a2ef9e37b89da55"


def uid(number):
    return f"{number:08x}-0000-4000-8000-000000000000"


def container_id(number):
    return f"{number:064x}"


def pod(name, number, *, namespace="team-a", labels=None, annotations=None, containers=("main",), env=(), **spec):
    """A running pod whose containers have ids that follow from the number."""
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": uid(number),
            "labels": labels or {},
            "annotations": annotations or {},
        },
        "spec": {
            "nodeName": "gpu-node-1",
            "containers": [{"name": container, "image": "x", "env": list(env)} for container in containers],
            **spec,
        },
        "status": {
            "phase": "Running",
            "qosClass": "Burstable",
            "containerStatuses": [
                {
                    "name": container,
                    "containerID": f"containerd://{container_id(number * 1000 + position)}",
                    "state": {"running": {"startedAt": "2026-03-02T08:00:00Z"}},
                }
                for position, container in enumerate(containers)
            ],
        },
    }


def kai_pod(name, number, *, fraction="0.25", group=GROUP, **more):
    labels = {"runai-gpu-group": group} | more.pop("labels", {})
    annotations = {"gpu-fraction": fraction} | more.pop("annotations", {})
    return pod(name, number, labels=labels, annotations=annotations, **more)


def reservation(number, *, group=GROUP, gpu=GPU_0, namespace="kai-resource-reservation"):
    return pod(
        f"gpu-reservation-{number}",
        number,
        namespace=namespace,
        labels={"app": "kai-resource-reservation", "runai-gpu-group": group},
        annotations={"run.ai/reserve_for_gpu_index": gpu},
    )


RESERVATIONS = [reservation(901), reservation(902, group=OTHER_GROUP, gpu=GPU_1)]


def process(pid, container, gibibytes, *, gpu=GPU_0, **more):
    where = {"container": container} if container else {}
    return {"pid": pid, "gpus": [{"gpu": gpu, "memory": f"{gibibytes}Gi", "sm": 5}], **where, **more}


def scenario(*pods, processes=(), timeline=(), allocated=(), **more):
    return {
        "node": {"name": "gpu-node-1", "labels": {"nvidia.com/gpu.memory": "81559"}},
        "gpus": [
            {"uuid": uuid, "model": "NVIDIA A100-SXM4-80GB", "memory_total": "81559Mi", "memory_reserved": "640Mi"}
            for uuid in (GPU_0, GPU_1)
        ],
        "pods": [*pods, *RESERVATIONS],
        "pod_resources": [
            {
                "namespace": namespace,
                "name": name,
                "containers": [{"name": "main", "devices": [{"resource_name": "nvidia.com/gpu", "device_ids": [gpu]}]}],
            }
            for namespace, name, gpu in allocated
        ],
        "processes": list(processes),
        "timeline": list(timeline),
        **more,
    }


class Exposed:
    """The series of one exposition."""

    def __init__(self, text):
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def all(self, name, **labels):
        found = [sample for sample in self.samples if sample.name == f"fgpu_{name}"]
        return [sample for sample in found if all(sample.labels.get(label) == value for label, value in labels.items())]

    def value(self, name, **labels):
        found = self.all(name, **labels)
        assert len(found) < 2, f"{name}{labels} stands there {len(found)} times"
        return found[0].value if found else None


@pytest.fixture
def play(tmp_path):
    """Answer a function that plays a scenario up to a moment and answers what is exposed then."""

    def played(document, *, at=30, flags=()):
        path = tmp_path / "scenario.yaml"
        path.write_text(json.dumps(document))
        config = parse_config(["--scenario", str(path), "--once", *flags], {})
        with ExitStack() as stack:
            clock = SimulatedClock()
            node = stack.enter_context(SimulatedNode(load_scenario(path), clock))
            sampler = simulated.wire(config, node, clock, stack)
            for number in range(int(at // 5) + 1):
                simulated.sample_at(node, sampler, number * 5.0)
            exposed = Exposed(sampler.exposition.render(Format.TEXT, compressed=False).decode())
            assert conserved(exposed, document, at) == []
            return exposed

    return played


def conserved(exposed, document, at):
    """The GPUs on which containers and what has no owner do not add up to the processes."""
    processes = {each["pid"]: each for each in document["processes"]}
    for step in document["timeline"]:
        if float(str(step["at"]).removesuffix("s")) <= at:
            processes = {pid: each for pid, each in processes.items() if pid not in step.get("remove", {}).get("processes", ())}
            processes |= {each["pid"]: {**processes.get(each["pid"], {}), **each} for each in step.get("processes", ())}
    wrong = []
    for uuid in (GPU_0, GPU_1):
        listed = sum(
            int(gpu["memory"].removesuffix("Gi")) * GIB for each in processes.values() for gpu in each["gpus"] if gpu["gpu"] == uuid
        )
        named = exposed.all("container_memory_used_bytes", gpu_uuid=uuid) + exposed.all("gpu_unattributed_memory_bytes", gpu_uuid=uuid)
        found = sum(sample.value for sample in named)
        if found != listed:
            wrong.append(f"{uuid}: {found} of {listed}")
    return wrong


# --- whose a process is ---


def test_a_cgroup_below_its_own_that_names_another_pod_makes_no_one_else_the_owner(play):
    def part(number):
        return f"kubepods-burstable-pod{uid(number).replace('-', '_')}.slice/cri-containerd-{container_id(number * 1000)}.scope"

    nested = f"0::/kubepods.slice/kubepods-burstable.slice/{part(1)}/kubepods.slice/{part(2)}"
    exposed = play(scenario(pod("thief", 1), pod("victim", 2), processes=[process(4001, None, 9, cgroup=nested)]))
    assert exposed.value("pod_memory_used_bytes", pod="thief") == 9 * GIB
    assert exposed.value("pod_limit_exceeded", pod="thief", resource="unallocated") == 1
    assert exposed.all("pod_memory_used_bytes", pod="victim") == []


@pytest.mark.parametrize("claimed", [STATIC_HASH, uid(2)], ids=["the hash of a static pod", "the uid of a pod"])
@pytest.mark.parametrize("mirror", [{}, {"kubernetes.io/config.mirror": STATIC_HASH}], ids=["plain", "as a mirror pod"])
def test_the_hash_of_a_static_pod_on_a_tenants_pod_takes_and_hides_nothing(play, claimed, mirror):
    cgroup = (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_HASH}.slice/cri-containerd-{container_id(1000)}.scope"
    )
    static = pod(
        "nvidia-driver",
        1,
        namespace="kube-system",
        annotations={"kubernetes.io/config.hash": STATIC_HASH, "kubernetes.io/config.mirror": STATIC_HASH},
    )
    # In the order of names it stands before the static pod.
    thief = pod("a-thief", 3, namespace="a-team", annotations={"kubernetes.io/config.hash": claimed, **mirror})
    exposed = play(
        scenario(static, pod("victim", 2), thief, processes=[process(4001, None, 3, cgroup=cgroup), process(4002, "team-a/victim/main", 5)])
    )
    assert exposed.value("pod_memory_used_bytes", pod="nvidia-driver") == 3 * GIB
    assert exposed.value("pod_memory_used_bytes", pod="victim") == 5 * GIB
    assert exposed.all("pod_memory_used_bytes", pod="a-thief") == []
    assert exposed.value("gpu_unattributed_memory_bytes", gpu_uuid=GPU_0, reason="unknown_container") == 0


def test_a_process_named_as_the_mps_server_is_its_pods(play):
    containers = ("mps-control-daemon-ctr", "main")
    disguised = pod("client", 1, containers=containers, labels={"app": "nvidia-device-plugin-mps-control-daemon"})
    exposed = play(scenario(disguised, processes=[process(4001, "team-a/client/mps-control-daemon-ctr", 7, command="nvidia-cuda-mps")]))
    assert exposed.value("container_memory_used_bytes", pod="client") == 7 * GIB
    assert exposed.value("pod_limit_exceeded", pod="client", resource="unallocated") == 1
    assert exposed.value("gpu_unattributed_memory_bytes", gpu_uuid=GPU_0, reason="mps_server") == 0
    assert exposed.all("pod_info", pod="client")[0].labels["role"] == "workload"


# --- what it was given ---


def test_the_labels_of_a_reservation_pod_in_a_namespace_of_its_own_make_no_plumbing_and_move_no_group(play):
    fake = reservation(1, namespace="team-a", gpu=GPU_1)
    honest = kai_pod("honest", 2)
    exposed = play(
        scenario(fake, honest, processes=[process(4001, "team-a/gpu-reservation-1/main", 7), process(4002, "team-a/honest/main", 5)])
    )
    assert exposed.value("pod_limit_exceeded", pod="gpu-reservation-1", resource="unallocated") == 1
    assert exposed.value("claim_memory_bytes", pod="honest", gpu_uuid=GPU_0) == QUARTER
    assert exposed.all("claim_errors") == []


EDITS = {
    "loosened": {"metadata": {"annotations": {"gpu-fraction": "0.9"}}},
    "emptied": {"metadata": {"annotations": {"gpu-fraction": ""}}},
    "made unreadable": {"metadata": {"annotations": {"gpu-fraction": "half"}}},
    "turned into memory": {"metadata": {"annotations": {"gpu-fraction": "0.25", "gpu-memory": "80000"}}},
    "given to another container": {"metadata": {"annotations": {"gpu-fraction-container-name": "side"}}},
    "moved to another GPU": {"metadata": {"labels": {"runai-gpu-group": OTHER_GROUP}}},
    "given a second GPU": {"metadata": {"labels": {f"runai-gpu-group/{OTHER_GROUP}": OTHER_GROUP}}},
    "moved to a group that is not there": {"metadata": {"labels": {"runai-gpu-group": "nowhere"}}},
    "covered by HAMi": {"metadata": {"annotations": {"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,80000,0:;"}}},
    "covered by Koordinator": {
        "metadata": {
            "annotations": {
                "scheduling.koordinator.sh/device-allocated": json.dumps(
                    {"gpu": [{"id": GPU_0, "resources": {"koordinator.sh/gpu-memory": "80Gi"}}]}
                )
            }
        }
    },
    "covered by NvFractions": {"metadata": {"annotations": {"nvidia.com/container.main.gpu-memory.limit": "80Gi"}}},
    "called allocating": {"metadata": {"annotations": {"hami.io/vgpu-devices-allocated": "x", "hami.io/bind-phase": "allocating"}}},
}


def edited(each, change):
    metadata = {**each["metadata"]}
    for key, values in change["metadata"].items():
        metadata[key] = {**metadata[key], **values}
    return {**each, "metadata": metadata}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_an_edit_after_binding_ends_no_breach(play, change):
    greedy = kai_pod("greedy", 1, containers=("main", "side"))
    exposed = play(
        scenario(
            greedy,
            processes=[process(4001, "team-a/greedy/main", 30)],
            timeline=[{"at": "20s", "pods": [edited(greedy, change)]}],
        ),
        at=60,
    )
    assert exposed.value("pod_limit_exceeded", pod="greedy", gpu_uuid=GPU_0, resource="memory") == 1
    assert exposed.value("pod_limit_exceeded_seconds_total", pod="greedy", gpu_uuid=GPU_0, resource="memory") == 50
    assert exposed.value("container_memory_limit_bytes", container="main", pod="greedy", gpu_uuid=GPU_0) <= QUARTER


SECOND_GPU = {
    "an annotation of Koordinator": {
        "pods": {
            "scheduling.koordinator.sh/device-allocated": json.dumps(
                {"gpu": [{"id": GPU_1, "resources": {"koordinator.sh/gpu-memory": "80Gi"}}]}
            )
        }
    },
    "an annotation of HAMi": {"pods": {"hami.io/vgpu-devices-allocated": f"{GPU_1},NVIDIA,80000,0:;"}},
    "a process there": {"processes": [process(4002, "team-a/greedy/main", 1, gpu=GPU_1)]},
}


@pytest.mark.parametrize("second", SECOND_GPU.values(), ids=SECOND_GPU)
@pytest.mark.parametrize("given", [True, False], ids=["with a GPU of the kubelet", "with a process only"])
def test_a_second_gpu_takes_no_limit_by_a_devices_number_from_the_first(play, second, given):
    def greedy(annotations):
        return pod("greedy", 1, annotations=annotations, env=[{"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "10g"}])

    step = {"at": "20s", "pods": [greedy(second.get("pods", {}))], "processes": second.get("processes", [])}
    # It is there again after 40 s without the process, and without the annotation: what was counted first is still what counts.
    back = {"at": "40s", "remove": {"processes": [4001]}, "pods": [greedy({})]}
    again = {"at": "50s", "processes": [process(4001, "team-a/greedy/main", 30)], "pods": [greedy(second.get("pods", {}))]}
    exposed = play(
        scenario(
            greedy({}),
            allocated=[("team-a", "greedy", GPU_0)] if given else [],
            processes=[process(4001, "team-a/greedy/main", 30)],
            timeline=[step, back, again],
        ),
        at=70,
    )
    assert exposed.value("container_memory_limit_bytes", pod="greedy", gpu_uuid=GPU_0) == 10 * GIB
    assert exposed.value("container_limit_exceeded", pod="greedy", gpu_uuid=GPU_0, resource="memory") == 1
    assert exposed.value("claim_memory_bytes", pod="greedy", gpu_uuid=GPU_1, system="container_env") is None


def test_a_second_gpu_of_the_kubelet_makes_the_limit_by_a_devices_number_unknown(play):
    # The first samples could not ask the kubelet, and saw a process on one of the container's two GPUs.
    several = pod(
        "several", 1, env=[{"name": f"CUDA_DEVICE_MEMORY_LIMIT_{number}", "value": value} for number, value in enumerate(("10g", "60g"))]
    )
    document = scenario(several, processes=[process(4001, "team-a/several/main", 30)], allocated=[("team-a", "several", GPU_0)])
    document["pod_resources"][0]["containers"][0]["devices"][0]["device_ids"] = [GPU_0, GPU_1]
    document["sources"] = {"kubelet": "down"}
    document["timeline"] = [{"at": "20s", "sources": {"kubelet": "up"}}]
    assert play(document, at=15).value("claim_memory_bytes", pod="several", gpu_uuid=GPU_0, system="container_env") == 10 * GIB
    exposed = play(document, at=60)
    assert exposed.all("claim_memory_bytes", pod="several", system="container_env") == []
    assert exposed.value("pod_limit_exceeded", pod="several", gpu_uuid=GPU_0, resource="memory") == 0


def test_annotations_taken_away_after_binding_end_no_breach(play):
    greedy = kai_pod("greedy", 1)
    bare = {**greedy, "metadata": {**greedy["metadata"], "annotations": {}, "labels": {}}}
    steps = [{"at": "20s", "remove": {"pods": ["team-a/greedy"]}, "pods": [bare]}]
    exposed = play(scenario(greedy, processes=[process(4001, "team-a/greedy/main", 30)], timeline=steps), at=60)
    assert exposed.value("pod_limit_exceeded", pod="greedy", gpu_uuid=GPU_0, resource="memory") == 1
    assert exposed.value("claim_errors", pod="greedy", system="kai") == 1


def test_an_edit_that_tightens_applies_and_stays(play):
    modest = kai_pod("modest", 1, fraction="0.5")
    steps = [
        {"at": "10s", "pods": [kai_pod("modest", 1, fraction="0.25")]},
        {"at": "20s", "pods": [kai_pod("modest", 1, fraction="0.5")]},
    ]
    exposed = play(scenario(modest, processes=[process(4001, "team-a/modest/main", 30)], timeline=steps), at=60)
    assert exposed.value("pod_memory_limit_bytes", pod="modest") == QUARTER
    assert exposed.value("pod_limit_exceeded", pod="modest", resource="memory") == 1


def test_a_new_pod_of_the_same_name_inherits_neither_limits_nor_breaches(play):
    first, second = kai_pod("worker-0", 1), kai_pod("worker-0", 2, fraction="0.5")
    step = {
        "at": "30s",
        "remove": {"pods": ["team-a/worker-0"], "processes": [4001]},
        "pods": [second],
        "processes": [process(4002, "team-a/worker-0/main", 30)],
    }
    exposed = play(scenario(first, processes=[process(4001, "team-a/worker-0/main", 30)], timeline=[step]), at=60)
    assert exposed.value("pod_memory_limit_bytes", pod="worker-0") == 2 * QUARTER
    assert exposed.value("pod_limit_exceeded", pod="worker-0", resource="memory") == 0
    assert exposed.value("pod_limit_breaches_total", pod="worker-0", resource="memory") == 0


@pytest.mark.parametrize("phase", ["allocating", "failed", "success", "", "\u202e"])
def test_a_bind_phase_hides_no_use_of_what_the_kubelet_gave_to_no_one(play, phase):
    annotations = {"hami.io/vgpu-devices-allocated": f"{GPU_0},NVIDIA,1024,10:;", "hami.io/bind-phase": phase}
    exposed = play(scenario(pod("hami", 1, annotations=annotations), processes=[process(4001, "team-a/hami/main", 30)]))
    assert exposed.value("pod_memory_used_bytes", pod="hami") == 30 * GIB
    memory, unallocated = (exposed.value("pod_limit_exceeded", pod="hami", resource=each) for each in ("memory", "unallocated"))
    # "allocating" says that the GPU is not known yet: then, and only then, is nothing said.
    assert (memory, unallocated) == {"allocating": (None, None), "failed": (None, 1)}.get(phase, (1, 0))


@pytest.mark.parametrize(
    "env",
    [
        [{"name": "GPU_MEMORY_LIMIT", "value": "99999999999999"}],
        [{"name": "CUDA_DEVICE_MEMORY_LIMIT", "value": "80g"}],
        [{"name": "CUDA_DEVICE_MEMORY_LIMIT", "valueFrom": {"configMapKeyRef": {"name": "mine", "key": "CUDA_DEVICE_MEMORY_LIMIT"}}}],
        [{"name": "CUDA_DEVICE_MEMORY_LIMIT", "value": "0"}, {"name": "CUDA_DISABLE_CONTROL", "value": "true"}],
        [{"name": "GPU_MEMORY_LIMIT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['mine']"}}}],
        [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "NODE_NAME", "value": "other"}],
    ],
    ids=["above", "above in another unit", "a config map of its own", "off", "an annotation that is not there", "all devices"],
)
def test_no_variable_raises_a_limit(play, env):
    exposed = play(scenario(kai_pod("greedy", 1, env=env), processes=[process(4001, "team-a/greedy/main", 30)]))
    assert exposed.value("pod_memory_limit_bytes", pod="greedy") <= QUARTER
    assert exposed.value("pod_limit_exceeded", pod="greedy", resource="memory") == 1


def test_a_claim_that_looks_as_if_it_were_for_a_monitor_gives_and_hides_nothing(play):
    mine = pod(
        "monitor",
        1,
        annotations={"resource.kubernetes.io/admin-access": "true"},
        resourceClaims=[{"name": "gpu", "resourceClaimName": "mine"}],
    )
    claim = {
        "metadata": {"namespace": "team-a", "name": "mine", "uid": uid(77)},
        # Asked for, and granted without: what counts is what was allocated.
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "adminAccess": True}}]}},
        "status": {},
    }
    exposed = play(scenario(mine, processes=[process(4001, "team-a/monitor/main", 9)], resource_claims=[claim]))
    assert exposed.value("pod_limit_exceeded", pod="monitor", resource="unallocated") == 1
    assert exposed.all("pod_info", pod="monitor")[0].labels["role"] == "workload"


# --- text and numbers ---

HOSTILE = {
    "newline": 'a\nfgpu_gpu_up{gpu_uuid="x"} 0\n',
    "quotes": '","pod="other"} 1 #',
    "backslash": "\\\\\\n\\",
    "NUL": "a\0b",
    "right to left": "\u202e\u2066team\u2069",
    "10 kB": "x" * 10_000,
    "no characters": "\ue000\ufdd0\uffff",
    "a number": "99999999999999999999999999999999",
    "JSON": "[" * 5000,
}
KEYS = (
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-container-name",
    "nvidia.com/container.main.gpu-memory.limit",
    "hami.io/vgpu-devices-allocated",
    "hami.io/vgpu-mig-allocations",
    "4pd.io/vgpu-ids-new",
    "volcano.sh/vgpu-ids-new",
    "scheduling.koordinator.sh/device-allocated",
    "ALIYUN_COM_GPU_MEM_IDX",
)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_in_what_a_pods_author_writes_costs_that_pod_only(play, text):
    hostile = [
        pod(
            f"hostile-{number}",
            100 + number,
            annotations={key: text},
            labels={"runai-gpu-group": text, "kai.scheduler/queue": text},
            env=[{"name": "GPU_MEMORY_LIMIT", "value": text}, {"name": text, "value": text}],
            schedulerName=text,
        )
        for number, key in enumerate(KEYS)
    ]
    honest = kai_pod("honest", 1)
    processes = [process(5000 + number, f"team-a/hostile-{number}/main", 1) for number in range(len(KEYS))]
    exposed = play(scenario(*hostile, honest, processes=[process(4001, "team-a/honest/main", 30), *processes]))
    assert exposed.value("pod_limit_exceeded", pod="honest", resource="memory") == 1
    assert exposed.value("pod_limit_exceeded_seconds_total", pod="honest", resource="memory") == 20
    assert len(exposed.all("pod_memory_used_bytes")) == 1 + len(KEYS)
    assert [sample.value for sample in exposed.all("gpu_up")] == [1, 1]
    assert all(sample.value == 1 for sample in exposed.all("source_up"))
    assert max(len(value) for sample in exposed.samples for value in sample.labels.values()) <= 256
    assert len(exposed.text) < 200_000


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_cost_only_their_own_series(play, text):
    # No API server takes such names; an exporter that breaks over them would hang on its good will.
    named = pod(text, 2, namespace=text, containers=(text,))
    exposed = play(scenario(named, kai_pod("honest", 1), processes=[process(4001, "team-a/honest/main", 30), process(4002, None, 2)]))
    assert exposed.value("pod_limit_exceeded", pod="honest", resource="memory") == 1
    assert all(sample.value == 1 for sample in exposed.all("source_up"))


def many(uuids, amount):
    koordinator = {"gpu": [{"id": uuid, "resources": {"koordinator.sh/gpu-memory": amount}} for uuid in uuids]}
    return {
        "scheduling.koordinator.sh/device-allocated": json.dumps(koordinator),
        "hami.io/vgpu-devices-allocated": "".join(f"{uuid},NVIDIA,1024,10:" for uuid in uuids) + ";",
        "volcano.sh/vgpu-ids-new": "".join(f"{uuid},NVIDIA,1024,10:" for uuid in uuids) + ";",
    }


@pytest.mark.parametrize("count", [16, 200, 2_000], ids=["as many as a node may have", "more", "far more"])
def test_very_many_gpus_in_annotations_are_bounded_and_push_no_one_out(play, count):
    liars = [
        pod(f"liar-{number}", 100 + number, annotations=many([f"GPU-{number}-{each}" for each in range(count)], "1Gi"))
        for number in range(20)
    ]
    exposed = play(
        scenario(*liars, kai_pod("honest", 1), processes=[process(4001, "team-a/honest/main", 30)]), at=15, flags=("--max-series", "2000")
    )
    own = [sample for sample in exposed.samples if sample.name.startswith("fgpu_")]
    assert len(own) < 2000 + 60  # those of the exporter itself
    assert exposed.value("pod_limit_exceeded", pod="honest", resource="memory") == 1
    if count == 16:
        assert exposed.value("pods_dropped") > 10
        assert exposed.value("series_dropped", reason="over_limit") > 2_000
    else:
        assert exposed.value("pods_dropped") == 0
        assert len(exposed.all("claim_errors")) == 60
