"""Plan the faults of one job after another, so that those of all jobs together have the shares that were asked for. Pure.

What chance gives differs from job to job, and a server can only die under a rule whose jobs outlive it. So each job gets what its rule can
take of what the jobs before it still owe; what a job could not do (nobody was there to be hit) is owed again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from offbeat.core.policy import ServerRule
from offbeat.policies import RULES, rule

SHARES = {"worker": 0.50, "server": 0.20, "freeze": 0.15, "cut": 0.10, "other": 0.05}
"""``worker``, ``server``: one is killed. ``freeze``: one is stopped and goes on. ``cut``: the links of a host. ``other``: `OTHERS`."""
DEATHS = {"worker": 0.70, "server": 0.30}
"""The shares where processes are killed, and nothing else happens."""
OTHERS = ("slow:worker", "term:worker", "slow:worker", "kill:supervisor", "slow:worker", "term:worker", "slow:worker", "disk:journal")
"""In turn."""
ENDING = ("kill:supervisor", "disk:journal")
FROZEN = 6
"""Most freezes in a job with servers: each lasts for 2 s on average, and more would leave nobody to train."""
RANKS_FROZEN = 2
"""Most freezes in a job without servers: half of them outlast the timeout, and the parameters go with the last rank that is there."""
SERVERS_FROZEN = 0.25
"""The part of the freezes that hit a server, where one may be hit."""
RULES_OF_TURN = [kind.about.examples[0] for kind in RULES.values()]
"""Every rule with its first example of settings."""
CUT_RULES = ("bsp", "ssp(staleness=3)", "dbw", "majority")
CUT_FAULTS, CUTS = 16, 11
"""Faults of a job on two hosts, and how many of these are cuts."""
CUT_MTBF = 2.5
"""Times the mean between two faults of other jobs: a cut lasts for 1.8 s on average, and while it lasts no other can begin."""


class Job(NamedTuple):
    """One job to come."""

    number: int
    sync: str
    hosts: int
    plan: dict[str, int]
    """How many faults of each ``kind:target``."""


def group_of(fault: str) -> str:
    """Return the group of a ``kind:target``."""
    kind, _, target = fault.partition(":")
    if kind in ("stop", "cut"):
        return {"stop": "freeze", "cut": "cut"}[kind]
    return target if kind == "kill" and target in ("worker", "server") else "other"


def grouped(faults: Mapping[str, int]) -> Counter[str]:
    """Return how many faults of each group these are."""
    found: Counter[str] = Counter()
    for fault, number in faults.items():
        found[group_of(fault)] += number
    return found


def following(
    seed: int,
    before: Iterable[tuple[str, int]],
    done: Mapping[str, int],
    *,
    rules: list[str],
    faults: int,
    cuts: bool,
    wanted: Mapping[str, float] = SHARES,
) -> Job:
    """Return the next job.

    Args:
        seed: of all draws.
        before: rules and numbers of hosts of the jobs so far.
        done: how many faults of each ``kind:target`` have happened in them.
        rules: that have their turn.
        faults: of a job on one host.
        cuts: True if jobs on two hosts are possible.
        wanted: the shares, by group.
    """
    earlier = list(before)
    number = len(earlier)
    draw = random.Random(f"{seed} {number}")
    groups = grouped(done)
    owed_cuts = SHARES["cut"] * (groups.total() + CUT_FAULTS) - groups["cut"]
    if cuts and owed_cuts >= CUTS - 1:
        on_two = sum(hosts == 2 for _, hosts in earlier)
        return Job(number, CUT_RULES[on_two % len(CUT_RULES)], 2, {"cut:link": CUTS, "kill:worker": CUT_FAULTS - CUTS})
    sync = rules[sum(hosts == 1 for _, hosts in earlier) % len(rules)]
    owed = {group: share * (groups.total() + faults) - groups[group] for group, share in wanted.items() if group != "cut"}
    frozen = FROZEN if isinstance(rule(sync), ServerRule) else RANKS_FROZEN
    limits = {"server": faults // 2, "freeze": frozen, "other": 4}
    given: Counter[str] = Counter()
    for _ in range(faults):
        able = [group for group in owed if given[group] < limits.get(group, faults)]
        most = max(able, key=lambda group: owed[group] - given[group])
        given[most] += 1
    return Job(number, sync, 1, _cells(draw, given, sum(n for fault, n in done.items() if group_of(fault) == "other")))


def _cells(draw: random.Random, given: Mapping[str, int], others: int) -> dict[str, int]:
    """Return kinds and targets of so many faults of each group."""
    plan: Counter[str] = Counter({"kill:worker": given["worker"], "kill:server": given["server"]})
    for _ in range(given["freeze"]):
        plan["stop:server" if draw.random() < SERVERS_FROZEN else "stop:worker"] += 1
    ends = False
    for place in range(others, others + given["other"]):
        fault = OTHERS[place % len(OTHERS)]
        if (fault in ENDING and ends) or (fault == "term:worker" and plan[fault]):
            fault = "slow:worker"  # a job ends once, and needs two workers that may die
        ends = ends or fault in ENDING
        plan[fault] += 1
    return {fault: number for fault, number in plan.items() if number}
