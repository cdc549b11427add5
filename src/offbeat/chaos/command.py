"""Implement ``offbeat chaos``: check its options, run the undisturbed job, then the job with faults, and report."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from offbeat.chaos import links
from offbeat.chaos.clock import Clock
from offbeat.chaos.injector import Injected
from offbeat.chaos.judgement import Evidence, Verdict, judge, rate
from offbeat.chaos.machine import LinuxMachine
from offbeat.chaos.observation import Observation, pauses
from offbeat.chaos.run import Ended, Run
from offbeat.chaos.schedule import DEFAULT_KINDS, GROUPS, KINDS, TARGETS, Cell, Fault, cells, chances, planned, schedule
from offbeat.chaos.table import as_data, table
from offbeat.errors import BY_SIGNAL, ConfigurationError, JobError
from offbeat.files import write_result
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.types import Seconds

STARTS: Final = {("offbeat", "run"), ("offbeat.cli", "run"), ("offbeat", "agent"), ("offbeat.cli", "agent")}
"""Words after which the options of a job come; so they do after ``-m offbeat.agent``."""
DEFAULT_FAULTS: Final = ",".join(DEFAULT_KINDS)
DEFAULT_TARGETS: Final = "worker"
NO_LINKS: Final = "has no links of its own: all its processes are on this machine"

Parse = Callable[[str, list[str]], Mapping[str, Any]]
"""Returns the options of a command, ``run`` or ``agent``, by name."""


@dataclass(frozen=True)
class JobCommand:
    """The command after ``--``."""

    words: tuple[str, ...]
    journal: Path | None
    """The file that it writes by its own options, or as ``--journal`` of ``chaos`` says."""
    place: int | None
    """Where options of the job may be inserted; None: unknown."""
    timeout_s: Seconds = 10.0
    max_restarts: int = 3
    local: bool = False
    """True if all processes are on this machine for sure."""

    def writing(self, journal: Path) -> list[str]:
        """Return the command with this journal."""
        if self.place is None:
            return list(self.words)
        rest = list(self.words[self.place :])
        if self.journal is not None:
            at = next(number for number, word in enumerate(rest) if word.split("=", 1)[0] == "--journal")
            del rest[at : at + (1 if "=" in rest[at] else 2)]
        return [*self.words[: self.place], "--journal", str(journal), *rest]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one command, checked."""

    job: JobCommand
    chances: Mapping[Cell, float]
    plan: Mapping[Cell, int] | None
    """How many faults of each kind there are, exactly; None: they are drawn by their chances."""
    mtbf_s: Seconds
    seed: int
    time_s: Seconds | None
    count: int | None
    patience_s: Seconds
    baseline: bool
    """True if the undisturbed job is run first."""
    compare: Path | None
    """The journal of an undisturbed job that is there already."""
    result: Path | None
    own_host: bool


def check(
    *,
    words: Sequence[str],
    parse: Parse,
    faults: str,
    targets: str,
    mix: Sequence[str],
    plan: str | None,
    mtbf_s: Seconds,
    seed: int,
    time_s: Seconds | None,
    count: int | None,
    patience_s: Seconds,
    no_baseline: bool,
    compare: Path | None,
    journal: Path | None,
    timeout_s: Seconds | None,
    result: Path | None,
) -> Options:
    """Check the options of ``chaos`` and return them. No process is started.

    Raises:
        ConfigurationError: an option is wrong, or what it asks for cannot be had here.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"offbeat chaos needs /proc and pidfd, which {sys.platform} does not have: run it on Linux")
    for name, value in (("mtbf", mtbf_s), ("time", time_s), ("patience", patience_s), ("count", count), ("timeout", timeout_s)):
        if value is not None and not 0.0 < value < float("inf"):
            raise ConfigurationError(f"--{name} {value:g}: must be a number above 0")
    if no_baseline and compare is not None:
        raise ConfigurationError(f"--no-baseline and --baseline {compare}: leave out one of them")
    if result is not None and not result.absolute().parent.is_dir():
        raise ConfigurationError(f"--json {result}: there is no folder {result.absolute().parent}")
    exactly = None if plan is None else _plan(plan)
    if exactly is None:
        kinds, hit = _names(faults), _names(targets)
        of = chances(kinds, hit, {**GROUPS, **_shares(mix)})
    else:
        kinds, hit = [cell.kind for cell in exactly], [cell.target for cell in exactly]
        of = {cell: number / sum(exactly.values()) for cell, number in exactly.items()}
        if mix or count is not None or faults != DEFAULT_FAULTS or targets != DEFAULT_TARGETS:
            raise ConfigurationError(f"--plan {plan}: it says which faults there are; leave out --faults, --targets, --mix and --count")
    job = job_command(words, parse, journal, timeout_s)
    if "cut" in kinds:
        why = links.why_not()
        if why is not None:
            raise ConfigurationError(f"--faults cut: {why}; leave cut out")
        if job.local:
            raise ConfigurationError(f"--faults cut: this job {NO_LINKS}; start agents on hosts, or leave cut out")
    return Options(
        job=job,
        chances=of,
        plan=exactly,
        mtbf_s=mtbf_s,
        seed=seed,
        time_s=time_s,
        count=count,
        patience_s=patience_s,
        baseline=not no_baseline and compare is None,
        compare=compare,
        result=result,
        own_host="supervisor" in hit,
    )


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _shares(mix: Sequence[str]) -> dict[str, float]:
    found = {}
    for item in ",".join(mix).split(",") if mix else ():
        name, _, share = item.partition("=")
        try:
            found[name.strip()] = float(share)
        except ValueError:
            raise ConfigurationError(f"--mix {item}: write GROUP=SHARE, for instance worker=50") from None
    return found


def _plan(text: str) -> dict[Cell, int]:
    found: dict[Cell, int] = {}
    for item in _names(text):
        what, _, number = item.partition("=")
        cell = Cell(*what.partition(":")[::2])
        known = cell.kind in KINDS and cell in [one for members in cells([cell.kind], TARGETS).values() for one in members]
        if not known or not number.isdecimal() or not int(number):
            raise ConfigurationError(f"--plan {item}: write KIND:TARGET=NUMBER, for instance kill:worker=12, cut:link=3 or disk:journal=1")
        found[cell] = int(number)
    if not found:
        raise ConfigurationError("--plan: it names no fault; write KIND:TARGET=NUMBER, for instance kill:worker=12")
    return found


def job_command(words: Sequence[str], parse: Parse, journal: Path | None = None, timeout_s: Seconds | None = None) -> JobCommand:
    """Return the command of a job with what its options say.

    Args:
        words: after ``--``.
        parse: of the options of ``run`` and ``agent``.
        journal: where the command writes its journal, if its words do not say it.
        timeout_s: its timeout, likewise.

    Raises:
        ConfigurationError: there is no command, it cannot be found, or its journal is not known.
    """
    if not words:
        raise ConfigurationError("there is no command: write the job after --, for instance offbeat chaos -- offbeat run train.py")
    if shutil.which(words[0]) is None:
        raise ConfigurationError(f"there is no command {words[0]!r} here")
    for place, word in enumerate(words):
        pair = (Path(words[place - 1]).name if place else "", word)
        if pair in STARTS or word == "offbeat.agent":
            name = "agent" if word == "offbeat.agent" else word
            given = parse(name, list(words[place + 1 :]))
            named = given.get("journal")
            if named is not None and journal is not None:
                raise ConfigurationError(f"--journal {journal}: the command has a --journal of its own, {named}; leave out one of them")
            if timeout_s is not None:
                raise ConfigurationError(f"--timeout {timeout_s:g}: the options of {name} say it; leave it out")
            path = None if named is None else Path(named)
            local = name == "run" and given.get("on") == "local"
            return JobCommand(tuple(words), path, place + 1, float(given["timeout"]), int(given["max_restarts"]), local)
    if journal is None:
        raise ConfigurationError(f"{words[0]}: no 'offbeat run' or 'offbeat agent' in this command; name its journal with --journal FILE")
    return JobCommand(tuple(words), journal, None, 10.0 if timeout_s is None else timeout_s)


# Running.


def run(options: Options, clock: Clock, screen: Console) -> Verdict:
    """Run the undisturbed job, then the job with faults; print the table, and write the result. Returns the verdict.

    Raises:
        ConfigurationError: a fault that was asked for is impossible in this job.
        JobError: the undisturbed job has failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="offbeat-chaos-"))
    kept = True
    before = {
        number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        baseline, gap_s = _baseline(options, clock, screen, folder)
        journal = _journal(options, folder / "faults.jsonl")
        ended = _with_faults(options, clock, screen, folder, journal)
        seen = Evidence(
            tally=ended.tally,
            observation=ended.observation,
            injected=ended.injected,
            status=ended.status,
            said=ended.said,
            hang=ended.hang,
            left=ended.left,
            offset_s=ended.offset_s,
            timeout_s=options.job.timeout_s,
            max_restarts=options.job.max_restarts,
            timed=ended.timed,
            baseline=baseline,
            baseline_gap_s=gap_s,
        )
        verdict = judge(seen)
        kept = not verdict.ok
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    _report(options, screen, verdict, ended, None if baseline is None else rate(baseline))
    if kept:
        screen.print(f"journals and output: {folder}", soft_wrap=True, highlight=False)
    return verdict


def _leave(number: int, frame: object) -> None:
    """End as Ctrl-C does, which leaves nothing stopped."""
    raise SystemExit(BY_SIGNAL + number)


def _journal(options: Options, otherwise: Path) -> Path:
    return otherwise if options.job.journal is None else options.job.journal


def _baseline(options: Options, clock: Clock, screen: Console, folder: Path) -> tuple[Tally | None, Seconds]:
    """Return the tally of the undisturbed job, and the longest time between two of its folds."""
    if options.compare is not None:
        observation, tally = Observation.of(read(options.compare)), Tally.of(read(options.compare))
    elif options.baseline:
        screen.print("the undisturbed job:", highlight=False)
        journal = folder / "undisturbed.jsonl" if options.job.place is not None else _journal(options, folder)
        ended = _run(options, clock, folder, journal).run()
        if ended.hang is not None or not (ended.status == 0 or ended.timed):
            why = ended.hang or f"status {ended.status}: {ended.said}"
            raise JobError(f"the undisturbed job has failed, so that faults would prove nothing: {why}; its output is in {folder}")
        observation, tally = ended.observation, ended.tally
        screen.print(f"  {rate(tally):,.0f} samples/s, {ended.ended - ended.began:.1f} s after the first pushes", highlight=False)
    else:
        return None, 0.0
    return tally, pauses(observation.folds, (), options.job.timeout_s).usual


def _run(options: Options, clock: Clock, folder: Path, journal: Path, **more: Any) -> Run:
    words = options.job.writing(journal)
    return Run(words, journal, folder, clock, patience_s=options.patience_s, time_s=options.time_s, own_host=options.own_host, **more)


def _with_faults(options: Options, clock: Clock, screen: Console, folder: Path, journal: Path) -> Ended:
    def ready(machine: LinuxMachine) -> None:
        if any(cell.kind == "cut" for cell in options.chances) and not any(options.own_host or not on for _, on in machine.hosts()):
            raise ConfigurationError(f"--faults cut: this job {NO_LINKS}, or only the supervisor's host has some; leave cut out")

    def told(entry: Injected) -> None:
        lasts = "" if entry.fault.kind in ("kill", "term") or not entry.done else f" for {entry.fault.seconds:.2f} s"
        what = f"{entry.fault.kind} {entry.victim or entry.fault.target}{lasts}"
        screen.print(f"{entry.fault.at_s:8.1f} s  {what}{f' ({entry.note})' if entry.note else ''}", highlight=False, markup=False)

    def faults() -> Iterator[Fault]:
        limits = {"mtbf_s": options.mtbf_s, "timeout_s": options.job.timeout_s}
        if options.plan is not None:
            return iter(planned(options.seed, plan=options.plan, **limits))
        return schedule(options.seed, of=options.chances, count=options.count, **limits)

    screen.print(f"the job with faults, seed {options.seed}:", highlight=False)
    one = _run(options, clock, folder, journal, ready=ready, told=told, insists=options.plan is not None)
    return one.run(faults)


def _report(options: Options, screen: Console, verdict: Verdict, ended: Ended, baseline_rate: float | None) -> None:
    screen.print(table(verdict, ended.injected, seed=options.seed, baseline_rate=baseline_rate))
    screen.print(f"--seed {options.seed} with the same options repeats the schedule.", highlight=False)
    if options.result is not None:
        more = {"seed": options.seed, "command": shlex.join(options.job.words), "baseline_samples_per_s": baseline_rate}
        data = as_data(verdict, ended.injected, start=ended.began, offset_s=ended.offset_s, **more)
        write_result(options.result, json.dumps(data, indent=1) + "\n")
