"""The display of a running job: redrawn in place on a terminal, a plain line now and then anywhere else.

Fed snapshots (`journal.summary.Tally.summary`) a few times per second by the supervisor. What is shown is put together by pure
functions; `LiveProgress` only prints. It starts no thread and reads no clock, so nothing moves unless it is told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.guarded import stderr
from offbeat.journal.epoch_reports import epoch_words
from offbeat.report.columns import Column, Fitted, unbroken
from offbeat.report.figures import (
    CLOSED,
    TOLD_TO_LEAVE,
    Summary,
    local,
    per_step,
    rate_words,
    share,
    short,
    state_words,
    version_words,
    waiting_share,
)
from offbeat.report.remarks import culprits, marked
from offbeat.types import Seconds

PLAIN_EVERY_S: Final = 5.0
RATE_OVER_S: Final = 5.0
"""The rate shown is that of the last few seconds, so that a change is seen when it happens."""
STYLES: Final = {"dead": "red", "recovered": "magenta", "expected": "dim", "finished": "green"}


class LiveProgress:
    """Shows how a job gets on.

    Args:
        console: where to; a rich `Live` is used if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._before: Summary | None = None
        self._rated = 0.0
        self._bar: str | None = None
        self._elapsed_s: Seconds = 0.0
        self._began: Seconds = 0.0
        self._printed: Seconds | None = None
        self._said = ""
        self._history: deque[tuple[Seconds, int]] = deque()

    @property
    def redraws(self) -> bool:
        """True if the display overwrites lines that others print on the terminal; print with `note` then."""
        return self._console.is_terminal

    def update(self, snapshot: Summary, now: Seconds) -> None:
        """Show a snapshot. ``now`` is any clock that goes on when nothing happens in the job."""
        # A snapshot's time is that of its last record, which may be old: the earliest beginning is the nearest to the journal's.
        began = now - snapshot["elapsed_s"]
        self._began = began if self._before is None else min(self._began, began)
        elapsed_s = self._elapsed_s = max(self._elapsed_s, now - self._began)
        for text in changes(self._before, snapshot):
            self.note(f"{elapsed_s:8.1f} s  {text}")
        self._before = snapshot
        rate = self._rated = self._rate(snapshot, now)
        if self._console.is_terminal:
            self._draw(snapshot, elapsed_s, headline(snapshot, rate, now=True))
        elif snapshot["ok"] is None and (self._printed is None or now - self._printed >= PLAIN_EVERY_S):  # `close` prints the last one
            self._printed = now
            self._say(elapsed_s, headline(snapshot, rate, now=True))

    def note(self, text: str) -> None:
        """Print a line that stays, above the display if there is one."""
        self.lines([text], error=False)

    def event(self, text: str, now: Seconds) -> None:
        """Print what has happened, with the job's time once that is known."""
        if self._before is not None:
            self._elapsed_s = max(self._elapsed_s, now - self._began)
        self.note(text if self._before is None else f"{self._elapsed_s:8.1f} s  {text}")

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        """Print lines that stay: to stderr, or to the console."""
        target = stderr() if error else self._console.file
        if self._live is not None and target.isatty():
            # Not console.print's markup or wrapping: what comes here may be anybody's output, to be read by programs as well.
            self._console.print(Text("\n".join(lines)), soft_wrap=True)
        else:
            target.write("".join(f"{line}\n" for line in lines))
            target.flush()

    def bar(self, text: str | None) -> None:
        """Show a worker's progress bar below the workers, on a terminal."""
        if text != self._bar:
            self._bar = text
            if self._live is not None and self._before is not None:
                self._draw(self._before, self._elapsed_s, headline(self._before, self._rated, now=True))

    def close(self) -> None:
        """Leave the last state on the screen. May be called twice."""
        last = "" if self._before is None else headline(self._before, self._before["samples_per_s"])
        if self._live is not None:
            if self._before is not None:
                self._draw(self._before, self._elapsed_s, last)
            self._live.stop()
            self._live = None
        elif self._before is not None and not self._console.is_terminal and last != self._said:
            self._say(self._elapsed_s, last)
        self._before = None

    def _say(self, elapsed_s: Seconds, line: str) -> None:
        self._said = line
        self.note(f"{elapsed_s:8.1f} s  {line}")

    def _draw(self, snapshot: Summary, elapsed_s: Seconds, line: str) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        head = Text(f"{elapsed_s:8.1f} s  {line}", style="bold")
        width = self._console.width
        rows = max(1, self._console.height - 5 - len(head) // width - (self._bar is not None))
        bar = [Text(self._bar, no_wrap=True, overflow="ellipsis")] if self._bar is not None else []
        self._live.update(Group(head, worker_table(snapshot, rows, width), *bar), refresh=True)

    def _rate(self, snapshot: Summary, now: Seconds) -> float:
        self._history.append((now, snapshot["samples"]))
        while len(self._history) > 2 and now - self._history[1][0] >= RATE_OVER_S:
            self._history.popleft()
        (start, before), (stop, after) = self._history[0], self._history[-1]
        return (after - before) / (stop - start) if stop > start else float(snapshot["samples_per_s"])


def headline(snapshot: Summary, rate: float, *, now: bool = False) -> str:
    """The job in one line; ``rate`` is in samples per second, ``now``: of the last few seconds only, else of the whole training."""
    workers = snapshot["per_worker"]
    if not workers:
        return "the workers are starting"
    alive = sum(worker["state"] == "alive" for worker in workers)
    loss = "" if snapshot["loss"] is None else f"  loss {float(snapshot['loss']):.4f}"
    # The number of an epoch counts from the job's beginning also where it has resumed, and of a loader made later from that one's own.
    ended = "".join(f"  epoch {epoch_words(epoch['epoch'] + 1, epoch['pool'])}" for epoch in snapshot["epochs"][-1:])
    more = snapshot["optimizers"] or ()
    shown = more if len(more) < 3 else more[-1:]  # where each training has its own, as of a cross-validation, the newest is in work
    others = f"  and {len(more) - 1} more" if len(more) > len(shown) else ""
    others += "".join(f"  and {short(one['sync'])} version {one['version']:,}" for one in shown)
    job = f"{short(snapshot['sync'])}{ended}  {version_words(snapshot)}{others}"
    left = [worker for worker in workers if worker["state"] == "finished"]
    stopped = sum(worker["reason"] == TOLD_TO_LEAVE for worker in left)
    how = f"{stopped} of {len(workers)} stopped" if stopped else f"{len(left)} of {len(workers)} finished"
    live = f"{alive} of {len(workers)} alive" if alive or not left else how
    return f"{job}  {rate_words(snapshot, rate)}{' now' if now and snapshot['samples'] else ''}{loss}  {live}"


def worker_table(snapshot: Summary, rows: int, width: int | None = None) -> Table:
    """A row for each worker; where there is no room for all, those that are slow or not alive come first.

    Args:
        snapshot: a summary.
        rows: how many rows fit, at least 1.
        width: characters that a line has; None: any number.
    """
    shown = _chosen(snapshot["per_worker"], culprits(snapshot), rows)
    fitted = Fitted.of(_columns(snapshot, shown), width)
    table = fitted.table(header_style="dim")
    slow = marked(snapshot, (worker["worker"] for worker in shown))
    for row, worker in enumerate(shown):
        style = STYLES.get(worker["state"], "yellow" if worker["worker"] in slow else None)
        table.add_row(*fitted.row(row), style=style)
    hidden = len(snapshot["per_worker"]) - len(shown)
    if hidden:
        table.add_row("", f"and {hidden} more", style="dim")
    return table


def _columns(snapshot: Summary, workers: Sequence[dict[str, Any]]) -> list[Column]:
    steps = local(snapshot)
    columns = [
        Column("worker", [str(worker["worker"]) for worker in workers]),
        Column("state", [state_words(worker) for worker in workers], justify="left"),
        Column("doing", [worker["doing"] if worker["state"] == "alive" else "" for worker in workers], justify="left"),
        Column("clock", [f"{worker['clock']:,}" for worker in workers]),
        *([Column("steps", [f"{worker['steps']:,}" for worker in workers])] if steps else []),
        Column("compute /step" if steps else "compute /push", [unbroken(per_step(worker)) for worker in workers]),
        Column("waiting", [share(waiting_share([worker])) for worker in workers]),
    ]
    for fate in ("folded", "dropped", "rejected"):
        counts = [worker["fates"][fate] for worker in workers]
        if any(counts) or fate == "folded":
            columns.append(Column(fate, [f"{count:,}" for count in counts]))
    if snapshot["abandoned"]:
        columns.append(Column("abandoned", [f"{worker['abandoned']:,}" for worker in workers]))
    return columns


def changes(before: Summary | None, after: Summary) -> list[str]:
    """A line for each worker that finished or lives after all between two snapshots, each warning and each change of the rule.

    Deaths are told at once.
    """
    old = {} if before is None else {worker["worker"]: worker for worker in before["per_worker"]}
    warned, changed = (after[key][0 if before is None else len(before[key]) :] for key in ("warnings", "rule_changes"))
    said = [f"warning: {warning['detail']}" for warning in warned]
    said += [f"from version {change['version']:,} on the rule is {change['rule']}: {change['reason']}" for change in changed]
    return said + [text for worker in after["per_worker"] for text in _changes(old.get(worker["worker"]), worker)]


def _changes(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    state, number = new["state"], new["worker"]
    if state == ("expected" if old is None else old["state"]) or state not in ("finished", "recovered"):
        return []
    ended = {TOLD_TO_LEAVE: "left, as it was told to", CLOSED: "has closed its optimizer"}.get(new["reason"], "finished")
    return [f"worker {number} " + (ended if state == "finished" else f"was declared dead but lives: {new['reason']}")]


def _chosen(workers: Sequence[dict[str, Any]], slow: Sequence[int], rows: int) -> list[dict[str, Any]]:
    if len(workers) <= rows:
        return list(workers)
    urgent = sorted(workers, key=lambda worker: (worker["state"] == "alive" and worker["worker"] not in slow, worker["worker"]))
    return sorted(urgent[: max(0, rows - 1)], key=lambda worker: int(worker["worker"]))
