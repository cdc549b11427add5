"""Draw the faults of a run from a seed: kinds, targets, times and lengths. Pure: the same arguments give the same faults.

A fault is named by its kind and what it hits, such as ``kill:worker``.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

KINDS: Final = ("kill", "stop", "term", "slow", "cut", "disk")
TARGETS: Final = ("worker", "server", "standby", "supervisor", "agent", "forkserver")
ALONE: Final = {"cut": ("link",), "disk": ("journal",)}
"""Kinds of faults that hit no process, and what they hit."""
DEADLY: Final = ("kill", "term")
"""Kinds of which nothing is undone."""
DEFAULT_KINDS: Final = ("kill", "stop", "slow")
"""After ``term`` a worker does not return, so that it is not drawn unless it is asked for."""
GROUPS: Final = {"worker": 50.0, "server": 20.0, "freeze": 15.0, "cut": 10.0, "other": 5.0}
"""Shares of the groups of faults. ``worker``, ``server``: such a process dies. ``freeze``: a process stops or is slowed down, and goes on.
``other``: a standby, the supervisor, an agent or the forkserver dies, or the disk under the journal is full."""

SHORT: Final = (0.1, 0.6)
LONG: Final = (1.2, 1.8)
"""Lengths of stops and cuts, in timeouts of the job: half of them end before the worker is declared dead. After two timeouts the
supervisor kills a worker, so that a longer stop would be a death."""
SLOW: Final = (0.5, 2.0)
DUTY: Final = (0.5, 0.9)

LAST: Final = ("term", "kill:supervisor", "term:supervisor", "disk")
"""Faults of a plan that come last, in this order, by kind or by name: the worker does not come back, or the job or its journal ends."""


@dataclass
class Fault:
    """One fault: what was drawn, and what became of it. Times are seconds after the first pushes of all workers."""

    number: int
    at_s: Seconds
    """When it is due."""
    kind: str
    target: str
    """One of `TARGETS`, or ``link``, or ``journal``."""
    pick: float
    """Which of the targets: from 0 to 1, a place in their order by number."""
    seconds: Seconds
    """How long it lasts; without meaning for ``kill`` and ``term``."""
    duty: float
    """Of ``slow``: the part of the time during which the process is stopped."""
    injected_at_s: Seconds | None = None
    """When it was carried out, or tried last."""
    journal_s: Seconds = 0.0
    """The same in the journal's time; known once the job has ended."""
    until_s: Seconds | None = None
    """When the process, link or file was let go again."""
    victim: str = ""
    """What it has hit, in words."""
    worker: int | None = None
    """The number of the worker that it has hit; None: it is none, or its number is not known."""
    done: bool = False
    """False: there was nothing to hit."""
    proved: bool | None = None
    """Whether it is seen to have happened; None: not known."""
    note: str = ""

    @property
    def name(self) -> str:
        """Return its kind and target."""
        return f"{self.kind}:{self.target}"

    @property
    def over_s(self) -> Seconds:
        """Return when it was over, in the journal's time: a death when it happened."""
        return self.journal_s + (0.0 if self.until_s is None or self.injected_at_s is None else self.until_s - self.injected_at_s)


def possible(kinds: Iterable[str], targets: Iterable[str]) -> list[tuple[str, str]]:
    """Return what may happen: kinds and what they hit.

    Args:
        kinds: of faults, some of `KINDS`.
        targets: which processes may be hit, some of `TARGETS`. A link and the journal are targets of their own kinds.

    >>> possible(["kill", "disk"], ["worker", "server"])
    [('kill', 'worker'), ('kill', 'server'), ('disk', 'journal')]
    """
    return [(kind, target) for kind in kinds for target in ALONE.get(kind, targets)]


def chances(kinds: Collection[str], targets: Collection[str], mix: Mapping[str, float] = GROUPS) -> dict[str, float]:
    """Return the probability of each fault by its name.

    The groups share as ``mix`` says. Within the group ``freeze`` targets share as the groups in which they die; otherwise alike.

    Raises:
        ConfigurationError: a name is not known, a share is negative, or nothing is left that may happen.

    >>> {fault: round(chance, 3) for fault, chance in chances(["kill", "stop"], ["worker"]).items()}
    {'kill:worker': 0.769, 'stop:worker': 0.231}
    """
    for what, names, known in (("--faults", kinds, KINDS), ("--targets", targets, TARGETS), ("--mix", mix, GROUPS)):
        for name in names:
            if name not in known:
                raise ConfigurationError(f"{what}: {name!r} is not known; it may name {', '.join(known)}")
    for name, share in mix.items():
        if not 0.0 <= share < float("inf"):
            raise ConfigurationError(f"--mix {name}={share:g}: must be a number of at least 0")
    groups: dict[str, dict[str, float]] = {}
    for kind, target in possible(kinds, targets):
        group = "freeze" if kind in ("stop", "slow") else "cut" if kind == "cut" else target if target in ("worker", "server") else "other"
        groups.setdefault(group, {})[f"{kind}:{target}"] = mix.get(target, mix.get("other", 0.0)) if group == "freeze" else 1.0
    parts = ((name, mix.get(group, 0.0), part, sum(own.values())) for group, own in groups.items() for name, part in own.items())
    weights = {name: share * part / whole if whole else 0.0 for name, share, part, whole in parts}
    total = sum(weights.values())
    if not total > 0.0:
        asked = f"--faults {','.join(kinds)} --targets {','.join(targets)}"
        raise ConfigurationError(f"{asked}: with these shares of --mix nothing can happen")
    return {name: weight / total for name, weight in weights.items()}


def schedule(seed: int, *, mtbf_s: Seconds, timeout_s: Seconds, of: Mapping[str, float], count: int | None = None) -> Iterator[Fault]:
    """Yield the faults of a run, the earliest first; without ``count`` they have no end.

    The times between them are drawn from the exponential law with the mean ``mtbf_s``. Each fault takes the same number of draws, so
    that faults of another kind in one place change nothing after it.

    Args:
        seed: of all draws.
        mtbf_s: mean time between two faults.
        timeout_s: the job's; stops and cuts are shorter or longer than it, with equal chances.
        of: chances of faults by their names (`chances`).
        count: of faults; None: without end.
    """
    draw = random.Random(seed)
    names, weights = list(of), list(of.values())
    at_s, number = 0.0, 0
    while count is None or number < count:
        at_s += draw.expovariate(1.0 / mtbf_s)
        (name,) = draw.choices(names, weights)
        yield _fault(draw, number, at_s, name, timeout_s)
        number += 1


def planned(seed: int, *, mtbf_s: Seconds, timeout_s: Seconds, plan: Mapping[str, int]) -> Iterator[Fault]:
    """Yield exactly these faults, the earliest first, in an order and at times that are drawn.

    The times are those of a Poisson process of which it is known that so many faults fall into the first ``mtbf_s`` seconds for each. What
    takes something away for good comes last (`LAST`).

    Args:
        seed: of all draws.
        mtbf_s: mean time between two faults.
        timeout_s: the job's; stops and cuts are shorter or longer than it, with equal chances.
        plan: how many there are of each name.

    >>> [fault.kind for fault in planned(1, mtbf_s=1.0, timeout_s=2.0, plan={"disk:journal": 1, "kill:worker": 2})]
    ['kill', 'kill', 'disk']
    """
    draw = random.Random(seed)
    names = [name for name, count in plan.items() for _ in range(count)]
    draw.shuffle(names)
    names.sort(key=lambda name: max((place for place, last in enumerate(LAST, start=1) if last in (name, name.split(":")[0])), default=0))
    times = sorted(draw.uniform(0.0, mtbf_s * len(names)) for _ in names)
    for number, (at_s, name) in enumerate(zip(times, names, strict=True)):
        yield _fault(draw, number, at_s, name, timeout_s)


def _fault(draw: random.Random, number: int, at_s: Seconds, name: str, timeout_s: Seconds) -> Fault:
    """Draw the rest of a fault, with as many draws for each kind."""
    kind, _, target = name.partition(":")
    long, length, duty, pick = (draw.random() for _ in range(4))
    low, high = SLOW if kind in ("slow", "disk") else LONG if long < 0.5 else SHORT
    return Fault(number, at_s, kind, target, pick, timeout_s * (low + (high - low) * length), DUTY[0] + (DUTY[1] - DUTY[0]) * duty)


def chosen(pick: float, numbers: Collection[int], total: int) -> int | None:
    """Return which of these a fault hits: the one at ``pick`` among ``total``, or where that is away the next one; None: there is none.

    The choice depends on ``total`` and not on how many are there, so that a repeated schedule hits the same workers whenever it can.

    >>> chosen(0.5, [0, 1, 2, 3], 4), chosen(0.5, [0, 1, 3], 4), chosen(0.9, [0, 1], 4), chosen(0.9, [], 4)
    (2, 3, 0, None)
    """
    wanted = int(pick * max(total, 1))
    return min(numbers, key=lambda number: (number < wanted, number), default=None)
