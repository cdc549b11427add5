"""Kill server 0 at a job's first version, and say how long the workers waited for the second one: ``python -m benchmarks.first_death``.

A server that dies in the first seconds cannot always be forked from an interpreter that has imported what it needs. Times are seconds: from
the start of the command to the first version, and from SIGKILL to the second version.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.job import Job

from benchmarks.job import HERE, PYTHONPATH, save

LOOK_S = 0.005


def times(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(workers: int, more: list[str], *, kill: bool) -> dict[str, Any]:
    """Run one job. Returns its row."""
    with tempfile.TemporaryDirectory() as name:
        noted, began = Path(name, "times"), time.monotonic()
        script = [str(HERE / "first_death_worker.py"), "--times", str(noted)]
        job = Job(Path(name), ["--workers", str(workers), *more, *script], environment={"PYTHONPATH": PYTHONPATH})
        try:
            victim = job.wait("server 0", lambda: job.servers().get(0))
            while not times(noted):
                assert job.process.poll() is None, "the job ended before its first version"
                time.sleep(LOOK_S)
            killed = time.monotonic()
            if kill:
                victim.send_signal(signal.SIGKILL)
            ended = job.ended()
            assert ended.status == 0, ended.err
            first, second, _ = times(noted)
            return {"start_s": round(first - began, 2), "pause_s": round(second - killed, 2) if kill else None}
        finally:
            job.clean_up()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-preload", action="store_true", help="workers are new processes")
    parser.add_argument("--calm", action="store_true", help="do not kill: only the start is timed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [run(args.workers, ["--no-preload"] if args.no_preload else [], kill=not args.calm) for _ in range(args.repeats)]
    for key in ("start_s", "pause_s"):
        found = [row[key] for row in rows if row[key] is not None]
        if found:
            print(json.dumps({key: found, "median": statistics.median(found), "max": max(found), "load": os.getloadavg()[0]}))
    save(args.json, rows)


if __name__ == "__main__":
    main()
