"""Goodput and loss on a fleet of spot machines that vanish and come back: barriers, majorities, local steps, fragments."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import nn

from experiments._training.runs import side_by_side
from experiments.claims import Claim
from experiments.learning_rates.tasks import digits
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.core.fragments import Fragments
from offbeat.core.policy import ServerRule
from offbeat.journal.file import read
from offbeat.policies import rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

PAPER = "Decoupled DiLoCo (Douillard et al. 2026): goodput under failures, 88 % against 58 % of elastic data parallel training"
WORKERS: Final = 16
SERVERS: Final = 4
"""Under rules with fragments; the others have one."""
LIFE_S: Final = 500.0
"""The mean life of a machine; lives and absences have exponential laws."""
AWAY_S: Final = 100.0
TIMEOUT_S: Final = 10.0
"""A machine that vanishes closes no connection: so long nobody knows of it."""
TIME_S: Final = 1000.0
QUICK_S: Final = 400.0
COMPUTE: Final = "lognormal(mean=1, sd=0.2)"
MODEL_S: Final = {"fast": 0.0, "slow": 2.0}
"""Seconds in which the whole model travels one way, by the links; a fragment takes its share."""
RULES: Final = (
    "bsp",
    "majority",
    "ensemble(steps=20)",
    "diloco(steps=20, delay=2, alpha=0.5)",
    "decoupled(steps=20, quorum=8, delay=2, alpha=0.5)",
)
RATES: Final = (0.2, 0.4, 0.8)
SEEDS: Final = 2
BATCH: Final = 16
CLAIMS: Final = (
    Claim(row="decoupled, fast: goodput", at_least=0.85, why="no worker waits; what is lost is what the dead had not pushed"),
    Claim(row="bsp, fast: goodput", at_most=0.75, why="a death every 31 s stops everybody for up to 10 s"),
    Claim(row="decoupled, slow: goodput", over="bsp, slow: goodput", at_least=3.0, why="bsp waits four seconds for each second of work"),
    Claim(row="decoupled, fast: goodput", over="diloco, fast: goodput", at_least=1.1, why="diloco waits for the timeout, too"),
)


class Job(NamedTuple):
    """One run."""

    sync: str
    links: str
    lr: float
    seed: int
    time_s: float


class Outcome(NamedTuple):
    """What came of a run."""

    goodput: float
    loss: float
    curve: tuple[tuple[float, float], ...]
    """Times and losses."""


def deaths(seed: int, time_s: float) -> tuple[str, float]:
    """Return the faults of one fleet, the same for every rule, and the seconds for which its machines are there, all together."""
    chance = random.Random(f"fleet {seed}")
    faults, there = [], 0.0
    for worker in range(WORKERS):
        at = 0.0
        while at < time_s:
            end = at + chance.expovariate(1.0 / LIFE_S)
            there += min(end, time_s) - at
            at = end + TIMEOUT_S + chance.expovariate(1.0 / AWAY_S)
            if end < time_s:
                faults.append(f"vanish worker={worker} at={end:.3f}")
            if at < time_s:
                faults.append(f"restart worker={worker} at={at:.3f}")
    return "; ".join(faults), there


def outcome(job: Job) -> Outcome:
    """Train under a virtual clock."""
    policy, task = rule(job.sync), digits()
    shards = SERVERS if isinstance(policy, ServerRule) and policy.scope == "shard" else 1
    faults, there = deaths(job.seed, job.time_s)
    way = f"constant(seconds={MODEL_S[job.links] / shards})"
    torch.manual_seed(job.seed)
    model = task.model()
    x, y = task.data

    def evaluate(module: nn.Module) -> dict[str, float]:
        return {"loss": float(task.loss(module(x), y))}

    training = Training(model, task.loss, task.data, torch.optim.SGD(model.parameters(), lr=job.lr), evaluate=evaluate, every=4)
    cluster = Cluster(
        workers=WORKERS,
        servers=shards,
        compute=COMPUTE,
        delay=way,
        push_delay=way,
        faults=faults,
        timeout_s=TIMEOUT_S,
        seed=job.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "run.jsonl"
        result = simulate(policy, cluster, Work(time_s=job.time_s, batch=BATCH), content=training, journal=journal)
        useful = used(journal, policy, shards)
    curve = tuple((point.t, point.values["loss"]) for point in result.curve)
    return Outcome(useful / there, curve[-1][1], curve)


def used(journal: Path, policy: object, shards: int) -> float:
    """Return the seconds of computing that are in some version of the model.

    A push of a fragment brings what its worker has computed since it pushed this fragment last, for a share of the model, less what was
    overwritten when it took the fragment. A push that a newer one of its worker replaces leaves its seconds to that one.
    """
    fragments = policy.blocks(shards) if isinstance(policy, ServerRule) and shards > 1 else None
    overwritten = (1.0 - fragments.alpha) * policy.delay if isinstance(fragments, Fragments) else 0.0  # type: ignore[attr-defined]
    computed: defaultdict[tuple[int, int], float] = defaultdict(float)
    """By worker and incarnation: seconds, up to its newest push."""
    pushed: dict[tuple[int, int, int | None], tuple[float, int]] = {}
    """By worker, incarnation and fragment: the seconds at its last push, and the version from which that was made."""
    open_: dict[tuple[int, int], list[tuple[int | None, float]]] = defaultdict(list)
    useful = 0.0
    for record in read(journal):
        if record["kind"] == "pushed":
            who, shard = (record["worker"], record["incarnation"]), record.get("shard")
            computed[who] += record["compute_s"]
            before, version = pushed.get((*who, shard), (0.0, -1))
            seconds = computed[who] - before
            if overwritten and version >= 0 and version != record["version"]:
                seconds -= overwritten * record["compute_s"] / record.get("steps", 1)
            pushed[*who, shard] = computed[who], record["version"]
            open_[who].append((shard, seconds / shards))
        elif record["kind"] == "settle":
            who, shard = (record["worker"], record["incarnation"]), record.get("shard")
            at = next((at for at, (other, _) in enumerate(open_[who]) if other == shard), None)
            if at is None:
                continue
            _, seconds = open_[who].pop(at)
            if record["fate"] == "folded":
                useful += seconds
            elif record["fate"] == "carried":
                newer = next(at for at, (other, _) in enumerate(open_[who]) if other == shard)
                open_[who][newer] = shard, open_[who][newer][1] + seconds
    return useful


def run(quick: bool, out: Path) -> list[Row]:
    """Train under every rule, over both kinds of links, with every learning rate; write the figure."""
    rates, seeds, time_s = (RATES[1:2], 1, QUICK_S) if quick else (RATES, SEEDS, TIME_S)
    jobs = [Job(sync, links, lr, seed, time_s) for sync in RULES for links in MODEL_S for lr in rates for seed in range(seeds)]
    return rows_of(dict(zip(jobs, side_by_side(outcome, jobs), strict=True)), out)


def rows_of(found: dict[Job, Outcome], out: Path) -> list[Row]:
    """Return each rule's goodput, and its least loss over the learning rates, medians over the seeds; draw the losses of the first seed."""
    rows = []
    figure = new_figure(9.0, 4.0)
    for panel, links in enumerate(MODEL_S):
        axes = figure.add_subplot(1, 2, panel + 1)
        for colour, sync in zip(COLOURS, RULES, strict=False):
            name = sync.partition("(")[0]
            by_rate: dict[float, list[Outcome]] = defaultdict(list)
            for job, result in found.items():
                if (job.sync, job.links) == (sync, links):
                    by_rate[job.lr].append(result)
            best = min(by_rate, key=lambda lr: median(result.loss for result in by_rate[lr]))
            goodputs = sorted(result.goodput for result in by_rate[best])
            losses = sorted(result.loss for result in by_rate[best])
            paper = {"bsp": 0.58, "decoupled": 0.88}.get(name) if links == "fast" else None
            span = f"{goodputs[0]:.3f} to {goodputs[-1]:.3f} over {len(goodputs)} seeds"
            rows.append(Row(f"{name}, {links}: goodput", paper, median(goodputs), "", span))
            rows.append(
                Row(
                    f"{name}, {links}: loss",
                    None,
                    median(losses),
                    "",
                    f"lr {best}, {losses[0]:.4f} to {losses[-1]:.4f} over {len(losses)} seeds",
                )
            )
            axes.plot(*zip(*by_rate[best][0].curve, strict=True), color=colour, label=name)
        axes.set_yscale("log")
        label(axes, title=f"{WORKERS} spot machines, {links} links", x="seconds", y="loss")
    save(figure, out / "spot_fleet.png")
    return rows
