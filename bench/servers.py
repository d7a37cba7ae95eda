"""The kubelet and the API server of a scenario, as a process of their own, so that their cost is not the exporter's.

    python bench/servers.py SCENARIO FOLDER

Prints a line of JSON that says where they are, and serves until standard input ends. With each line on standard input it prints how often
each was asked so far. The API server speaks TLS, as every real one does; its authority's certificate is FOLDER/ca.crt.
"""

import asyncio
import json
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import trustme

from exporter.clock import SystemClock
from exporter.simulation import SimulatedNode, load_scenario
from exporter.simulation.kubelet import SimulatedKubelet
from exporter.simulation.kubernetes import SimulatedApi


def main() -> None:
    """Serve."""
    scenario, folder = Path(sys.argv[1]), Path(sys.argv[2])
    calls: Counter[str] = Counter()
    _count(calls, SimulatedKubelet, "_list", "kubelet List")
    _count(calls, SimulatedKubelet, "_get_allocatable", "kubelet GetAllocatableResources")
    _count(calls, SimulatedApi, "list_objects", "API list")
    _count(calls, SimulatedApi, "open_watch", "API watch")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with SimulatedNode(load_scenario(scenario), SystemClock()) as node:
        # Only a node that is played sends bookmarks.
        threading.Thread(target=node.play, args=(threading.Event(),), daemon=True).start()
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        listening = asyncio.run_coroutine_threadsafe(_serve_tls(context, urlsplit(node.kubernetes_url).port or 0), loop)
        _say({"kubelet_socket": str(node.kubelet_socket), "kubernetes_port": listening.result()})
        for _ in sys.stdin:
            _say(calls)


async def _serve_tls(context: ssl.SSLContext, plain_port: int) -> int:
    """Pass what comes by TLS on to a port of this machine, and what that answers back; answer the port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", plain_port)
        await asyncio.gather(copy(reader, plain_writer), copy(plain_reader, writer))

    server = await asyncio.start_server(converse, "127.0.0.1", 0, ssl=context)
    port: int = server.sockets[0].getsockname()[1]
    return port


def _count(calls: Counter[str], owner: type, method: str, name: str) -> None:
    """Have each call of a method counted."""
    called = getattr(owner, method)

    def counted(*arguments: object) -> object:
        calls[name] += 1
        return called(*arguments)

    setattr(owner, method, counted)


def _say(value: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
