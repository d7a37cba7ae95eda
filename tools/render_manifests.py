"""Writes the manifests that are made from the Helm chart: `render_manifests.py HELM`. A test holds them equal to the chart."""

import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm/fgpu-exporter"
RELEASE = NAMESPACE = "fgpu-exporter"

_HEAD = "# Made from deploy/helm/fgpu-exporter by `make manifests`; docs/install.md says why it is as it is.\n"


def render_chart(helm: str, *arguments: str) -> str:
    """Answer what the chart renders. Raises CalledProcessError, whose stderr says why, where helm refuses."""
    rendered = subprocess.run(  # noqa: S603 - the caller names the program
        [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments], capture_output=True, text=True, check=True
    ).stdout
    return "".join(line for line in rendered.splitlines(keepends=True) if not line.startswith("# Source: "))


MANIFESTS = {
    DEPLOY / "daemonset.yaml": ("--set", "namespace.create=true"),
    DEPLOY / "podmonitor.yaml": ("--set", "podMonitor.enabled=true", "--show-only", "templates/podmonitor.yaml"),
    DEPLOY / "components/openshift/securitycontextconstraints.yaml": (
        *("--values", str(CHART / "presets/openshift.yaml")),
        *("--show-only", "templates/openshift.yaml"),
    ),
    DEPLOY / "components/network-policy/networkpolicy.yaml": (
        *("--values", str(CHART / "presets/network-policy.yaml")),
        *("--show-only", "templates/networkpolicy.yaml"),
    ),
}


def main() -> None:
    """Write every manifest."""
    _, helm = sys.argv
    for path, arguments in MANIFESTS.items():
        path.write_text(_HEAD + render_chart(helm, *arguments))


if __name__ == "__main__":
    main()
