"""Implement ``offbeat chaos``: check its options, run the undisturbed job, then the job with faults, and report."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.chaos import machine
from offbeat.chaos.history import History
from offbeat.chaos.judgement import Ended, Verdict, judge, rate
from offbeat.chaos.run import Run
from offbeat.chaos.schedule import DEADLY, DEFAULT_KINDS, GROUPS, KINDS, TARGETS, Fault, chances, planned, possible, schedule
from offbeat.errors import BY_SIGNAL, ConfigurationError, JobError
from offbeat.files import write_result
from offbeat.journal.file import read
from offbeat.types import Seconds

STARTS: Final = {("offbeat", "run"), ("offbeat.cli", "run"), ("offbeat", "agent"), ("offbeat.cli", "agent")}
"""Words after which the options of a job come; so they do after ``-m offbeat.agent``."""
SHARES: Final = ",".join(f"{name}={share:g}" for name, share in GROUPS.items())
WORDS: Final = {True: "yes", False: "NO", None: "-"}
STYLES: Final = {True: None, False: "red", None: "dim"}

Parse = Callable[[str, list[str]], Mapping[str, Any]]
"""Returns the options of a command, ``run`` or ``agent``, by name."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    faults: Annotated[str, typer.Option(help=f"Kinds of faults: {', '.join(KINDS)}.")] = ",".join(DEFAULT_KINDS)
    targets: Annotated[str, typer.Option(help=f"Processes that may be hit: {', '.join(TARGETS)}.")] = "worker"
    mix: Annotated[list[str] | None, typer.Option(help=f"GROUP=SHARE of all faults.  \\[default: {SHARES}]")] = None
    plan: Annotated[
        str | None,
        typer.Option(help="KIND:TARGET=NUMBER,...: exactly these faults, in an order and at times that are drawn; with --mtbf and --seed."),
    ] = None
    mtbf: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 10.0
    seed: Annotated[int | None, typer.Option(help="Seed of the schedule of faults.  \\[default: a new one, which is printed]")] = None
    time: Annotated[
        float | None,
        typer.Option(help="End the job by SIGTERM this many seconds after the first pushes.  \\[default: it ends by itself]"),
    ] = None
    count: Annotated[int | None, typer.Option(help="Most faults.  \\[default: no limit]")] = None
    patience: Annotated[float, typer.Option(help="Seconds without a record in the journal after which the job counts as hanging.")] = 120.0
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not run the undisturbed job first.")] = False
    baseline: Annotated[Path | None, typer.Option(help="Compare with this JOURNAL of an undisturbed job, and run none.")] = None
    journal: Annotated[Path | None, typer.Option(help="FILE with the journal of the command, where its words do not name it.")] = None
    timeout: Annotated[float | None, typer.Option(help="The job's --timeout, where the command does not say it.  \\[default: 10]")] = None
    result: Annotated[Path | None, typer.Option("--json", help="Write the result to this file, as JSON.")] = None

    def __post_init__(self) -> None:
        """Check what can be checked without the job. Raises `ConfigurationError`."""
        for name in ("mtbf", "time", "patience", "count", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigurationError(f"--{name} {value:g}: must be a number above 0")
        if self.result is not None and not self.result.absolute().parent.is_dir():
            raise ConfigurationError(f"--json {self.result}: there is no folder {self.result.absolute().parent}")
        if self.plan is not None and (self.mix or (self.count, self.faults, self.targets) != (None, Options.faults, Options.targets)):
            advice = "it says which faults there are; leave out --faults, --targets, --mix and --count"
            raise ConfigurationError(f"--plan {self.plan}: {advice}")

    def chances(self) -> dict[str, float]:
        """Return the chances of faults by their names; of a plan, how many there are.

        Raises:
            ConfigurationError: a name is not known, a number is wrong, or nothing is left that may happen.
        """
        if self.plan is None:
            mix = _numbers(self.mix or [], "--mix", "GROUP=SHARE, for instance worker=50")
            return chances(_names(self.faults), _names(self.targets), {**GROUPS, **mix})
        how = "KIND:TARGET=NUMBER, for instance kill:worker=12, cut:link=3 or disk:journal=1"
        plan = _numbers([self.plan], "--plan", how)
        known = {f"{kind}:{target}" for kind, target in possible(KINDS, TARGETS)}
        for name, number in plan.items():
            if name not in known or number < 1.0 or number != int(number):
                raise ConfigurationError(f"--plan {name}={number:g}: write {how}")
        return plan


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(texts: Sequence[str], option: str, how: str) -> dict[str, float]:
    """Return the numbers of an option by name. Raises `ConfigurationError` if one is none; ``how`` they are written."""
    found = {}
    for item in _names(",".join(texts)) or [""] * bool(texts):
        name, _, number = item.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise ConfigurationError(f"{option} {item}: write {how}") from None
    return found


@dataclass(frozen=True)
class JobCommand:
    """The command after ``--``."""

    words: Sequence[str]
    journal: Path | None
    """The file that it writes by its own options, or as ``--journal`` of ``chaos`` says."""
    place: int | None = None
    """Where options of the job may be inserted; None: unknown."""
    timeout_s: Seconds = 10.0
    max_restarts: int = 3
    local: bool = False
    """True if all processes are on this machine for sure."""

    def writing(self, journal: Path) -> list[str]:
        """Return the command, which writes this journal unless it says another one."""
        if self.journal is not None or self.place is None:
            return list(self.words)
        return [*self.words[: self.place], "--journal", str(journal), *self.words[self.place :]]


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
        if (Path(words[place - 1]).name if place else "", word) in STARTS or word == "offbeat.agent":
            name = "agent" if word == "offbeat.agent" else word
            given = parse(name, list(words[place + 1 :]))
            named = given["journal"]
            if named is not None and journal is not None:
                raise ConfigurationError(f"--journal {journal}: the command has a --journal of its own, {named}; leave out one of them")
            if timeout_s is not None:
                raise ConfigurationError(f"--timeout {timeout_s:g}: the options of {name} say it; leave it out")
            local = name == "run" and given["on"] == "local"
            return JobCommand(words, named and Path(named), place + 1, given["timeout"], given["max_restarts"], local)
    if journal is None:
        raise ConfigurationError(f"{words[0]}: no 'offbeat run' or 'offbeat agent' in this command; name its journal with --journal FILE")
    return JobCommand(words, journal, timeout_s=10.0 if timeout_s is None else timeout_s)


def run(options: Options, words: Sequence[str], parse: Parse, screen: Console) -> Verdict:
    """Run the undisturbed job, then the job with faults; print the table, and write the result. Returns the verdict.

    Raises:
        ConfigurationError: an option is wrong, or what it asks for cannot be had here; no process has been started then.
        JobError: the undisturbed job has failed.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"offbeat chaos needs /proc and pidfd, which {sys.platform} does not have: run it on Linux")
    of, job = options.chances(), job_command(words, parse, options.journal, options.timeout)
    alone = "this job has no links of its own: all its processes are on this machine" if job.local else None
    if "cut:link" in of and (why := machine.why_no_cuts() or alone) is not None:
        raise ConfigurationError(f"--faults cut: {why}; leave cut out")
    seed = secrets.randbelow(1 << 16) if options.seed is None else options.seed
    limits = {"mtbf_s": options.mtbf, "timeout_s": job.timeout_s}
    exactly = {name: int(number) for name, number in of.items()}
    faults = schedule(seed, of=of, count=options.count, **limits) if options.plan is None else planned(seed, plan=exactly, **limits)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    folder = Path(tempfile.mkdtemp(prefix="offbeat-chaos-"))
    baseline = _baseline(options, job, folder, screen)
    screen.print(f"the job with faults, seed {seed}:", highlight=False)
    journal = job.journal or folder / "faults.jsonl"

    def told(fault: Fault) -> None:
        lasts = f" for {fault.seconds:.2f} s" if fault.done and fault.kind not in DEADLY else ""
        note = f" ({fault.note})" if fault.note else ""
        what = f"{fault.at_s:8.1f} s  {fault.kind} {fault.victim or fault.target}{lasts}{note}"
        screen.print(what, highlight=False, markup=False)

    insists = options.plan is not None
    patience_s, time_s = options.patience, options.time
    one = Run(job.writing(journal), journal, folder, patience_s=patience_s, time_s=time_s, told=told, insists=insists)
    ended = one.run(faults)
    verdict = judge(ended, timeout_s=job.timeout_s, max_restarts=job.max_restarts, baseline=baseline)
    screen.print(table(verdict, ended, seed))
    screen.print(f"--seed {seed} with the same options repeats the schedule.", highlight=False)
    if options.result is not None:
        known = {"seed": seed, "command": shlex.join(job.words), "ok": verdict.ok}
        data = {**known, **asdict(verdict), "faults": [asdict(fault) for fault in ended.faults]}
        write_result(options.result, json.dumps(data, indent=1) + "\n")
    if verdict.ok:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        screen.print(f"journals and output: {folder}", soft_wrap=True, highlight=False)
    return verdict


def _leave(number: int, frame: object) -> None:
    """End as Ctrl-C does, which leaves nothing stopped."""
    raise SystemExit(BY_SIGNAL + number)


def _baseline(options: Options, job: JobCommand, folder: Path, screen: Console) -> History | None:
    """Return what the journal of the undisturbed job says; None: there is none to compare with."""
    if options.baseline is not None:
        return History.of(read(options.baseline))
    if options.no_baseline:
        return None
    screen.print("the undisturbed job:", highlight=False)
    journal = job.journal or folder / "undisturbed.jsonl"
    ended = Run(job.writing(journal), journal, folder, patience_s=options.patience, time_s=options.time).run()
    if ended.hang is not None or not (ended.status == 0 or ended.timed):
        why = ended.hang or f"status {ended.status}: {ended.said}"
        raise JobError(f"the undisturbed job has failed, so that faults would prove nothing: {why}; its output is in {folder}")
    screen.print(f"  {rate(ended.history.tally):,.0f} samples/s", highlight=False)
    return ended.history


def table(verdict: Verdict, ended: Ended, seed: int) -> Table:
    """Return the table: a row for each kind of fault, for each check, and for the goodput."""
    done, spared = ended.done, {fault.note for fault in ended.faults if not fault.done}
    shown = Table("what", "figures", "held", title=escape(f"{len(done)} faults, seed {seed}: {verdict.outcome}"), title_justify="left")
    shown.columns[1].overflow = "fold"
    for name in sorted({fault.name for fault in done}):
        victims = Counter(fault.victim for fault in done if fault.name == name)
        words = (victim if count == 1 else f"{victim} ({count} times)" for victim, count in sorted(victims.items()))
        shown.add_row(name.replace(":", " "), f"{victims.total()} of {len(done)}, {', '.join(words)}")
    if spared:
        shown.add_row("not done", f"{len(ended.faults) - len(done)}: {'; '.join(sorted(spared))}")
    shown.add_section()
    for check in verdict.checks:
        shown.add_row(check.name, escape(check.figures), WORDS[check.held], style=STYLES[check.held])
    shown.add_section()
    there = f"workers were there {verdict.present:.1%} of the time"
    if verdict.goodput is None:
        figures = f"{verdict.figures['samples_per_s']:,.0f} samples/s; {there}; no undisturbed job to compare with"
    else:
        figures = f"{verdict.goodput:.2f} times the undisturbed job's {verdict.baseline_samples_per_s:,.0f} samples/s; {there}"
    shown.add_row("goodput", escape(figures))
    return shown
