"""A share of a GPU under MPS: a replica id `GPU-<uuid>::<n>` of NVIDIA's device plugin on a node whose sharing strategy is `mps`.

The plugin's MPS control daemon limits each client process: memory floor(total / replicas) in whole MiB, threads floor(100 / replicas)
percent. That is enforced and does not grow with the replicas that a container holds. The container's own share, memory x replicas held,
is a promise that nothing enforces: three processes may take three times the cap.

A user's CUDA_MPS_PINNED_DEVICE_MEM_LIMIT and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in the pod's spec can only tighten the daemon's.
https://docs.nvidia.com/deploy/mps/ (environment variables)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from exporter.claims.claim import NOT_MINE, Allocation, Answer, Claim, Derivation, Node, Phrase, Resolver, Scope, System
from exporter.claims.device_ids import DeviceIds, Held, held_phrase, is_mps
from exporter.claims.environment import text_of
from exporter.claims.quantity import parse_positive_percent, shown
from exporter.claims.time_slicing import no_share_phrase, share_allocation, share_bytes, share_memory_phrase, told_by
from exporter.snapshot import Pod

MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

# Ten digits of G are below 2^64.
_MEMORY_LIMIT = re.compile(r"([0-9]{1,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,80})=([1-9][0-9]{0,9})([gGmM])[bB]?")
_SHIFTS = {"m": 20, "g": 30}

_DAEMON_CONTAINERS = frozenset({"mps-control-daemon-ctr", "mps-control-daemon"})


def resolver(node: Node) -> Resolver:
    """Answer the function that says what a pod holds of GPUs under MPS."""
    ids = DeviceIds(node)

    def resolve(pod: Pod) -> Answer:
        # Its own word would not make a tenant's pod plumbing: only the namespaces of the cluster's own are believed.
        if pod.namespace in node.system_namespaces and any(container.name in _DAEMON_CONTAINERS for container in pod.containers):
            return Answer(plumbing=True)
        if not is_mps(node):
            return NOT_MINE
        shares = [held for held in ids.held(pod) if held.shares and not held.is_gke and held.gpu.parent_gpu_uuid is None]
        return resolve_clients("mps", pod, [(held, ids.replicas_of(held.gpu)) for held in shares])

    return resolve


def resolve_clients(system: str, pod: Pod, shares: Sequence[tuple[Held, int | None]], *, cap_grows: bool = False) -> Answer:
    """Answer the claims of a pod's containers that hold shares, each with the number of shares that its GPU is cut into.

    `cap_grows`: whether the cap of each process is that of all the shares that its container holds, and not that of one.
    Where that number is unknown, or less than the container holds, there is an allocation without an amount. A variable that cannot be
    read is an error, and what the daemon imposes holds all the same.
    """
    claims: list[Claim] = []
    allocations: list[Allocation] = []
    errors: list[str] = []
    for held, replicas in shares:
        unknown = no_share_phrase(held, replicas)
        allocations.append(share_allocation(held, unknown))
        if replicas is None or unknown is not None:
            continue
        is_only_gpu = sum(other.container is held.container for other, _ in shares) == 1
        user, unreadable = _user_limits(pod, held, is_only_gpu=is_only_gpu)
        errors += unreadable
        claims += _client_claims(system, held, replicas, user, in_cap=held.shares if cap_grows else 1)
    return Answer(
        claims=tuple(claims),
        allocations=tuple(allocations),
        errors=tuple(dict.fromkeys(errors)),
    )


@dataclass(frozen=True, slots=True)
class _UserLimits:
    """What a container's own environment allows each client process; None: what the daemon does."""

    memory_bytes: int | None = None
    threads_ratio: float | None = None


def _client_claims(system: str, held: Held, replicas: int, user: _UserLimits, *, in_cap: int) -> tuple[Claim, Claim]:
    """Answer the cap of each client process, which stands for `in_cap` shares, and the share of the container."""
    total = held.gpu.memory_total_bytes
    cap = None if total is None else share_bytes(total * in_cap, replicas)
    times = held.shares // in_cap
    contract = held_phrase(held)
    of_cap = share_memory_phrase(held, replicas, in_cap, 1)
    of_threads = Phrase(f"floor(100 x {{}} / {{}}) / 100 (percent of the threads over its shares, {told_by(held)})", (in_cap, replicas))
    process = Claim(
        system=system,
        gpu_uuid=held.gpu.gpu_uuid,
        container=held.container.name,
        scope=Scope.PROCESS,
        memory_bytes=min((amount for amount in (cap, user.memory_bytes) if amount is not None), default=None),
        compute_ratio=min(ratio for ratio in (100 * in_cap // replicas / 100, user.threads_ratio) if ratio is not None),
        enforced=True,
        shares=held.shares,
        derivation=Derivation(
            contract=contract,
            memory=_least(of_cap, cap, user.memory_bytes, "{} bytes", MEMORY_VARIABLE),
            compute=_least(of_threads, 0.0, user.threads_ratio, "{}", THREADS_VARIABLE),
        ),
    )
    container = Claim(
        system=system,
        gpu_uuid=held.gpu.gpu_uuid,
        container=held.container.name,
        scope=Scope.CONTAINER,
        memory_bytes=None if cap is None else cap * times,
        enforced=False,
        shares=held.shares,
        derivation=Derivation(contract=contract, memory=share_memory_phrase(held, replicas, in_cap, times)),
    )
    return process, container


def _least(of_daemon: Phrase, daemon: float | None, user: float | None, template: str, variable: str) -> Phrase:
    """Answer how the lower of the daemon's limit and the user's own follows."""
    if user is None:
        return of_daemon
    own = f"(the latter by the container's variable {variable})"
    if daemon is None:
        return Phrase(f"{template} (by the container's variable {variable})", (user,))
    return Phrase(f"min({of_daemon.template.partition(' (')[0]}, {template}) {own}", (*of_daemon.operands, user))


def _user_limits(pod: Pod, held: Held, *, is_only_gpu: bool) -> tuple[_UserLimits, list[str]]:
    memory_bytes, threads_ratio = None, None
    errors = []
    memory, threads = text_of(pod, held.container, MEMORY_VARIABLE), text_of(pod, held.container, THREADS_VARIABLE)
    try:
        memory_bytes = _parse_memory_limit(memory, held.gpu.gpu_uuid, is_only_gpu=is_only_gpu) if memory else None
    except ValueError as error:
        errors.append(f"container {held.container.name}: {MEMORY_VARIABLE}: {error}")
    try:
        threads_ratio = parse_positive_percent(threads) / 100 if threads else None
    except ValueError as error:
        errors.append(f"container {held.container.name}: {THREADS_VARIABLE}: {error}")
    return _UserLimits(memory_bytes, threads_ratio), errors


def _parse_memory_limit(text: str, gpu_uuid: str, *, is_only_gpu: bool) -> int | None:
    """Answer the limit for one GPU out of `0=2G,GPU-...=512MB`; None where it is not among them. Raises ValueError.

    A number counts the container's own devices. With more than one GPU their order is not known here, so a number then says nothing.
    """
    limits = []
    for entry in text.split(","):
        match = _MEMORY_LIMIT.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"{shown(text)} is no list like 0=2G,1=512MB")
        if match[1] == gpu_uuid or (is_only_gpu and match[1] == "0"):
            limits.append(int(match[2]) << _SHIFTS[match[3].lower()])
    return min(limits, default=None)


SYSTEM = System(name="mps", resolver=resolver)
