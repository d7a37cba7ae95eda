import threading

import pynvml
import pytest

GIB = 1 << 30

TWO_GPUS = """
    node: {name: n}
    gpus:
      - {uuid: GPU-a, memory_total: 80Gi, memory_reserved: 640Mi}
      - {uuid: GPU-b, model: NVIDIA H100, minor: 5}
    processes:
      - {pid: 71, gpus: [{gpu: GPU-a, memory: 3Gi, sm: 40, memory_bandwidth: 10, encoder: 2, decoder: 1}]}
      - {pid: 72, gpus: [{gpu: GPU-a, memory: hidden, sm: 75, kind: [compute, mps]}, {gpu: GPU-b, memory: 1Gi, kind: graphics}]}
"""


@pytest.fixture
def nvml_of(start):
    """Answer a function from a scenario to its node and the initialised NVML of it."""

    def of(text):
        node = start(text)
        node.nvml.nvmlInit()
        return node, node.nvml

    return of


def error_of(call, *arguments):
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return caught.value.value


def stamps(samples):
    return [sample.timeStamp for sample in samples]


def test_devices_are_counted_and_described(nvml_of):
    _, nvml = nvml_of(TWO_GPUS)
    assert nvml.nvmlDeviceGetCount() == 2
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetUUID(handle) == "GPU-b"
    assert nvml.nvmlDeviceGetName(handle) == "NVIDIA H100"
    assert nvml.nvmlDeviceGetMinorNumber(handle) == 5
    assert nvml.nvmlDeviceGetIndex(handle) == 1
    assert nvml.nvmlDeviceGetPciInfo(handle).busId == "00000000:0F:00.0"
    assert nvml.nvmlDeviceGetHandleByUUID("GPU-b") == handle
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    assert nvml.nvmlSystemGetDriverVersion().count(".") == 2
    assert error_of(nvml.nvmlDeviceGetHandleByIndex, 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_reserved_memory_is_apart_in_the_second_version_and_used_in_the_first(nvml_of):
    _, nvml = nvml_of(TWO_GPUS)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    second = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    assert (second.total, second.reserved, second.used) == (80 * GIB, 640 << 20, 3 * GIB)
    first = nvml.nvmlDeviceGetMemoryInfo(handle)
    assert (first.total, first.used) == (80 * GIB, 3 * GIB + (640 << 20))
    assert first.free == second.free == 77 * GIB - (640 << 20)


def test_the_devices_numbers_follow_from_its_processes_unless_they_are_said(nvml_of):
    node, nvml = nvml_of(
        TWO_GPUS + "    timeline: [{at: 5s, gpus: [{uuid: GPU-a, memory_used: 9Gi, utilization: 7, memory_total: unsupported}]}]"
    )
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    assert (rates.gpu, rates.memory) == (100, 10)
    node.advance_to(5)
    assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 7
    assert error_of(nvml.nvmlDeviceGetMemoryInfo, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_each_list_names_the_processes_of_its_kind(nvml_of):
    _, nvml = nvml_of(TWO_GPUS)
    first, second = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    compute = nvml.nvmlDeviceGetComputeRunningProcesses(first)
    assert [(entry.pid, entry.usedGpuMemory, entry.gpuInstanceId) for entry in compute] == [
        (71, 3 * GIB, 0xFFFFFFFF),
        (72, None, 0xFFFFFFFF),
    ]
    assert [entry.pid for entry in nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(first)] == [72]
    assert nvml.nvmlDeviceGetGraphicsRunningProcesses(first) == []
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(second) == []
    assert [entry.pid for entry in nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(second)] == [72]


def test_no_sample_is_older_than_the_scenario(nvml_of):
    node, nvml = nvml_of(TWO_GPUS)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert error_of(nvml.nvmlDeviceGetProcessUtilization, handle, 0) == pynvml.NVML_ERROR_NOT_FOUND
    node.advance_to(0.16)
    assert error_of(nvml.nvmlDeviceGetProcessUtilization, handle, 0) == pynvml.NVML_ERROR_NOT_FOUND
    node.advance_to(0.17)
    assert len(nvml.nvmlDeviceGetProcessUtilization(handle, 0)) == 2


def test_a_process_is_sampled_six_times_a_second_and_told_once(nvml_of):
    node, nvml = nvml_of(TWO_GPUS)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    node.advance_to(2)
    samples = [sample for sample in nvml.nvmlDeviceGetProcessUtilization(handle, 0) if sample.pid == 71]
    assert len(samples) == 12
    assert {(sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil) for sample in samples} == {(40, 10, 2, 1)}
    last = max(stamps(samples))
    assert last == round(1767225602 * 1e6)
    assert error_of(nvml.nvmlDeviceGetProcessUtilization, handle, last) == pynvml.NVML_ERROR_NOT_FOUND
    node.advance_to(3)
    newer = nvml.nvmlDeviceGetProcessesUtilizationInfo(handle, last)
    assert len(newer) == 12
    assert {(sample.pid, sample.smUtil, sample.jpgUtil) for sample in newer} == {(71, 40, 0), (72, 75, 0)}


def test_the_driver_keeps_ten_seconds_of_samples(nvml_of):
    node, nvml = nvml_of(TWO_GPUS)
    node.advance_to(100)
    kept = stamps(nvml.nvmlDeviceGetProcessUtilization(nvml.nvmlDeviceGetHandleByIndex(0), 0))
    assert len(set(kept)) == 60
    assert max(kept) - min(kept) < 10_000_000


def test_an_idle_process_has_no_samples_and_an_ended_one_keeps_its_earlier(nvml_of):
    node, nvml = nvml_of(
        TWO_GPUS + "    timeline: [{at: 2s, remove: {processes: [71]}, processes: [{pid: 72, gpus: [{gpu: GPU-a, sm: 0}]}]}]"
    )
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    node.advance_to(5)
    samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
    assert sorted((sample.pid, sample.smUtil) for sample in samples) == [(71, 40)] * 12 + [(72, 75)] * 12
    assert max(stamps(samples)) == round(1767225602 * 1e6)
    assert error_of(nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetHandleByIndex(1), 0) == pynvml.NVML_ERROR_NOT_FOUND


MIG = """
    node: {name: n}
    gpus:
      - uuid: GPU-a
        memory_total: 80Gi
        mig:
          - {uuid: MIG-x, profile: 3g.40gb, gpu_instance_id: 2, compute_instance_id: 1, memory_total: 40Gi}
          - {uuid: MIG-y}
    processes:
      - {pid: 71, gpus: [{gpu: MIG-x, memory: 3Gi, sm: 40}]}
      - {pid: 72, gpus: [{gpu: MIG-y, memory: 1Gi}]}
      - {pid: 73, gpus: [{gpu: GPU-a, memory: 2Gi, kind: graphics}]}
"""


def test_a_mig_device_is_found_through_its_parent(nvml_of):
    _, nvml = nvml_of(MIG)
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetCount() == 1
    assert nvml.nvmlDeviceGetMigMode(parent) == [1, 1]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 7
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
    assert nvml.nvmlDeviceGetUUID(device) == "MIG-x"
    assert nvml.nvmlDeviceGetName(device) == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert (nvml.nvmlDeviceGetGpuInstanceId(device), nvml.nvmlDeviceGetComputeInstanceId(device)) == (2, 1)
    assert nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) == parent
    assert nvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    assert (memory.total, memory.used) == (40 * GIB, 3 * GIB)
    assert error_of(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 2) == pynvml.NVML_ERROR_NOT_FOUND
    assert error_of(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 7) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert error_of(nvml.nvmlDeviceGetGpuInstanceId, parent) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_the_parents_lists_repeat_the_processes_of_its_mig_devices(nvml_of):
    _, nvml = nvml_of(MIG)
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    entries = nvml.nvmlDeviceGetComputeRunningProcesses_v3(parent)
    assert [(entry.pid, entry.gpuInstanceId, entry.computeInstanceId) for entry in entries] == [(71, 2, 1), (72, 2, 0)]
    assert [entry.gpuInstanceId for entry in nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(parent)] == [0xFFFFFFFF]
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
    assert [entry.pid for entry in nvml.nvmlDeviceGetComputeRunningProcesses_v3(device)] == [71]
    assert nvml.nvmlDeviceGetMemoryInfo(parent).used == 6 * GIB


def test_shares_of_time_are_not_measured_with_mig(nvml_of):
    node, nvml = nvml_of(MIG)
    node.advance_to(5)
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    for handle in (parent, nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)):
        assert error_of(nvml.nvmlDeviceGetProcessUtilization, handle, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert error_of(nvml.nvmlDeviceGetUtilizationRates, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("lost", pynvml.NVML_ERROR_GPU_IS_LOST),
        ("unknown", pynvml.NVML_ERROR_UNKNOWN),
        ("no_permission", pynvml.NVML_ERROR_NO_PERMISSION),
    ],
)
def test_a_fault_costs_one_gpu_until_it_heals(nvml_of, fault, code):
    node, nvml = nvml_of(
        TWO_GPUS + f"    timeline: [{{at: 5s, gpus: [{{uuid: GPU-b, fault: {fault}}}]}}, {{at: 9s, gpus: [{{uuid: GPU-b, fault: none}}]}}]"
    )
    healthy, broken = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    node.advance_to(5)
    assert nvml.nvmlDeviceGetCount() == 2
    assert nvml.nvmlDeviceGetUUID(healthy) == "GPU-a"
    for call in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetComputeRunningProcesses_v3):
        assert error_of(call, broken) == code
    assert error_of(nvml.nvmlDeviceGetHandleByIndex, 1) == code
    node.advance_to(9)
    assert nvml.nvmlDeviceGetUUID(broken) == "GPU-b"


HANGS = TWO_GPUS + "    timeline: [{at: 5s, gpus: [{uuid: GPU-b, fault: hang}]}, {at: 9s, gpus: [{uuid: GPU-b, fault: none}]}]"


def test_a_call_hangs_until_the_gpu_is_well_again(nvml_of):
    node, nvml = nvml_of(HANGS)
    node.advance_to(5)
    answers = []
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    thread = threading.Thread(target=lambda: answers.append(nvml.nvmlDeviceGetName(handle)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)) == "NVIDIA A100-SXM4-80GB"
    node.advance_to(9)
    assert answers == ["NVIDIA H100"]
    assert not thread.is_alive()


def test_a_call_that_hangs_ends_with_the_simulation(nvml_of):
    node, nvml = nvml_of(HANGS)
    node.advance_to(5)
    codes = []
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    thread = threading.Thread(target=lambda: codes.append(error_of(nvml.nvmlDeviceGetName, handle)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    nvml.close()
    thread.join(5)
    assert codes == [pynvml.NVML_ERROR_UNINITIALIZED]


@pytest.mark.parametrize(
    ("state", "at_init", "at_a_call"),
    [
        ("down", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_UNINITIALIZED),
        ("not_loaded", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        ("version_mismatch", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    ],
)
def test_an_outage_of_the_library_costs_everything_until_it_is_initialised_anew(nvml_of, state, at_init, at_a_call):
    node, nvml = nvml_of(TWO_GPUS + f"    timeline: [{{at: 5s, sources: {{nvml: {state}}}}}, {{at: 9s, sources: {{nvml: up}}}}]")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    node.advance_to(5)
    assert error_of(nvml.nvmlInit) == at_init
    for call in (nvml.nvmlDeviceGetCount, nvml.nvmlSystemGetDriverVersion, nvml.nvmlShutdown):
        assert error_of(call) == at_a_call
    assert error_of(nvml.nvmlDeviceGetName, handle) == at_a_call
    node.advance_to(9)
    assert error_of(nvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 2


def test_nothing_works_before_nvml_is_initialised_or_after_it_is_shut_down(start):
    nvml = start(TWO_GPUS).nvml
    assert error_of(nvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    nvml.nvmlInitWithFlags(0)
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert nvml.nvmlDeviceGetCount() == 2
    nvml.nvmlShutdown()
    assert error_of(nvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_gpu_that_is_removed_leaves_no_hole_in_the_indexes(nvml_of):
    node, nvml = nvml_of("""
        node: {name: n}
        gpus: [{uuid: GPU-a, index: 0}, {uuid: GPU-b, index: 1}, {uuid: GPU-c, index: 2}]
        timeline: [{at: 5s, remove: {gpus: [GPU-b]}}]
    """)
    removed = nvml.nvmlDeviceGetHandleByIndex(1)
    node.advance_to(5)
    assert [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())] == [
        "GPU-a",
        "GPU-c",
    ]
    assert error_of(nvml.nvmlDeviceGetUUID, removed) == pynvml.NVML_ERROR_GPU_IS_LOST


def test_constants_and_exceptions_are_pynvmls_and_other_functions_are_not_there(nvml_of):
    _, nvml = nvml_of(TWO_GPUS)
    assert nvml.NVMLError is pynvml.NVMLError
    assert nvml.NVML_ERROR_GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert error_of(nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert error_of(nvml.nvmlDeviceGetTemperature, handle, 0) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    with pytest.raises(AttributeError):
        _ = nvml.nvmlDeviceGetWeather
