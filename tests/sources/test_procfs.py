"""Which container a process belongs to, read from a real tree that looks like /proc."""

import contextlib
import csv
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.snapshot import CgroupRef
from exporter.sources import SourceError
from exporter.sources.procfs import ProcfsSource, parse_cgroup, parse_stat

SAMPLES = Path(__file__).parents[1] / "data" / "cgroup-samples.tsv"

POD = "dde1244b-5bb5-4297-b544-85f3bc0d80bf"
CONTAINER = "a" * 64
CGROUP = f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope\n"
FIRST_NAMESPACE = "pid:[4026531836]"


def _rows():
    with SAMPLES.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row['runtime']} {row['note'][:60]}")
def test_every_known_cgroup_text_is_parsed_as_its_row_says(row):
    refs = parse_cgroup(row["raw"].replace("\\n", "\n"))
    found = (refs[0].pod_uid or "", refs[0].container_id or "") if refs else ("", "")
    assert found == (row["pod_uid"], row["container_id"])


def test_the_samples_are_all_there():
    assert len(_rows()) == 50


def test_nested_pods_are_all_named_the_outermost_first():
    inner = "c55ba69a-e39f-44af-925d-c4794fd57878"
    text = f"0::/kubepods/burstable/pod{POD}/{CONTAINER}/kubepods/besteffort/pod{inner}/{'d' * 64}"
    assert parse_cgroup(text) == (CgroupRef(POD, CONTAINER), CgroupRef(inner, "d" * 64))


def test_a_pod_directory_outside_of_kubepods_is_no_pod():
    assert parse_cgroup(f"0::/system.slice/pod{POD}/{CONTAINER}") == ()


def test_a_deleted_cgroup_still_names_its_container():
    assert parse_cgroup(CGROUP.rstrip() + " (deleted)") == (CgroupRef(POD, CONTAINER),)


def test_a_container_id_of_63_or_65_digits_is_none():
    for digits in (63, 65):
        assert parse_cgroup(f"0::/kubepods/pod{POD}/{'a' * digits}") == (CgroupRef(POD, None),)


@given(st.text())
def test_no_cgroup_text_raises(text):
    parse_cgroup(text)


@given(st.text(alphabet="0:/.podkubes-_slice" + "abcdef\n", max_size=300))
def test_no_text_that_looks_like_a_cgroup_raises(text):
    for ref in parse_cgroup(text):
        assert ref.pod_uid or ref.container_id


def test_a_name_with_parentheses_and_spaces_does_not_move_the_start_time():
    assert parse_stat(_stat(7, comm="a) S (b 1 2", start_time=4711)) == ("a) S (b 1 2", 4711)


@pytest.mark.parametrize("text", ["", "1", "1 (x", "1 (x) S 1 2 3", "1 (x) " + "S " * 19 + "notanumber"])
def test_a_torn_stat_is_an_error(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_stat(text)


@given(st.text())
def test_no_stat_text_raises_anything_else(text):
    with contextlib.suppress(ValueError):
        parse_stat(text)


def _stat(pid, *, comm="python", start_time=100, state="S"):
    return f"{pid} ({comm}) {state} " + "0 " * 18 + f"{start_time} " + "0 " * 30 + "0\n"


class _Proc:
    """A folder that looks like /proc."""

    def __init__(self, root: Path, *, own_pid=50, own_namespace=FIRST_NAMESPACE, first_namespace=FIRST_NAMESPACE, first_comm="systemd"):
        self.root = root
        self.add(1, "0::/init.scope\n", comm=first_comm)
        self.add(own_pid, CGROUP)
        (root / "self").symlink_to(str(own_pid))
        for pid, namespace in ((1, first_namespace), (own_pid, own_namespace)):
            (root / str(pid) / "ns").mkdir()
            if namespace:
                (root / str(pid) / "ns" / "pid").symlink_to(namespace)

    def add(self, pid, cgroup, **stat):
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text(cgroup)
        (folder / "stat").write_text(_stat(pid, **stat))

    def remove(self, pid):
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()


def test_a_process_has_its_container_name_and_start_time(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP, comm="trainer", start_time=31)
    facts = ProcfsSource(tmp_path).read([900]).processes[900]
    assert (facts.cgroup, facts.comm, facts.start_time_ticks) == ((CgroupRef(POD, CONTAINER),), "trainer", 31)


def test_a_process_that_is_gone_is_absent(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP)
    source = ProcfsSource(tmp_path)
    assert 900 in source.read([900, 901]).processes
    proc.remove(900)
    assert source.read([900, 901]).processes == {}


def test_a_pid_given_to_another_process_is_read_anew(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP, start_time=1)
    source = ProcfsSource(tmp_path)
    source.read([900])
    proc.add(900, "0::/system.slice/host.service\n", start_time=2)
    assert source.read([900]).processes[900].cgroup == ()


def test_a_pid_that_changes_hands_while_it_is_read_is_no_ones(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(77, CGROUP, start_time=100)
    cgroup = tmp_path / "77" / "cgroup"
    cgroup.unlink()
    os.mkfifo(cgroup)  # the reader waits at it, after it has read `stat` for the first time

    def change_hands():
        with cgroup.open("w") as file:
            (tmp_path / "77" / "stat").write_text(_stat(77, start_time=200))
            file.write(CGROUP)

    other = threading.Thread(target=change_hands)
    other.start()
    assert ProcfsSource(tmp_path).read([77]).processes == {}
    other.join(5)
    assert not other.is_alive()


def test_what_is_known_of_a_process_is_not_read_again(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP)
    source = ProcfsSource(tmp_path)
    source.read([900])
    (tmp_path / "900" / "cgroup").unlink()
    assert source.read([900]).processes[900].cgroup == (CgroupRef(POD, CONTAINER),)


def test_a_process_without_a_container_is_asked_again(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, "0::/\n")
    source = ProcfsSource(tmp_path)
    source.read([900])
    proc.add(900, CGROUP)
    assert source.read([900]).processes[900].cgroup == (CgroupRef(POD, CONTAINER),)


def test_a_zombie_keeps_its_container(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP, state="Z")
    assert ProcfsSource(tmp_path).read([900]).processes[900].cgroup == (CgroupRef(POD, CONTAINER),)


def test_a_torn_stat_costs_that_process_only(tmp_path):
    proc = _Proc(tmp_path)
    proc.add(900, CGROUP)
    proc.add(901, CGROUP)
    (tmp_path / "900" / "stat").write_text("900 (x")
    assert set(ProcfsSource(tmp_path).read([900, 901]).processes) == {901}


@pytest.mark.parametrize(
    "tree",
    [
        {"own_pid": 1, "own_namespace": "pid:[4026532001]"},
        {"own_namespace": "pid:[4026532001]", "first_namespace": "pid:[4026531999]"},
        {"own_namespace": "pid:[4026532001]", "first_namespace": None, "first_comm": "pause"},
        {"own_namespace": None, "first_namespace": None, "first_comm": "pause"},
    ],
    ids=["we are PID 1", "PID 1 is elsewhere", "PID 1 is the pod's pause process", "no links can be read"],
)
def test_outside_the_hosts_pid_namespace_nothing_is_answered(tmp_path, tree):
    if tree.get("own_pid") == 1:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "ns").mkdir()
        (tmp_path / "1" / "ns" / "pid").symlink_to(tree["own_namespace"])
        (tmp_path / "self").symlink_to("1")
    else:
        _Proc(tmp_path, **tree)
    with pytest.raises(SourceError, match="hostPID: true"):
        ProcfsSource(tmp_path).read([1])


def test_a_first_process_that_cannot_be_read_tells_nothing_of_its_namespace(tmp_path):
    _Proc(tmp_path, own_namespace="pid:[4026532001]", first_namespace=None)
    (tmp_path / "1" / "stat").unlink()
    with pytest.raises(SourceError, match=r"(?s)/1 cannot be read .*hostPID: true"):
        ProcfsSource(tmp_path).read([])


def test_a_node_that_is_itself_a_container_has_an_init_as_pid_1(tmp_path):
    _Proc(tmp_path, own_namespace="pid:[4026532001]", first_namespace=None)
    assert ProcfsSource(tmp_path).read([50]).own_pid == 50


def test_a_folder_that_is_no_proc_says_so(tmp_path):
    with pytest.raises(SourceError, match="is a proc file system mounted"):
        ProcfsSource(tmp_path).read([1])


def test_this_machine_reads_itself():
    reading = ProcfsSource().read([1])
    assert reading.own_pid > 1
    assert 1 in reading.processes
