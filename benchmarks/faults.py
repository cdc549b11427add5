"""Hit jobs under all rules with many faults, and say in one table what became of them: ``python -m benchmarks.faults --faults 1000``.

One job after another is run by ``offbeat chaos`` (docs/chaos.md) until so many faults have happened; each has a plan of its own
(`benchmarks.fault_plan`), so that all together have the shares 50 % (deaths of workers), 20 (of servers), 15 (freezes), 10 (cut links) and
5 (supervisor, disk, slow workers, notices). Cuts happen in jobs on two hosts with a link between them: network namespaces, which need
root. With ``--deaths`` processes are killed, 70 % of them workers and 30 % servers, and nothing else happens.

Directly before each job, or directly after it, in turn, the same job runs undisturbed for a few seconds. Both are measured from the first
push of the last worker.

    away      part of the workers' time during which they could not work: dead, stopped, cut off, or a server was dead or stopped
    goodput   folded samples per second over those of the undisturbed job
    of what could be    goodput / (1 - away): 100 % where nothing is lost but the capacity that was away
    survived  faults after which the job went on
    lost      indices that no epoch's report accounts for

Each job is one line of ``--results``. With that file the command goes on after its last line, so that it can be run in pieces:
``--minutes 8`` begins no job after that time.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.cluster import hosts
from tests.cluster.hosts import Network
from tests.cluster.test_chaos import SCRIPT as TWO_AGENTS
from tests.faults.job import SCRIPTS

from benchmarks.fault_figures import gaps, infinite, lost_indices, shares, table, waits, window
from benchmarks.fault_plan import CUT_MTBF, DEATHS, ENDING, RULES_OF_TURN, SHARES, Job, following
from offbeat.chaos.run import Run

TRAIN = str(SCRIPTS / "replicas.py")
OPTIONS = ("--timeout", "2", "--max-restarts", "9999", "--slow", "any=0.02")
CLI = (sys.executable, "-m", "offbeat.cli")
SAMPLES = ("--samples", "1024")
"""Of an epoch, which lasts two to four seconds: a restarted script first runs through all past epochs, and under bsp the others wait."""
TAIL_S = 2.0
"""Seconds from the end of the faults' time to the end of the job: the last worker comes back."""
PATIENCE_S = 60.0


@contextmanager
def command(job: Job, args: argparse.Namespace, journal: Path, folder: Path) -> Iterator[list[str]]:
    """Return the words that run this job, which writes this journal."""
    rest = [*OPTIONS, "--sync", job.sync, "--journal", str(journal), TRAIN, *SAMPLES, "--width", str(args.width)]
    if job.hosts == 1:
        yield [*CLI, "run", "--workers", str(args.workers), "--servers", str(args.servers), *rest]
        return
    token, script = folder / "token", folder / "two.sh"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    with Network(2) as pair:
        if args.rate is not None:
            for host in pair:
                host.limit(args.rate)
        endpoint = ("--nnodes=2", f"--rdzv-endpoint={pair[0].address}:7100", "--token-file", str(token))
        words = [sys.executable, "-m", "offbeat.agent", *endpoint, *rest]
        first, second = (shlex.join(host.words(*words)) for host in pair)
        script.write_text(TWO_AGENTS.format(first=first, second=second))
        yield ["sh", str(script)]


def undisturbed(job: Job, args: argparse.Namespace, folder: Path) -> float:
    """Run the job without faults; its folded samples per second, and 0 if it has failed."""
    journal = folder / "undisturbed.jsonl"
    with command(job, args, journal, folder) as words:
        ended = Run(words, journal, folder, patience_s=PATIENCE_S, time_s=args.calm).run()
    if ended.hang is not None or not ended.timed:
        say(f"      the undisturbed job has failed: {ended.hang or ended.said}")
        return 0.0
    return window(journal, args.calm).rate


def disturbed(job: Job, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job with its faults; the result of ``offbeat chaos``, with its journal's figures."""
    journal, result = folder / "faults.jsonl", folder / "result.json"
    seed = args.seed * 10_000 + job.number
    mtbf_s = args.mtbf * (CUT_MTBF if job.hosts == 2 else 1.0)
    lasts_s = sum(job.plan.values()) * mtbf_s + TAIL_S
    plan = ",".join(f"{fault}={number}" for fault, number in job.plan.items())
    with command(job, args, journal, folder) as words:
        options = ["--seed", str(seed), "--plan", plan, "--mtbf", f"{mtbf_s:g}", "--time", f"{lasts_s:g}", "--no-baseline"]
        options += ["--patience", f"{PATIENCE_S:g}", *(["--journal", str(journal), "--timeout", "2"] if job.hosts == 2 else [])]
        chaos = [*CLI, "chaos", *options, "--json", str(result), "--", *words]
        run_chaos(chaos, folder)
        if not result.exists():
            sys.exit(f"job {job.number} has no result:\n{shlex.join(chaos)}\n{(folder / 'chaos.out').read_text()}")
    found: dict[str, Any] = json.loads(result.read_text())
    done = [fault for fault in found["faults"] if fault["done"]]
    counts = Counter(f"{fault['kind']}:{fault['target']}" for fault in done)
    seen = window(journal, lasts_s, done, ends=any(counts[fault] for fault in ENDING) or found["outcome"] != "finished")
    broken = [f"{one['name']}: {one['figures']}" for one in found["checks"] if one["held"] is False]
    if (diverged := infinite(journal)) > 0:
        broken.append(f"the model has diverged: {diverged:,} gradients were not finite, so the goodput says nothing")
    return {
        "seed": seed,
        "command": shlex.join(chaos),
        "done": counts,
        "outcome": found["outcome"],
        "reason": found["reason"],
        "broken": broken,
        "indices": found["figures"]["indices"],
        "lost": lost_indices(journal),
        "pauses_s": found["figures"]["pauses_s"],
        "gaps": gaps(journal, done),
        **{"seconds": seen.seconds, "samples": seen.samples, "present": seen.present},
    }


def run_chaos(words: list[str], folder: Path) -> None:
    """Run ``offbeat chaos`` and keep what it prints."""

    with (folder / "chaos.out").open("w") as out:
        subprocess.run(words, stdout=out, stderr=out, check=False)


def run(job: Job, args: argparse.Namespace, kept: Path) -> dict[str, Any]:
    """Run a job, with and without faults; what is known of it. The journals stay if a check did not hold."""
    folder = Path(tempfile.mkdtemp(prefix=f"{job.number}-", dir=kept))
    rate = undisturbed(job, args, folder) if job.number % 2 == 0 else 0.0
    found = disturbed(job, args, folder)
    if job.number % 2:
        rate = undisturbed(job, args, folder)
    if not found["broken"]:
        shutil.rmtree(folder)
    return {**job._asdict(), **found, "rate": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--of-a-job", type=int, default=26, help="faults of one job")
    parser.add_argument("--mtbf", type=float, default=0.7, help="mean seconds between two faults")
    parser.add_argument("--calm", type=float, default=5.0, help="seconds of the undisturbed job")
    parser.add_argument("--no-cuts", action="store_true", help="no jobs on two hosts, which need root")
    parser.add_argument("--deaths", action="store_true", help="only kill workers and servers, in jobs on one host")
    parser.add_argument("--width", type=int, default=0, help="the model has WIDTH * WIDTH parameters and some; 0: five")
    parser.add_argument("--rate", help="of the links of jobs on two hosts, as tc writes it, for instance 100mbit")
    parser.add_argument("--rules", nargs="+", default=RULES_OF_TURN, metavar="RULE")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1, help="of jobs on one host")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, default=Path("faults.jsonl"), help="one line for each job; the command goes on after the last"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after that time")
    args = parser.parse_args()
    cuts = not (args.no_cuts or args.deaths)
    if cuts and (reason := hosts.why_not()) is not None:
        parser.error(f"{reason}; or leave the cuts out with --no-cuts")
    wanted = DEATHS if args.deaths else SHARES
    began, kept = time.monotonic(), Path(tempfile.mkdtemp(prefix="faults-"))
    jobs = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    while time.monotonic() < began + 60.0 * args.minutes:
        done = sum((Counter(job["done"]) for job in jobs), Counter[str]())
        if done.total() >= args.faults:
            break
        before = [(job["sync"], job["hosts"]) for job in jobs]
        job = following(args.seed, before, done, rules=args.rules, faults=args.of_a_job, cuts=cuts, wanted=wanted)
        jobs.append(found := run(job, args, kept))
        with args.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        say(f"{done.total() + sum(found['done'].values()):5} faults, job {job.number}, {job.sync}: {found['outcome']}")
        for broken in found["broken"]:
            say(f"      {broken}")
    report(jobs, kept, wanted)


def report(jobs: list[dict[str, Any]], kept: Path, wanted: Mapping[str, float]) -> None:
    """Print the table, the shares, and how to repeat what failed."""
    Console(width=160).print(table(jobs), waits(jobs))
    print(shares(sum((Counter(job["done"]) for job in jobs), Counter[str]()), wanted))
    print("jobs:", ", ".join(f"{number} {outcome}" for outcome, number in Counter(job["outcome"] for job in jobs).items()))
    for job in jobs:
        if job["broken"]:
            print(f"seed {job['seed']}, {job['sync']}: {'; '.join(job['broken'])}\n  {job['command']}")
    if not any(kept.iterdir()):
        kept.rmdir()
    else:
        print(f"journals of what failed in this piece: {kept}")


def say(text: str) -> None:
    """Print a line on the way."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
