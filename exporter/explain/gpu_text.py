"""How the memory of a GPU adds up, in sentences."""

from collections.abc import Iterator

from exporter.explain import reasons, words
from exporter.explain.gpu import ContainerShare, GpuEvidence
from exporter.explain.process import ProcessEvidence, known_bytes
from exporter.explain.process_text import describe_process, held_memory, why_unattributed
from exporter.explain.section import Section
from exporter.health import Health
from exporter.usage import Owner


def summarize_gpu(evidence: GpuEvidence, health: Health) -> str:
    """Answer the sentence that says who holds the memory, and names each reason for which some has no container."""
    uuid = evidence.report.gpu.gpu_uuid
    if evidence.unknown_use is not None:
        return f"Who uses {uuid} is not known: {reasons.unknown_use(evidence.unknown_use, health)}."
    processes = evidence.processes
    if not processes:
        return f"No process uses {uuid}{_in_mig_devices(evidence)}."
    parts = []
    if evidence.containers:
        told = [share for share in evidence.containers if share.memory_used_bytes is not None]
        hidden = {(share.namespace, share.pod) for share in evidence.containers if share.memory_used_bytes is None}
        if told:
            pods = len({(share.namespace, share.pod) for share in told})
            parts.append(f"{words.memory(sum(share.memory_used_bytes or 0 for share in told))} by {words.count(pods, 'pod')}")
        if hidden:
            parts.append(f"an amount that the driver hides by {words.count(len(hidden), 'pod')}")
    parts += [f"{held_memory(theirs)} by {reasons.UNATTRIBUTED[reason]} ({reason})" for reason, theirs in evidence.unattributed.items()]
    count = words.count(len(processes), "process", "processes")
    hold = "holds" if len(processes) == 1 else "hold"
    return f"On {uuid} {count} {hold} {held_memory(processes)}: {words.join(parts)}."


def tell_gpu(evidence: GpuEvidence, health: Health) -> tuple[Section, ...]:
    """Answer how the memory adds up, process by process, and what is not known."""
    sections = [
        Section("Containers", tuple(sentence for share in evidence.containers for sentence in _tell_share(share))),
        Section("In no container", tuple(_tell_unattributed(evidence))),
        Section("Given", tuple(_tell_given(evidence))),
        Section("As the driver counts", tuple(_tell_driver(evidence))),
        Section("Not known", tuple(_tell_unknown(evidence, health))),
    ]
    return tuple(section for section in sections if section.sentences)


def _tell_share(share: ContainerShare) -> Iterator[str]:
    name = f"Container {share.container} of {share.namespace}/{share.pod}"
    if share.memory_used_bytes is None:
        yield f"{name}: what it uses is not known, because the driver hides the memory of a process of it."
    else:
        yield f"{name} uses {words.memory(share.memory_used_bytes)}, in {words.count(len(share.processes), 'process', 'processes')}."
    for process in share.processes:
        yield describe_process(process, "which is that container")


def _tell_unattributed(evidence: GpuEvidence) -> Iterator[str]:
    for reason, processes in evidence.unattributed.items():
        yield f"{_capital(held_memory(processes))} by {reasons.UNATTRIBUTED[reason]} ({reason})."
        for process in processes:
            yield describe_process(process, _whose(process, evidence))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _whose(process: ProcessEvidence, evidence: GpuEvidence) -> str:
    if isinstance(process.owner, Owner):
        pod = evidence.pods[process.owner.pod_uid]
        return f"which is container {process.owner.container} of {pod.namespace}/{pod.name}"
    return why_unattributed(process, evidence.pods)


def _tell_given(evidence: GpuEvidence) -> Iterator[str]:
    report = evidence.report
    for row in evidence.limits:
        if row.limits.memory_bytes is not None:
            used = "what it uses is not known" if row.memory_used_bytes is None else f"it uses {words.memory(row.memory_used_bytes)}"
            yield f"{row.namespace}/{row.pod} may use {words.memory(row.limits.memory_bytes)}; {used}."
    if report.memory_allocated_bytes:
        total = report.gpu.memory_total_bytes
        of = f" of the GPU's {words.memory(total)}" if total is not None else ""
        more = ", which is more than there is" if total is not None and report.memory_allocated_bytes > total else ""
        yield f"Together the limits are {words.memory(report.memory_allocated_bytes)}{of}{more}."


def _tell_driver(evidence: GpuEvidence) -> Iterator[str]:
    reading = evidence.report.reading
    if reading is None or reading.memory_used_bytes is None:
        return
    reserved = f", beside {words.memory(reading.memory_reserved_bytes)} that it reserves" if reading.memory_reserved_bytes else ""
    yield f"The driver says that {words.memory(reading.memory_used_bytes)} are in use{reserved}."
    if evidence.unknown_use is None and not evidence.mig_uuids:
        processes = known_bytes(evidence.processes)
        if reading.memory_used_bytes > processes:
            rest = words.memory(reading.memory_used_bytes - processes)
            yield f"That is {rest} more than its process lists tell: its own, what it hides, or what ended between two of its answers."
        elif reading.memory_used_bytes < processes:
            less = words.memory(processes - reading.memory_used_bytes)
            yield f"That is {less} less than its process lists tell, where what several processes share counts for each."


def _tell_unknown(evidence: GpuEvidence, health: Health) -> Iterator[str]:
    if evidence.unknown_use is not None:
        yield f"Who uses it: {reasons.unknown_use(evidence.unknown_use, health)}."
    hidden = [process.pid for process in evidence.processes if process.memory_used_bytes is None]
    if hidden:
        yield f"The memory of {words.join([f'PID {pid}' for pid in hidden])}, which the driver hides."
    if evidence.mig_uuids and evidence.processes:
        yield f"Nothing of the use of its MIG devices stands here{_in_mig_devices(evidence)}."
    if reason := reasons.down("kubernetes", health):
        yield f"Pods that are newer than the last word of the Kubernetes API: {reason}."


def _in_mig_devices(evidence: GpuEvidence) -> str:
    if not evidence.mig_uuids:
        return ""
    return f", beside those of its {words.count(len(evidence.mig_uuids), 'MIG device')}: explain {words.join(list(evidence.mig_uuids))}"
