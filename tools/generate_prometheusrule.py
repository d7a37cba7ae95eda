"""Writes deploy/prometheusrule.yaml, for the Prometheus operator, from the rule files. A test holds it equal to them."""

from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
RULE_FILES = (DEPLOY / "prometheus" / "fgpu.rules.yaml", DEPLOY / "prometheus" / "fgpu.alerts.yaml")
MANIFEST = DEPLOY / "prometheusrule.yaml"

_HEAD = """\
# Made from deploy/prometheus/*.rules.yaml and *.alerts.yaml by `make docs`. The comments, and how to change a threshold, are there.
# A Prometheus object takes it up by its ruleSelector: add the label that yours asks for, such as `release`.
"""


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as they were written."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def render() -> str:
    """Answer deploy/prometheusrule.yaml."""
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "fgpu-exporter",
            "namespace": "fgpu-exporter",
            "labels": {"app.kubernetes.io/name": "fgpu-exporter"},
        },
        "spec": {"groups": [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]},
    }
    return _HEAD + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=140)


def main() -> None:
    """Write the manifest."""
    MANIFEST.write_text(render())


if __name__ == "__main__":
    main()
