"""Where the Kubernetes API server is, and with what credentials it is asked.

In a pod that is two variables and two files (https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/), read here. Everything
that a kubeconfig can say is the kubernetes package's to read; to load it costs 19 MiB, which a node does not pay.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection

from exporter.sources import SourceError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod's token and the cluster's certificate authority are mounted."""

_KEEPALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """An API server and how it is reached."""

    host: str
    """`https://10.96.0.1:443`."""
    pool: urllib3.PoolManager
    credentials: Callable[[], Mapping[str, str]]
    """Answers the headers that say who asks, read anew because tokens are rotated. Raises SourceError."""


def find_api_server(*, host: str | None = None, kubeconfig: Path | None = None) -> ApiServer:
    """Answer the API server at `host`, else the one that `kubeconfig` names, else that of the cluster this process runs in.

    Raises SourceError where what says so cannot be read.
    """
    if host is not None:
        return ApiServer(host=host, pool=urllib3.PoolManager(socket_options=_KEEPALIVE), credentials=dict)
    if kubeconfig is not None:
        return _of_kubeconfig(kubeconfig)
    return _of_this_cluster()


def _of_this_cluster() -> ApiServer:
    address, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    if not (address and port):
        raise SourceError(
            "the configuration of this pod cannot be used (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set); "
            "outside a cluster set --kubeconfig"
        )
    authority = SERVICE_ACCOUNT / "ca.crt"
    _read(authority, "utf-8")  # whose certificate it is may stand above it, in the owner's letters
    _read_token()
    return ApiServer(
        host=f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}",
        # No proxy of the environment: the address is one of the cluster's own.
        pool=urllib3.PoolManager(socket_options=_KEEPALIVE, ca_certs=str(authority)),
        credentials=lambda: {"Authorization": f"Bearer {_read_token()}"},
    )


def _read_token() -> str:
    path = SERVICE_ACCOUNT / "token"
    token = _read(path)
    if token.split() != [token]:
        raise SourceError(f"the configuration of this pod cannot be used ({path} is no token: it has spaces or several lines)")
    return token


def _read(path: Path, encoding: str = "ascii") -> str:
    try:
        text = path.read_text(encoding).strip()
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the configuration of this pod cannot be used ({error}); the service account must be mounted "
            "(automountServiceAccountToken), outside a cluster set --kubeconfig"
        ) from error
    if not text:
        raise SourceError(f"the configuration of this pod cannot be used ({path} is empty)")
    return text


# The package loads its parts when they are asked for, and each watch asks on a thread of its own.
_loading = threading.Lock()


def _of_kubeconfig(path: Path) -> ApiServer:
    with _loading:
        return _load_kubeconfig(path)


def _load_kubeconfig(path: Path) -> ApiServer:
    import yaml  # noqa: PLC0415 - only who needs it pays for loading it
    from kubernetes.client import ApiClient, Configuration  # noqa: PLC0415
    from kubernetes.config import ConfigException, load_kube_config  # noqa: PLC0415

    configuration = Configuration()
    try:
        load_kube_config(config_file=str(path), client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise SourceError(f"kubeconfig {path} cannot be used ({error})") from error
    configuration.socket_options = _KEEPALIVE

    def credentials() -> Mapping[str, str]:
        try:
            settings: Mapping[str, Any] = configuration.auth_settings()
            return {setting["key"]: setting["value"] for setting in settings.values()}
        except (ConfigException, OSError) as error:
            raise SourceError(f"kubeconfig {path}: the credentials cannot be read ({error})") from error

    return ApiServer(host=configuration.host, pool=ApiClient(configuration).rest_client.pool_manager, credentials=credentials)
