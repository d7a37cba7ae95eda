"""What the documents say of their examples is what the systems answer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from exporter.claims import SYSTEMS, Granter
from exporter.claims.claim import Node, Scope
from exporter.snapshot import ContainerAllocation, Devices, Gpu, NodeFacts, PodAllocation
from exporter.sources.kubernetes_objects import parse_claim, parse_pod

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "sharing-systems.md").read_text()
WALK_THROUGH = (DOCS / "add-a-system.md").read_text()
MIB = 1 << 20

EXAMPLE = re.compile(r"```yaml\n(?P<yaml>.*?)```\n\n(?P<claims>(?:- [^\n]*\n)+)", re.DOTALL)
CLAIM = re.compile(
    r"- `(?P<system>\w+)` gives (?:each (?P<process>process) of )?(?:`(?P<container>\w+)`|the (?P<pod>pod)) (?P<mib>\d+) MiB"
    r"(?: and (?P<compute>[0-9.]+))? on `(?P<gpu>[\w-]+)`, (?P<wall>enforced|not enforced)\."
)
GPUS = {
    "GPU-a": Gpu(gpu_uuid="GPU-a", minor=0, memory_total_bytes=81559 * MIB),
    "GPU-b": Gpu(gpu_uuid="GPU-b", minor=1, memory_total_bytes=81559 * MIB),
    "MIG-b": Gpu(
        gpu_uuid="MIG-b", minor=1, parent_gpu_uuid="GPU-b", gpu_instance_id=2, compute_instance_id=0, memory_total_bytes=40192 * MIB
    ),
}


def named(example):
    """The object as the API server has it: examples leave out what is the same in all of them."""
    return example | {"metadata": {"namespace": "default", "uid": example["metadata"]["name"]} | example["metadata"]}


def devices(container):
    return tuple(Devices(each["resource_name"], tuple(each["device_ids"])) for each in container["devices"])


def granted(example, systems=SYSTEMS):
    pods = tuple(parse_pod(named(each)) for each in example["pods"])
    allocations = (
        PodAllocation("default", each["name"], tuple(ContainerAllocation(inner["name"], devices(inner)) for inner in each["containers"]))
        for each in example.get("pod_resources", ())
    )
    node = Node(
        facts=NodeFacts(name="node", labels=example.get("node", {}).get("labels", {})),
        gpus=GPUS,
        pods=pods,
        allocations={(each.namespace, each.name): each for each in allocations},
        resource_claims=tuple(parse_claim(named(each)) for each in example.get("resource_claims", ())),
    )
    granter = Granter(node, systems=systems)
    grants = [granter.grant(pod, {}, {})[0] for pod in pods]
    assert not any(grant.errors or grant.not_placed for grant in grants)
    return {
        (claim.system, claim.container, claim.scope, claim.gpu_uuid): (claim.memory_bytes, claim.compute_ratio, claim.enforced)
        for grant in grants
        for claim in grant.claims
    }


def stated(text):
    claims = {}
    for line in text.splitlines():
        match = CLAIM.fullmatch(line)
        assert match, line
        scope = Scope.PROCESS if match["process"] else Scope.POD if match["pod"] else Scope.CONTAINER
        compute = None if match["compute"] is None else float(match["compute"])
        claims[match["system"], match["container"] or "", scope, match["gpu"]] = (
            int(match["mib"]) * MIB,
            compute,
            match["wall"] == "enforced",
        )
    return claims


EXAMPLES = list(EXAMPLE.finditer(TEXT))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["claims"].split("`")[1])
def test_an_example_gives_what_stands_below_it(example):
    assert granted(yaml.safe_load(example["yaml"])) == stated(example["claims"])


def test_every_example_is_read():
    assert len(EXAMPLES) == TEXT.count("```yaml") > 10
    assert len(CLAIM.findall(TEXT)) == len(re.findall(r"^- `\w+` gives ", TEXT, re.MULTILINE))


# --- docs/add-a-system.md ---

CODE = re.search(r"```python\n(.*?)```", WALK_THROUGH, re.DOTALL)[1]


def added_system():
    module = {"__name__": "exporter.claims.acme"}
    exec(compile(CODE, "docs/add-a-system.md", "exec"), module)  # noqa: S102 - the project's own documentation
    return module["SYSTEM"]


def test_the_system_that_the_walk_through_adds_gives_what_it_says():
    example = EXAMPLE.search(WALK_THROUGH)
    promised = stated(example["claims"])
    assert len(promised) == 2
    assert granted(yaml.safe_load(example["yaml"]), (*SYSTEMS, added_system())) == promised


def test_without_the_entry_in_systems_the_placeholder_of_the_kubelet_is_all_there_is():
    example = yaml.safe_load(EXAMPLE.search(WALK_THROUGH)["yaml"])
    assert granted(example) == {("whole_gpu", "main", Scope.CONTAINER, "GPU-b"): (81559 * MIB, 1.0, True)}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "acme.example/gpu: '' is no <container>@<GPU's uuid>=<memory>"),
        ("main@GPU-a=8Gi,", "acme.example/gpu: '' is no <container>@<GPU's uuid>=<memory>"),
        ("main@card0=8Gi", "acme.example/gpu: 'main@card0=8Gi' is no <container>@<GPU's uuid>=<memory>"),
        ("main@GPU-a=lots", "acme.example/gpu: 'lots' is no quantity like 8Gi or 4096M"),
    ],
)
def test_what_the_added_system_cannot_read_is_an_error_and_no_claim(text, error):
    pod = parse_pod(
        named({"metadata": {"name": "p", "annotations": {"acme.example/gpu": text}}, "spec": {"containers": [{"name": "main"}]}})
    )
    node = Node(facts=None, gpus=GPUS, pods=(pod,))
    grant, _ = Granter(node, systems=(*SYSTEMS, added_system())).grant(pod, {}, {})
    assert (grant.claims, grant.errors) == ((), {"acme": (error,)})


@pytest.mark.parametrize("check", [("check",), ("format", "--check")], ids=["check", "format"])
def test_the_code_of_the_walk_through_keeps_the_projects_own_style(check):
    command = [sys.executable, "-m", "ruff", *check, "--stdin-filename", "exporter/claims/acme.py", "-"]
    done = subprocess.run(command, input=CODE, capture_output=True, text=True, check=False, timeout=60, cwd=DOCS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
