import pytest

from exporter.simulation.node import Process
from exporter.simulation.proc import render_stat

PROCESSES = """
    node: {name: n}
    pods:
      - metadata: {name: p, uid: ee913e27-37a4-4d14-901f-c8f79dda8094}
        status: {containerStatuses: [{name: c, containerID: containerd://abc}]}
    processes:
      - {pid: 1000, command: nvidia-cuda-mps-server, container: default/p/c, start_time: 4711}
      - {pid: 1001, command: "a (b) c", state: Z, cgroup: "0::/"}
      - {pid: 1002, state: gone}
      - {pid: 0}
      - {pid: 4294967295}
"""


def fields(path):
    before, _, after = path.read_text().rpartition(")")
    return [before.partition(" ")[0], before.partition("(")[2], *after.split()]


def test_a_process_has_cgroup_stat_and_comm(start):
    root = start(PROCESSES).proc_root
    assert (root / "1000" / "cgroup").read_text() == (
        "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podee913e27_37a4_4d14_901f_c8f79dda8094.slice/"
        "cri-containerd-abc.scope\n"
    )
    assert (root / "1000" / "comm").read_text() == "nvidia-cuda-mps\n"
    stat = fields(root / "1000" / "stat")
    assert len(stat) == 52
    assert (stat[0], stat[1], stat[2], stat[21]) == ("1000", "nvidia-cuda-mps", "S", "4711")


def test_a_zombie_keeps_its_line_and_a_name_may_hold_anything(start):
    root = start(PROCESSES).proc_root
    assert (root / "1001" / "cgroup").read_text() == "0::/\n"
    assert fields(root / "1001" / "stat")[:3] == ["1001", "a (b) c", "Z"]


def test_what_is_gone_or_cannot_be_a_pid_is_not_there(start):
    root = start(PROCESSES).proc_root
    assert sorted(path.name for path in root.iterdir() if path.name.isdecimal()) == ["1", "1000", "1001", "1003", "2"]


def test_on_the_host_pid_1_is_an_init_and_the_exporter_is_in_its_namespace(start):
    root = start(PROCESSES).proc_root
    assert (root / "1" / "comm").read_text() == "systemd\n"
    assert (root / "2" / "comm").read_text() == "kthreadd\n"
    assert str((root / "self").readlink()) == "1003"  # no process of the scenario
    assert (root / "self" / "comm").read_text() == "fgpu-exporter\n"
    assert str((root / "self" / "ns" / "pid").readlink()) == "pid:[4026531836]"
    assert (root / "1" / "ns" / "pid").readlink() == (root / "self" / "ns" / "pid").readlink()


def test_in_a_container_the_exporter_is_alone(start):
    node = start(PROCESSES.replace("name: n}", "name: n, host_pid: false}", 1) + "    timeline: [{at: 5s, node: {host_pid: true}}]")
    root = node.proc_root
    assert sorted(path.name for path in root.iterdir()) == ["1", "self"]
    assert str((root / "self").readlink()) == "1"
    assert (root / "1" / "comm").read_text() == "fgpu-exporter\n"
    assert str((root / "self" / "ns" / "pid").readlink()) not in ("pid:[4026531836]", "")
    node.advance_to(5)
    assert (root / "1" / "comm").read_text() == "systemd\n"
    assert (root / "1000").exists()


def test_a_reused_pid_changes_as_a_whole(start):
    node = start("""
        node: {name: n}
        processes: [{pid: 1000, cgroup: "0::/one", start_time: 5}, {pid: 1001}]
        timeline: [{at: 5s, processes: [{pid: 1000, cgroup: "0::/two", start_time: 9}], remove: {processes: [1001]}}]
    """)
    path = node.proc_root / "1000"
    held = (path / "cgroup").open()
    node.advance_to(5)
    with held:
        assert held.read() == "0::/one\n"
    assert ((path / "cgroup").read_text(), fields(path / "stat")[21]) == ("0::/two\n", "9")
    assert not (node.proc_root / "1001").exists()


def test_an_empty_cgroup_is_an_empty_file(start):
    node = start("""
        node: {name: n}
        processes: [{pid: 1000, cgroup: ""}]
    """)
    assert (node.proc_root / "1000" / "cgroup").read_bytes() == b""


def test_host_files_are_there_and_follow_the_timeline(start):
    node = start("""
        node: {name: n}
        files: {/etc/a: {text: "one"}, /var/lib/b: {base64: AAH/}, /var/lib/c: {gzip: H4sIAAAAAAACA0vMKU5UBADqfbh1BQAAAA==}}
        timeline: [{at: 5s, files: {/etc/a: {text: "two"}}}]
    """)
    assert (node.host_root / "etc/a").read_text() == "one"
    assert (node.host_root / "var/lib/b").read_bytes() == b"\x00\x01\xff"
    assert (node.host_root / "var/lib/c").read_bytes() == b"alsa!"
    node.advance_to(5)
    assert (node.host_root / "etc/a").read_text() == "two"
    assert (node.host_root / "var/lib/b").read_bytes() == b"\x00\x01\xff"


@pytest.mark.parametrize("command", ["python", "x" * 15, "a) b (c", "日本語日本語日本語"])
def test_a_stat_line_has_52_fields_whatever_the_name(command):
    line = render_stat(Process(pid=7, command=command, start_time_ticks=123456))
    after = line.rpartition(b")")[2].split()
    assert len(after) == 50
    assert after[22 - 3] == b"123456"


def test_nothing_is_left_behind(start):
    node = start(PROCESSES)
    folder = node.proc_root.parent
    node.close()
    assert not folder.exists()
