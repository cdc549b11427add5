"""Attack every receiver of messages with frames of a peer that has the token: ``python -m tests.fuzz --frames 100000 --seed 1``.

Printed are the counts by conversation and outcome, memory and open files before and after, and what was found: a receiver that has raised
an error, ended without a sentence, or needed its last guard. The same seed repeats a run. The exit status is 1 if something was found, or
memory has grown by more than ``--growth`` MiB.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.fuzz.run import RECEIVERS, attack, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--only", choices=[receiver.name for receiver in RECEIVERS], action="append", help="one conversation")
    parser.add_argument("--growth", type=int, default=32, metavar="MIB", help="most growth of memory after the first fifth")
    args = parser.parse_args()
    began = time.monotonic()
    report = attack(args.frames, args.seed, [receiver for receiver in RECEIVERS if not args.only or receiver.name in args.only], watch=True)
    seconds = time.monotonic() - began
    print(table(report))
    for finding in report.findings:
        print(f"FOUND {finding}", file=sys.stderr)
    before, after = report.memory
    print(
        f"{report.frames:,} frames with seed {args.seed} in {seconds:.0f} s; memory {before / 1024:.1f} MiB after a fifth of them, "
        f"{after / 1024:.1f} MiB at the end; open files {report.files[0]}, {report.files[1]}"
    )
    grown = after - before > args.growth << 10 or report.files[1] > report.files[0]
    return 1 if report.findings or grown else 0


if __name__ == "__main__":
    sys.exit(main())
