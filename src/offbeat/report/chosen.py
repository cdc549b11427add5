"""Choose, of many workers, those about which a reader wants to know: who costs the job time, who died, and the extremes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from offbeat.journal.verdicts import short
from offbeat.report.figures import waiting_share

SLOWEST: Final = 3
FEW: Final = 0.05
"""Workers that cost less than this part of the costliest one's cost need no row."""


def chosen(
    workers: Sequence[dict[str, Any]], slow: Sequence[int], rows: int, costs: Mapping[int, float] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide workers into those that are shown and the others, each in the order of their numbers.

    Args:
        workers: of a summary, ``per_worker``.
        slow: those that verdicts name, which come first.
        rows: how many are shown at most, at least 1.
        costs: what each costs the job, in seconds; the costliest come next.

    >>> workers = [
    ...     {"worker": n, "state": "alive", "deaths": 0, "busy_s": 1.0 + (n == 7), "wait_s": 0.5, "pushes": 4}
    ...     for n in range(9)
    ... ]
    >>> [worker["worker"] for worker in chosen(workers, [3], 4)[0]]
    [3, 6, 7, 8]
    """
    if len(workers) <= rows:
        return list(workers), []
    busy = sorted((one for one in workers if one["pushes"]), key=lambda one: one["busy_s"] / one["pushes"])
    waiting = sorted(workers, key=lambda one: waiting_share([one]) or 0.0)
    order = list(slow[: max(1, rows // 2)])
    order += [one["worker"] for one in (busy[-SLOWEST:] + busy[:1] + waiting[-1:])]
    order += [one["worker"] for one in workers if one["state"] == "dead"][: rows // 4]
    order += [one["worker"] for one in workers if one["deaths"]][: rows // 4]
    if costs:
        order += [number for number in sorted(costs, key=lambda number: -costs[number]) if costs[number] >= FEW * max(costs.values()) > 0.0]
    shown = set(list(dict.fromkeys(order))[:rows])
    return [one for one in workers if one["worker"] in shown], [one for one in workers if one["worker"] not in shown]


def extent(seconds: Iterable[float]) -> str:
    """Return the least and the greatest of some durations in words.

    >>> extent([0.02, 0.3, 0.1]), extent([2.0])
    ('20.0 ms to 300.0 ms', '2.0 s')
    """
    found = sorted(seconds)
    least, most = short(found[0]), short(found[-1])
    return least if least == most else f"{least} to {most}"
