"""Tell for whom the workers of a job waited, in groups: ``offbeat report run.jsonl --why wait``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.journal.arrivals import Record
from offbeat.journal.costs import Costs
from offbeat.journal.turns import ENDED_BY, NOBODY, OTHER, Turn, Turns, Watcher
from offbeat.journal.verdicts import ADVICE, percent, short
from offbeat.types import Seconds

ROWS = 12
"""Most groups that are told."""
PAIRS_KEPT = 4096


@dataclass
class Waits(Watcher):
    """Adds up the waits of a job by the worker that ended them.

    >>> waits = Waits()
    >>> turns = Turns((waits,))
    >>> for record in (
    ...     *({"kind": "release", "t": 1.0, "worker": worker, "incarnation": 1, "clock": 0} for worker in (0, 1)),
    ...     {"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "id": 1},
    ...     {"kind": "pushed", "t": 4.0, "worker": 1, "incarnation": 1, "id": 2},
    ...     *({"kind": "release", "t": 4.0, "worker": worker, "incarnation": 1, "clock": 1, "cause": 2} for worker in (0, 1)),
    ... ):
    ...     turns.add(record)
    >>> waits.groups
    {(1, 'pushed'): [1, 2.5]}
    """

    groups: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    """By the worker of the event that ended the waits, and its kind: how many, and their seconds."""
    busy_s: Seconds = 0.0
    """The time of all workers from each release to the push after it."""
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by the worker that waited and the worker that ended it, in a job of few workers."""

    def waited(self, worker: int, turn: Turn, stop: Seconds) -> None:
        """Count a wait, unless it took no time."""
        if turn.waited <= 0.0:
            return
        group = self.groups.setdefault((turn.ended, turn.ended_by), [0, 0.0])
        group[0] += 1
        group[1] += turn.waited
        pair = worker, turn.ended
        if pair in self.pairs or len(self.pairs) < PAIRS_KEPT:
            self.pairs[pair] = self.pairs.get(pair, 0.0) + turn.waited

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Count the time from the release to a push."""
        self.busy_s += record["t"] - begun
        return 0

    def stretch(self, worker: int, turn: Turn, doing: str, stop: Seconds) -> None:
        """Count a wait that nobody ended, and computing of which no push came."""
        if doing == "computing":
            self.busy_s += stop - turn.since
        elif doing == "waiting":
            group = self.groups.setdefault((NOBODY, "over"), [0, 0.0])
            group[0] += 1
            group[1] += stop - turn.since


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
