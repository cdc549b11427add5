"""Tell for whom the workers of a job waited, in groups: ``offbeat report run.jsonl --why wait``."""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.journal.arrivals import Record
from offbeat.journal.costs import Costs
from offbeat.journal.verdicts import ADVICE, percent, short
from offbeat.report.turns import ENDED_BY, NOBODY, OTHER, Turns, Waits

ROWS = 12
"""Most groups that are told."""


class WaitStory:
    """Tells which workers ended the waits of the others, the longest waits first, and what took these workers so long.

    >>> story = WaitStory()
    >>> for record in (
    ...     {"kind": "job", "t": 0.0, "workers": 2},
    ...     *({"kind": "release", "t": 1.0, "worker": worker, "incarnation": 1, "clock": 0} for worker in (0, 1)),
    ...     {"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "compute_s": 0.5, "id": 1},
    ...     {"kind": "pushed", "t": 4.0, "worker": 1, "incarnation": 1, "compute_s": 3.0, "id": 2},
    ...     *({"kind": "release", "t": 4.0, "worker": worker, "incarnation": 1, "clock": 1, "cause": 2} for worker in (0, 1)),
    ... ):
    ...     story.add(record)
    >>> print(*story.lines(), sep="\\n")
    1 wait of 2.5 s together, 42 % of the workers' time
    1 of 1 wait ended with worker 1 (2.5 s)
    """

    def __init__(self) -> None:
        self.waits, self._costs = Waits(), Costs()
        self._turns = Turns((self.waits,))

    def add(self, record: Record) -> None:
        """Take the next record of a journal; those of further optimizers are passed over."""
        if not record.get("optimizer"):
            self._turns.add(record)
            self._costs.add(record)

    def lines(self) -> Iterator[str]:
        """Tell the story of the records so far, a line for each group of waits."""
        self._turns.end()
        waits = self.waits
        count = sum(int(group[0]) for group in waits.groups.values())
        seconds = sum(group[1] for group in waits.groups.values())
        if not count:
            yield "no worker waited for another: under this rule, or in this run, each went on at once"
            return
        share = f", {percent(seconds / (seconds + waits.busy_s))} of the workers' time" if waits.busy_s > 0.0 else ""
        yield f"{count:,} wait{'s' * (count > 1)} of {short(seconds)} together{share}"
        groups = sorted(waits.groups.items(), key=lambda item: -item[1][1])
        for (worker, kind), (number, group_s) in groups[:ROWS]:
            verb = "ended" if kind != "over" else "had not ended when the records end, or their worker died"
            by = _by(worker, kind, self._costs) if kind != "over" else ""
            yield f"{int(number):,} of {count:,} wait{'s' * (count > 1)} {verb}{by} ({short(group_s)})"
        if rest := groups[ROWS:]:
            hidden = sum(int(group[0]) for _, group in rest)
            least, most = (short(extreme(group[1] for _, group in rest)) for extreme in (min, max))
            yield f"and {hidden:,} more, with {len({worker for (worker, _), _ in rest}):,} workers: {least} to {most} each"


def _by(worker: int, kind: str, costs: Costs) -> str:
    """Return with what waits ended, and why that came late."""
    if worker == NOBODY:
        return f" {OTHER}"
    if kind != "pushed":
        return f" with {ENDED_BY[kind]}: worker {worker}"
    causes = costs.workers[worker].causes if worker in costs.workers else {}
    if not causes:
        causes = costs.by_worker().get(worker, {})
    cause = max(causes, key=lambda name: causes[name], default="")
    return f" with worker {worker}" + (f": its {ADVICE[cause].one}" if cause in ADVICE else "")
