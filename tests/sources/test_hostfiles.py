"""What HAMi-core's files say, read from files that were written as C would write them."""

import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from hami_core_region import VERSIONS, Process, case_regions, write_region
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.simulation import load_scenario
from exporter.snapshot import FoundRegion, HostfilesReading, Region, RegionSlot, UnreadableFile
from exporter.sources import SourceError
from exporter.sources.hostfiles import LAYOUTS, HostfilesSource, RegionError, parse_is_local, parse_region

MIB = 1 << 20
UID = "9d0b6a3e-54c1-4a57-8d8f-2b1f3c6e7a11"
MAIN = (UID, "main")
HAMI = f"usr/local/vgpu/containers/{UID}_main"
REGION = write_region("2.8.2", gpus=("GPU-a",), limits=(100,), processes=(Process(41, (7,)),))
READ = Region(gpu_uuids=("GPU-a",), memory_limit_bytes=(100,), slots=(RegionSlot(41, (7,)),))


# --- regions ---


@pytest.mark.parametrize("version", VERSIONS)
def test_a_region_of_every_layout_is_read(version):
    gpus = tuple(f"GPU-{index}" for index in range(16))
    processes = [
        Process(41, tuple(range(1000, 1016))),
        Process(42, (5,), status=0),
        Process(0, (6,)),
        *(Process(100 + number, tuple(range(number, number + 16)), status=2) for number in range(1021)),
    ]
    region = parse_region(write_region(version, gpus=gpus, limits=range(1, 17), processes=processes))
    assert region.gpu_uuids == gpus
    assert region.memory_limit_bytes == tuple(range(1, 17))
    assert len(region.slots) == 1023
    assert region.slots[:2] == (RegionSlot(41, tuple(range(1000, 1016))), RegionSlot(None, (6, *[0] * 15)))
    assert region.slots[-1] == RegionSlot(1120, tuple(range(1020, 1036)))


def test_every_layout_has_a_size_of_its_own_and_one_that_c_makes():
    assert sorted(layout.file_bytes for layout in LAYOUTS) == sorted(len(write_region(version)) for version in VERSIONS)


def test_a_region_that_the_library_is_still_setting_up_says_nothing():
    assert parse_region(b"") is None
    assert parse_region(write_region("2.8.2", gpus=("GPU-a",), magic=0)) is None


def test_a_gpu_whose_uuid_is_not_written_yet_is_unknown_and_no_limit_is_none():
    region = parse_region(write_region("2.8.1", gpus=("GPU-a", ""), limits=(0, 5)))
    assert region == Region(gpu_uuids=("GPU-a", None), memory_limit_bytes=(None, 5))


def test_the_uuid_of_a_mig_device_is_read_whole():
    uuid = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"
    longest = "MIG-" + "a" * 91
    assert parse_region(write_region("2.8.2", gpus=(uuid, longest))).gpu_uuids == (uuid, longest)


@pytest.mark.parametrize("version", ["2.8.1", "2.8.2"])
def test_what_is_just_being_written_is_unknown(version):
    processes = (Process(41, (7,), seqlock=3), Process(42, (8,), seqlock=4))
    region = parse_region(write_region(version, gpus=("GPU-a",), processes=processes))
    assert region.slots == (RegionSlot(41, None), RegionSlot(42, (8,)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (REGION[:-1], UnreadableFile.UNKNOWN_LAYOUT),
        (REGION + b"\0", UnreadableFile.UNKNOWN_LAYOUT),
        (REGION[:64], UnreadableFile.UNKNOWN_LAYOUT),
        (b"x", UnreadableFile.UNKNOWN_LAYOUT),
        (write_region("2.8.2", magic=1), UnreadableFile.WRONG_MAGIC),
        (write_region("2.8.2", magic=-1), UnreadableFile.WRONG_MAGIC),
        (write_region("2.8.2", device_num=17), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", device_num=(1 << 64) - 1), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", proc_num=1025), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", proc_num=-1), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPU-a", "GPU-a")), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPU a",)), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPÜ-a",)), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("G" * 96,)), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPU-a",), limits=(1 << 63,)), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPU-a",), processes=(Process(41, ((1 << 64) - 5,)),)), UnreadableFile.IMPOSSIBLE_VALUE),
        (write_region("2.8.2", gpus=("GPU-a",), processes=(Process(41, (5,), status=3),)), UnreadableFile.IMPOSSIBLE_VALUE),
    ],
    ids=range(17),
)
def test_what_cannot_be_true_is_no_region(data, reason):
    with pytest.raises(RegionError) as caught:
        parse_region(data)
    assert caught.value.reason is reason


def test_what_an_exited_process_left_behind_may_be_anything():
    left = (Process(-5, ((1 << 64) - 5,), status=0), Process(41, (7,)))
    assert parse_region(write_region("2.8.2", gpus=("GPU-a",), processes=left)).slots == (RegionSlot(41, (7,)),)


@given(st.binary(max_size=3000))
def test_bytes_of_any_kind_raise_nothing_else(data):
    with pytest.raises(RegionError) if data else nullcontext():
        parse_region(data)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS), head=st.binary(min_size=200, max_size=4000), tail=st.binary(max_size=64), fill=st.binary(min_size=1)
)
def test_a_file_of_a_known_size_with_any_content_is_a_region_or_an_error(layout, head, tail, fill):
    body = struct.pack("<i", 19920718) + head
    data = bytearray((body + fill * (layout.file_bytes // len(fill) + 1))[: layout.file_bytes])
    data[layout.file_bytes - len(tail) :] = tail
    struct.pack_into("<Q", data, layout.device_num, head[0] % 18)
    struct.pack_into("<i", data, layout.proc_num, head[1] % 8)
    try:
        region = parse_region(bytes(data))
    except RegionError:
        return
    assert len(region.gpu_uuids) == len(region.memory_limit_bytes) == head[0] % 18
    assert all(0 <= used < 1 << 63 for slot in region.slots for used in slot.memory_used_bytes or ())


# --- files ---


@pytest.fixture
def root(tmp_path):
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


@pytest.fixture
def source(root):
    return HostfilesSource(host_root=root, proc_root=root / "proc")


def put(root, path, content=REGION):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "folder", ["usr/local/vgpu/containers", "usr/local/vgpu/vgpu/containers", "tmp/vgpu/containers"], ids=["HAMi", "Volcano", "before"]
)
def test_the_region_of_a_container_is_found_wherever_it_may_lie(root, source, folder):
    put(root, f"{folder}/{UID}_main/0b6d2c1e.cache")
    put(root, f"{folder}/{UID}_other/0b6d2c1e.cache")
    assert source.read([MAIN], []) == HostfilesReading(regions=(FoundRegion(READ, frozenset({MAIN})),))


def test_a_region_in_the_container_is_found_through_its_processes(root, source):
    put(root, "proc/41/root/tmp/cudevshr.cache")
    (root / "proc/42").mkdir()
    (root / "proc/42/root").symlink_to(root / "proc/41/root")  # two processes of one container
    reading = source.read([], [41, 42, 43])
    assert reading == HostfilesReading(regions=(FoundRegion(READ, frozenset(), frozenset({41, 42})),))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("processes", [0, 1, 3, 1024])
def test_a_file_says_what_its_bytes_say(root, source, version, processes):
    slots = [Process(41 + number, (number, 5)) for number in range(processes)]
    content = write_region(version, gpus=("GPU-a", "GPU-b"), limits=(100, 200), processes=slots)
    put(root, f"{HAMI}/x.cache", content)
    (found,) = source.read([MAIN], []).regions
    assert found.region == parse_region(content)
    assert len(found.region.slots) == processes


@pytest.mark.parametrize("proc_num", [-1, 1025, (1 << 31) - 1])
def test_a_file_that_has_an_impossible_number_of_processes_costs_itself(root, source, proc_num):
    put(root, f"{HAMI}/x.cache", write_region("2.8.2", proc_num=proc_num))
    assert source.read([MAIN], []) == HostfilesReading(unreadable={UnreadableFile.IMPOSSIBLE_VALUE: 1})


def test_a_node_without_any_region_is_fine(source):
    assert source.read([MAIN], [1, 2]) == HostfilesReading()


def test_a_host_path_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path):
    source = HostfilesSource(host_root=tmp_path / "none", proc_root=tmp_path)
    with pytest.raises(SourceError, match=r"none cannot be read \(No such file or directory\): mount the host's file system there"):
        source.read([], [])


@pytest.mark.parametrize("name", ["../../../etc/passwd", "a/b", ""])
def test_a_name_that_could_lead_elsewhere_is_passed_over(root, source, name):
    put(root, f"usr/local/vgpu/containers/{UID}_x/a.cache")
    assert source.read([(UID, name), (name, "main")], []) == HostfilesReading()


def make_link(path, root):
    path.symlink_to(put(root, "elsewhere.cache"))


def make_fifo(path, _root):
    os.mkfifo(path)


def make_folder(path, _root):
    path.mkdir()


def make_socket(path, _root):
    # A name of a socket may have 107 characters.
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


@pytest.mark.parametrize("make", [make_link, make_fifo, make_folder, make_socket])
@pytest.mark.parametrize("place", [HAMI, "proc/41/root/tmp"], ids=["host", "container"])
def test_what_is_no_file_is_never_opened_and_is_counted(root, source, make, place):
    (root / place).mkdir(parents=True)
    make(root / place / "cudevshr.cache", root)
    opened = threading.Thread(target=lambda: readings.append(source.read([MAIN], [41])), daemon=True)
    readings = []
    opened.start()
    opened.join(10)
    assert readings == [HostfilesReading(unreadable={UnreadableFile.NOT_A_FILE: 1})]


@pytest.mark.parametrize("link", ["usr/local/vgpu", "usr/local/vgpu/containers", HAMI])
def test_no_link_is_followed_where_a_container_may_write(root, source, link):
    put(root, "elsewhere/x.cache")
    put(root, f"elsewhere/{UID}_main/x.cache")
    put(root, f"elsewhere/containers/{UID}_main/x.cache")
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(root / "elsewhere")
    reading = source.read([MAIN], [])
    assert reading.regions == ()
    assert set(reading.unreadable) == {UnreadableFile.NOT_A_FILE}


def test_a_containers_own_link_on_its_tmp_is_not_followed(root, source):
    put(root, "elsewhere/cudevshr.cache")
    (root / "proc/41/root").mkdir(parents=True)
    (root / "proc/41/root/tmp").symlink_to(root / "elsewhere")
    assert source.read([], [41]) == HostfilesReading()


def test_the_systems_own_folder_may_be_a_link(root, source):
    put(root, f"var/usrlocal/vgpu/containers/{UID}_main/x.cache")
    (root / "usr").mkdir()
    (root / "usr/local").symlink_to("../var/usrlocal")
    assert len(source.read([MAIN], []).regions) == 1


def test_a_huge_file_is_not_read(root, source):
    with put(root, f"{HAMI}/x.cache").open("r+b") as file:
        file.truncate(1 << 40)
    assert source.read([MAIN], []) == HostfilesReading(unreadable={UnreadableFile.UNKNOWN_LAYOUT: 1})


def test_a_file_that_cannot_be_read_costs_itself(root, source):
    put(root, f"{HAMI}/a.cache", REGION[:-7])
    put(root, f"{HAMI}/b.cache")
    put(root, f"{HAMI}/c.cache", b"")
    put(root, f"usr/local/vgpu/containers/{UID}_side/a.cache", write_region("2.8.2", magic=5))
    reading = source.read([MAIN, (UID, "side")], [])
    assert reading.regions == (FoundRegion(READ, frozenset({MAIN})),)
    assert reading.unreadable == {UnreadableFile.UNKNOWN_LAYOUT: 1, UnreadableFile.WRONG_MAGIC: 1}


@pytest.mark.parametrize(("files", "suffix"), [(9, ".cache"), (65, ".txt")])
def test_a_folder_that_someone_filled_is_left_alone(root, source, files, suffix):
    for number in range(files):
        put(root, f"{HAMI}/{number}{suffix}", b"")
    assert source.read([MAIN], []) == HostfilesReading(unreadable={UnreadableFile.TOO_MANY_FILES: 1})


def test_one_file_in_two_places_is_one_region_of_both(root, source):
    file = put(root, f"{HAMI}/x.cache")
    other = root / f"usr/local/vgpu/containers/{UID}_side/x.cache"
    other.parent.mkdir()
    other.hardlink_to(file)
    (found,) = source.read([MAIN, (UID, "side")], []).regions
    assert found.containers == {MAIN, (UID, "side")}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_we_may_not_read_is_counted(root, source):
    put(root, f"{HAMI}/x.cache").chmod(0)
    assert source.read([MAIN], []) == HostfilesReading(unreadable={UnreadableFile.NOT_PERMITTED: 1})


def test_files_that_come_and_go_while_they_are_read_raise_nothing(root, source):
    stop = threading.Event()

    def churn():
        folder = root / HAMI
        while not stop.is_set():
            put(root, f"{HAMI}/x.cache").unlink()
            folder.rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        readings = [source.read([MAIN], []) for _ in range(200)]
    finally:
        stop.set()
        thread.join()
    assert {found.region for reading in readings for found in reading.regions} <= {READ}
    assert {reason for reading in readings for reason in reading.unreadable} <= {UnreadableFile.UNKNOWN_LAYOUT}


def test_nothing_is_written(root, source):
    file = put(root, f"{HAMI}/x.cache")
    file.chmod(0o400)
    before = file.stat()
    source.read([MAIN], [])
    assert (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ctime_ns) == (REGION, before.st_mtime_ns, before.st_ctime_ns)


def test_an_unreadable_file_is_logged_once_with_its_size_and_again_after_it_was_well(root, source, caplog):
    put(root, f"{HAMI}/x.cache", b"torn")
    source.read([MAIN], [])
    (root / HAMI / "x.cache").rename(root / HAMI / "y.cache")
    source.read([MAIN], [])
    said = f"file=/{HAMI} state=unreadable reason=unknown_layout size_bytes=4"
    assert [record.message for record in caplog.records] == [said]
    put(root, f"{HAMI}/y.cache")
    source.read([MAIN], [])
    put(root, f"{HAMI}/y.cache", b"torn")
    source.read([MAIN], [])
    assert [record.message for record in caplog.records] == [said, said]


def test_no_descriptor_is_left_open(root, source):
    put(root, f"{HAMI}/x.cache")
    put(root, f"{HAMI}/y.cache", b"torn")
    put(root, "proc/41/root/tmp/cudevshr.cache")
    source.read([MAIN], [41])
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        source.read([MAIN, (UID, "none")], [41, 42])
    assert len(list(descriptors.iterdir())) == before


CONTAINER = """
import os, sys, time
os.chroot(sys.argv[1])
os.chdir("/")
print("up", flush=True)
time.sleep(60)
"""


def test_a_region_is_found_in_a_real_mount_namespace_behind_which_an_absolute_link_leads_nowhere(tmp_path):
    script = 'mount -t tmpfs none "$1" && mkdir "$1/tmp" && cp "$2" "$1/tmp/cudevshr.cache" && exec "$3" -c "$4" "$1"'
    (tmp_path / "root").mkdir()
    region = put(tmp_path, "region")
    inside = ["sh", "-c", script, "sh", str(tmp_path / "root"), str(region), sys.executable, CONTAINER]
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are root's to make")
    with subprocess.Popen(["unshare", "-m", *inside], stdout=subprocess.PIPE, text=True) as container:
        try:
            assert container.stdout.readline() == "up\n"
            source = HostfilesSource(host_root=tmp_path, proc_root=Path("/proc"))
            assert source.read([], [container.pid]).regions == (FoundRegion(READ, frozenset(), frozenset({container.pid})),)
            own = Path(f"/proc/{container.pid}/root/tmp")
            (own / "cudevshr.cache").unlink()
            (own / "cudevshr.cache").symlink_to(region)
            assert source.read([], [container.pid]) == HostfilesReading(unreadable={UnreadableFile.NOT_A_FILE: 1})
        finally:
            container.kill()


# --- file systems that can hang ---

MOUNTS = """\
1017 956 0:151 / / rw,relatime master:357 - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
1018 1017 0:154 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1021 1017 0:155 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k
1022 1017 0:160 / /data rw,relatime - nfs4 server:/x rw,vers=4.2
"""


@pytest.mark.parametrize(
    ("more", "is_local"),
    [
        ("", True),
        ("1030 1017 8:1 /e /tmp rw,relatime - ext4 /dev/sda1 rw", True),
        ("1030 1017 0:161 / /tmp rw,relatime - nfs4 server:/tmp rw", False),
        ("1030 1017 0:161 / /tmp rw,relatime shared:1 master:2 - fuse.sshfs host:/ rw", False),
        ("1030 1017 0:161 / /tmp/cudevshr.cache rw - fuse x rw", False),
        ("1030 1017 0:161 / /tmpfiles rw - fuse x rw", True),
        ("1030 1017 0:161 / /tmp rw - nfs4 x rw\n1031 1030 0:162 / /tmp rw - tmpfs tmpfs rw", True),
        ("1030 1017 0:161 / / rw - fuse.fuse-overlayfs x rw", False),
        ("nonsense\n - \n1 2 3", True),
    ],
)
def test_a_containers_tmp_is_looked_into_on_a_file_system_of_this_machine_only(root, source, more, is_local):
    put(root, "proc/41/root/tmp/cudevshr.cache")
    put(root, "proc/41/mountinfo", (MOUNTS + more).encode())
    assert parse_is_local(MOUNTS + more, "/tmp/cudevshr.cache") is is_local  # noqa: S108 - the library's own choice
    assert bool(source.read([], [41]).regions) is is_local


@given(st.text())
def test_no_mountinfo_raises_and_one_without_a_root_is_not_trusted(text):
    assert parse_is_local(text, "/tmp/cudevshr.cache") is False or " / " in text  # noqa: S108 - likewise


# --- the cases ---


@pytest.mark.parametrize("case", case_regions())
def test_a_case_holds_the_regions_that_its_script_writes(case, request):
    scenario = load_scenario(request.config.rootpath / "tests/cases" / f"{case}.yaml")
    held = {}
    for step in scenario.steps:
        for path, content in step.files.items():
            held.setdefault(path, []).append(content)
    for path, regions in case_regions()[case].items():
        assert held[path][: len(regions)] == regions
