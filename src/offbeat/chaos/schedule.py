"""Draw the faults of a run from a seed: kinds, targets, times and lengths. Pure: the same arguments give the same faults."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

KINDS: Final = ("kill", "stop", "term", "slow", "cut", "disk")
TARGETS: Final = ("worker", "server", "standby", "supervisor", "agent", "forkserver")
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

LAST: Final = ("term", "kill supervisor", "term supervisor", "disk")
"""Faults of a plan that come last, in this order, by kind or by kind and target: the worker does not come back, or the job or its journal
ends."""


class Cell(NamedTuple):
    """A kind of fault and what it hits."""

    kind: str
    target: str
    """One of `TARGETS`, or ``link``, or ``journal``."""


class Fault(NamedTuple):
    """One fault to come."""

    number: int
    at_s: Seconds
    """When, in seconds after the first push of every worker."""
    kind: str
    target: str
    pick: float
    """Which of the targets: from 0 to 1, a place in their order by number."""
    seconds: Seconds
    """How long it lasts; without meaning for ``kill`` and ``term``."""
    duty: float
    """Of ``slow``: the part of the time during which the process is stopped."""


def cells(kinds: Collection[str], targets: Collection[str]) -> dict[str, list[Cell]]:
    """Return what may happen, by group; groups of which nothing may happen are left out.

    Args:
        kinds: of faults, some of `KINDS`.
        targets: which processes may be hit, some of `TARGETS`. A link and the journal are targets of their own kinds.

    >>> cells(["kill", "stop"], ["worker"])
    {'worker': [Cell(kind='kill', target='worker')], 'freeze': [Cell(kind='stop', target='worker')]}
    """
    found: dict[str, list[Cell]] = {}
    for kind in kinds:
        if kind in ("cut", "disk"):
            name, cell = ("cut", Cell("cut", "link")) if kind == "cut" else ("other", Cell("disk", "journal"))
            found.setdefault(name, []).append(cell)
            continue
        for target in targets:
            group = "freeze" if kind in ("stop", "slow") else target if target in ("worker", "server") else "other"
            found.setdefault(group, []).append(Cell(kind, target))
    return found


def chances(kinds: Collection[str], targets: Collection[str], mix: Mapping[str, float] = GROUPS) -> dict[Cell, float]:
    """Return the probability of each kind of fault on each target.

    The groups share as ``mix`` says. Within the group ``freeze`` targets share as the groups in which they die; otherwise alike.

    Raises:
        ConfigurationError: a name is not known, a share is negative, or nothing is left that may happen.

    >>> [(cell.kind, round(chance, 3)) for cell, chance in chances(["kill", "stop"], ["worker"]).items()]
    [('kill', 0.769), ('stop', 0.231)]
    """
    for what, names, known in (("--faults", kinds, KINDS), ("--targets", targets, TARGETS), ("--mix", mix, GROUPS)):
        for name in names:
            if name not in known:
                raise ConfigurationError(f"{what}: {name!r} is not known; it may name {', '.join(known)}")
    for name, share in mix.items():
        if not 0.0 <= share < float("inf"):
            raise ConfigurationError(f"--mix {name}={share:g}: must be a number of at least 0")
    weights: dict[Cell, float] = {}
    for group, members in cells(kinds, targets).items():
        own = [mix.get(cell.target, mix.get("other", 0.0)) if group == "freeze" else 1.0 for cell in members]
        for cell, part in zip(members, own, strict=True):
            weights[cell] = mix.get(group, 0.0) * part / sum(own) if sum(own) else 0.0
    total = sum(weights.values())
    if not total > 0.0:
        asked = f"--faults {','.join(kinds)} --targets {','.join(targets)}"
        raise ConfigurationError(f"{asked}: with these shares of --mix nothing can happen")
    return {cell: weight / total for cell, weight in weights.items()}


def schedule(seed: int, *, mtbf_s: Seconds, timeout_s: Seconds, of: Mapping[Cell, float], count: int | None = None) -> Iterator[Fault]:
    """Yield the faults of a run, the earliest first; without ``count`` they have no end.

    The times between them are drawn from the exponential law with the mean ``mtbf_s``. Each fault takes the same number of draws, so
    that faults of another kind in one place change nothing after it.

    Args:
        seed: of all draws.
        mtbf_s: mean time between two faults.
        timeout_s: the job's; stops and cuts are shorter or longer than it, with equal chances.
        of: chances of kinds and targets (`chances`).
        count: of faults; None: without end.
    """
    draw = random.Random(seed)
    choices, weights = list(of), list(of.values())
    at_s, number = 0.0, 0
    while count is None or number < count:
        at_s += draw.expovariate(1.0 / mtbf_s)
        (cell,) = draw.choices(choices, weights)
        yield _fault(draw, number, at_s, cell, timeout_s)
        number += 1


def planned(seed: int, *, mtbf_s: Seconds, timeout_s: Seconds, plan: Mapping[Cell, int]) -> list[Fault]:
    """Return exactly these faults, the earliest first, in an order and at times that are drawn.

    The times are those of a Poisson process of which it is known that so many faults fall into the first ``mtbf_s`` seconds for each. What
    takes something away for good comes last (`LAST`).

    Args:
        seed: of all draws.
        mtbf_s: mean time between two faults.
        timeout_s: the job's; stops and cuts are shorter or longer than it, with equal chances.
        plan: how many of each kind and target.

    >>> [fault.kind for fault in planned(1, mtbf_s=1.0, timeout_s=2.0, plan={Cell("disk", "journal"): 1, Cell("kill", "worker"): 2})]
    ['kill', 'kill', 'disk']
    """
    draw = random.Random(seed)
    cells = [cell for cell, count in plan.items() for _ in range(count)]
    draw.shuffle(cells)
    cells.sort(key=_lasting)
    times = sorted(draw.uniform(0.0, mtbf_s * len(cells)) for _ in cells)
    return [_fault(draw, number, at_s, cell, timeout_s) for number, (at_s, cell) in enumerate(zip(times, cells, strict=True))]


def _lasting(cell: Cell) -> int:
    """Return 0, or the place of a fault among those that come last."""
    return max((place for place, name in enumerate(LAST, start=1) if name in (cell.kind, f"{cell.kind} {cell.target}")), default=0)


def _fault(draw: random.Random, number: int, at_s: Seconds, cell: Cell, timeout_s: Seconds) -> Fault:
    """Draw the rest of a fault, with as many draws for each kind."""
    long, length, duty, pick = (draw.random() for _ in range(4))
    low, high = SLOW if cell.kind in ("slow", "disk") else LONG if long < 0.5 else SHORT
    seconds = timeout_s * (low + (high - low) * length)
    return Fault(number, at_s, cell.kind, cell.target, pick, seconds, DUTY[0] + (DUTY[1] - DUTY[0]) * duty)


def chosen(pick: float, numbers: Collection[int], total: int) -> int | None:
    """Return which of these a fault hits: the one at ``pick`` among ``total``, or where that is away the next one; None: there is none.

    The choice depends on ``total`` and not on how many are there, so that a repeated schedule hits the same workers whenever it can.

    >>> chosen(0.5, [0, 1, 2, 3], 4), chosen(0.5, [0, 1, 3], 4), chosen(0.9, [0, 1], 4), chosen(0.9, [], 4)
    (2, 3, 0, None)
    """
    wanted = int(pick * max(total, 1))
    return min(numbers, key=lambda number: (number < wanted, number), default=None)
