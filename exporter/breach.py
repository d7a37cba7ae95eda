"""Whether a pod or container takes more than its limit, over time. Pure: state in, state out.

A breach is not one look above a limit. It begins when use has been above for the hold, and ends when it has been below as long:

    WITHIN --above--> RISING --above for the hold--> EXCEEDED --below--> FALLING --below for the hold--> WITHIN
                      RISING --below--> WITHIN       FALLING --above--> EXCEEDED

The hold counts from the first look above (or below), and is reached at >=. The flag is up in EXCEEDED and FALLING. What is unknown
moves nothing: time that ends in an unknown look, or begins with one, counts neither toward a hold nor as time in breach. Without a
limit there is nothing to exceed. With a hold of 0 a breach begins and ends at once.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Verdict(Enum):
    """What one look says."""

    ABOVE = auto()
    BELOW = auto()
    UNKNOWN = auto()
    """Use or limit cannot be known now."""
    NO_LIMIT = auto()
    """There is no limit."""

    __hash__ = object.__hash__  # Enum's own is a function of Python, and each look looks a transition up


class State(Enum):
    """Where a breach stands."""

    WITHIN = auto()
    RISING = auto()
    EXCEEDED = auto()
    FALLING = auto()

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Verdict], State] = {
    (State.WITHIN, Verdict.ABOVE): State.RISING,
    (State.WITHIN, Verdict.BELOW): State.WITHIN,
    (State.WITHIN, Verdict.UNKNOWN): State.WITHIN,
    (State.WITHIN, Verdict.NO_LIMIT): State.WITHIN,
    (State.RISING, Verdict.ABOVE): State.RISING,
    (State.RISING, Verdict.BELOW): State.WITHIN,
    (State.RISING, Verdict.UNKNOWN): State.RISING,
    (State.RISING, Verdict.NO_LIMIT): State.WITHIN,
    (State.EXCEEDED, Verdict.ABOVE): State.EXCEEDED,
    (State.EXCEEDED, Verdict.BELOW): State.FALLING,
    (State.EXCEEDED, Verdict.UNKNOWN): State.EXCEEDED,
    (State.EXCEEDED, Verdict.NO_LIMIT): State.WITHIN,
    (State.FALLING, Verdict.ABOVE): State.EXCEEDED,
    (State.FALLING, Verdict.BELOW): State.FALLING,
    (State.FALLING, Verdict.UNKNOWN): State.FALLING,
    (State.FALLING, Verdict.NO_LIMIT): State.WITHIN,
}

WHEN_HELD: dict[State, State] = {State.RISING: State.EXCEEDED, State.FALLING: State.WITHIN}

_FLAG_UP = (State.EXCEEDED, State.FALLING)
_KNOWN = (Verdict.ABOVE, Verdict.BELOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """The history of one limit of one pod or container."""

    state: State = State.WITHIN
    verdict: Verdict = Verdict.UNKNOWN
    """Of the last look."""
    looked_at_seconds: float = 0.0
    """Monotonic time of the last look."""
    held_seconds: float = 0.0
    """How long RISING or FALLING has lasted."""
    since_seconds: float | None = None
    """Wall clock of the first look above of the present breach; None in WITHIN."""
    exceeded_seconds_total: float = 0.0
    breaches_total: int = 0

    @property
    def is_on(self) -> bool:
        """Whether a breach is going on, seen or frozen."""
        return self.state in _FLAG_UP

    @property
    def exceeded(self) -> bool | None:
        """Whether the limit counts as exceeded now; None while that is unknown or there is no limit."""
        return self.state in _FLAG_UP if self.verdict in _KNOWN else None


def step(breach: Breach, verdict: Verdict, *, time_seconds: float, monotonic_seconds: float, hold_seconds: float) -> Breach:
    """Answer the breach after one more look at this wall-clock and monotonic time."""
    known_seconds = 0.0
    if verdict in _KNOWN and breach.verdict in _KNOWN:
        known_seconds = max(0.0, monotonic_seconds - breach.looked_at_seconds)
    state = TRANSITIONS[breach.state, verdict]
    held_seconds = breach.held_seconds + known_seconds if state is breach.state else 0.0
    if state in WHEN_HELD and verdict in _KNOWN and held_seconds >= hold_seconds:
        state, held_seconds = WHEN_HELD[state], 0.0
    begins = state in _FLAG_UP and breach.state not in _FLAG_UP
    since_seconds = breach.since_seconds if breach.since_seconds is not None else time_seconds
    return Breach(
        state=state,
        verdict=verdict,
        looked_at_seconds=monotonic_seconds,
        held_seconds=held_seconds,
        since_seconds=None if state is State.WITHIN else since_seconds,
        exceeded_seconds_total=breach.exceeded_seconds_total + (known_seconds if breach.state in _FLAG_UP else 0.0),
        breaches_total=breach.breaches_total + begins,
    )
