"""Hypothesis draws schedules: which rule, spelled how, for how many workers, and what goes wrong. A new rule is a new line in `rules`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from hypothesis import strategies as st
from tests.core.scripts import Schedule

from offbeat.policies import rule

FAULTS = ("kill", "vanish", "freeze", "restart", "usurp", "newcomer", "poison", "haste")


def spelled(pattern: str, **settings: st.SearchStrategy[object]) -> st.SearchStrategy[str]:
    """Spellings like ``ssp(staleness={staleness})`` with its settings drawn."""
    return st.fixed_dictionaries(settings).map(pattern.format_map)


few = st.integers(0, 3)
some = st.integers(1, 4)
grace = st.sampled_from((0.5, 1.0, 3.0, "inf"))
averaged = "elastic(R={R}, grace={grace}, history={history}, monitor={monitor}, mode={mode}, weighting={weighting}, objective={objective})"
ways = {
    "grace": grace,
    "history": some,
    "monitor": few,
    "weighting": st.sampled_from(("gradients", "workers")),
    "objective": st.sampled_from(("range", "sum")),
}
obsolete = st.sampled_from(("push_and_wait", "pull_and_wait", "push_and_interrupt"))
rates = st.sampled_from(("constant", "proportional"))
dynamic = "{word}(k_min={k}, obsolete={o}, lr_rule={lr}, warm_up=1, {rest})"
norms = ("history=2", "smoothness=auto", "smoothness=3.0, beta=None, censored=True")
combined = st.sampled_from(("mean", "samples", "median"))
rounds = {"s": st.sampled_from((None, 1, 2, 5)), "d": st.sampled_from(("replay", "latest"))}
shared = st.sampled_from(("none", "affine", "inverse"))
apart = "ensemble(per_epoch={p}, overlap={o}, budget={b}, reallocate={r}, combine={c})"
rules: dict[str, Callable[[int], st.SearchStrategy[str]]] = {
    "bsp": lambda n: st.just("bsp"),
    "asp": lambda n: spelled("asp(discount={d})", d=st.sampled_from(("none", "inverse", "sqrt"))),
    "ssp": lambda n: spelled("ssp(staleness={s})", s=few),
    "dssp": lambda n: spelled("dssp(lower={s[0]}, upper={s[1]})", s=st.tuples(few, few).map(lambda s: (s[0], s[0] + s[1]))),
    "backup": lambda n: spelled("backup(b={b}, obsolete={o}, lr_rule={lr})", b=st.integers(0, n - 1), o=obsolete, lr=rates),
    "ringmaster": lambda n: spelled("ringmaster(threshold={t})", t=st.integers(1, 2 * n)),
    "rennala": lambda n: spelled("rennala(batch={b})", b=st.integers(1, 2 * n)),
    "elastic": lambda n: spelled("elastic(R={R}, grace={grace}, history={h}, monitor={m})", R=some, grace=grace, h=some, m=few),
    "elastic bulk": lambda n: spelled(averaged, R=some, mode=st.just("bulk"), **ways),
    "elastic local": lambda n: spelled(averaged, R=some, mode=st.just("local"), **ways),
    "dbw": lambda n: spelled(dynamic, word=st.just("dbw"), k=st.integers(1, n), o=obsolete, lr=rates, rest=st.sampled_from(norms)),
    "b_dbw": lambda n: spelled(dynamic, word=st.just("b_dbw"), k=st.integers(1, n), o=obsolete, lr=rates, rest=st.just("beta=1.01")),
    "solo": lambda n: spelled("solo(staleness={s}, delivery={d})", **rounds),
    "majority": lambda n: spelled("majority(staleness={s}, delivery={d})", **rounds),
    "first_of": lambda n: spelled("first_of(m={m}, staleness={s})", m=st.integers(1, n), **rounds),
    "all_of": lambda n: spelled("all_of(m={m}, staleness={s})", m=st.integers(1, n), **rounds),
    "quorum": lambda n: spelled("quorum(q={q}, staleness={s})", q=st.integers(1, n), **rounds),
    "full": lambda n: st.just("full"),
    "ensemble": lambda n: spelled("ensemble(steps={s}, combine={c}, adapt_period={a})", s=some, c=combined, a=st.booleans()),
    "ensemble splits": lambda n: spelled(apart, p=some, o=st.sampled_from((0.0, 0.5, 1.0)), b=st.integers(n, 12), r=shared, c=combined),
}
"""By a name that begins with the rule's word: how the rule may be spelled in a job of n workers."""


@cache
def spellings(name: str, workers: int) -> st.SearchStrategy[str]:
    """Made once: hypothesis looks at each new strategy for a while before it draws from it."""
    return rules[name](workers)


@st.composite
def schedules(draw: st.DrawFn, name: str, faults: tuple[str, ...] = FAULTS, least_epochs: int = 0) -> Schedule:
    """Small ones: everything fine-grained comes from the seed, so that what is left to shrink is what a person would want shrunk."""
    workers = draw(st.integers(1, 6))
    happenings = st.lists(st.tuples(st.sampled_from(faults), st.integers(0, 5), st.integers(0, 40)), max_size=5) if faults else st.just([])
    return Schedule(
        rule(draw(spellings(name, workers))),
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
