"""Hit jobs under all rules with many faults, and say in one table what became of them: ``python -m benchmarks.faults --faults 1000``.

One job after another is run by ``offbeat chaos`` (docs/chaos.md) until so many faults have happened. Each rule has its turn: a job in which
workers die, and one in which processes stop and become slow, too, and servers die under rules whose jobs outlive them. ``--cuts`` of the
faults happen in jobs of two hosts with a link between them (network namespaces, needs root), and ``--ends`` jobs have one fault that ends
them or their journal as documented: the death of the supervisor, or a full disk.

    pause, back after    median (and longest) time without a fold after a fault on a worker, and until a worker came back
    present   part of the workers' time during which they were there: neither dead nor stopped
    goodput   folded samples per second over those of an undisturbed job of the rule, run before
    of what could be    goodput / present: 100 % where nothing is lost but the capacity that was away
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster import hosts
from tests.cluster.hosts import Network
from tests.cluster.test_chaos import SCRIPT as TWO_AGENTS
from tests.faults.job import SCRIPTS

from benchmarks.job import save
from offbeat.core.policy import ServerRule
from offbeat.policies import RULES, rule

TRAIN = str(SCRIPTS / "replicas.py")
OPTIONS = ("--timeout", "2", "--max-restarts", "9999", "--slow", "any=0.02")
CLI = (sys.executable, "-m", "offbeat.cli")
RULES_OF_TURN = [kind.about.examples[0] for word, kind in RULES.items() if word != "allreduce"]
"""Every rule with its first example of settings, but the one that ends with the death of a rank."""
HEADINGS = (
    "rule",
    "jobs",
    "faults",
    "ended",
    "pushes",
    "indices",
    "checks broken",
    "pause s",
    "back after s",
    "present %",
    "goodput %",
    "of what could be %",
)
CUT_RULES = ("bsp", "ssp(staleness=3)", "dbw", "majority")


@dataclass
class Row:
    """What became of the jobs under one rule."""

    sync: str
    jobs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    pushes: int = 0
    indices: int = 0
    broken: list[str] = field(default_factory=list)
    """Checks that did not hold, with the seed."""
    pauses: list[float] = field(default_factory=list)
    """Seconds without a fold after each fault on a worker."""
    returns: list[float] = field(default_factory=list)
    """Seconds for which a worker was away that came back."""
    present: list[float] = field(default_factory=list)
    goodput: list[float] = field(default_factory=list)

    def add(self, seed: int, result: dict[str, Any]) -> None:
        """Add the result of one ``offbeat chaos``."""
        self.jobs += 1
        self.faults.update(f"{fault['kind']} {fault['target']}" for fault in result["faults"] if fault["done"])
        self.outcomes[result["outcome"]] += 1
        self.pushes += result["figures"]["pushes"] or 0
        self.indices += result["figures"]["indices"]
        self.pauses += result["figures"]["pauses_s"]
        self.returns += result["figures"]["returns_s"]
        self.broken += [f"seed {seed}: {one['name']}: {one['figures']}" for one in result["checks"] if one["held"] is False]
        if result["goodput"] is not None:
            self.present.append(result["present"])
            self.goodput.append(result["goodput"])

    def cells(self) -> list[str]:
        """Return the row of the table."""
        ended = ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.items())
        ratios = [good / there for good, there in zip(self.goodput, self.present, strict=True) if there > 0]
        shares = [f"{100 * median(part):.0f}" if part else "-" for part in (self.present, self.goodput, ratios)]
        times = [f"{median(part):.2f} ({max(part):.2f})" if part else "-" for part in (self.pauses, self.returns)]
        return [
            self.sync,
            str(self.jobs),
            str(self.faults.total()),
            ended,
            f"{self.pushes:,}",
            f"{self.indices:,}",
            str(len(self.broken)),
            *times,
            *shares,
        ]


def undisturbed(sync: str, workers: int, seconds: float, journal: Path) -> None:
    """Write the journal of an undisturbed job."""
    words = [*CLI, "run", "--workers", str(workers), "--sync", sync, *OPTIONS, "--journal", str(journal), TRAIN]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        while job.poll() is None and not (journal.exists() and b'"kind":"settle"' in journal.read_bytes()):
            time.sleep(0.1)
        time.sleep(seconds)
        job.send_signal(signal.SIGTERM)


def chaos(seed: int, words: list[str], job: list[str], folder: Path) -> dict[str, Any]:
    """Run ``offbeat chaos``; its result."""
    result = folder / f"{seed}.json"
    command = [*CLI, "chaos", "--seed", str(seed), "--json", str(result), "--patience", "60", *words, "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / f"{seed}.out").write_text(done.stdout + done.stderr)
    if not result.exists():
        sys.exit(f"seed {seed} has no result:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def on_one_host(seed: int, sync: str, deaths: bool, args: argparse.Namespace, baseline: Path, folder: Path) -> dict[str, Any]:
    """Run a job of which workers die, or workers stop and, where the job outlives them, servers die and stop."""
    dying = isinstance(rule(sync), ServerRule) and not sync.startswith("psp")
    words = ["--faults", "kill", "--targets", "worker"]
    if not deaths:
        words = ["--faults", "kill,stop,slow", "--targets", "worker,server" if dying else "worker"]
        words += ["--mix", "worker=10,server=20,freeze=15"]
    words += ["--mtbf", str(args.mtbf), "--time", str(args.time), "--baseline", str(baseline)]
    preload = ["--preload", "torch._dynamo"]
    return chaos(seed, words, [*CLI, "run", "--workers", str(args.workers), "--sync", sync, *OPTIONS, *preload, TRAIN], folder)


def with_cuts(seed: int, sync: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job of two hosts between which the link goes down."""
    token, journal, script = folder / "token", folder / f"{seed}.jsonl", folder / f"{seed}.sh"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    with Network(2) as pair:
        endpoint = ("--nnodes=2", f"--rdzv-endpoint={pair[0].address}:7100", "--token-file", str(token), "--preload", "torch._dynamo")
        words = [sys.executable, "-m", "offbeat.agent", *endpoint, *OPTIONS, "--sync", sync, "--journal", str(journal), TRAIN]
        first, second = (shlex.join(host.words(*words)) for host in pair)
        script.write_text(TWO_AGENTS.format(first=first, second=second))
        faults = ["--faults", "cut", "--mtbf", "2", "--time", str(args.time), "--no-baseline", "--journal", str(journal), "--timeout", "2"]
        return chaos(seed, faults, ["sh", str(script)], folder)


def ending(seed: int, sync: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job that ends by a fault, or whose journal does."""
    kind = ["kill", "--targets", "supervisor"] if seed % 2 else ["disk"]
    words = ["--faults", *kind, "--mtbf", "3", "--count", "1", "--time", "12", "--no-baseline"]
    return chaos(seed, words, [*CLI, "run", "--workers", str(args.workers), "--sync", sync, *OPTIONS, TRAIN], folder)


def turns(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Run one job after another until enough faults have happened. Yields each job's row, seed and result."""
    seeds = count(args.seed)
    happened = cut = 0
    for number in range(args.ends):
        seed = next(seeds)
        result = ending(seed, args.rules[number % len(args.rules)], args, folder)
        happened += hits(result)
        yield "(ends)", seed, result
    while cut < args.cuts:
        for sync in CUT_RULES:
            seed = next(seeds)
            result = with_cuts(seed, sync, args, folder)
            cut += hits(result)
            yield f"{sync}, two hosts", seed, result
    happened += cut
    for number, sync in enumerate(cycle(args.rules)):
        if happened >= args.faults:
            return
        baseline = folder / f"undisturbed-{number % len(args.rules)}.jsonl"
        if not baseline.exists():
            undisturbed(sync, args.workers, args.time / 2, baseline)
        for deaths in (True, False):
            seed = next(seeds)
            result = on_one_host(seed, sync, deaths, args, baseline, folder)
            happened += hits(result)
            yield f"{sync}, {'deaths of workers' if deaths else 'the rest'}", seed, result


def hits(result: dict[str, Any]) -> int:
    """Return how many faults have happened."""
    return sum(fault["done"] for fault in result["faults"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--ends", type=int, default=10)
    parser.add_argument("--rules", nargs="+", default=RULES_OF_TURN, metavar="RULE")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--mtbf", type=float, default=1.0)
    parser.add_argument("--time", type=float, default=25.0, help="seconds of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cuts and (reason := hosts.why_not()) is not None:
        parser.error(f"--cuts {args.cuts}: {reason}")
    rows: dict[str, Row] = {}
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    say(f"what each job said is in {folder}")
    for name, seed, result in turns(args, folder):
        row = rows.setdefault(name, Row(name))
        row.add(seed, result)
        say(f"{sum(one.faults.total() for one in rows.values()):5} faults, seed {seed}, {name}: {result['outcome']}")
        for broken in row.broken:
            say(f"      {broken}")
        save(args.json, [{**vars(one), "faults": dict(one.faults), "outcomes": dict(one.outcomes)} for one in rows.values()])
    table = Table(title=f"{args.workers} workers", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows.values():
        table.add_row(*row.cells())
    Console(width=160).print(table)
    kinds = sum((row.faults for row in rows.values()), Counter[str]())
    print(f"{kinds.total():,} faults:", ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()))


def say(text: str) -> None:
    """Print a line on the way."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
