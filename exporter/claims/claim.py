"""What a sharing system says a container or a pod may use on one GPU.

A sharing system is a `System`: a name (the label value `system`) and a resolver. The resolver is made once for each snapshot from
the `Node`, so that it can build its indexes once, and is then asked for each pod. It is pure. It answers nothing (not mine), claims
and allocations, or errors (mine, but unreadable). What cannot be read is an error, never a guess, and costs that contract only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.claims.quantity import shown
from exporter.snapshot import Devices, Gpu, NodeFacts, Pod, PodAllocation, ResourceClaim, SliceDevice

MIB = 1 << 20

_OPERAND_CHARACTERS = 80


class Scope(StrEnum):
    """Whom a claim limits: the pod as a whole, one container, or each client process of a container."""

    POD = "pod"
    CONTAINER = "container"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of a sentence, put together when someone reads it: most claims are never explained."""

    template: str
    """As `str.format` reads it. Constant: what stands in a pod goes into the operands."""
    operands: tuple[str | float, ...] = ()
    """Numbers, and texts, which are quoted and cut: authors of pods write them."""

    def __str__(self) -> str:
        return self.template.format(
            *(shown(each, _OPERAND_CHARACTERS) if isinstance(each, str) else _number(each) for each in self.operands)
        )


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """What a claim was read from and how its amounts follow, written where they are computed.

    A phrase of an amount begins with the arithmetic, and a remark follows in parentheses. Where the amount cannot be known it says why.
    """

    contract: Phrase
    memory: Phrase | None = None
    """None: the system says nothing of memory."""
    compute: Phrase | None = None
    """None: the system says nothing of compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one sharing system says may be used on one GPU."""

    system: str
    gpu_uuid: str
    container: str
    """The container's name; empty for a pod-scoped claim."""
    scope: Scope
    memory_bytes: int | None = None
    """None: the system claims no memory here, or the amount cannot be known."""
    compute_ratio: float | None = None
    enforced: bool
    """Whether something on the node makes it a wall; otherwise it is a promise."""
    shares: int = 1
    """How many replicas of the GPU it stands for."""
    compute_unlimited: bool = False
    """The contract says in so many words that compute is not limited (HAMi cores 0 or 100)."""
    supersedes: frozenset[str] = frozenset()
    """Systems whose memory claim on the same container and GPU this one replaces in the limit; both stay visible."""
    derivation: Derivation | None = field(default=None, compare=False, repr=False)
    """Equal claims may have been read from different places."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A GPU that a container was handed, whether or not an amount goes with it."""

    container: str
    """The container's name; empty where the whole pod was handed the GPU."""
    gpu_uuid: str
    derivation: Derivation | None = field(default=None, compare=False, repr=False)
    """Of an allocation without a claim: what it was read from, and why no amount goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a system says of one pod; an empty answer is "not mine"."""

    claims: tuple[Claim, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    """GPUs held beyond those that the claims name; a claim is an allocation too."""
    errors: tuple[str, ...] = ()
    """One sentence for each unreadable contract: the key, what stands there (cut to a sane length), what was expected."""
    not_placed: bool = False
    """The contract is sound but no GPU is known yet: no claim, no error, nothing to judge."""
    plumbing: bool = False
    """The pod is a part of the sharing system itself: it holds no claim and is never flagged."""
    holds_despite_errors: bool = False
    """The errors are about a later edit of a contract that was readable before, and what it said then is all told here."""


NOT_MINE = Answer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a system may know of the node."""

    facts: NodeFacts | None
    """None: the Node object was never read."""
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """By uuid: devices and MIG devices that NVML lists, and those it listed before (static facts are remembered)."""
    pods: tuple[Pod, ...] = ()
    """All pods of the node, in no particular order."""
    allocations: Mapping[tuple[str, str], PodAllocation] = field(default_factory=dict)
    """(namespace, pod name) -> what the kubelet lists; empty while the kubelet was never read."""
    allocatable: tuple[Devices, ...] = ()
    """The kubelet's GetAllocatableResources; empty where unknown."""
    slice_devices: tuple[SliceDevice, ...] = ()
    resource_claims: tuple[ResourceClaim, ...] = ()
    kai_reservation_namespaces: frozenset[str] = frozenset({"kai-resource-reservation", "runai-reservation"})
    system_namespaces: frozenset[str] = frozenset()

    @property
    def labels(self) -> Mapping[str, str]:
        """The Node object's labels; none while it is unknown."""
        return self.facts.labels if self.facts else {}

    @property
    def gpus_by_minor(self) -> Mapping[int, Gpu]:
        """N of /dev/nvidiaN -> the device; MIG devices have none of their own. Contracts that write an index mean this one."""
        return {gpu.minor: gpu for gpu in self.gpus.values() if gpu.parent_gpu_uuid is None and gpu.minor is not None}


Resolver = Callable[[Pod], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A sharing system: an entry of SYSTEMS."""

    name: str
    resolver: Callable[[Node], Resolver]
    """Makes the function that answers for each pod of that node. It is not asked for pods that have ended."""
    places_by_annotation: Callable[[Pod], bool] = lambda _pod: False
    """Whether this system placed the pod by annotation, so that the kubelet's device ids for it are no placement
    (HAMi, Volcano, Aliyun, Koordinator). Other systems are then shown no kubelet devices for the pod."""
    author_writable: bool = False
    """Whether the pod's author can write the contract: its first readable form is then pinned (exporter.report)."""
