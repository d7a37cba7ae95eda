"""What a real node answered, through the exporter's own parsers: whose each process is."""

import csv
import json
from pathlib import Path

import pytest

from exporter.snapshot import ProcessFacts
from exporter.sources.kubernetes_objects import parse_pod
from exporter.sources.procfs import parse_cgroup, parse_stat
from exporter.usage import Owner, Owners, Unattributed

CAPTURES = Path(__file__).parent / "captures"
NO_ONE = -1


@pytest.fixture(scope="module")
def pods():
    return [parse_pod(pod) for pod in json.loads((CAPTURES / "pods-list.json").read_text())["items"]]


def owners_table():
    with (CAPTURES / "proc" / "owners.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def captured_process(pid):
    folder = CAPTURES / "proc" / pid
    comm, start_time_ticks = parse_stat((folder / "stat").read_text())
    return ProcessFacts(pid=int(pid), start_time_ticks=start_time_ticks, comm=comm, cgroup=parse_cgroup((folder / "cgroup").read_text()))


@pytest.mark.parametrize("row", owners_table(), ids=lambda row: f"{row['pid']} {row['pod'] or 'no one'}")
def test_each_process_of_a_real_node_is_given_to_its_owner(row, pods):
    owner = Owners(pods, frozenset()).owner_of(captured_process(row["pid"]), own_pid=NO_ONE)
    if not row["pod"]:
        assert owner is Unattributed.UNKNOWN_CONTAINER
        return
    assert isinstance(owner, Owner)
    pod = next(pod for pod in pods if pod.uid == owner.pod_uid)
    assert (pod.namespace, pod.name, owner.container) == (row["namespace"], row["pod"], row["container"])


@pytest.mark.parametrize("row", owners_table(), ids=lambda row: row["pid"])
def test_the_name_in_stat_is_the_one_in_comm(row):
    assert captured_process(row["pid"]).comm == (CAPTURES / "proc" / row["pid"] / "comm").read_text().rstrip("\n")
