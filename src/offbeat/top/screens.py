"""The screens of ``offbeat top``: the jobs of a user, one job with the culprit first, and one worker. Pure functions of what was received.

Everything that a job says of itself may be anybody's text: `readable` keeps it from moving the cursor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.core.phases import PHASES
from offbeat.journal.costs import LINK, QUEUED
from offbeat.report.columns import Column, Fitted, unbroken
from offbeat.report.figures import Summary, judged_s, share, short, state_words
from offbeat.report.live import STYLES, headline
from offbeat.transport.schema import readable
from offbeat.types import Seconds

OVER_S: Final[Seconds] = 10.0
"""Rates and phases are those of the last seconds, as many as these."""
BAR_LEAST: Final = 12
LEAST: Final = 0.005
"""A phase of a smaller share of a worker's time has no line."""
EVENTS_SHOWN: Final = 5
VERDICTS_SHOWN: Final = 3
LETTERS: Final = {
    **dict(zip(PHASES, "dfboegus>.<c", strict=True)),
    QUEUED: "q",
    LINK: "m",
}
"""The letter of each phase and cause in a bar."""
COLOURS: Final = {"data": "yellow", "forward": "blue", "backward": "cyan", "gc": "magenta", "wait": "bright_black", QUEUED: "red"}
NAMES: Final = {"wait": "waiting", "own": "own code", QUEUED: "no core", LINK: "messages on their way", "compute": "computing"}


class View(NamedTuple):
    """What a watcher knows of a job."""

    about: Mapping[str, Any]
    snapshot: Summary | None
    """None: the job's server has not reported yet."""
    before: Summary | None
    """An earlier one, of `OVER_S` seconds ago at most; None: there is none."""
    events: Sequence[tuple[Seconds | None, str]]
    silent_s: Seconds = 0.0
    """For how long the job has not answered."""


class History:
    """Keeps what was received of one job."""

    def __init__(self) -> None:
        self._snapshots: deque[Summary] = deque()
        self._last: Mapping[str, Any] | None = None

    def add(self, message: Mapping[str, Any]) -> None:
        """Take an answer of the supervisor."""
        self._last = message
        if (snapshot := message["snapshot"]) is not None:
            self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[-1]["elapsed_s"] - self._snapshots[1]["elapsed_s"] >= OVER_S:
            self._snapshots.popleft()

    def order(self) -> list[int]:
        """Return the workers as the screen lists them."""
        return [worker["worker"] for worker in by_cost(self._snapshots[-1])] if self._snapshots else []

    def view(self, silent_s: Seconds = 0.0) -> View | None:
        """Return what is known; None: nothing was received."""
        if self._last is None:
            return None
        newest = self._snapshots[-1] if self._snapshots else None
        before = self._snapshots[0] if len(self._snapshots) > 1 else None
        return View(self._last["about"], newest, before, [(at, line) for at, line in self._last["events"]], silent_s)


# All jobs.


def job_list(rows: Sequence[tuple[Mapping[str, Any], Summary | None, str]], width: int) -> RenderableType:
    """Return a row for each job.

    Args:
        rows: what it says of itself, its summary, and what is wrong with it, if anything.
        width: characters that a line has.
    """
    if not rows:
        return Text("no job of yours runs on this machine")
    found = [summary or {} for _, summary, _ in rows]
    columns = [
        Column("pid", [str(about["pid"]) for about, _, _ in rows]),
        Column("script", [_script(about["script"], 30) for about, _, _ in rows], justify="left"),
        Column("rule", [_clip(short(one["sync"]), 30) if one.get("sync") else "-" for one in found], justify="left"),
        Column("workers", [_alive(one, about["workers"]) for one, (about, _, _) in zip(found, rows, strict=True)]),
        Column("version", [f"{one['version']:,}" if one else "-" for one in found]),
        Column("samples/s", [f"{one['samples_per_s']:,.0f}" if one.get("samples") else "-" for one in found]),
        Column("age", [age(about["age_s"]).replace(" ", "\u00a0") for about, _, _ in rows]),
    ]
    fitted = Fitted.of(columns, width)
    table = fitted.table(header_style="dim")
    for row in range(len(rows)):
        table.add_row(*(Text(cell) for cell in fitted.row(row)))
    # Below the table: a reason is a sentence, and as a cell it would take the width of all other columns.
    reasons = [f"pid {about['pid']}: {readable(wrong)}" for about, _, wrong in rows if wrong]
    return Group(table, *(Text(fill(reason, max(20, width), subsequent_indent="  "), style="dim") for reason in reasons))


def _alive(summary: Summary, workers: int) -> str:
    if not summary:
        return str(workers)
    alive = sum(worker["state"] == "alive" for worker in summary.get("per_worker", ()))
    return f"{alive} of {workers}"


def age(seconds: Seconds) -> str:
    """Return how long ago something was.

    >>> age(12.3), age(700), age(8000), age(200_000)
    ('12 s', '12 min', '2.2 h', '2.3 d')
    """
    for least, unit, factor in ((172_800, "d", 86_400.0), (7200, "h", 3600.0)):
        if seconds >= least:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


# One job.


def job_screen(view: View, width: int, height: int, foot: str = "") -> RenderableType:
    """Return the screen of one job: what costs it most, its workers by cost, and what has happened."""
    parts: list[Text] = [_head(view, width)]
    snapshot = view.snapshot
    if snapshot is None or not snapshot["per_worker"]:
        parts.append(Text("the job starts: nothing is known yet"))
        return Group(*parts, *_events(view.events, EVENTS_SHOWN, width), *_foot(foot))
    verdicts = [part for verdict in snapshot["verdicts"][:VERDICTS_SHOWN] for part in _verdict(verdict, width)]
    parts += verdicts or [Text("no worker costs this job 5 % of its time or more", style="green")]
    events = _events(view.events, EVENTS_SHOWN, width)
    lines = sum(_lines(part, width) for part in (*parts, *events)) + (2 if foot else 0)
    table = workers_table(view, max(1, height - lines - 6), width)
    return Group(*parts, "", table, _legend(snapshot), *([Text(""), *events] if events else []), *_foot(foot))


def _lines(text: Text, width: int) -> int:
    return sum(1 + max(0, len(line) - 1) // max(1, width) for line in text.plain.split("\n"))


def _head(view: View, width: int) -> Text:
    about, snapshot = view.about, view.snapshot
    name = f"{_script(about['script'], 40)}, pid {about['pid']} on {_clip(about['host'], 40)}, since {age(about['age_s'])}"
    head = Text(_clip(name, width), style="bold")
    if snapshot is not None:
        head.append(f"\n{readable(headline(snapshot, _rate(view), now=view.before is not None))}", style="not bold")
    if view.silent_s >= 3.0:
        head.append(f"\nno answer for {view.silent_s:.0f} s: the job's supervisor is stopped, hangs or cannot be reached", style="bold red")
    return head


def _rate(view: View) -> float:
    now, before = view.snapshot, view.before
    assert now is not None
    if before is None or now["elapsed_s"] <= before["elapsed_s"]:
        return float(now["samples_per_s"])
    return max(0.0, float(now["samples"] - before["samples"]) / float(now["elapsed_s"] - before["elapsed_s"]))


def _verdict(verdict: Mapping[str, Any], width: int) -> list[Text]:
    style = "bold magenta" if verdict["kind"] == "death" else "bold yellow"
    said = [(verdict["what"], "", style), (verdict["evidence"], "  ", ""), (verdict["remedy"], "  > ", "dim")]
    return [
        Text(fill(readable(text), max(20, width), initial_indent=first, subsequent_indent=" " * (len(first) or 2)), style=look)
        for text, first, look in said
        if text
    ]


def by_cost(snapshot: Summary) -> list[dict[str, Any]]:
    """Return the workers: those that are not alive and have not finished first, then by what they cost, then by number."""

    def key(worker: dict[str, Any]) -> tuple[bool, float, int]:
        return worker["state"] in ("alive", "finished"), -worker["cost_s"], worker["worker"]

    return sorted(snapshot["per_worker"], key=key)


def workers_table(view: View, rows: int, width: int) -> RenderableType:
    """Return a row for each worker, by cost; of those that do not fit, their number."""
    snapshot = view.snapshot
    assert snapshot is not None
    workers = by_cost(snapshot)
    shown = workers if len(workers) <= rows else workers[: max(1, rows - 1)]
    old = {} if view.before is None else {worker["worker"]: worker for worker in view.before["per_worker"]}
    recent = [_recent(worker, old.get(worker["worker"])) for worker in shown]
    columns = [
        Column("worker", [str(worker["worker"]) for worker in shown]),
        Column("state", [readable(state_words(worker)) for worker in shown], justify="left"),
        Column("cost", [share(_part(worker["cost_s"], judged_s(snapshot))) for worker in shown]),
        Column("a step", [unbroken(_own(one) / one.steps if one.steps else None) for one in recent]),
        Column("most of it", [_most(one.phases) for one in recent], justify="left"),
    ]
    fitted = Fitted.of(columns, max(1, width - BAR_LEAST - 2))
    table = fitted.table(header_style="dim")
    room = width - sum(fitted.widths) - fitted.gap * len(fitted.widths)
    table.add_column("where its time goes", header_style="dim", no_wrap=True, width=max(1, room))
    for row, worker in enumerate(shown):
        style = STYLES.get(worker["state"])
        cells = [Text(cell, style=style or "") for cell in fitted.row(row)]
        table.add_row(*cells, bar(recent[row].phases, max(1, room)))
    if len(shown) < len(workers):
        return Group(table, Text(f"and {len(workers) - len(shown):,} more, which cost less", style="dim"))
    return table


class Recent(NamedTuple):
    """Where a worker's time went: since an earlier summary, or since the start."""

    phases: dict[str, Seconds]
    processor: dict[str, Seconds]
    host: dict[str, float]
    steps: int
    whole: bool
    """Since the start."""


def _recent(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Recent:
    if before is not None and now["steps"] > before["steps"] and now["phases"]:
        phases, processor, host = (
            {name: value - before[what].get(name, 0.0) for name, value in now[what].items()} for what in ("phases", "processor", "host")
        )
        if sum(phases.values()) > 0.0:
            return Recent(phases, processor, host, now["steps"] - before["steps"], whole=False)
    return Recent(dict(now["phases"]), dict(now["processor"]), dict(now["host"]), now["steps"], whole=True)


def _own(one: Recent) -> Seconds:
    return sum(value for name, value in one.phases.items() if name != "wait")


def _most(phases: Mapping[str, Seconds]) -> str:
    """Return the phase that takes most of the time, with its share."""
    whole = sum(phases.values())
    if whole <= 0.0:
        return "-"
    name = max(phases, key=lambda one: phases[one])
    return f"{name_of(name)}\u00a0{share(phases[name] / whole)}"


def name_of(phase: str) -> str:
    """Return what a phase is called on the screen."""
    return NAMES.get(phase, readable(phase))


def bar(phases: Mapping[str, Seconds], width: int) -> Text:
    """Return a bar of letters, of as many characters as the screen has room for: each phase has its share of them.

    >>> bar({"data": 3.0, "forward": 1.0}, 8).plain
    'ddddddff'
    """
    whole, text = sum(value for value in phases.values() if value > 0.0), Text(no_wrap=True, overflow="crop")
    if whole <= 0.0:
        return text
    done, at = 0.0, 0
    for name in sorted(phases, key=lambda one: list(LETTERS).index(one) if one in LETTERS else len(LETTERS)):
        done += max(0.0, phases[name])
        until = round(width * done / whole)
        text.append(LETTERS.get(name, "?") * (until - at), style=COLOURS.get(name, ""))
        at = until
    return text


def _legend(snapshot: Summary) -> Text:
    seen = {name for worker in snapshot["per_worker"] for name, value in worker["phases"].items() if value > 0.0}
    return Text("  ".join(f"{letter} {name_of(name)}" for name, letter in LETTERS.items() if name in seen), style="dim")


def _part(value: float, whole: float) -> float | None:
    return min(1.0, value / whole) if whole > 0.0 else None


def _events(events: Sequence[tuple[Seconds | None, str]], most: int, width: int) -> list[Text]:
    return [Text(_clip(f"{'' if at is None else f'{at:8.1f} s'}  {line.strip()}", width)) for at, line in events[-most:]]


def _foot(foot: str) -> list[RenderableType]:
    return ["", Text(foot, style="dim")] if foot else []


def _script(text: str, width: int) -> str:
    """Return a script's name; of one that is too long, the end of its path.

    >>> _script("/home/me/projects/train.py", 15), _script("module_with_a_long_name", 15)
    ('.../train.py', 'module_with_...')
    """
    return f".../{_clip(text.rpartition('/')[2], width - 4)}" if len(text) > width and "/" in text else _clip(text, width)


def _clip(text: str, width: int) -> str:
    text = readable(text)
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


# One worker.


def worker_screen(
    view: View, number: int, stacks: Sequence[str], width: int, height: int, foot: str = "", *, only_stacks: bool = False
) -> RenderableType:
    """Return the screen of one worker: where its time goes, what its host does to it, what is said of it, and its Python stacks."""
    snapshot = view.snapshot
    worker = None if snapshot is None else next((one for one in snapshot["per_worker"] if one["worker"] == number), None)
    if snapshot is None or worker is None:
        return Group(_head(view, width), Text(f"worker {number} is not known"), *_foot(foot))
    old = None if view.before is None else next((one for one in view.before["per_worker"] if one["worker"] == number), None)
    recent = _recent(worker, old)
    doing = f", {worker['doing']}" if worker["state"] == "alive" else f": {worker['reason']}" if worker["reason"] else ""
    parts: list[RenderableType] = [
        _head(view, width),
        Text(readable(f"worker {number}: {state_words(worker)}{doing}"), style="bold"),
        Text(
            f"costs {share(_part(worker['cost_s'], judged_s(snapshot)))} of the job's time; {worker['pushes']:,} pushes, "
            f"{worker['samples']:,} samples, {worker['samples_per_step']:.0f} a step; died {worker['deaths']} times"
        ),
    ]
    parts += [part for verdict in snapshot["verdicts"] if number in verdict["workers"] for part in _verdict(verdict, width)[:2]]
    parts += ["", _phases(recent, width)]
    if readings := _readings(recent, worker):
        parts.append(Text(f"host: {readings}"))
    parts = parts[:2] if only_stacks else parts
    used = sum(_lines(part, width) if isinstance(part, Text) else 1 for part in parts)
    room = max(3, height - used - (4 if only_stacks else 5 + len(_told(recent))))
    stacks = _script_first(stacks)
    shown = [Text(_stack_line(line, width)) for line in stacks[:room]]
    more = [Text(f"and {len(stacks) - room} more lines", style="dim")] if len(stacks) > room else []
    return Group(*parts, "", *shown, *more, *_foot(foot))


def _script_first(lines: Sequence[str]) -> list[str]:
    """Return the threads in another order: the main one, which runs the script and is printed last, comes first.

    >>> _script_first(["Thread 0x1 (most recent call first):", "  a", "", "Thread 0x2 (most recent call first):", "  b"])[:2]
    ['Thread 0x2 (most recent call first):', '  b']
    """
    starts = [at for at, line in enumerate(lines) if "hread 0x" in line]
    if len(starts) < 2:
        return list(lines)
    return [*lines[starts[-1] :], "", *lines[: starts[-1]]]


def _stack_line(line: str, width: int) -> str:
    """Return a line of a stack; where it is too long, the folders of the file are left out."""
    head, mark, rest = line.partition('File "')
    path, _, place = rest.partition('"')
    if mark and len(line) > width and "/" in path:
        line = f'{head}{mark}.../{"/".join(path.split("/")[-2:])}"{place}'
    return _clip(line, width)


def _told(recent: Recent) -> list[str]:
    """Return the phases that are worth a line, the longest first."""
    whole = sum(recent.phases.values())
    names = sorted(recent.phases, key=lambda name: -recent.phases[name])
    return [name for name in names if recent.phases[name] >= LEAST * whole > 0.0]


def _phases(recent: Recent, width: int) -> RenderableType:
    if not recent.phases or not recent.steps:
        return Text("no phases are known: it has made too few steps, or they are off (--no-phases)", style="dim")
    since = "since the start" if recent.whole else f"its last {recent.steps:,} steps"
    whole = sum(recent.phases.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (since, "a step", "share", "on a processor"):
        table.add_column(name, header_style="dim", justify="left" if name == since else "right")
    table.add_column("", no_wrap=True)
    for name in _told(recent):
        value = recent.phases[name]
        used = recent.processor.get(name)
        cpu = "" if used is None or value <= 0.0 else share(min(1.0, used / value))
        part = value / whole if whole > 0.0 else 0.0
        letters = LETTERS.get(name, "?") * round(part * max(1, min(40, width - 60)))
        row = (name_of(name), unbroken(value / recent.steps).replace("\u00a0", " "), share(part), cpu)
        table.add_row(*map(Text, row), Text(letters, style=COLOURS.get(name, "")))
    return table


READINGS: Final = {
    "preempted": "{:,.0f} involuntary context switches",
    "queued_s": "{:.2f} s without a core",
    "major_faults": "{:,.0f} pages read from the disk",
    "stolen_s": "{:.2f} s taken by the hypervisor",
    "memory_stalled_s": "{:.2f} s of waits for memory",
    "throttled_s": "{:.2f} s above its limit of cores",
    "children_s": "{:.2f} s of processors for the processes that it has started",
}


def _readings(recent: Recent, worker: Mapping[str, Any]) -> str:
    """Return what the host has done to a worker meanwhile."""
    found = {name: value for name, value in recent.host.items() if value > 0.0 and name != "cores"}
    said = [READINGS[name].format(value) if name in READINGS else f"{readable(name)} {value:g}" for name, value in found.items()]
    cores = worker["host"].get("cores")
    return "; ".join([*([f"{cores:g} cores"] if cores else []), *said])
