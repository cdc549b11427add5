"""Hypothesis draws schedules: which rule, spelled how, for how many workers, and what goes wrong. A rule's class says itself
what its settings are drawn from (`About.draws`)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from tests.core.scripts import Schedule

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES, AllReduce

FAULTS = ("kill", "vanish", "freeze", "restart", "usurp", "newcomer", "poison", "haste")


few = st.integers(0, 3)
IN_THESE_WORLDS = [
    word
    for word, kind in RULES.items()
    if (issubclass(kind, ServerRule) and kind.scope is ServerRule.scope) or (issubclass(kind, RoundRule) and kind is not AllReduce)
]
"""Gossip and rules of shard scope have worlds of their own; under allreduce torch.distributed does the work."""
rules: dict[str, tuple[type[Policy], int]] = {
    word if number == 0 else f"{word} {number}": (RULES[word], number)
    for word in IN_THESE_WORLDS
    for number in range(len(RULES[word].about.draws(1)))
}
"""By a name that begins with the rule's word: the rule, and which of its draws (`About.draws`)."""


@cache
def settings(name: str, workers: int) -> st.SearchStrategy[Policy]:
    """Return a strategy for the rule in a job of so many workers. Made once: hypothesis looks at each new one for a while."""
    kind, number = rules[name]
    drawn = {setting: st.sampled_from(list(values)) for setting, values in kind.about.draws(workers)[number].items()}
    return st.fixed_dictionaries(drawn).filter(partial(_accepts, kind)).map(lambda values: kind(**values))


def _accepts(kind: type[Policy], values: dict[str, Any]) -> bool:
    """Whether the rule can have these settings together."""
    try:
        kind(**values)
    except ConfigurationError:
        return False
    return True


@st.composite
def schedules(draw: st.DrawFn, name: str, faults: tuple[str, ...] = FAULTS, least_epochs: int = 0) -> Schedule:
    """Small ones: everything fine-grained comes from the seed, so that what is left to shrink is what a person would want shrunk."""
    workers = draw(st.integers(1, 6))
    happenings = st.lists(st.tuples(st.sampled_from(faults), st.integers(0, 5), st.integers(0, 40)), max_size=5) if faults else st.just([])
    return Schedule(
        draw(settings(name, workers)),
        workers,
        seed=draw(st.integers(0, 2**16)),
        iterations=draw(st.integers(1, 5)),
        epochs=draw(st.integers(least_epochs, 3)),
        size=draw(st.integers(1, 40)),
        batch=draw(st.integers(1, 5)),
        prefetch=draw(st.integers(0, 4)),
        timeout_s=draw(st.sampled_from((None, 12.0))),
        faults=tuple(draw(happenings)),
    )
