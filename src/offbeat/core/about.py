"""What a rule's class says about itself, as plain data, so that no list elsewhere has to name the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Draws: TypeAlias = Sequence[Mapping[str, Sequence[Any]]]
"""Ways to draw a rule's settings at random: in each, the values that a setting may take; a value that is named twice comes more often.
Combinations that the rule refuses are left out."""


def _no_settings(workers: int) -> Draws:
    """Return the draws of a rule that has no settings."""
    return ({},)


class Row(NamedTuple):
    """A line of README's comparison of the rules, in Markdown."""

    rule: str
    """The spelling, in backquotes; of several rules where one line stands for all."""
    fold: str
    """In words: which contributions become the next version."""
    admit: str
    """In words: which workers may continue."""
    made_for: str


class About(NamedTuple):
    """What tests and documents need to know of a rule. A class with an ``about`` of its own in a module of ``policies/`` is a rule that
    users can spell; its subclasses are not, unless they have one too."""

    examples: tuple[str, ...]
    """Spellings for tests that cannot try all settings: what is worth a simulated and a live run, in a job of three or more workers."""
    draws: Callable[[int], Draws] = _no_settings
    """For a number of workers: the settings of random schedules, each entry of the sequence in schedules of its own."""
    row: Row | None = None
    """None: another rule's line mentions this one."""
