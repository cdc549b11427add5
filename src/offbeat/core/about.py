"""Define the facts that a rule's class states about itself, as plain data, so that no list elsewhere has to name the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Draws: TypeAlias = Sequence[Mapping[str, Sequence[Any]]]
"""Ways to draw a rule's settings at random. Each maps the name of a setting to the values that it may take; a value that is listed twice
is drawn twice as often. Combinations that the rule refuses are left out."""


def _no_settings(workers: int) -> Draws:
    """Return the draws of a rule that has no settings."""
    return ({},)


class Row(NamedTuple):
    """Hold the cells of a line of the comparison of the rules in docs/choosing.md, in Markdown."""

    rule: str
    """The spelling, in backquotes; several spellings where one line describes several rules."""
    fold: str
    """In words: which contributions become the next version."""
    admit: str
    """In words: which workers may continue."""
    made_for: str
    """In words: the cluster or the data for which the rule was made."""


class About(NamedTuple):
    """Hold the facts about a rule that tests and documents need.

    A class in a module of ``policies/`` that defines ``about`` is a rule that users can spell. A subclass is one only if it defines its
    own.
    """

    examples: tuple[str, ...]
    """Spellings for tests that cannot try all settings: each gets a simulated and a live run, in a job of three or more workers."""
    draws: Callable[[int], Draws] = _no_settings
    """Returns, for a number of workers, the ways to draw settings for random schedules; tests try each way separately."""
    row: Row | None = None
    """The rule's line of the comparison; None: another rule's line describes this one too."""
