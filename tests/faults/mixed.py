"""Mixed faults over all rules, as ``offbeat chaos`` injects and judges: ``python -m tests.faults.mixed --faults 300 --seed 1``.

In most cases two processes are hit at the same moment. Beside what ``offbeat chaos`` draws, a process is stopped until it is killed, dies
again while it is started again, loses its connections while everything lives, or has no descriptors left; and a worker hangs, ends or
crashes in its script. All is drawn from the seed. Each job is told to end after its faults, and must then end as documented, with every
push and every index accounted for, and with nothing left. Only pauses are not judged: a script that hangs may hold the others up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.cutting import reset
from tests.faults.job import FAULTY, QUICK, RUN

from offbeat import policies
from offbeat.chaos import procfs
from offbeat.chaos.judgement import DOCUMENTED, LOST, Ended, judge
from offbeat.chaos.machine import LinuxMachine, ProcessVictim
from offbeat.chaos.run import Run
from offbeat.chaos.schedule import Fault
from offbeat.core.policy import ServerRule
from offbeat.types import Seconds

TIMEOUT_S, PROGRESS_S, WORKERS, PER_JOB, RESTARTS = 3.0, 8.0, 3, 6, 99
MTBF_S: Seconds = 6.0
"""Between two moments: a worker that hangs is killed after `PROGRESS_S`."""
BOUND_S: Seconds = 300.0
"""For the imports of seven processes on a busy machine, and for anything after them."""
AGAIN_S: Seconds = 0.4
"""Within which a process dies for the second time, while it is started again."""
ENDS = ("raise", "exit", "end", "memory")
"""What a worker does to itself (``scripts/faulty.py``) and its script is blamed for: if it comes twice, the job may fail."""
ORDERS = (*ENDS, "gil", "loop", "block", "crash", "sockets")
DEATHS = ("kill", "kill twice", "stop and kill")
HARMLESS = ("reset", "no descriptors")
KINDS = {
    "supervisor": (*HARMLESS, "stop"),
    "forkserver": DEATHS[::2],
    "worker": (*DEATHS, *HARMLESS, "stop", *ORDERS),
    **dict.fromkeys(("server", "standby"), DEATHS + HARMLESS),
}
"""What happens to a process, by its role."""
PLACES = ("one host", "apart", "replicas")
MAY_FAIL = re.compile("may have folded|nobody is left to copy the parameters from")
"""Sentences of docs/failures.md on deaths at the same moment, which `judge` does not know."""


def drawn(draw: random.Random, count: int) -> Iterator[Fault]:
    """Yield at least so many faults; in most cases two have the same time."""
    at_s, number = 0.0, 0
    while number < count:
        at_s += draw.expovariate(1.0 / MTBF_S)
        # Forkservers only at last: each process after the death of one imports PyTorch for itself.
        roles = [role for role in KINDS if role != "forkserver" or number >= count - 2]
        for role in draw.sample(roles, draw.choice((1, 2, 2))):
            kind, pick, length = draw.choice(KINDS[role]), draw.random(), draw.random()
            lasts_s = {"reset": 0.0, "no descriptors": 0.2 + length}.get(kind, 2 * TIMEOUT_S * length if "stop" in kind else BOUND_S)
            yield Fault(number, at_s, "kill" if kind == "kill twice" else kind, role, pick, lasts_s, 0.5)
            number += 1
            if kind == "kill twice":
                yield Fault(number, at_s + AGAIN_S * length, "kill", role, pick, 0.0, 0.5)
                number += 1


class Mishap(ProcessVictim):
    """A process to which also happens what ``offbeat chaos`` does not do."""

    def __init__(self, victim: ProcessVictim, folder: Path) -> None:
        super().__init__(victim._process, victim.name, victim.worker, victim._mark)
        self._order = folder / str(victim.worker)
        """The file in which a worker finds what it has to do to itself."""
        self._limits: tuple[int, int] | None = None
        self._kind = ""

    def down(self, kind: str) -> bool:
        self._kind, pid = kind, self._process.pid
        if kind in ORDERS:
            if self.worker is None:
                return False
            hidden = self._order.with_name(f".{self.worker}")
            hidden.write_text(kind)
            hidden.rename(self._order)
            return True
        with contextlib.suppress(OSError):
            if kind == "reset":
                return reset(pid) > 0
            return self._take_descriptors(pid) if kind == "no descriptors" else super().down(kind)
        return False

    def is_down(self, kind: str) -> bool:
        if kind in ORDERS:
            return procfs.state(self._process) in ("", "Z", "X")
        return kind in HARMLESS or super().is_down(kind)

    def up(self) -> None:
        if self._kind in ORDERS:
            self._order.unlink(missing_ok=True)
        if self._limits is not None:
            with contextlib.suppress(OSError):
                resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, self._limits)
        procfs.send(self._process, signal.SIGKILL if self._kind == "stop and kill" else signal.SIGCONT, self._mark)

    def _take_descriptors(self, pid: int) -> bool:
        """Reset its connections where it can open nothing in their place for a while: all numbers below the limit are taken."""
        links = Path(f"/proc/{pid}/fd").iterdir()
        kept = {int(link.name) for link in links if not os.readlink(link).startswith("socket:")}
        limit = next(number for number in itertools.count() if number not in kept)
        self._limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, self._limits[1]))
        return reset(pid) > 0


class Machine(LinuxMachine):
    """Finds processes to which mishaps happen.

    Args:
        machine: of the run.
        folder: for orders to workers.
    """

    def __init__(self, machine: LinuxMachine, folder: Path) -> None:
        super().__init__(machine._mark, machine._journal)
        self._folder = folder

    def find(self, target: str) -> tuple[dict[int, Mishap], int]:  # type: ignore[override]
        found, total = super().find(target)
        return {number: Mishap(one, self._folder) for number, one in found.items() if isinstance(one, ProcessVictim)}, total


def trial(rule: str, place: str, draw: random.Random, folder: Path, faults: int = PER_JOB) -> tuple[Ended, list[str]]:
    """Run one job of a rule in a place, with faults that are drawn. Returns its end, and what is wrong with it."""
    served = isinstance(policies.rule(rule), ServerRule)
    options = ["--servers", str(draw.choice([1, 2]))] if served else []
    options += ["--replicas", "1"] if place == "replicas" else []
    options += ["--timeout", f"{TIMEOUT_S:g}", "--progress-timeout", f"{PROGRESS_S:g}", "--max-restarts", str(RESTARTS)]
    apart = ["OFFBEAT_HOST=apart"] if place == "apart" or (place == "replicas" and not served) else []
    journal, script = folder / "journal.jsonl", (FAULTY, "--until", str(folder / "never"), "--orders", str(folder))
    words = ["env", *(f"{name}={value}" for name, value in QUICK.items()), *apart, *RUN, "--journal", str(journal), "--sync", rule]
    plan = list(drawn(draw, faults))
    one = Run(
        [*words, "--workers", str(WORKERS), *options, "--slow", "any=0.02", *script],
        journal,
        folder,
        patience_s=BOUND_S,
        time_s=plan[-1].at_s + PROGRESS_S + 2 * TIMEOUT_S,
    )
    one.machine = Machine(one.machine, folder)
    ended = one.run(plan)
    return ended, problems(ended, place)


def problems(ended: Ended, place: str) -> list[str]:
    """Return what is wrong with the end of a job, in the words of `judge`, to which each death is a kill."""
    deaths = [replace(one, kind="kill") if one.kind in (*ORDERS, *DEATHS) else one for one in ended.faults]
    if place == "apart":  # servers and workers may be forks of the forkserver, and no other process can have what servers held
        deaths += [replace(one, target="server") for one in deaths if one.target == "forkserver"]
    known = replace(ended, faults=deaths)
    verdict = judge(known, timeout_s=TIMEOUT_S, max_restarts=RESTARTS)
    blamed = any(fault.kind in ENDS for fault in ended.done)
    documented = verdict.outcome == DOCUMENTED or (verdict.outcome == LOST and (blamed or MAY_FAIL.search(ended.said)))
    passed = {"no wait for the dead", *(["end"] if documented else [])}
    return [f"{check.name}: {check.figures}" for check in verdict.checks if check.held is False and check.name not in passed]


def jobs(seed: int) -> Iterator[tuple[str, str]]:
    """Rules and places, without end: every rule comes once before one comes again, and so does every place."""
    draw = random.Random(seed)
    rules: list[str] = []
    places: list[str] = []
    while True:
        rules = rules or draw.sample(sorted(policies.RULES), len(policies.RULES))
        places = places or draw.sample(PLACES, len(PLACES))
        kind, place = policies.RULES[rules.pop()], places.pop()
        yield draw.choice(kind.about.examples), "one host" if kind.family == "gossip" else place  # these ranks need one machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", type=int, help="only the one with this number")
    parser.add_argument("--keep", type=Path, help="a folder for what jobs with problems have left")
    args = parser.parse_args()
    kinds, total = Counter[str](), Counter[str]()
    for number, (rule, place) in enumerate(jobs(args.seed)):
        if args.job not in (None, number):
            continue
        with tempfile.TemporaryDirectory(prefix="offbeat-mixed-") as name:
            began = time.monotonic()
            ended, wrong = trial(rule, place, random.Random(f"{args.seed} {number}"), Path(name))
            if wrong and args.keep is not None:
                shutil.copytree(name, args.keep / f"{args.seed}-{number}", dirs_exist_ok=True)
        done = ", ".join(f"{fault.kind} {fault.victim}" for fault in ended.done)
        print(f"job {number:3} {rule:22} {place:9} {time.monotonic() - began:4.0f} s  {done}: {ended.said[:200]}", flush=True)
        print(*(f"    PROBLEM {problem}\n" for problem in wrong), sep="", end="", flush=True)
        kinds.update(fault.name for fault in ended.done)
        total.update(faults=len(ended.done), missed=len(ended.faults) - len(ended.done), jobs=1, wrong=bool(wrong))
        if args.job is not None or total["faults"] >= args.faults:
            break
    print("\n" + "\n".join(f"{kind:36}{count:>5}" for kind, count in sorted(kinds.items())))
    print(f"\n{', '.join(f'{count} {what}' for what, count in total.items())}")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
