"""List the rules that an advice compares, each with settings that suit the number of workers and servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES, rule

SETTINGS: Final[dict[str, Callable[[int, int], tuple[str, ...]]]] = {
    "auto": lambda workers, servers: (),
    "backup": lambda workers, servers: tuple(f"backup(b={b})" for b in sorted({1, workers // 4}) if 0 < b < workers),
    "ssp": lambda workers, servers: ("ssp(staleness=3)",),
    "ringmaster": lambda workers, servers: (f"ringmaster(threshold={2 * workers})",),
    "rennala": lambda workers, servers: (f"rennala(batch={workers})",),
    "psp": lambda workers, servers: () if servers < 2 else (f"psp(c={max(1, 3 * workers // 4)}, b=0.75)",),
    "elastic": lambda workers, servers: ("elastic", "elastic(mode=local)"),
    "ensemble": lambda workers, servers: ("ensemble(steps=10)",),
    "diloco": lambda workers, servers: () if servers < 2 else (f"diloco(steps={10 * servers}, delay=5)",),
    "decoupled": lambda workers, servers: (f"decoupled(steps={10 * servers}, quorum={max(1, workers // 2)})",),
    "first_of": lambda workers, servers: (f"first_of(m={max(1, workers // 2)})",),
    "all_of": lambda workers, servers: (f"all_of(m={max(1, workers // 2)})",),
    "quorum": lambda workers, servers: (f"quorum(q={max(1, 3 * workers // 4)})",),
    "dbw": lambda workers, servers: (),
    "full": lambda workers, servers: (),
}
"""By rule: its spellings. Other rules have their defaults. `dbw` decides as `b_dbw` without gradients; `full` is `bsp` without servers;
`auto` chooses among the others."""


def considered(workers: int, servers: int, own: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the rules to compare with the rule that ran, ``own``, which is not among them: those that are asked for, ``more``, first.

    >>> [name for name in considered(4, 1, "bsp") if name.startswith(("b", "r", "q"))]
    ['b_dbw', 'backup(b=1)', 'rennala(batch=4)', 'ringmaster(threshold=8)', 'quorum(q=3)']
    """
    names = sorted(RULES, key=lambda name: (RULES[name].family != "server", name))
    spelled = [spec for name in names for spec in SETTINGS.get(name, lambda workers, servers, name=name: (name,))(workers, servers)]
    known = [_known(own)]
    found = []
    for spec in (*more, *spelled):
        policy = rule(spec)
        if policy in known:
            continue
        known.append(policy)
        try:
            policy.check(workers)
        except ConfigurationError:
            continue  # for another number of workers
        found.append(spec)
    return tuple(found)


def _known(spec: str) -> Policy | None:
    try:
        return rule(spec)
    except ConfigurationError:
        return None  # of another version of offbeat
