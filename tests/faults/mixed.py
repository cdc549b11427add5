"""Mixed faults in a loop, over all rules: ``python -m tests.faults.mixed --faults 300 --seed 1``; as root also full disks.

Beside `tests.faults.loop`, whose faults come one by one: here two processes are hit at the same moment in half of the cases, a process dies
while it is started again, is stopped and then killed, loses its connections while everything lives, or has no descriptors left; and a
job has a full disk under its journal and checkpoints, or nobody who reads its output, from the beginning. The kind of a job and its faults
are drawn from the seed. After each job: it has ended within a bound and with a status that its faults allow, the audit finds no fate and
no index wrong, and nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.cutting import cut
from tests.faults.job import FAULTY, GONE, Job
from tests.faults.loop import RULES

from offbeat import policies
from offbeat.chaos import procfs
from offbeat.chaos.observation import Observation
from offbeat.chaos.tail import Tail
from offbeat.core.policy import ServerRule

TIMEOUT_S, BOUND_S, WORKERS, PER_JOB = 3.0, 120.0, 3, 6
APART = {"OFFBEAT_HOST": "apart"}
KINDS = ("kill", "stop and kill", "reset", "reset twice", "no descriptors", "kill while restarting")
PLACES = ("one host", "apart", "replicas", "full disk", "no reader")
DISK_BYTES = 96 << 10


class Trial:
    """One job of a rule and a place, and its faults, which are drawn from ``draw``."""

    def __init__(self, rule: str, place: str, count: int, draw: random.Random, folder: Path) -> None:
        self.rule, self.place, self.count, self._draw, self._folder = rule, place, count, draw, folder
        self.done: list[str] = []
        self.problems: list[str] = []
        self.said, self.pairs, self.missed, self._may_fail = "no end", 0, 0, False
        chosen = policies.rule(rule)
        self._has_servers = isinstance(chosen, ServerRule)
        more: list[str] = ["--servers", "2"] if self._has_servers and place in ("apart", "replicas") else []
        more += ["--replicas", "1"] if place == "replicas" else []
        more += ["--checkpoint", str(folder / "disk" / "saved"), "--every", "1"] if place == "full disk" else []
        limits = ("--timeout", f"{TIMEOUT_S:g}", "--max-restarts", "99", "--slow", "any=0.02")
        script = (FAULTY, "--until", str(folder / "enough"), "--orders", str(folder))
        if place == "full disk":
            (folder / "journal.jsonl").symlink_to(folder / "disk" / "journal.jsonl")
        environment = APART if place == "apart" or (place == "replicas" and not self._has_servers) else {}
        self._reader = -1
        popen = self._unread if place == "no reader" else subprocess.Popen
        arguments = ("--workers", str(WORKERS), *more, "--sync", rule, *limits, *script)
        self._job = Job(folder, arguments, environment=environment, popen=popen)
        self._books = Tail(self._job.journal)

    def _unread(self, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start the job with its output into a pipe, whose reader goes after its first pushes."""
        self._reader, writer = os.pipe()
        with contextlib.closing(os.fdopen(writer, "wb")) as out:
            return subprocess.Popen(command, **{**how, "stdout": out})

    def run(self) -> None:
        """Run it to its end, and find what is wrong with it."""
        try:
            self._wait("the first pushes", lambda: len(self._books.incarnations) == WORKERS)
            if self._reader >= 0:
                os.close(self._reader)
                self._reader = -1
            while len(self.done) < self.count and self._job.process.poll() is None:
                self._strike()
                self._progress()
            (self._folder / "enough").touch()
            self._judge()
        except AssertionError as error:
            self.problems.append(str(error)[:1500])
        finally:
            if self._reader >= 0:
                os.close(self._reader)
            self._job.clean_up()

    # Faults.

    def _victims(self) -> dict[tuple[str, int], int]:
        """By role and number, of processes that work."""
        roles = procfs.roles(self._job._found())
        return {(role, number or 0): pid for pid, (role, number) in roles.items() if role in ("worker", "server", "standby")}

    def _strike(self) -> None:
        """Hit one process, or two at the same moment."""
        victims = self._victims()
        if not victims:
            return
        hit = self._draw.sample(sorted(victims), min(len(victims), self._draw.choice([1, 2])))
        self.pairs += len(hit) == 2
        start = threading.Barrier(len(hit))
        kinds = [self._draw.choice(KINDS) for _ in hit]
        threads = []
        for (role, number), kind in zip(hit, kinds, strict=True):
            lethal = kind in ("kill", "stop and kill", "kill while restarting")
            # Two standbys or a server and its standby at once, and servers that nobody replaces: the job may end, with a sentence.
            self._may_fail |= lethal and role != "worker" and (self.place != "one host" or len(hit) == 2)
            self._may_fail |= not self._has_servers and lethal and len(hit) == 2
            # The script opens files itself, and the same exception on two workers is final.
            self._may_fail |= kind == "no descriptors" and role == "worker"
            self.done.append(f"{kind} {role} {number}")
            how = (start, victims[role, number], (role, number), kind, self._draw.random())
            threads.append(threading.Thread(target=self._do, args=how))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _do(self, start: threading.Barrier, pid: int, who: tuple[str, int], kind: str, pause_s: float) -> None:
        with contextlib.suppress(*GONE, OSError):
            process = psutil.Process(pid)
            start.wait()
            match kind:
                case "kill":
                    process.kill()
                case "stop and kill":
                    process.send_signal(signal.SIGSTOP)
                    threading.Event().wait(2 * pause_s)
                    process.kill()
                case "reset" | "reset twice":
                    self.missed += not cut(pid)  # it has just begun, or is dying
                    if kind == "reset twice":
                        threading.Event().wait(pause_s / 10)
                        cut(pid)
                case "no descriptors":
                    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (process.num_fds(), hard))
                    cut(pid)
                    threading.Event().wait(1.5 * pause_s)
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
                case "kill while restarting":
                    process.kill()
                    deadline = time.monotonic() + 10.0
                    while time.monotonic() < deadline and (again := self._victims().get(who, pid)) == pid:
                        threading.Event().wait(0.02)
                    threading.Event().wait(pause_s / 2)
                    psutil.Process(again).kill()

    # Waiting, and the end.

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not ready() and self._job.process.poll() is None:
            assert time.monotonic() < deadline, f"HANG: no {what} within {BOUND_S:g} s after {self.done[-2:]}"
            threading.Event().wait(0.1)
            self._books.read(time.monotonic())

    def _progress(self) -> None:
        """Wait until every worker pushes; where the journal is full, for a while."""
        if self.place == "full disk":
            threading.Event().wait(2.0)
            return
        self._books.read(time.monotonic())
        before = dict(self._books.pushes)
        self._wait("progress", lambda: all(self._books.pushes[worker] > before.get(worker, 0) + 1 for worker in range(WORKERS)))

    def _judge(self) -> None:
        try:
            ended = self._job.ended(BOUND_S)
        except AssertionError as error:
            raise AssertionError(f"HANG: {error}") from None
        self.said = ended.last_line.removeprefix("offbeat: ")[:150] if ended.status else "finished"
        allowed = {0} | ({1} if self._may_fail else set()) | ({141} if self.place == "no reader" else set())
        if ended.status not in allowed:
            end = ended.records[-1] if ended.records else {}
            self.problems.append(f"status {ended.status} (expected one of {sorted(allowed)}): {end.get('reason')}; {ended.err[-1500:]}")
        if ended.status == 1 and not self.said:
            self.problems.append("status 1 without a sentence")
        if self.place == "full disk":
            return  # the journal is cut off
        self.problems += ended.tally().problems()
        seen = Observation.of(ended.records)
        self.problems += [*seen.gaps_in_versions, *(f"an epoch does not account for every index: {text}" for text in seen.unaccounted)]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw, done, trials = random.Random(args.seed), 0, list[Trial]()
    places = [place for place in PLACES if place != "full disk" or os.geteuid() == 0]
    while done < args.faults:
        rule, place = draw.choice(RULES), draw.choice(places)
        kind = policies.rule(rule)
        if place in ("apart", "replicas") and kind.family == "gossip":
            place = "one host"  # these ranks need one machine
        with folder_of(place) as folder:
            began = time.monotonic()
            trial = Trial(rule, place, min(PER_JOB, args.faults - done), random.Random(f"{args.seed} {len(trials)}"), folder)
            trial.run()
        trials.append(trial)
        done += max(1, len(trial.done))
        print(
            f"job {len(trials) - 1:3} {rule:22} {place:9} {time.monotonic() - began:4.0f} s  {', '.join(trial.done)}: {trial.said}",
            flush=True,
        )
        for problem in trial.problems:
            print(f"    PROBLEM {problem}", flush=True)
    counts = Counter(fault.rsplit(" ", 1)[0] for trial in trials for fault in trial.done)
    print("\n" + "\n".join(f"{kind:36}{count:>5}" for kind, count in sorted(counts.items())))
    pairs, wrong = sum(trial.pairs for trial in trials), [trial for trial in trials if trial.problems]
    hangs = sum("HANG" in problem for trial in trials for problem in trial.problems)
    missed = sum(trial.missed for trial in trials)
    print(
        f"\n{done} faults in {len(trials)} jobs, {pairs} times two at once, {missed} missed; hangs {hangs}, jobs with problems {len(wrong)}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
