"""What a journal costs server 0: processor time per record, and bytes on the disk, plain and compressed, by the way the job flushes it.

    python -m benchmarks.journal RUN.jsonl [--repeats 5] [--pace 500] [--json FILE]

The records are those of a real journal, written again with its own times as the clock: at ``--pace`` versions per second, if given.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.job import save
from offbeat.journal.file import Journal, read
from offbeat.journal.records import Record

NAMES = ("run.jsonl", "run.jsonl.zst", "run.jsonl.gz")


def rewritten(records: list[Record], name: str, factor: float) -> tuple[float, int]:
    """Write the records to a new journal; returns processor seconds and the file's size in bytes."""
    clock = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        began = time.thread_time()
        journal = Journal(path, now=lambda: clock[0])
        for record in records:
            clock[0] = record["t"] * factor
            journal.write(record)
        journal.close()
        return time.thread_time() - began, path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pace", type=float, help="versions per second  [default: those of the journal]")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records = list(read(args.run))
    folds = [record for record in records if record["kind"] == "fold"]
    own = len(folds) / (folds[-1]["t"] - folds[0]["t"])
    factor = own / args.pace if args.pace else 1.0
    rows: list[dict[str, Any]] = []
    print(f"{len(records):,} records of {len(folds):,} versions, at {args.pace or own:.0f} versions/s")
    print("| journal | us per record | records/s | bytes per version | ratio |\n|---|--:|--:|--:|--:|")
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in NAMES}
    for _ in range(args.repeats):
        for name in NAMES:
            found[name].append(rewritten(records, name, factor))
    for name in NAMES:
        seconds, nbytes = median(seconds for seconds, _ in found[name]), found[name][0][1]
        ratio = found[NAMES[0]][0][1] / nbytes
        rows.append({"journal": name, "us": 1e6 * seconds / len(records), "nbytes": nbytes / len(folds), "ratio": ratio})
        print(f"| {name} | {rows[-1]['us']:.2f} | {len(records) / seconds:,.0f} | {rows[-1]['nbytes']:.0f} | {ratio:.1f} |")
    save(args.json, rows)


if __name__ == "__main__":
    main()
