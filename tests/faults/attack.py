"""A job attacked by one of its workers: ``python -m tests.faults.attack --messages 100000``, ``... --connections 20000``.

The attacker has the job's token. It sends mutations of every message there is, over local sockets and TCP, to a server of a gradient rule
and to one of a rule without servers; or it opens connections. Printed are what the attacker and the others say, and the job's status: the
job is to go on, and nobody else is to be declared dead. ``scripts/attacker.py`` is the script of all workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.faults.job import QUICK, SCRIPTS, Ended, Job

WAYS = [(way, sync) for way in ("local", "tcp") for sync in ("asp", "solo")]


def attacked(
    folder: Path, way: str, sync: str, *, messages: int = 0, connections: int = 0, seed: int = 1, bound_s: float = 3600.0
) -> Ended:
    """Run a job of three workers, one of which attacks it."""
    script = (str(SCRIPTS / "attacker.py"), "--enough", str(folder / "enough"), "--way", way, "--seed", str(seed))
    counts = ("--messages", str(messages), "--connections", str(connections))
    options = ("--workers", "3", "--sync", sync, "--max-restarts", "0", "--progress-timeout", "0")
    path = os.pathsep.join((QUICK["PYTHONPATH"], str(Path(__file__).parents[2])))
    job = Job(folder, (*options, *script, *counts), environment={"PYTHONPATH": path})
    try:
        return job.ended(bound_s)
    finally:
        job.clean_up()


def harmed(ended: Ended) -> list[str]:
    """What the attack has done to the job and to the two workers that train."""
    dead = [r for r in ended.records if r["kind"] == "state_changed" and r["worker"] < 2 and r["state"] not in ("alive", "finished")]
    problems = [f"worker {record['worker']} is {record['state']}: {record['reason']}" for record in dead]
    if ended.status:
        problems.append(f"status {ended.status}: {ended.err[-3000:]}")
    return problems + ended.tally().problems()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=0, help="to each of the four jobs")
    parser.add_argument("--connections", type=int, default=0, help="to each of the four jobs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    failed = 0
    for way, sync in WAYS:
        with tempfile.TemporaryDirectory(prefix="offbeat-attack-") as folder:
            ended = attacked(Path(folder), way, sync, messages=args.messages, connections=args.connections, seed=args.seed)
        said = [line for line in ended.out.splitlines() if "TOTAL" in line or "trained" in line]
        problems = harmed(ended)
        failed += bool(problems)
        print(f"{way} {sync}: status {ended.status}", *said, *(f"PROBLEM {problem}" for problem in problems), sep="\n    ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
