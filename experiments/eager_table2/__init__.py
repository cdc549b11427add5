"""Steps per second of an asynchronous server, gossip and eager SGD on 64 ranks, of which four, drawn anew each step, are late by 460 ms.

Two of the paper's four figures calibrate the cluster, the slowest and the fastest; what the simulation finds is those between.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from experiments.claims import MECHANISM, Claim, near
from experiments.eager_table2 import live, mechanism
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

PAPER = "Eager-SGD (Li et al. 2020), table 2: steps/s for ResNet-50 on ImageNet, 64 processes, four of them delayed by 460 ms each step"
SEED: Final = 0
RANKS: Final = 64
DELAYED: Final = 4
DELAY_S: Final = 0.46
SYNCHRONOUS: Final = (1.29, 1.27)
"""How many times as fast as two synchronous systems, Deep500 and Horovod, eager-SGD is with these delays, says section 7.2.2."""
SERVER_STEPS, EAGER_STEPS = 0.45, 1.19
"""The two figures of the table, in steps of all ranks per second, that calibrate."""
UPDATE_S: Final = 1 / (SERVER_STEPS * RANKS)
"""What a gradient costs the server, 35 ms: it is the bottleneck, says the paper, so its turn is all that counts."""
STEP_S: Final = 1 / EAGER_STEPS - DELAY_S * DELAYED / RANKS
"""A step without delay, with its communication, 0.81 s: under ``solo`` no rank waits, and each is delayed in a sixteenth of its steps."""


SYNCHRONOUS_STEPS: Final = fmean(EAGER_STEPS / ratio for ratio in SYNCHRONOUS)
OVER: Final = (STEP_S + DELAY_S) * EAGER_STEPS
"""Eager over synchronous SGD on this cluster, 1.51: ``full`` waits for the whole delay in each step."""
D_PSGD: Final = "sgp(graph=ring, out_degree=2)"
"""On a ring everybody sends as much as they get, so that no mass moves: each rank takes the mean of three once it has made its step."""


class Contender(NamedTuple):
    """A row of the table."""

    sync: str
    name: str
    steps: float | None
    """The paper's, per second."""
    note: str


CONTENDERS: Final = (
    Contender("asp", "Asynch-PS", SERVER_STEPS, "calibrated: a gradient costs the server 35 ms"),
    Contender("full", "synchronous allreduce", SYNCHRONOUS_STEPS, "not in the table: 0.92 and 0.94 by the text's ratios; see figure 11"),
    Contender("sgp(out_degree=2)", "SGP without overlap", None, "not in the table"),
    Contender(D_PSGD, "D-PSGD", 0.94, "mean with both neighbours after the step, as the paper has it"),
    Contender("dpsgd", "D-PSGD beside computation", None, "as its authors have it: with what the neighbours had before the step"),
    Contender("sgp(out_degree=2, overlap=1)", "SGP with overlap 1", 1.02, "the paper's SGP: it delays the synchronisation by one step"),
    Contender("solo", "eager-SGD, solo", EAGER_STEPS, "calibrated: a step takes 0.81 s"),
)
ORDER: Final = ("asp", D_PSGD, "sgp(out_degree=2, overlap=1)", "solo")
"""The paper's, the slowest first."""


LIVE: Final = ("full", "solo", D_PSGD, "sgp(out_degree=2, overlap=1)", "asp")
"""Contenders that run live as well; the first two in a quick run, with half as many ranks: to start them is most of what each costs."""
LIVE_RANKS: Final = 8
SCALE: Final = 5
"""Live, a second of the table takes a fifth of one."""


def compute(scale: int = 1, step_s: float = STEP_S, delay_s: float = DELAY_S) -> str:
    """The law of a step's seconds."""
    return f"one_of(law='constant(seconds={step_s / scale:.4f})', seconds={delay_s / scale:g}, count={DELAYED})"


def steps_per_s(sync: str, time_s: float, step_s: float = STEP_S, delay_s: float = DELAY_S) -> float:
    """Steps of all ranks in a second, over so many simulated seconds."""
    cluster = Cluster(
        workers=RANKS,
        compute=compute(1, step_s, delay_s),
        update_s=UPDATE_S if sync == "asp" else 0.0,
        seed=SEED,
    )
    result = simulate(sync, cluster, Work(time_s=time_s))
    return float(result.summary["pushes"] / RANKS / result.seconds)


CLAIMS: Final = (
    *mechanism.CLAIMS,
    Claim(row="order", says="Asynch-PS < D-PSGD < SGP with overlap 1 < eager-SGD, solo", why="paper"),
    near("Asynch-PS", SERVER_STEPS, 0.02, "paper; calibrated"),
    near("eager-SGD, solo", EAGER_STEPS, 0.02, "paper; calibrated"),
    near("synchronous allreduce", 1 / (STEP_S + DELAY_S), 0.01, "a step and the delay; 15 % below what the paper's text gives"),
    near("eager-SGD over synchronous allreduce", OVER, 0.02, "as above: the paper's text has 1.27 and 1.29"),
    near("D-PSGD", 0.94, 0.1, "paper; messages between ranks cost nothing here"),
    near("SGP with overlap 1", 1.02, 0.15, "paper; messages between ranks cost nothing here"),
    Claim(row="live: eager-SGD over synchronous", at_least=0.95, why="1.15 by the delays alone; a loaded machine slows both, full more"),
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """Simulate every row, run some of them live, write the figure."""
    found = {contender.sync: steps_per_s(contender.sync, 100.0 if quick else 3000.0) for contender in CONTENDERS}
    rows = [Row(c.name, c.steps, found[c.sync], "steps/s", c.note) for c in CONTENDERS]
    ranked = sorted(ORDER, key=lambda sync: found[sync])
    names = {contender.sync: contender.name for contender in CONTENDERS}
    rows.append(Row("order", " < ".join(names[sync] for sync in ORDER), " < ".join(names[sync] for sync in ranked), ""))
    for sync in ("full", *ORDER[:-1]):
        paper = next(c.steps for c in CONTENDERS if c.sync == sync)
        assert paper is not None
        rows.append(Row(f"eager-SGD over {names[sync]}", EAGER_STEPS / paper, found["solo"] / found[sync], "x"))
    picture(found, out)
    tried, ranks, steps = (LIVE[:2], LIVE_RANKS // 2, 25) if quick else (LIVE, LIVE_RANKS, 250)
    lived = {sync: live.steps_per_s(sync, ranks, compute(SCALE), RANKS, steps) / SCALE for sync in tried}
    note = f"{ranks} processes on one machine, {SCALE} times as fast; the delays of the first {ranks} of the {RANKS}"
    rows += [Row(f"live: {names[sync]}", None, per_s, "steps/s", note) for sync, per_s in lived.items()]
    rows += mechanism.rows()
    return [*rows, Row("live: eager-SGD over synchronous", None, lived["solo"] / lived["full"], "x")]


def picture(found: dict[str, float], out: Path) -> None:
    """A pair of bars for each row."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    places = range(len(CONTENDERS))
    axes.bar([place - 0.2 for place in places], [found[c.sync] for c in CONTENDERS], 0.4, color=COLOURS[0], label="here, simulated")
    axes.bar([place + 0.2 for place in places], [c.steps or 0.0 for c in CONTENDERS], 0.4, color=COLOURS[1], label="paper")
    axes.set_xticks(list(places), [c.name.replace(" ", "\n") for c in CONTENDERS], fontsize=8)
    label(axes, x="", y="steps of all ranks in a second")
    save(figure, out / "eager_table2.png")
