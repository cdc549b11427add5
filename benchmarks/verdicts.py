"""Are the verdicts right? Jobs that are slow on purpose, by real work and by sleep, and jobs that nothing disturbs.

    python -m benchmarks.verdicts [--runs 20] [--quiet-runs 40] [--only CAUSE] [--sync bsp] [--json FILE]

A job is right if the costliest verdict names the slow workers and the cause. A job that nothing disturbs is right if nothing is said. The
neighbour is a busy process on the core of the slow worker, in steps of 20 ms and in short ones. The link is the loopback device of a
network namespace, limited by ``tc`` (as root), over which a worker of another host name sends. Short memory is a cgroup with less memory
than the worker uses (as root; with cgroups of version 1, where there is swap). One job runs at a time, alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.job import save

WORKER = str(Path(__file__).with_name("verdicts_worker.py"))
OFFBEAT = (sys.executable, "-m", "offbeat", "run")
NETNS, RATE = "offbeat-verdicts", "100mbit"
MEMORY_NBYTES = 80 << 20
FIRST = Path("/sys/fs/cgroup/memory")


class Case(NamedTuple):
    """A cause, the workers that have it, and what the verdict has to say."""

    cause: str
    expected: str
    workers: int = 2
    slow: tuple[int, ...] = (1,)
    batches: int = 40


CASES = [
    Case("data sleep", "data"),
    Case("data decode", "data"),
    Case("data hash", "data"),
    Case("data disk", "data", batches=160),
    Case("data process", "data"),
    Case("data sleep", "data", 3, (1, 2)),
    Case("forward", "forward"),
    Case("forward sleep", "forward"),
    Case("backward", "backward"),
    Case("own", "own"),
    Case("own disk", "own"),
    Case("own sleep", "own", 3, (0, 2)),
    Case("gc", "gc", batches=60),
    Case("save", "save", slow=(0,)),
    Case("evaluation", "evaluation", slow=(0,), batches=60),
    Case("neighbour", "queued", batches=60),
    Case("neighbour short", "queued", batches=200),
    Case("link", "link", batches=30),
    Case("memory", "memory"),
]
CALM = [Case("none", "", batches=150), Case("compute", "", batches=100)]
CROWDED = Case("compute", "cores", 5, (), 100)


class Ran(NamedTuple):
    """What a job has said."""

    verdicts: list[dict[str, Any]]
    """Deaths left out."""
    error: float
    """By how much the phases of a worker differ from the time between its first push and its last, at most; a share of that."""


def ran(case: Case, sync: str) -> Ran:
    """Run a job."""
    with tempfile.TemporaryDirectory(prefix="offbeat-verdicts-") as folder:
        summary, journal = Path(folder, "summary.json"), Path(folder, "journal.jsonl")
        slow = ",".join(map(str, case.slow))
        words = [
            *OFFBEAT,
            "--workers",
            str(case.workers),
            "--sync",
            sync,
            "--summary",
            str(summary),
            "--journal",
            str(journal),
            WORKER,
            case.cause,
            slow,
            str(case.batches),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERDICTS_DISK": folder}
        neighbour = None
        if case.cause.startswith("neighbour"):
            neighbour = subprocess.Popen([sys.executable, "-c", "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"])
        if case.cause == "link":
            words = ["ip", "netns", "exec", NETNS, *words]
            environment["VERDICTS_WIDTH"] = "512"
        if case.cause == "memory":
            environment["VERDICTS_CGROUP"] = str(cgroup())
        try:
            ended = subprocess.run(words, check=False, env=environment, capture_output=True, text=True, timeout=300)
        finally:
            if neighbour is not None:
                neighbour.kill()
                neighbour.wait()
        if ended.returncode:
            raise SystemExit(f"{case}: status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        said = [one for one in json.loads(summary.read_text())["verdicts"] if one["kind"] != "death"]
        return Ran(said, max(map(error, pushes(journal).values())))


def pushes(journal: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the pushes of each worker."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in journal.read_text().splitlines():
        if (record := json.loads(line))["kind"] == "pushed":
            found.setdefault(record["worker"], []).append(record)
    return found


def error(of_worker: list[dict[str, Any]]) -> float:
    whole = of_worker[-1]["t"] - of_worker[0]["t"]
    return float(abs(sum(sum(push["phases"].values()) for push in of_worker[1:]) / whole - 1.0))


def possible(case: Case) -> bool:
    """Return whether this user and this machine can make the cause."""
    if case.cause not in ("link", "memory"):
        return True
    swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    controllers = FIRST.with_name("cgroup.controllers")
    limited = swap if FIRST.exists() else controllers.exists() and "memory" in controllers.read_text()
    return os.geteuid() == 0 and (case.cause == "link" or limited)


def cgroup() -> Path:
    """Make a cgroup with little memory."""
    group = (FIRST if FIRST.exists() else FIRST.parent) / NETNS
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if FIRST.exists() else "memory.high")).write_text(str(MEMORY_NBYTES))
    return group


def right(case: Case, said: list[dict[str, Any]]) -> bool:
    """Return whether the costliest verdict names workers and cause, or nothing is said where nothing is wrong."""
    if not case.expected:
        return not said
    if case.expected == "cores":
        return [one["cause"] for one in said] == ["cores"]
    return bool(said) and said[0]["cause"] == case.expected and tuple(said[0]["workers"]) == case.slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--quiet-runs", type=int, default=40)
    parser.add_argument("--only")
    parser.add_argument("--sync", default="bsp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.geteuid() == 0:
        subprocess.run(["ip", "netns", "add", NETNS], check=False, capture_output=True)
        for words in ("ip link set lo up", f"tc qdisc add dev lo root tbf rate {RATE} burst 256kb latency 500ms"):
            subprocess.run(["ip", "netns", "exec", NETNS, *words.split()], check=False, capture_output=True)
    rows, errors = [], []
    print("| cause | workers | slow | right | otherwise |\n|---|--:|---|--:|---|")
    todo = [(case, args.runs) for case in CASES] + [(case, args.quiet_runs // 2) for case in CALM] + [(CROWDED, args.runs)]
    for case, runs in todo:
        if args.only not in (None, case.cause):
            continue
        if not possible(case):
            print(f"| {case.cause} | {case.workers} | {', '.join(map(str, case.slow))} | not possible here | |", flush=True)
            continue
        wrong: Counter[str] = Counter()
        for _ in range(runs):
            said, off = ran(case, args.sync)
            errors.append(off)
            if not right(case, said):
                wrong["; ".join(f"{one['cause']} of {one['workers']} {one['share']:.0%}" for one in said) or "nothing"] += 1
        good = runs - sum(wrong.values())
        rows.append({**case._asdict(), "right": good, "runs": runs, "wrong": dict(wrong)})
        others = ", ".join(f"{text} ({count})" for text, count in wrong.most_common(4))
        print(f"| {case.cause} | {case.workers} | {', '.join(map(str, case.slow)) or '-'} | {good} of {runs} | {others} |", flush=True)
    print(f"Phases differ from the time between a worker's first push and its last by at most {max(errors, default=0.0):.2%}.")
    save(args.json, rows)


if __name__ == "__main__":
    main()
