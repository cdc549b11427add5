"""Hypothesis draws schedules: which rule, spelled how, for how many workers, and what goes wrong. A rule's class says itself
what its settings are drawn from (`About.draws`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.core.scripts import Schedule

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES

FAULTS = ("kill", "vanish", "freeze", "restart", "usurp", "newcomer", "poison", "haste", "skip", "keep")


few = st.integers(0, 3)


class Drawn(NamedTuple):
    """One way to draw the settings of a rule."""

    kind: type[Policy]
    number: int
    """Of the entry of `About.draws`."""


def drawn(which: Callable[[type[Policy]], bool]) -> dict[str, Drawn]:
    """Return the ways to draw each of these rules, by a name that begins with the rule's word."""
    return {
        word if number == 0 else f"{word} {number}": Drawn(kind, number)
        for word, kind in RULES.items()
        if which(kind)
        for number in range(len(kind.about.draws(1)))
    }


def _in_shards(kind: type[Policy]) -> bool:
    return issubclass(kind, ServerRule) and kind.scope is not ServerRule.scope


rules = drawn(lambda kind: not _in_shards(kind) and not issubclass(kind, GossipRule))
"""For `World`."""
shard_rules = drawn(_in_shards)
"""For ``shard_world.ShardWorld``."""
gossip_rules = drawn(lambda kind: issubclass(kind, GossipRule))
"""For ``tests/core/gossip/test_ledger.py``."""


@cache
def settings(name: str, workers: int) -> st.SearchStrategy[Policy]:
    """Return a strategy for the rule in a job of so many workers. Made once: hypothesis looks at each new one for a while."""
    kind, number = (rules | shard_rules | gossip_rules)[name]
    values = {setting: st.sampled_from(list(values)) for setting, values in kind.about.draws(workers)[number].items()}
    return st.fixed_dictionaries(values).filter(partial(_accepts, kind)).map(lambda chosen: kind(**chosen))


def chosen(name: str, workers: int, chance: random.Random) -> Policy:
    """Return the rule with settings that ``chance`` draws, for worlds of which everything is drawn from one seed."""
    kind, number = (rules | shard_rules | gossip_rules)[name]
    draws = kind.about.draws(workers)[number]
    while not _accepts(kind, values := {setting: chance.choice(list(choice)) for setting, choice in draws.items()}):
        pass
    return kind(**values)


def _accepts(kind: type[Policy], values: dict[str, Any]) -> bool:
    """Whether the rule can have these settings together."""
    try:
        kind(**values)
    except ConfigurationError:
        return False
    return True


@st.composite
def schedules(draw: st.DrawFn, name: str | Policy, faults: tuple[str, ...] = FAULTS, least_epochs: int = 0) -> Schedule:
    """Small ones: everything fine-grained comes from the seed, so that what is left to shrink is what a person would want shrunk.

    A rule in place of its name is taken as it is, for two to five workers, as many as `About.examples` are for.
    """
    workers = draw(st.integers(1, 6) if isinstance(name, str) else st.integers(2, 5))
    happenings = st.lists(st.tuples(st.sampled_from(faults), st.integers(0, 5), st.integers(0, 40)), max_size=5) if faults else st.just([])
    return Schedule(
        draw(settings(name, workers)) if isinstance(name, str) else name,
        workers,
        seed=draw(st.integers(0, 2**16)),
        iterations=draw(st.integers(1, 5)),
        epochs=draw(st.integers(least_epochs, 3)),
        size=draw(st.integers(1, 40)),
        batch=draw(st.integers(1, 5)),
        prefetch=draw(st.integers(0, 4)),
        barriers=draw(st.sampled_from((0, 0, 1, 2))),
        timeout_s=draw(st.sampled_from((None, 12.0))),
        faults=tuple(draw(happenings)),
    )
