"""A job of many versions: does the memory of its processes stay the same, and does its summary agree with its journal?

python -m benchmarks.long [--versions 500000] [--sync asp] [--samples 0] [--deaths 0] [--journal run.jsonl.zst] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.job import HERE, PYTHONPATH, save
from offbeat.journal.file import read
from offbeat.journal.summary import Tally

SAMPLES = 400
"""Roughly how often the processes are looked at."""
SETTLED_S = 20.0
"""Seconds after which a process has imported what it needs; what a younger one holds is not counted, and no worker dies beside it."""
FIELDS = {"Rss": "RSS", "Pss": "PSS", "Anonymous": "anonymous"}
"""What is measured, as ``/proc/PID/smaps_rollup`` and people call it. PSS changes with what other jobs on the machine share."""
ROLES: dict[str, Callable[[str], bool]] = {
    "server": lambda shown: shown.startswith(("ob-server-", "ob-standby-")) or "offbeat.runtime.server" in shown,
    "worker": lambda shown: shown.startswith("ob-worker-") or ("long_worker.py" in shown and "offbeat.cli" not in shown),
}
"""What a child of the supervisor is, by its name, which forks have, and its command line."""


class Look(NamedTuple):
    """What the processes held at one moment."""

    t: float
    version: int
    kib: dict[str, dict[str, int]]
    """By process: each of `FIELDS`, in KiB."""
    journal_nbytes: int


class Watch:
    """Look at a job's processes while it runs, and kill a worker now and then if asked to.

    Args:
        job: the supervisor.
        progress: the file in which worker 0 says the version.
        journal: of the job.
        kill_at: versions at which worker processes are killed, in turn, or as soon after as the one before is back.
        workers: how many there are.
    """

    def __init__(self, job: subprocess.Popen[bytes], progress: Path, journal: Path, kill_at: Sequence[int], workers: int) -> None:
        self._job, self._progress, self._journal = job, progress, journal
        self._kill_at, self._workers = list(kill_at), workers
        self.looks: list[Look] = []

    def until_the_end(self, versions: int) -> int:
        """Look until the job has ended; returns its status."""
        began, due = time.monotonic(), 0
        while (status := self._job.poll()) is None:
            time.sleep(0.2)
            version = self.version()
            if version >= due and version:
                due = version + max(1, versions // SAMPLES)
                self.looks.append(self.look(time.monotonic() - began, version))
            if self._kill_at and version >= self._kill_at[0] and self._kill(len(self._kill_at)):
                del self._kill_at[0]
        return status

    def version(self) -> int:
        """Return how far the job is."""
        try:
            return int(self._progress.read_text() or 0)
        except (OSError, ValueError):
            return 0

    def look(self, t: float, version: int) -> Look:
        """Return what the processes hold now."""
        kib = {}
        for name, process in self._processes():
            if not _settled(process):
                continue
            try:
                kib[name] = _memory(process.pid)
            except OSError:
                continue
        size = self._journal.stat().st_size if self._journal.exists() else 0
        return Look(t, version, kib, size)

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        found = [("supervisor", psutil.Process(self._job.pid))]
        for child in psutil.Process(self._job.pid).children(recursive=True):
            try:
                name = child.name()
                shown = " ".join([name, *child.cmdline()])
                role = next((role for role, matches in ROLES.items() if matches(shown)), None)
                number = name.removeprefix("ob-worker-") if name.startswith("ob-") else child.environ().get("OFFBEAT_WORKER", "")
            except psutil.Error:
                continue
            if role is not None:
                found.append((f"{role} {number}" if role == "worker" else role, child))
        return found

    def _kill(self, turn: int) -> bool:
        """Kill a worker, unless another one has only just come back; returns whether one was killed."""
        workers = [process for name, process in sorted(self._processes(), key=lambda found: found[0]) if name.startswith("worker")]
        if len(workers) < self._workers or not all(map(_settled, workers)):
            return False
        workers[turn % len(workers)].send_signal(signal.SIGKILL)
        return True


def _settled(process: psutil.Process) -> bool:
    try:
        return time.time() - float(process.create_time()) > SETTLED_S
    except psutil.Error:
        return False


def _memory(pid: int) -> dict[str, int]:
    fields = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name: int(fields[f"{name}:"]) for name in FIELDS}


def measured(looks: Sequence[Look], versions: int) -> list[dict[str, Any]]:
    """Return a row for each process: its memory at the first tenth and at the end, the most after the tenth, and how much it has grown.

    A worker that is killed and started again counts as one process.
    """
    series: defaultdict[str, list[dict[str, int]]] = defaultdict(list)
    for look in looks:
        for name, kib in look.kib.items():
            if look.version >= versions / 10:
                series[name].append(kib)
    rows = []
    for name, points in sorted(series.items()):
        row: dict[str, Any] = {"process": name}
        for field in FIELDS:
            tenth, most = points[0][field], max(point[field] for point in points)
            figures = {"tenth_mib": tenth / 1024, "end_mib": points[-1][field] / 1024, "most_mib": most / 1024, "growth": most / tenth - 1}
            row |= {f"{field}_{figure}": value for figure, value in figures.items()}
        rows.append(row)
    return rows


def recount(journal: Path, summary: Path) -> dict[str, Any]:
    """Return how the job's summary compares with a new count of its journal."""
    began = time.monotonic()
    tally = Tally.of(read(journal))
    counted, told = tally.summary(), json.loads(summary.read_text())
    counted = json.loads(json.dumps(counted))
    differ = sorted(name for name in counted if counted[name] != told.get(name))
    return {"differ": differ, "problems": tally.problems(), "seconds": time.monotonic() - began, **_counts(counted)}


def _counts(summary: dict[str, Any]) -> dict[str, Any]:
    ended = len(summary["epochs"]) + (summary["earlier_epochs"] or {"epochs": 0})["epochs"]
    deaths = sum(worker["deaths"] for worker in summary["per_worker"])
    return {**{name: summary[name] for name in ("version", "pushes", "fates", "wall_s")}, "epochs": ended, "deaths": deaths}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    titles = [f"{name} MiB at a tenth | most after | growth" for name in FIELDS.values()]
    lines = [f"| process | {' | '.join(titles)} |", "|---|" + "--:|" * 3 * len(FIELDS)]
    for row in rows:
        cells = [
            f"{row[f'{field}_tenth_mib']:.1f} | {row[f'{field}_most_mib']:.1f} | {100 * row[f'{field}_growth']:+.1f} %" for field in FIELDS
        ]
        lines.append(f"| {row['process']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=500_000)
    parser.add_argument("--sync", default="asp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=0, help="size of a data set that is dealt out in elastic epochs; 0: none")
    parser.add_argument("--deaths", type=int, default=0, help="how often a worker is killed, all along the run")
    parser.add_argument("--journal", default="run.jsonl.zst", help="name of the journal, which decides its compression")
    parser.add_argument("--keep", type=Path, help="the folder for the journal and the summary  [default: one that is removed]")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        journal, summary, progress = folder / args.journal, folder / "summary.json", Path(temporary, "progress")
        command = [sys.executable, "-m", "offbeat.cli", "run", "--workers", str(args.workers), "--sync", args.sync]
        command += ["--journal", str(journal), "--summary", str(summary), "--max-restarts", str(args.deaths)]
        command += [str(HERE / "long_worker.py"), "--progress", str(progress)]
        command += ["--versions", str(args.versions), "--samples", str(args.samples)]
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            job = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, stdout=log, stderr=subprocess.STDOUT)
            kill_at = [args.versions * (number + 1) // (args.deaths + 1) for number in range(args.deaths)]
            watch = Watch(job, progress, journal, kill_at, args.workers)
            try:
                status = watch.until_the_end(args.versions)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait()
        seconds = time.monotonic() - began
        if status != 0:
            sys.exit(f"the job failed with status {status}:\n{(folder / 'log').read_text()[-2000:]}")
        rows = measured(watch.looks, args.versions)
        print(table(rows))
        books = recount(journal, summary)
        nbytes = journal.stat().st_size
        print(f"\n{args.sync}: {books['version']:,} versions in {seconds:,.0f} s")
        print(f"journal: {nbytes:,} bytes, {nbytes / books['version']:.0f} a version; {books['problems'] or 'no problems'}")
        print(f"a recount of {books['seconds']:.0f} s differs from the summary in {books['differ'] or 'nothing'}")
        print({name: books[name] for name in ("pushes", "fates", "epochs", "deaths")})
        job_row = {"sync": args.sync, "versions": args.versions, "seconds": seconds, "journal_nbytes": nbytes, **books}
        save(args.json, [job_row, *rows, *(look._asdict() for look in watch.looks)])


if __name__ == "__main__":
    main()
