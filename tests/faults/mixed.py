"""Mixed faults in a loop, over all rules: ``python -m tests.faults.mixed --faults 300 --seed 1``; as root also full disks.

In most cases two processes are hit at the same moment. A process dies, also while it is started again, is stopped for a while or until it
is killed, loses its connections while everything lives, or has no descriptors left; a worker hangs, ends or crashes in its script; and a
job has a full disk under its journal and checkpoints, or nobody who reads its output, from the beginning. All is drawn from the seed. A
fault counts once its effect was seen. After each job: it has ended within a bound, with the status and the sentence that the documentation
has for its faults, the audit finds no fate and no index wrong, and nothing is left. Of a hang, the stacks are kept if py-spy is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.cutting import reset
from tests.faults.job import FAULTY, GONE, Books, Ended, Job, signalled
from tests.faults.resuming import newest

from offbeat import policies
from offbeat.chaos import procfs
from offbeat.core.policy import ServerRule
from offbeat.errors import FAILED, READER_GONE
from offbeat.journal.records import Record

TIMEOUT_S, PROGRESS_S, WORKERS, PER_JOB = 3.0, 8.0, 3, 6
START_S, BOUND_S = 300.0, 120.0
"""For the imports of seven processes on a busy machine, and for anything after them."""
APART = {"OFFBEAT_HOST": "apart"}
LETHAL = ("kill", "stop and kill", "kill while restarting")
HARMLESS = ("reset", "reset twice", "no descriptors")
ENDS = ("raise", "exit", "end", "memory")
"""What a worker does to itself (``scripts/faulty.py``) and its script is blamed for: if it comes twice, the job may fail."""
ORDERS = (*ENDS, "gil", "loop", "block", "crash", "sockets")
KINDS = {
    "supervisor": (*HARMLESS, "stop"),
    "forkserver": LETHAL[:2],
    "worker": (*LETHAL, *HARMLESS, "stop", *ORDERS),
    **dict.fromkeys(("server", "standby"), LETHAL + HARMLESS),
}
"""What happens to a process, by its role. Forkserver 0 is that of the workers, a fork of forkserver 1, from which servers are forked."""
PLACES = ("one host", "apart", "replicas", "full disk", "no reader")
DISK_BYTES = 96 << 10
TOGETHER_S = 0.1
"""Two faults within this time are at the same moment."""
LOST = r"server \d .*(gone with it|is gone)"
SPY = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@dataclass
class Fault:
    """What happens to one process."""

    kind: str
    role: str
    number: int
    pid: int
    draw: float
    """How long its pauses are, from 0 to 1."""
    again: Callable[[], int | None] = lambda: None
    """Finds the process that takes the place of this one."""
    order: Path | None = None
    """The file in which a worker finds what it has to do to itself."""
    at: float | None = None
    """When its effect was seen first; None: it was not."""

    @property
    def lethal(self) -> bool:
        return self.kind in LETHAL + ORDERS

    def __str__(self) -> str:
        return f"{self.kind} {self.role} {self.number}" + (" (missed)" if self.at is None else "")

    def happen(self, start: threading.Barrier) -> None:
        """Wait for the other fault of this moment, then do it. A process that is gone, or only just there, is not hit."""
        process = psutil.Process(self.pid) if psutil.pid_exists(self.pid) else None
        start.wait()
        with contextlib.suppress(*GONE, OSError, AssertionError):
            if process is not None and process.status() != psutil.STATUS_ZOMBIE:
                self._hit(process)

    def _hit(self, process: psutil.Process) -> None:
        match self.kind:
            case "kill":
                signalled(process, signal.SIGKILL)
            case "stop and kill":
                signalled(process, signal.SIGSTOP)
                self.at = time.monotonic()
                threading.Event().wait(2 * TIMEOUT_S * self.draw)  # declared dead meanwhile, or not
                process.kill()
            case "stop":
                signalled(process, signal.SIGSTOP)
                self.at = time.monotonic()
                threading.Event().wait(2 * TIMEOUT_S * self.draw)
                process.send_signal(signal.SIGCONT)
            case "kill while restarting":
                signalled(process, signal.SIGKILL)
                self.at, self.kind = time.monotonic(), "kill"  # if no other comes, since the job ends
                while (found := self.again()) in (None, self.pid):
                    assert time.monotonic() < self.at + 10.0
                    threading.Event().wait(0.01)
                threading.Event().wait(0.3 * self.draw)
                signalled(psutil.Process(found), signal.SIGKILL)
                self.kind = "kill while restarting"
            case "reset" | "reset twice":
                assert reset(self.pid)
                self.at = time.monotonic()
                if self.kind == "reset twice":
                    threading.Event().wait(self.draw / 10)
                    reset(self.pid)
            case "no descriptors":
                self._take_descriptors()
            case order:
                self._give(order)
        self.at = self.at or time.monotonic()

    def _give(self, order: str) -> None:
        """Give a worker an order, and wait until it has ended of it, or has been killed because it hung."""
        assert self.order is not None
        hidden = self.order.with_name(f".{self.number}")
        hidden.write_text(order)
        hidden.rename(self.order)
        deadline = time.monotonic() + BOUND_S
        while self.order.exists() or psutil.pid_exists(self.pid):  # its next process would take it, and a script that fails twice is over
            if time.monotonic() > deadline:
                self.order.unlink(missing_ok=True)
                raise AssertionError(f"worker {self.number} has not taken its order, or not ended of it")
            threading.Event().wait(0.01)

    def _take_descriptors(self) -> None:
        """Reset its connections where it can open nothing in their place for a while: all numbers below the limit are taken."""
        folder = Path(f"/proc/{self.pid}/fd")
        kept = {int(link.name) for link in folder.iterdir() if not os.readlink(link).startswith("socket:")}
        limit = next(number for number in itertools.count() if number not in kept)
        before = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            cut = reset(self.pid)
            moment = time.monotonic()
            threading.Event().wait(0.2 + self.draw)  # less than workers and ranks may be silent
            if cut and all((folder / str(number)).exists() for number in range(limit)):
                self.at = moment
        finally:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, before)


@dataclass
class Expected:
    """What may become of a job: patterns of the sentences with which it may fail, or must."""

    may: list[str] = field(default_factory=list)
    must: list[str] = field(default_factory=list)

    def learn(self, faults: list[Fault], rule: str, place: str, servers: int) -> None:
        """Take what docs/failures.md says of deaths, for faults of one moment."""
        served = isinstance(policies.rule(rule), ServerRule)
        dead = {(fault.role, fault.number): fault for fault in faults if fault.lethal and fault.at is not None}
        self.may += [".*"] if any(fault.kind in ENDS for fault in dead.values()) else []
        for (role, number), fault in dead.items():
            if role == "forkserver":
                self.may += [] if served else ["worker . has come back and nobody is left to copy the parameters from"]
                if number == 1:  # servers may be its forks, too
                    self.may += {"apart": [LOST], "replicas": [".*may have folded"]}.get(place, [])
            elif role == "server" and place == "apart":
                self.must.append(LOST)
            elif role in ("server", "standby") and place == "replicas":
                both = {("server", number), ("standby", number)} <= dead.keys() or ("forkserver", 1) in dead
                alone = both or (role, fault.kind) == ("server", "kill while restarting")
                self.may += [f"server {number} .*(its standby|no standby)"] if alone else []
                folding = role == "server" and (number > 0 or (rule.startswith("psp") and servers > 1))
                self.may += [".*may have folded"] if folding and any(other in ("worker", "forkserver") for other, _ in dead) else []

    def problem(self, ended: Ended, good: int, sentence: str) -> str | None:
        """Return what is wrong with the end of a job, whose status and sentence without a failure would be these."""
        said = ended.last_line
        if ended.status == good and not self.must and sentence in said:
            return None
        if ended.status == FAILED and any(re.match(f"offbeat: {text}", said) for text in (*self.must, *self.may)):
            return None
        return f"status {ended.status} after faults that allow {good} {self.may}, or ask for {self.must}: {ended.err[-1500:]}"


class Trial:
    """One job of a rule and a place, and its faults, which are drawn from ``draw``."""

    def __init__(self, rule: str, place: str, draw: random.Random, folder: Path, faults: int = PER_JOB) -> None:
        self.rule, self.place, self._draw, self._folder, self._faults = rule, place, draw, folder, faults
        self.done: list[Fault] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.said = "no end"
        self._expected = Expected()
        served = isinstance(policies.rule(rule), ServerRule)
        self._servers = draw.choice([1, 2]) if served else 1
        more = ["--servers", str(self._servers)] if served else []
        more += ["--replicas", "1"] if place == "replicas" else []
        more += ["--checkpoint", str(folder / "disk" / "saved"), "--every", "1"] if place == "full disk" else []
        more += ["--timeout", f"{TIMEOUT_S:g}", "--progress-timeout", f"{PROGRESS_S:g}"]
        limits = ("--max-restarts", "99", "--slow", "any=0.02", "--summary", str(folder / "summary.json"))
        script = (FAULTY, "--until", str(folder / "enough"), "--orders", str(folder))
        if place == "full disk":
            (folder / "journal.jsonl").symlink_to(folder / "disk" / "journal.jsonl")
        environment = APART if place == "apart" or (place == "replicas" and not served) else {}
        self._reader = -1
        popen = self._unread if place == "no reader" else subprocess.Popen
        arguments = ("--workers", str(WORKERS), *more, "--sync", rule, *limits, *script)
        self._job = Job(folder, arguments, environment=environment, popen=popen)
        self._books = Books(self._job.journal, self._note)
        self._standbys: dict[int, str] = {}
        """By server: what was said last of its standby."""

    def _unread(self, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start the job with its output into a pipe, whose reader goes after its first pushes."""
        self._reader, writer = os.pipe()
        with contextlib.closing(os.fdopen(writer, "wb")) as out:
            return subprocess.Popen(command, **{**how, "stdout": out})

    def run(self) -> None:
        """Run it to its end, and find what is wrong with it."""
        try:
            self._wait("first pushes", lambda: len(self._books.incarnations) == WORKERS)
            if self._reader >= 0:
                os.close(self._reader)
                self._reader = -1
            while len(self.done) < self._faults and self._job.process.poll() is None:
                self._strike()
                self._progress()
            (self._folder / "enough").touch()
            self._judge(self._job.ended(BOUND_S))
        except AssertionError as error:
            hangs = self._job.process.poll() is None
            self.problems.append(f"{'HANG: ' if hangs else ''}{str(error)[:1500]}")
            if hangs:
                self._keep_stacks()
        finally:
            if self._reader >= 0:
                os.close(self._reader)
            self._job.clean_up()

    # Faults.

    def _found(self) -> dict[tuple[str, int], int]:
        """By role and number, of the processes that live."""
        found = self._job._found()
        roles = procfs.roles(found)
        second = {one.pid: int(roles[one.pid][0] == "forkserver" and one.name != procfs.BRANCH) for one in found}
        return {(role, number or second.get(pid, 0)): pid for pid, (role, number) in roles.items() if role in KINDS}

    def _strike(self) -> None:
        """Hit one process, or two at the same moment."""
        found = self._found()
        if len(self.done) < self._faults - 2:  # only at last: each process after its death imports PyTorch for itself
            found = {who: pid for who, pid in found.items() if who[0] != "forkserver"}
        faults = []
        for role, number in self._draw.sample(sorted(found), min(len(found), self._draw.choice([1, 2, 2]))):
            kind = self._draw.choice(KINDS[role])
            again = lambda who=(role, number): self._found().get(who)  # noqa: E731
            faults.append(Fault(kind, role, number, found[role, number], self._draw.random(), again, self._folder / str(number)))
        start = threading.Barrier(len(faults))
        threads = [threading.Thread(target=fault.happen, args=(start,)) for fault in faults]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.done += faults
        self._expected.learn(faults, self.rule, self.place, self._servers)
        moments = [fault.at for fault in faults if fault.at is not None]
        self.counts["pairs"] += len(moments) == 2 and abs(moments[0] - moments[1]) < TOGETHER_S

    # Waiting, and the end.

    def _note(self, record: Record) -> None:
        if record["kind"] == "process" and record["role"] == "standby":
            first = record["number"] not in self._standbys
            self._standbys[record["number"]] = "follows" if first else record["what"]  # the first follow from the start

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        limit_s = BOUND_S if self.done else START_S
        deadline = time.monotonic() + limit_s
        while not ready() and self._job.process.poll() is None:
            assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s after {', '.join(map(str, self.done[-2:]))}"
            threading.Event().wait(0.1)
            self._books.read()

    def _progress(self) -> None:
        """Wait until every worker pushes, and standbys could lead again; where the journal is full, until all processes are there."""
        if self.place == "full disk":
            self._wait("worker", lambda: {("worker", number) for number in range(WORKERS)} <= self._found().keys())
            threading.Event().wait(2.0)
            return
        self._books.read()
        before = dict(self._books.pushes)
        self._wait("progress", lambda: all(self._books.pushes[worker] > before.get(worker, 0) + 1 for worker in range(WORKERS)))
        self._wait("new standby", lambda: all(what == "follows" for what in self._standbys.values()))

    def _judge(self, ended: Ended) -> None:
        """Find what is wrong with a job that has ended: its status and sentences, its books, its summary."""
        self.said = ended.last_line.removeprefix("offbeat: ")[:300] if ended.status not in (0, READER_GONE) else "finished"
        summary = json.loads((self._folder / "summary.json").read_text())
        full, missing = self.place == "full disk", summary["missing"]
        good = FAILED if full else READER_GONE if self.place == "no reader" else 0
        problem = self._expected.problem(ended, good, "worker's script has ended; " if full else "")
        self.problems += [] if problem is None else [problem]
        if summary["ok"] != (ended.status in (0, READER_GONE)):
            self.problems.append(f"status {ended.status}, but the summary says {summary['ok']}: {summary['reason']}")
        if full != any(re.match("the journal is not complete: .*No space left", text) for text in missing):
            self.problems.append(f"the journal is {'' if full else 'not '}cut off, but the summary says of what is missing: {missing}")
        self.problems += [f"not said in the last line: {text}" for text in missing if text not in ended.last_line]
        self.problems += [f"this is not missing: {text}" for text in missing if not full]  # a checkpoint may lack a dead rank as well
        sound = newest(self._folder / "disk" / "saved")
        left = "there is none" if sound is None else f"the newest one is of version {sound.version}"
        self.problems += [f"{text}; but {left}" for text in missing if "checkpoint failed" in text and not text.endswith(left)]
        if (ended.records[-1]["kind"] == "end") == full:
            self.problems.append(f"the last record is {ended.records[-1]}")
        tally = ended.tally()
        self.problems += tally.problems()
        figures = tally.summary()
        reports = [record["report"] for record in ended.records if record["kind"] == "epoch_ended"]
        if not ended.records[-1].get("cut", False):  # then server 0 is gone, and what it would have settled
            figures = summary  # of all that has happened, also where the journal stops before
            if (fates := sum(figures["fates"].values())) != figures["blocks"]:
                self.problems.append(f"{figures['blocks']} blocks were pushed, and {fates} have a fate")
            folded = sum(report["folded"] for report in reports)
            undone = sum(record["samples"] for record in ended.records if record["kind"] == "undone")  # reports keep what they said
            if not full and figures["samples"] + undone != folded:
                self.problems.append(f"fates say that {figures['samples']} samples were folded, and the reports of epochs say {folded}")
        used = {name: sum(report[name] for report in reports) for name in ("indices", "unused")}
        self.counts += Counter(fates=sum(figures["fates"].values()), epochs=len(reports), **used)
        self.problems += [] if figures["pushes"] and reports else [f"{figures['pushes']} pushes, {len(reports)} epochs"]

    def _keep_stacks(self) -> None:
        if SPY is None:
            return
        with (self._folder / "stacks").open("w") as file:
            for process in self._job.processes():
                with contextlib.suppress(subprocess.TimeoutExpired, *GONE):
                    subprocess.run([SPY, "dump", "--pid", str(process.pid)], stdout=file, stderr=file, timeout=30.0, check=False)


@contextlib.contextmanager
def folder_of(place: str) -> Iterator[Path]:
    """A new folder, in which ``disk`` is small for the place "full disk"."""
    with tempfile.TemporaryDirectory(prefix="offbeat-mixed-") as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        if place == "full disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
        try:
            yield Path(name)
        finally:
            if place == "full disk":
                subprocess.run(["umount", "-l", str(disk)], check=True)


def jobs(seed: int) -> Iterator[tuple[str, str]]:
    """Rules and places, without end: every rule comes once before one comes again, and so does every place."""
    draw = random.Random(seed)
    rules: list[str] = []
    places: list[str] = []
    while True:
        rules = rules or draw.sample(sorted(policies.RULES), len(policies.RULES))
        places = places or draw.sample(PLACES, len(PLACES))
        kind, place = policies.RULES[rules.pop()], places.pop()
        if (
            (place == "full disk" and os.geteuid() != 0)
            or (place in ("apart", "replicas") and kind.family == "gossip")  # these ranks need one machine
        ):
            place = "one host"
        yield draw.choice(kind.about.examples), place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", type=int, help="only the one with this number")
    parser.add_argument("--keep", type=Path, help="a folder for what jobs with problems have left")
    args = parser.parse_args()
    total, kinds, wrong, hangs = Counter[str](), Counter[str](), 0, 0
    for number, (rule, place) in enumerate(jobs(args.seed)):
        if args.job not in (None, number):
            continue
        with folder_of(place) as folder:
            began = time.monotonic()
            trial = Trial(rule, place, random.Random(f"{args.seed} {number}"), folder)
            trial.run()
            if trial.problems and args.keep is not None:
                shutil.copytree(folder, args.keep / f"{args.seed}-{number}", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        took = f"{time.monotonic() - began:4.0f} s"
        print(
            f"job {number:3} {rule:22} {place:9} {took}  {', '.join(map(str, trial.done))}: {trial.said}; {dict(trial.counts)}", flush=True
        )
        for problem in trial.problems:
            print(f"    PROBLEM {problem}", flush=True)
        happened = [fault for fault in trial.done if fault.at is not None]
        kinds.update(f"{fault.kind} {fault.role}" for fault in happened)
        total += trial.counts + Counter(faults=len(happened), missed=len(trial.done) - len(happened), jobs=1)
        wrong, hangs = wrong + bool(trial.problems), hangs + any(problem.startswith("HANG") for problem in trial.problems)
        if args.job is not None or total["faults"] >= args.faults:
            break
    print("\n" + "\n".join(f"{kind:36}{count:>5}" for kind, count in sorted(kinds.items())))
    print(f"\n{', '.join(f'{count} {what}' for what, count in total.items())}; hangs {hangs}, jobs with problems {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
