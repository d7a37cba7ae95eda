"""What `kubectl apply -f` takes is valid, asks for what the program needs and for nothing else, and configures flags that exist."""

import http.server
import json
import re
import threading
import time
from pathlib import Path
from random import Random

import kubernetes_validate
import pytest
import yaml

from exporter.breach import Breach, State
from exporter.clock import SystemClock
from exporter.config import FLAGS, parse_config
from exporter.event_writer import EventWriter
from exporter.journal import BreachChange
from exporter.judge import Resource
from exporter.limits import PodLimits
from exporter.report import PodReport
from exporter.sources.kubernetes import KubernetesSource
from exporter.sources.kubernetes_config import find_api_server

DEPLOY = Path(__file__).parents[2] / "deploy"
OLDEST, NEWEST = "1.26", "1.37"
MANIFEST = list(yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text()))
DAEMONSET = next(each for each in MANIFEST if each["kind"] == "DaemonSet")
POD = DAEMONSET["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifest_is_valid_in_the_oldest_and_the_newest_kubernetes(version):
    for each in MANIFEST:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_misspelt_field_would_be_found(version):
    wrong = yaml.safe_load(yaml.safe_dump(DAEMONSET))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_chart_states_the_oldest_kubernetes_that_is_validated():
    assert yaml.safe_load((DEPLOY / "helm/fgpu-exporter/Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"


def test_one_apply_brings_everything_and_nothing_of_an_operator():
    assert sorted(each["kind"] for each in MANIFEST) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "DaemonSet",
        "Namespace",
        "PriorityClass",
        "Service",
        "ServiceAccount",
    ]


def test_every_namespaced_object_is_in_the_namespace_that_comes_with_it():
    namespaced = [each for each in MANIFEST if each["kind"] in ("DaemonSet", "Service", "ServiceAccount")]
    assert {each["metadata"]["namespace"] for each in namespaced} == {"fgpu-exporter"}
    assert next(each for each in MANIFEST if each["kind"] == "Namespace")["metadata"]["name"] == "fgpu-exporter"


def test_the_service_and_the_role_binding_lead_to_the_daemonsets_pods():
    (service,) = (each for each in MANIFEST if each["kind"] == "Service")
    (binding,) = (each for each in MANIFEST if each["kind"] == "ClusterRoleBinding")
    (role,) = (each for each in MANIFEST if each["kind"] == "ClusterRole")
    labels = DAEMONSET["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert DAEMONSET["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["clusterIP"] == "None"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": POD["serviceAccountName"], "namespace": "fgpu-exporter"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


# --- RBAC ---


class ApiServer(http.server.ThreadingHTTPServer):
    """Answers lists with nothing in them, watches that end at once, and writes with what was written; remembers what was asked."""

    daemon_threads = True

    def __init__(self):
        asked = self.asked = set()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self._take("create", self.path)

            def do_PATCH(self):
                self._take("patch", self.path.rpartition("/")[0])

            def _take(self, verb, path):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                # Which namespace it is plays no part in a ClusterRole.
                asked.add((verb, re.sub(r"/namespaces/[^/]+", "", path)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                path, _, query = self.path.partition("?")
                asked.add(("watch" if "watch=true" in query else "list", path))
                body = b"" if "watch=true" in query else json.dumps({"items": [], "metadata": {"resourceVersion": "1"}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        super().__init__(("127.0.0.1", 0), Handler)


def permissions_asked_for(*, dra, kinds):
    def start(api):
        source = KubernetesSource(
            api=api,
            node_name="gpu-node-1",
            clock=SystemClock(),
            jitter=Random(1),  # noqa: S311 - guards nothing
            dra=dra,
        )
        source.start()
        return source

    return permissions_used(start, 2 * kinds)


def permissions_asked_for_by_events():
    def start(api):
        writer = EventWriter(api=api, node_name="gpu-node-1", clock=SystemClock(), jitter=Random(1))  # noqa: S311 - guards nothing
        writer.tell([breach(begun=True, since_seconds=1.0), breach(begun=False, since_seconds=1.0), breach(begun=True, since_seconds=2.0)])
        return writer

    return permissions_used(start, 2)


def breach(*, begun, since_seconds):
    row = PodReport(
        namespace="team-a",
        pod="train-0",
        gpu_uuid="GPU-0",
        pod_uid="uid",
        memory_used_bytes=None,
        limits=PodLimits(),
        sm_utilization_ratio=None,
        sm_utilization_mean_ratio=None,
        sm_busy_seconds_total=None,
        breaches={Resource.MEMORY: Breach(state=State.EXCEEDED if begun else State.WITHIN)},
    )
    return BreachChange(
        time_seconds=0.0,
        monotonic_seconds=0.0,
        pod=row,
        containers=(),
        resource=Resource.MEMORY,
        begun=begun,
        since_seconds=since_seconds,
    )


def permissions_used(start, count):
    server = ApiServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = start(lambda: find_api_server(host=f"http://127.0.0.1:{server.server_address[1]}"))
    try:
        deadline = time.monotonic() + 10
        while len(server.asked) < count and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        started.close()
        server.shutdown()
        server.server_close()
    asked = set()
    for verb, path in server.asked:
        core, group, resource = re.fullmatch(r"/(?:(api)|apis/([^/]+))/v[0-9a-z]+/([a-z]+)", path).groups()
        asked.add(("" if core else group, resource, verb))
    return asked


def permissions_granted(manifest):
    return {
        (group, resource, verb)
        for each in manifest
        if each["kind"] in ("ClusterRole", "Role")
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_role_grants_what_the_program_asks_the_api_server_for_and_nothing_else():
    assert permissions_granted(MANIFEST) == permissions_asked_for(dra=False, kinds=2)


def permissions_added_by(component):
    kustomization = yaml.safe_load((DEPLOY / f"components/{component}/kustomization.yaml").read_text())
    operations = [operation for patch in kustomization["patches"] for operation in yaml.safe_load(patch["patch"])]
    rules = [operation["value"] for operation in operations if operation["path"] == "/rules/-"]
    return permissions_granted([{"kind": "ClusterRole", "rules": rules}])


def test_the_dra_component_grants_what_the_program_asks_for_with_dra_and_nothing_else():
    assert permissions_granted(MANIFEST) | permissions_added_by("dra") == permissions_asked_for(dra=True, kinds=4)


def test_the_component_for_events_grants_to_make_and_to_change_them_and_nothing_else():
    granted = permissions_added_by("kubernetes-events")
    assert granted == permissions_asked_for_by_events() == {("", "events", "create"), ("", "events", "patch")}


# --- flags ---


def all_arguments():
    """Answer every argument that a manifest or a component hands to the program."""
    arguments = list(CONTAINER["args"])
    for path in sorted(DEPLOY.glob("components/*/kustomization.yaml")):
        for patch in yaml.safe_load(path.read_text()).get("patches", ()):
            operations = yaml.safe_load(patch["patch"])
            if isinstance(operations, list):
                arguments += [operation["value"] for operation in operations if "/args/" in operation["path"]]
    return arguments


def test_every_argument_is_a_flag_of_the_program():
    names = {re.fullmatch(r"--([a-z-]+)=.*", argument)[1] for argument in all_arguments()}
    assert names == {"node-name", "dra", "host-path", "kubernetes-events", "pod-source"}
    assert names <= {flag.name for flag in FLAGS}


def test_the_program_takes_all_arguments_together():
    config = parse_config([argument.replace("$(NODE_NAME)", "gpu-node-1") for argument in all_arguments()], {})
    assert (config.node_name, config.dra, config.host_path, config.pod_source) == ("gpu-node-1", True, Path("/host"), "auto")
    assert config.kubernetes_events is True


def test_the_port_and_the_sockets_folder_are_the_programs_defaults():
    config = parse_config(["--node-name=n"], {})
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": config.port}]
    mounts = {mount["name"]: mount for mount in CONTAINER["volumeMounts"]}
    assert mounts["pod-resources"]["mountPath"] == str(config.kubelet_socket.parent)
    assert mounts["pod-resources"]["readOnly"] is True
    assert POD["volumes"] == [{"name": "pod-resources", "hostPath": {"path": str(config.kubelet_socket.parent), "type": "Directory"}}]


def test_the_node_name_comes_from_the_pods_own_node():
    environment = {each["name"]: each for each in CONTAINER["env"]}
    assert environment["NODE_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


# --- documents ---


def test_the_install_document_has_a_row_for_every_component_and_names_the_measured_bounds():
    text = (DEPLOY.parent / "docs/install.md").read_text()
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)) == sorted(path.name for path in (DEPLOY / "components").iterdir())
    assert CONTAINER["resources"] == {"requests": {"cpu": "20m", "memory": "80Mi"}, "limits": {"memory": "256Mi"}}
    assert "request 80 MiB, limit 256 MiB" in text
    assert "Request 20m" in text
    assert f"Kubernetes {OLDEST} to {NEWEST}" in text


# --- what it may do on the node ---


def test_the_container_may_do_nothing_but_read():
    assert CONTAINER["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["securityContext"] == {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    assert not any(POD.get(field) for field in ("hostNetwork", "hostIPC", "shareProcessNamespace"))


def test_the_container_sees_every_process_and_every_gpu_and_takes_none():
    environment = {each["name"]: each.get("value") for each in CONTAINER["env"]}
    assert POD["hostPID"] is True
    assert POD["runtimeClassName"] == "nvidia"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    asked_for = {name for kind in CONTAINER["resources"].values() for name in kind}
    assert asked_for == {"cpu", "memory"}
    assert "cpu" not in CONTAINER["resources"]["limits"]


def test_no_probe_asks_for_metrics():
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/readyz"
