"""The flags. Nothing else reads the command line or the environment.

Every flag can also be set by an environment variable: `--breach-hold-seconds` by FGPU_BREACH_HOLD_SECONDS. The command line wins.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from exporter import __version__
from exporter.commands import COMMANDS
from exporter.duration import parse_duration

DEFAULT_SYSTEM_NAMESPACES = (
    "kube-system",
    "gpu-operator",
    "nvidia-gpu-operator",
    "nvidia-device-plugin",
    "nvidia-dra-driver-gpu",
)
DEFAULT_KAI_RESERVATION_NAMESPACES = ("kai-resource-reservation", "runai-reservation")


class ConfigError(Exception):
    """A flag or variable that cannot be used. The text is one line: which, what stood there, what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the operator set."""

    node_name: str | None
    listen_address: str
    port: int
    web_config_file: Path | None
    sample_interval_seconds: float
    utilization_window_seconds: float
    compute_window_seconds: float
    breach_hold_seconds: float
    identity_ttl_seconds: float
    kai_reservation_namespaces: tuple[str, ...]
    system_namespaces: tuple[str, ...]
    max_series: int
    kubelet_socket: Path
    pod_source: str
    kubelet_pods_socket: Path
    proc_path: Path
    host_path: Path | None
    kubeconfig: Path | None
    dra: bool
    kubernetes_events: bool
    log_level: str
    scenario: Path | None
    demo: bool
    once: bool
    at_seconds: float | None


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: a row of the table that the parser and the docs are made from."""

    name: str
    parse: Callable[[str], Any]
    expected: str
    help: str
    default: Any = None


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:  # noqa: PLR2004 - TCP
        raise ValueError(text)
    return value


def _count_of_series(text: str) -> int:
    value = int(text)
    if not 100 <= value <= 10_000_000:  # noqa: PLR2004 - the row says it
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if any(not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) for name in names):
        raise ValueError(text)
    return names


def _switch(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False, "": False}[text.lower()]


def _level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError(text)
    return text.lower()


def _existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ValueError(text)
    return path


def _pod_source(text: str) -> str:
    if text not in ("kubernetes", "kubelet", "auto"):
        raise ValueError(text)
    return text


FLAGS: tuple[Flag, ...] = (
    Flag("node-name", str, "a name", "Kubernetes name of this node; without it NODE_NAME of the environment is taken."),
    Flag("listen-address", str, "an IP address", "Address to listen on; `::` is every address, of IPv4 too.", default="::"),
    Flag("port", _port, "a number from 0 to 65535", "TCP port to listen on; 0 lets the system choose.", default=9844),
    Flag("web-config-file", Path, "a file", "TLS and basic authentication, in the format that Prometheus exporters share."),
    Flag(
        "sample-interval-seconds",
        _seconds(0.5, 60),
        "a number from 0.5 to 60",
        "How often the node is sampled. The driver keeps about 10 s of utilization: an interval above 9 s loses some.",
        default=5.0,
    ),
    Flag(
        "utilization-window-seconds",
        _seconds(1, 3600),
        "a number from 1 to 3600",
        "What the utilization gauges are the mean of.",
        default=15.0,
    ),
    Flag(
        "compute-window-seconds",
        _seconds(1, 3600),
        "a number from 1 to 3600",
        "Compute limits are judged on the mean over this.",
        default=60.0,
    ),
    Flag(
        "breach-hold-seconds",
        _seconds(0, 3600),
        "a number from 0 to 3600",
        "How long use must be above a memory limit to be a breach, and below to end it.",
        default=10.0,
    ),
    Flag(
        "identity-ttl-seconds",
        _seconds(0, 86400),
        "a number from 0 to 86400",
        "How long pods and allocations are remembered while the API server or the kubelet does not answer.",
        default=600.0,
    ),
    Flag(
        "kai-reservation-namespaces",
        _names,
        "names of namespaces, separated by commas",
        "Namespaces in which KAI's reservation pods are believed.",
        default=DEFAULT_KAI_RESERVATION_NAMESPACES,
    ),
    Flag(
        "system-namespaces",
        _names,
        "names of namespaces, separated by commas",
        "Pods of these are never flagged for using a GPU that no one gave them; KAI's reservation namespaces are always among them.",
        default=DEFAULT_SYSTEM_NAMESPACES,
    ),
    Flag(
        "max-series",
        _count_of_series,
        "a number from 100 to 10000000",
        "Most series about the node that are given; beyond it whole pods are left out, those with little memory in use first.",
        default=20_000,
    ),
    Flag(
        "kubelet-socket",
        Path,
        "a path",
        "The kubelet's pod-resources socket. Mount its directory: the socket is made anew when the kubelet starts.",
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
    ),
    Flag(
        "pod-source",
        _pod_source,
        "kubernetes, kubelet or auto",
        "Who tells the pods: the API server; the kubelet's Pods API alone, without the Node object and its labels; or the API server, and "
        "the kubelet while that does not answer.",
        default="kubernetes",
    ),
    Flag(
        "kubelet-pods-socket",
        Path,
        "a path",
        "The socket of the kubelet's Pods API (feature gate PodsAPI). Mount its directory.",
        default=Path("/var/lib/kubelet/pods-api/pods-api.sock"),
    ),
    Flag("proc-path", Path, "a folder", "The host's proc file system.", default=Path("/proc")),
    Flag(
        "host-path",
        Path,
        "a folder",
        "Where the host's file system is mounted: what HAMi-core itself counts is read below it. Without it that is not read.",
    ),
    Flag("kubeconfig", _existing_file, "a file that is there", "How to reach the API server from outside of a cluster."),
    Flag("dra", _switch, "true or false", "Read ResourceSlices and ResourceClaims (needs RBAC on resource.k8s.io).", default=False),
    Flag(
        "kubernetes-events",
        _switch,
        "true or false",
        "Tell a pod's owner of breaches by Kubernetes Events on the pod (needs RBAC on events).",
        default=False,
    ),
    Flag("log-level", _level, "debug, info, warning or error", "What is logged, to standard error.", default="info"),
    Flag("scenario", Path, "a file", "Run on a simulated node from this scenario file."),
    Flag("demo", _switch, "true or false", "Run on the built-in simulated node.", default=False),
    Flag("once", _switch, "true or false", "Print one exposition to standard output and exit.", default=False),
    Flag("at", parse_duration, "a time like 90s, 5m or 1h", "With --once and --scenario or --demo: the moment of the timeline to print."),
)

_FIELDS = {"at": "at_seconds"}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help says which flags and commands there are")


# Kubernetes sets FGPU_PORT=tcp://10.96.1.2:9844 in every pod beside a Service called fgpu, and more that begins with FGPU_.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE_LINK_NAME = re.compile(r"FGPU_(.*_)?(SERVICE_HOST|SERVICE_PORT.*|PORT(_[0-9]+_.*)?)")


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Answer the variables that look like flags and are none, sorted: misspelt ones."""
    known = {_environment_name(flag) for flag in FLAGS}
    candidates = (name for name in environment if name.startswith("FGPU_") and not _SERVICE_LINK_NAME.fullmatch(name))
    return tuple(sorted(name for name in candidates if name not in known))


def _environment_name(flag: Flag) -> str:
    return "FGPU_" + flag.name.upper().replace("-", "_")


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Answer the configuration. Raises ConfigError with one line for a person; `--help` and `--version` end the process."""
    parser = _OneLineParser(
        prog="fgpu-exporter",
        description="Prometheus exporter for shared GPUs: which pod uses how much, how much it was given, and whether it takes more.",
        epilog="Every flag can be set by an environment variable too: --breach-hold-seconds by FGPU_BREACH_HOLD_SECONDS. "
        f"A first argument may be a command for a person instead: {', '.join(sorted(COMMANDS))}; COMMAND --help says more.",
        allow_abbrev=False,
        usage="%(prog)s [flags] | %(prog)s COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"fgpu-exporter {__version__}")
    for flag in FLAGS:
        text = f"{flag.help} Expects {flag.expected}." + (f" Default: {show_default(flag)}" if show_default(flag) else "")
        if flag.parse is _switch:
            parser.add_argument(f"--{flag.name}", nargs="?", const="true", metavar="true|false", help=text)
        else:
            parser.add_argument(f"--{flag.name}", metavar=flag.name.rpartition("-")[2].upper(), help=text)
    given = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {}
    for flag in FLAGS:
        field = _FIELDS.get(flag.name, flag.name.replace("-", "_"))
        values[field] = _value(flag, given[flag.name.replace("-", "_")], environment)
    values["node_name"] = values["node_name"] or environment.get("NODE_NAME") or None
    config = Config(**values)
    _check_together(config)
    return config


def _value(flag: Flag, given: str | None, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - as the row says
    name, text = f"--{flag.name}", given
    if text is None:
        name = _environment_name(flag)
        text = environment.get(name)
        if _SERVICE_LINK.fullmatch(text or ""):
            text = None
    if text is None:
        return flag.default
    try:
        return flag.parse(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{name}: {text[:80]!r} is not {flag.expected}") from error


def _check_together(config: Config) -> None:
    if config.demo and config.scenario:
        raise ConfigError("--demo and --scenario: give one of them, the demo is a scenario")
    if config.at_seconds is not None and not (config.once and (config.scenario or config.demo)):
        raise ConfigError("--at: only together with --once and --scenario (or --demo)")
    if config.pod_source != "kubernetes" and (config.demo or config.scenario):
        raise ConfigError(f"--pod-source {config.pod_source}: the kubelet of a simulated node has no Pods API")
    if config.dra and config.pod_source == "kubelet":
        raise ConfigError("--dra and --pod-source kubelet: ResourceSlices and ResourceClaims are read from the API server alone")
    if config.kubernetes_events and config.pod_source == "kubelet":
        raise ConfigError("--kubernetes-events and --pod-source kubelet: events are written to the API server, which is not spoken to")
    if not config.node_name and not config.demo and not config.scenario:
        raise ConfigError("--node-name: not given, and NODE_NAME is not set; in a pod, set it from the field spec.nodeName")


def show_default(flag: Flag) -> str:
    """Answer a flag's default as it would be written on the command line."""
    if isinstance(flag.default, tuple):
        return ",".join(flag.default)
    if isinstance(flag.default, bool):
        return str(flag.default).lower()
    if isinstance(flag.default, float):
        return f"{flag.default:g}"
    return "" if flag.default is None else str(flag.default)


def config_facts(config: Config) -> dict[str, str]:
    """Answer the labels of config_info: the flags that shape the numbers."""
    return {
        "sample_interval_seconds": f"{config.sample_interval_seconds:g}",
        "utilization_window_seconds": f"{config.utilization_window_seconds:g}",
        "compute_window_seconds": f"{config.compute_window_seconds:g}",
        "breach_hold_seconds": f"{config.breach_hold_seconds:g}",
        "identity_ttl_seconds": f"{config.identity_ttl_seconds:g}",
    }


def fail(message: str) -> int:
    """Say why the program cannot start, in one line, and answer the exit status for that."""
    sys.stderr.write(f"fgpu-exporter: {message}\n")  # in one piece, whoever else writes there
    return 2
