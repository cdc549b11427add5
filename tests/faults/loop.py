"""Faults in a loop, over all rules: ``python -m tests.faults.loop --faults 300 --seed 1``.

Each job is small and real; its faults are drawn from the seed. After each job: it has ended within a bound, every push has one fate, every
epoch's report accounts for every index, no process and no shared memory is left. Printed are a line for each job, and a table of what was
done under which rule and how the jobs ended. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.job import FAULTY, GONE, Books, Job

from offbeat import policies
from offbeat.chaos.injector import Injector
from offbeat.chaos.machine import LinuxMachine
from offbeat.chaos.schedule import Fault
from offbeat.core.policy import ServerRule

TIMEOUT_S, PROGRESS_S = 2.0, 8.0
BOUND_S = 150.0
"""For the end of a job, and for the return of a worker, on a machine that is busy with other things."""
WORKERS = 3
PER_JOB = 5
RULES = tuple(kind.about.examples[0] for kind in policies.RULES.values())
ORDERS = ("gil", "loop", "block", "raise", "exit", "end", "crash", "memory", "sockets")
"""What a worker does to itself (``scripts/faulty.py``)."""
KINDS = (
    *("kill one", "kill two", "kill chief", "kill while starting", "kill and kill again", "terminate"),
    *("stop short", "stop long", "stop for ever", "stop server", "stop supervisor", *ORDERS),
)
LAST = ("kill all", "none")
"""Kinds that only the last fault of a job may be: where there are no servers the parameters are gone with the last rank."""


class Trial:
    """One job and its faults.

    Args:
        rule: the job's.
        faults: kinds, in order.
        draw: whom they hit.
        folder: for its files.
    """

    def __init__(self, rule: str, faults: list[str], draw: random.Random, folder: Path) -> None:
        self.rule, self.faults, self._draw, self._folder = rule, faults, draw, folder
        self.problems: list[str] = []
        self.said = ""
        self._present = set(range(WORKERS))
        self._all_killed = False
        """At once: where there are no servers the parameters are gone."""
        chosen = policies.rule(rule)
        servers = "2" if isinstance(chosen, ServerRule) and chosen.scope == "shard" else "1"
        options = ("--workers", str(WORKERS), "--servers", servers, "--sync", rule, "--max-restarts", "99", "--slow", "any=0.02")
        limits = ("--timeout", f"{TIMEOUT_S:g}", "--progress-timeout", f"{PROGRESS_S:g}")
        own = ("--until", str(folder / "enough"), "--orders", str(folder))
        self._job = Job(folder, (*options, *limits, FAULTY, *own))
        self._books = Books(self._job.journal)
        self._machine = LinuxMachine(self._job.mark, self._job.journal)
        self._machine.job = {"workers": WORKERS, "servers": int(servers)}

    def run(self) -> None:
        """Run it to its end, and find what is wrong with it."""
        try:
            if self._wait("the first pushes", lambda: len(self._books.incarnations) == WORKERS):
                for kind in self.faults:
                    self._fault(kind)
            (self._folder / "enough").touch()
            self._judge()
        except AssertionError as error:
            self.problems.append(str(error)[:2000])
        except GONE as error:
            self.problems.append(f"the loop itself: {error!r}")
        finally:
            self._job.clean_up()

    def _wait(self, what: str, ready: Callable[[], bool]) -> bool:
        """Wait for something; False: the job has ended before."""
        deadline = time.monotonic() + BOUND_S
        while True:
            self._books.read()
            if ready():
                return True
            if self._job.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"HANG: no {what} within {BOUND_S:g} s")
            threading.Event().wait(0.1)

    # Faults.

    def _fault(self, kind: str) -> None:
        if self._job.process.poll() is not None:
            return
        victims = sorted(self._present)
        one = self._draw.choice(victims)
        match kind:
            case "kill one" | "kill chief" | "kill two" | "kill all":
                count = {"kill two": 2, "kill all": len(victims)}.get(kind, 1)
                hit = victims[:1] if kind == "kill chief" else self._draw.sample(victims, min(count, len(victims)))
                self._all_killed |= len(hit) == len(victims)
                self._replace(hit, lambda: self._inject("kill", *hit))
            case "kill while starting" | "kill and kill again":
                self._inject("kill", one)
                count = self._books.restarted[one]
                if self._wait("restart", lambda: self._books.restarted[one] > count):
                    if kind == "kill and kill again":
                        threading.Event().wait(self._draw.random())
                    self._replace([one], lambda: self._inject("kill", one))
            case "terminate":
                if len(victims) > 1:
                    self._present.discard(one)
                    self._inject("term", one)
                    self._progress()
            case "stop short" | "stop long":
                self._inject("stop", one, seconds=0.2 + self._draw.random() if kind == "stop short" else TIMEOUT_S + 1.0)
                self._progress()
            case "stop server" | "stop supervisor":
                self._inject("stop", 0, target=kind.removeprefix("stop "), seconds=1.0 + 2 * self._draw.random())
                self._progress()
            case "stop for ever":
                self._replace([one], lambda: self._machine.find("worker")[0][one].down("stop"))
            case "none":
                self._progress()
            case order:
                self._replace([one], lambda: self._order(one, order))

    def _inject(self, kind: str, *numbers: int, target: str = "worker", seconds: float = 0.0) -> None:
        """Let a fault happen to these processes at once, and see it through: signals have arrived, what was stopped goes on."""
        began = time.monotonic()
        injector = Injector(self._machine.find, [Fault(0, 0.0, kind, target, number / WORKERS, seconds, 1.0) for number in numbers])
        try:
            while not injector.exhausted:
                injector.tick(now := time.monotonic() - began)
                threading.Event().wait(max(0.0, injector.wake_at(now) - now))
        finally:
            injector.release(time.monotonic() - began)
        self.problems += [f"{kind} {fault.victim}: {fault.note}" for fault in injector.faults if fault.proved is False]

    def _order(self, worker: int, order: str) -> None:
        hidden = self._folder / f".{worker}"
        hidden.write_text(order)
        hidden.rename(self._folder / str(worker))

    def _replace(self, workers: list[int], what: Callable[[], object]) -> None:
        """Do something that ends these workers' incarnations, and wait until their next have pushed."""
        self._books.read()
        before = dict(self._books.incarnations)
        what()
        self._wait(f"return of {workers}", lambda: all(self._books.incarnations[worker] > before[worker] for worker in workers))

    def _progress(self) -> None:
        """Wait until everybody who is there pushes."""
        self._books.read()
        before = dict(self._books.pushes)
        self._wait("progress", lambda: all(self._books.pushes[worker] > before[worker] + 1 for worker in self._present))

    # The end.

    def _judge(self) -> None:
        ended = self._job.ended(BOUND_S)
        self.said = ended.last_line.removeprefix("offbeat: ") if ended.status else "finished"
        if not ended.records or ended.records[-1]["kind"] != "end":
            self.problems.append(f"no end record, status {ended.status}: {ended.last_line}")
        elif ended.status == 0 and not ended.records[-1]["ok"]:
            self.problems.append("status 0 and an end that is not ok")
        self.problems += ended.tally().problems()
        if ended.status not in (0, 1):
            self.problems.append(f"status {ended.status}: {ended.last_line}")
        expected = ended.status == 0 or self._all_killed or {"raise", "exit", "end", "memory"} & set(self.faults)
        if not expected:
            self.problems.append(f"it failed: {ended.last_line}")


def schedule(faults: int, seed: int) -> list[tuple[str, list[str]]]:
    """Jobs, each a rule and its faults: all rules and kinds come in turn, in an order drawn from the seed."""
    draw = random.Random(seed)
    rules: list[str] = []
    kinds: list[str] = []
    jobs: list[tuple[str, list[str]]] = []
    count = 0
    while count < faults:
        rules = rules or draw.sample(RULES, len(RULES))
        chosen = []
        for _ in range(min(PER_JOB, faults - count)):
            kinds = kinds or draw.sample(KINDS, len(KINDS))
            chosen.append(kinds.pop())
        if len(chosen) == PER_JOB and draw.random() < 0.25:
            chosen[-1] = "kill all"
        count += len(chosen)
        jobs.append((rules.pop(), chosen))
    return jobs


def table(trials: list[Trial]) -> str:
    """A row for each kind of fault, a column for each rule, and below how the jobs ended."""
    counts = Counter((kind, trial.rule) for trial in trials for kind in trial.faults)
    rules = [rule for rule in RULES if any(trial.rule == rule for trial in trials)]
    heads = [rule.partition("(")[0] for rule in rules]
    lines = [f"{'fault':22}" + "".join(f"{head:>10}" for head in heads)]
    for kind in (*KINDS, *LAST):
        if any(counts[kind, rule] for rule in rules):
            lines.append(f"{kind:22}" + "".join(f"{counts[kind, rule] or '':>10}" for rule in rules))
    lines.append("")
    for rule in rules:
        ends = Counter(trial.said or "no end" for trial in trials if trial.rule == rule)
        lines += [f"{rule}: {count} x {said}" for said, count in ends.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{args.faults} faults, seed {args.seed}", flush=True)
    trials: list[Trial] = []
    for number, (rule, faults) in enumerate(schedule(args.faults, args.seed)):
        with tempfile.TemporaryDirectory(prefix="offbeat-loop-") as folder:
            began = time.monotonic()
            trial = Trial(rule, faults, random.Random(f"{args.seed} {number}"), Path(folder))
            trial.run()
        trials.append(trial)
        print(f"job {number:3} {rule:18} {time.monotonic() - began:5.0f} s  {', '.join(faults)}: {trial.said or 'no end'}", flush=True)
        for problem in trial.problems:
            print(f"    PROBLEM {problem}", flush=True)
    hangs = sum("HANG" in problem or "does not end" in problem for trial in trials for problem in trial.problems)
    done = sum(len(trial.faults) for trial in trials)
    wrong = sum(bool(trial.problems) for trial in trials)
    print(f"\n{table(trials)}\n\n{done} faults in {len(trials)} jobs, hangs {hangs}, jobs with problems {wrong}")
    return 1 if any(trial.problems for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
