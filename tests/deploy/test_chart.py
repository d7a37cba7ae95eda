"""The chart, the manifest and the kustomization say the same, under real helm and kubectl; and the chart refuses what cannot be."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from exporter.config import FLAGS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/fgpu-exporter"
TOOLS = ROOT / ".tools"
KUBECTL = TOOLS / "kubectl"
HELMS = {"helm 3": TOOLS / "helm3", "helm 4": TOOLS / "helm4"}
PRESETS = sorted(path.stem for path in (CHART / "presets").glob("*.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
OTHERS_KINDS = {"SecurityContextConstraints", "PodMonitor"}

pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in (KUBECTL, *HELMS.values())), reason="helm and kubectl are not in .tools: `make kubernetes-tools`"
)

specification = importlib.util.spec_from_file_location("render_manifests", ROOT / "tools/render_manifests.py")
render_manifests = importlib.util.module_from_spec(specification)
specification.loader.exec_module(render_manifests)


@pytest.fixture(params=HELMS)
def helm(request):
    return str(HELMS[request.param])


def render(helm, *arguments):
    return [each for each in yaml.safe_load_all(render_manifests.render_chart(helm, *arguments)) if each]


def refusal(helm, *arguments):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render_manifests.render_chart(helm, *arguments)
    return caught.value.stderr


def ordered(value):
    """Answer a manifest in which the order of lists that Kubernetes merges by name does not matter."""
    if isinstance(value, dict):
        return {key: ordered(each) for key, each in value.items()}
    if isinstance(value, list):
        return sorted((ordered(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    return value


def by_name(manifest):
    return {(each["kind"], each["metadata"]["name"]): ordered(each) for each in manifest}


def kustomize(folder):
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def kustomize_with(component, tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["../deploy"], "components": [f"../deploy/components/{component}"]})
    )
    return kustomize(tmp_path / "site")


# --- one source ---


@pytest.mark.parametrize("path", render_manifests.MANIFESTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_committed_manifest_is_what_the_chart_renders(helm, path):
    rendered = render(helm, *render_manifests.MANIFESTS[path])
    assert [each for each in yaml.safe_load_all(path.read_text()) if each] == rendered or by_name(rendered) == by_name(
        yaml.safe_load_all(path.read_text())
    )


def test_the_kustomization_is_the_manifest():
    assert by_name(kustomize(DEPLOY)) == by_name(yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text()))


def test_every_preset_of_the_chart_has_its_component():
    assert sorted(path.name for path in (DEPLOY / "components").iterdir()) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_component_is_what_the_chart_renders_with_the_preset_of_its_name(preset, tmp_path):
    chart = render(str(HELMS["helm 4"]), "--set", "namespace.create=true", "--values", str(CHART / f"presets/{preset}.yaml"))
    assert by_name(kustomize_with(preset, tmp_path)) == by_name(chart)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_changes_something(preset, helm):
    assert render(helm, "--values", str(CHART / f"presets/{preset}.yaml")) != render(helm)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_changes_is_valid(preset):
    helm = str(HELMS["helm 4"])
    usual = render(helm)
    for each in render(helm, "--values", str(CHART / f"presets/{preset}.yaml")):
        if each not in usual and each["kind"] not in OTHERS_KINDS:
            kubernetes_validate.validate(each, "1.26", strict=True)
            kubernetes_validate.validate(each, "1.37", strict=True)


def test_everything_at_once_is_valid():
    rendered = render(
        str(HELMS["helm 4"]),
        *("--set", "namespace.create=true,dra.enabled=true,hostFiles.enabled=true,migMonitor=true,podMonitor.enabled=true"),
        *("--set", "kubernetesEvents.enabled=true"),
        *("--set", "networkPolicy.enabled=true,openshift.enabled=true,podSource=auto,web.secretName=web,web.tls=true"),
        *("--set", "image.pullSecrets={a,b},podLabels.team=gpu,podAnnotations.a=b,nodeSelector.pool=gpu,seLinuxType=spc_t"),
        *(
            "--set",
            "flags.port=9999,flags.breach-hold-seconds=30,serviceAccount.annotations.a=b,hostFiles.paths={/usr/local/vgpu,/tmp/vgpu}",
        ),
    )
    for each in rendered:
        if each["kind"] not in OTHERS_KINDS:
            kubernetes_validate.validate(each, "1.37", strict=True)
    assert {each["kind"] for each in rendered} >= OTHERS_KINDS


def test_helm_finds_nothing_to_mend(helm):
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- values ---


def daemonset(helm, *arguments):
    return next(each for each in render(helm, *arguments) if each["kind"] == "DaemonSet")["spec"]["template"]["spec"]


def test_a_flag_of_the_values_becomes_an_argument(helm):
    pod = daemonset(helm, "--set", "flags.breach-hold-seconds=30,flags.system-namespaces=a\\,b")
    assert pod["containers"][0]["args"] == ["--node-name=$(NODE_NAME)", "--breach-hold-seconds=30", "--system-namespaces=a,b"]


def test_another_port_is_the_containers_and_the_services(helm):
    rendered = render(helm, "--set", "flags.port=9999")
    service = next(each for each in rendered if each["kind"] == "Service")
    assert service["spec"]["ports"] == [{"name": "http", "port": 9999, "targetPort": "http"}]
    container = daemonset(helm, "--set", "flags.port=9999")["containers"][0]
    assert container["ports"] == [{"name": "http", "containerPort": 9999}]
    assert "--port=9999" in container["args"]


def test_tls_reaches_probes_and_scrapes(helm):
    arguments = ("--set", "web.secretName=web,web.tls=true,podMonitor.enabled=true")
    container = daemonset(helm, *arguments)["containers"][0]
    assert {container[probe]["httpGet"]["scheme"] for probe in ("livenessProbe", "readinessProbe")} == {"HTTPS"}
    (monitor,) = (each for each in render(helm, *arguments) if each["kind"] == "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    assert "tlsConfig" not in monitor["spec"]["podMetricsEndpoints"][0]


def test_a_scrape_sends_the_password_and_verifies_as_it_is_told(helm):
    settings = (
        "web.secretName=web,web.tls=true,podMonitor.enabled=true,podMonitor.tlsConfig.serverName=fgpu,podMonitor.basicAuth.username.name=a"
    )
    (monitor,) = (each for each in render(helm, "--set", settings) if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["tlsConfig"], endpoint["basicAuth"]) == ({"serverName": "fgpu"}, {"username": {"name": "a"}})


def test_pods_from_the_kubelet_alone_need_no_access_to_the_api_server(helm):
    rendered = render(helm, "--set", "podSource=kubelet")
    assert not [each for each in rendered if each["kind"].startswith("ClusterRole")]
    assert daemonset(helm, "--set", "podSource=kubelet")["automountServiceAccountToken"] is False


def test_an_image_can_be_named_by_digest(helm):
    digest = "sha256:" + "ab" * 32
    pod = daemonset(helm, "--set", f"image.repository=registry.example.com/fgpu-exporter,image.tag=0.1.0,image.digest={digest}")
    assert pod["containers"][0]["image"] == f"registry.example.com/fgpu-exporter:0.1.0@{digest}"


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("flags.breach-hold-seconds=-1", "breach-hold-seconds"),
        ("flags.sample-interval-seconds=61", "sample-interval-seconds"),
        ("flags.sample-interval=5", "sample-interval"),
        ("flags.log-level=loud", "log-level"),
        ("flags.port=70000", "port"),
        ("flags.system-namespaces=Kube_System", "system-namespaces"),
        ("flags.dra=true", "dra"),
        ("driver.visibleDevices=none", "visibleDevices"),
        ("driver.hostDirectory=/run/nvidia/driver", "libraryPath"),
        ("driver.privileged=perhaps", "privileged"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=sha256:12", "digest"),
        ("hostFiles.paths={/etc}", "hostFiles"),
        ("web.tls=true", "secretName"),
        ("podMonitor.interval=fast", "interval"),
        ("podSource=kubelet,dra.enabled=true", "dra"),
        ("podSource=kubelet,kubernetesEvents.enabled=true", "kubernetesEvents"),
        ("tolerations[0].effect=Never", "effect"),
        ("resources.limits.memory=lots", "memory"),
        ("imagee.tag=1", "imagee"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(setting, word, helm):
    assert re.search(rf"values don't meet the specifications of the schema.*\b{word}\b", refusal(helm, "--set", setting), re.DOTALL)


def test_the_values_offer_every_flag_that_means_something_in_a_pod():
    by_values_of_their_own = {"node-name", "dra", "kubernetes-events", "host-path", "pod-source", "web-config-file"}
    fixed_by_the_manifest = {"kubelet-socket", "kubelet-pods-socket", "proc-path"}
    not_in_a_pod = {"kubeconfig", "scenario", "demo", "once", "at"}
    offered = set(SCHEMA["properties"]["flags"]["properties"])
    assert offered == {flag.name for flag in FLAGS} - by_values_of_their_own - fixed_by_the_manifest - not_in_a_pod


def test_the_values_have_the_bounds_of_the_flags():
    for flag in FLAGS:
        bounds = SCHEMA["properties"]["flags"]["properties"].get(flag.name, {})
        if "minimum" in bounds and flag.name != "port":
            assert flag.expected == f"a number from {bounds['minimum']} to {bounds['maximum']}"


def test_the_version_is_the_projects():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f'org.opencontainers.image.version="{version}"' in (ROOT / "Dockerfile").read_text()
