"""Is the advice right? Record a bsp run, predict what other rules would have made of it, then run these rules and compare.

    python -m benchmarks.advice [--only KIND] [--rules "asp;backup(b=1)"] [--seconds 12] [--hosts 2] [--keep FOLDER] [--json FILE]
    python -m benchmarks.advice --calibrate

Each kind of slowness is a script that sleeps before its step, so that two cores are enough for four workers. One job runs at a time;
with ``--hosts`` between network namespaces, which need root.
``--keep`` keeps the journals; where it has them already, nothing is run, and they are judged anew. ``--calibrate`` runs jobs without
slowness, with models of several sizes, and prints which part of a turn's unexplained time must be the fold's (`sim.recording.FOLD_SHARE`)
for asp to be predicted; no run of it is judged, and no judged run was used for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tests.cluster.hosts import Network, why_not

from benchmarks.job import PYTHONPATH, save
from offbeat.advise.trials import Ask, Found, Trial, ran
from offbeat.journal.file import Records
from offbeat.sim.recording import recorded
from offbeat.traces import read

WORKER = str(Path(__file__).with_name("advice_worker.py"))
TRACE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "alibaba-pai-minibatch" / "job_4_norm.csv.gz"
COLUMNS, SCALE = (0, 1, 2, 5), 0.5e-3
WORKERS, START_S = 4, 1.0
KINDS = ("always", "random", "bursts", "trace", "death")
RULES = (
    "asp",
    "ssp(staleness=3)",
    "backup(b=1)",
    "elastic(mode=local)",
    "ensemble(steps=10)",
    "majority",
    "solo",
    "psp(c=3, b=0.75)",
)
DIFFER = 1.1
OTHERS = 0.15
"""A run begins once other processes use less than this share of the cores, if that comes to be."""


class Cell(NamedTuple):
    """A kind of slowness under a rule; rates in samples/s."""

    kind: str
    rule: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def servers_of(rule: str) -> int:
    """Return with how many servers a rule is run."""
    return 2 if rule.startswith("psp") else 1


def run(folder: Path, kind: str, rule: str, seconds: float, name: str = "", width: int = 128, hosts: int = 0) -> Path:
    """Run a job unless its journal is there, and return the journal. ``hosts``: between so many; 0: on this machine."""
    journal = folder / f"{name or kind}-{rule.partition('(')[0]}.jsonl"
    if journal.exists():
        return journal
    trace, mark = folder / "trace.npy", folder / f"{journal.stem}.mark"
    if kind == "trace" and not trace.exists():
        np.save(trace, read(TRACE)[:, COLUMNS] * SCALE)
    written = folder / "run.jsonl"
    words = ["--servers", str(servers_of(rule)), "--sync", rule]
    script = [WORKER, kind, str(seconds), str(mark), str(trace)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "ADVICE_WIDTH": str(width)}
    for left in (mark, mark.with_suffix(".died")):
        left.unlink(missing_ok=True)
    calm()
    if hosts:
        between(hosts, words, ["--journal", str(written)], script, environment, seconds)
        written.replace(journal)
        return journal
    words = [sys.executable, "-m", "offbeat", "run", "--workers", str(WORKERS), *words, "--journal", str(written), *script]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds + 120, check=False)
    if ended.returncode:
        raise SystemExit(f"{kind} under {rule}: status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    written.replace(journal)
    return journal


def between(hosts: int, words: list[str], journal: list[str], script: list[str], environment: dict[str, str], seconds: float) -> None:
    """Run a job between network namespaces, its workers in equal parts on each, by agents."""
    with Network(hosts) as machines:
        agent = [sys.executable, "-m", "offbeat.agent", f"--nnodes={hosts}", f"--rdzv-endpoint={machines[0].address}:29400"]
        agent += [f"--nproc-per-node={WORKERS // hosts}", "--no-tls", *words]
        environment = {**environment, "OFFBEAT_TOKEN": "only-for-this-benchmark"}
        agents = [
            host.popen([*agent, *(journal if host.number == 0 else []), *script], env=environment, stdout=subprocess.DEVNULL)
            for host in machines
        ]
        statuses = [one.wait(seconds + 120) for one in agents]
    if any(statuses):
        raise SystemExit(f"{' '.join(words)} between {hosts} hosts: statuses {statuses}")


def busy_s() -> float:
    """Return the processor seconds that this machine has used, but for those of nice programs, which make way."""
    user, _, system, _, _, irq, softirq = (int(word) for word in Path("/proc/stat").read_text().split()[1:8])
    return (user + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def calm() -> None:
    """Wait until other processes leave the cores alone, for a quarter of a minute at most."""
    for _ in range(15):
        before = busy_s()
        time.sleep(1.0)
        if busy_s() - before < OTHERS * (os.cpu_count() or 1):
            return


def measured(journal: Path) -> float:
    """Return the folded samples/s of a run, from its first fold after the start until the first script ends."""
    samples, folds = 0, []
    for record in Records(journal):
        if record["kind"] == "settle" and record["fate"] == "folded" and not record.get("shard"):
            samples += record["samples"]
        elif record["kind"] == "fold" and not record.get("shard") and record["t"] > START_S:
            folds.append((record["t"], samples))
        elif record["kind"] == "state_changed" and record["state"] == "finished":
            break
    (begin, before), (end, after) = folds[0], folds[-1]
    return float((after - before) / (end - begin))


def predicted(journal: Path, rule: str) -> float:
    """Return the predicted samples/s of a rule, as `advise.advice` makes them: the measured rate times a ratio of simulations."""
    recording = recorded(journal)
    cast = recording.cast()
    rates = []
    for seed in range(3):
        turned = seed * max(len(one.factors) for one in recording.compute.values()) // 3
        base = ran(recording, Trial(Ask("", "own", "bsp", cast), seed, 0.0, recording.seconds, turned))
        other = ran(recording, Trial(Ask("", "rule", rule, cast, servers_of(rule)), seed, 0.0, recording.seconds, turned))
        assert isinstance(base, Found) and isinstance(other, Found), (base, other)
        rates.append(recording.rate * other.rate / base.rate)
    return median(rates)


def judged(folder: Path, kinds: Sequence[str], rules: Sequence[str], seconds: float, hosts: int) -> list[Cell]:
    """Run everything and compare."""
    cells = []
    for kind in kinds:
        base = run(folder, kind, "bsp", seconds, hosts=hosts)
        print(f"{kind}: bsp measured {measured(base):,.0f} samples/s", flush=True)
        for rule in rules:
            cell = Cell(kind, rule, predicted(base, rule), measured(run(folder, kind, rule, seconds, hosts=hosts)))
            print(f"  {rule:22} predicted {cell.predicted:7,.0f}  measured {cell.measured:7,.0f}  error {cell.error:+6.1%}", flush=True)
            cells.append(cell)
    return cells


def report(cells: Sequence[Cell]) -> dict[str, Any]:
    """Print the errors and whether the order of the rules is right; return the figures."""
    errors = sorted(abs(cell.error) for cell in cells)
    right = wrong = 0
    for one, other in combinations(cells, 2):
        if one.kind != other.kind or max(one.measured / other.measured, other.measured / one.measured) < DIFFER:
            continue
        same = (one.measured > other.measured) == (one.predicted > other.predicted)
        right, wrong = right + same, wrong + (not same)
        if not same:
            print(f"{one.kind}: the order of {one.rule} and {other.rule} is wrong")
    worst = max(cells, key=lambda cell: abs(cell.error))
    print(f"error of samples/s: median {median(errors):.1%}, worst {errors[-1]:.1%} ({worst.rule}, {worst.kind}), {len(cells)} cells")
    print(f"pairs of rules that differ by 10 %: {right} in the right order, {wrong} not")
    return {"median": median(errors), "worst": errors[-1], "right": right, "wrong": wrong}


def calibrate(folder: Path, seconds: float) -> None:
    """Print which share of the unexplained time explains asp, for models of several sizes without slowness."""
    from offbeat.sim import recording as module

    for width in (128, 1024, 2048):
        journals = {rule: run(folder, "none", rule, seconds, f"calibrate-{width}", width) for rule in ("bsp", "asp")}
        live, found = measured(journals["asp"]), {}
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            module.FOLD_SHARE = share  # type: ignore[misc]
            found[share] = predicted(journals["bsp"], "asp") / live - 1.0
        print(f"width {width}: error of asp by share: " + ", ".join(f"{share:g}: {error:+.1%}" for share, error in found.items()))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--rules", default=";".join(RULES))
    parser.add_argument("--seconds", type=float, default=12.0, help="of a run, from its first step")
    parser.add_argument("--hosts", type=int, default=0, help="network namespaces that share the workers; 0: one machine (default)")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.hosts and (WORKERS % args.hosts or (why := why_not()) is not None):
        sys.exit(f"--hosts {args.hosts}: {WORKERS} workers in equal parts: 1, 2 or 4" if WORKERS % args.hosts else why)
    with tempfile.TemporaryDirectory(prefix="offbeat-advice-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.calibrate:
            calibrate(folder, args.seconds)
            return
        kinds = [args.only] if args.only else [kind for kind in KINDS if kind != "trace" or TRACE.exists()]
        cells = judged(folder, kinds, args.rules.split(";"), args.seconds, args.hosts)
        figures = report(cells)
    if args.json is not None:
        save(args.json, [{**cell._asdict(), "error": cell.error, **figures} for cell in cells])


if __name__ == "__main__":
    main()
