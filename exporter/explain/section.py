"""Sentences that belong together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    sentences: tuple[str, ...]
