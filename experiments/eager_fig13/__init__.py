"""An LSTM on sequences of very different lengths, eight ranks: accuracy against time under full, majority and solo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from experiments._eager import NAMES, RANKS, Learned, Lesson, learn, speed_rows
from experiments._eager.models import Listener
from experiments._training.runs import side_by_side
from experiments.claims import Claim, near
from experiments.eager_fig13.speech import AsLong, load, speech_times, video_times
from experiments.result import COLOURS, Row, label, new_figure, save, spread
from offbeat.sim.cluster import Cluster

PAPER = "Eager-SGD (Li et al. 2020), figure 13: LSTM on UCF101's videos, which differ in length, 8 processes"
SEED: Final = 0
SPEEDUP: Final = {"majority": 1.27, "solo": 1.64}
"""Over synchronous SGD, in the paper."""
ACCURACY: Final = {"full": 69.6, "majority": 69.7, "solo": 60.6}
"""On the paper's test videos, top 1."""
HIDDEN: Final = 64
DELIVERIES: Final = {
    "full": "synchronous",
    "majority": "majority, replay",
    "majority(delivery=latest)": "majority, latest",
    "majority(delivery=latest, model_sync_every=20)": "majority, latest, mean every 20",
    "solo": "solo, replay",
    "solo(delivery=latest)": "solo, latest",
    "solo(delivery=latest, model_sync_every=100)": "solo, latest, mean every 100",
    "solo(delivery=latest, model_sync_every=20)": "solo, latest, mean every 20",
}
"""What `deliveries` compares, and what the figure calls it."""


class Job(NamedTuple):
    """One run."""

    sync: str
    lengths: str
    """Whose: ``speech`` or ``video``."""
    seed: int
    epochs: int


def run_one(job: Job) -> Learned:
    """Train; evaluated on the test recordings at the end of each epoch."""
    speech = load()
    times = speech_times() if job.lengths == "speech" else video_times()
    cluster = Cluster(workers=RANKS, compute=AsLong(seconds=tuple(times.tolist()), drawn=job.seed), seed=job.seed)

    def evaluate(module: nn.Module) -> float:
        return 100 * float((module(speech.test_x, speech.test_lengths).argmax(dim=1) == speech.test_y).double().mean())

    lesson = Lesson(
        model=lambda: Listener(speech.x.shape[-1], HIDDEN, 10),
        loss=loss,
        data=(speech.x, speech.lengths, speech.y),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        batch=1,
        epochs=job.epochs,
        evaluate=evaluate,
        schedule=lambda done: 0.5 + 0.5 * math.cos(math.pi * min(1.0, done / job.epochs)),
    )
    return learn(job.sync, lesson, cluster)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of batches (batches, sequences, classes)."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


CLAIMS: Final = (
    *(near(f"speech: {sync} over full", paper, 0.1, "paper; other sequences") for sync, paper in SPEEDUP.items()),
    *(
        Claim(row=f"speech: {sync}, accuracy", at_least=80.0, mode="quick", why="84 to 91 % over three seeds; not separated")
        for sync in NAMES
    ),
    *(Claim(row=f"speech: {sync}, accuracy", at_least=94.0, mode="full", why="96 % over four seeds, deviation 0.4") for sync in NAMES),
)


def run(quick: bool, out: Path, *, seeds: int | None = None) -> list[Row]:
    """Train under every rule; write the figure."""
    return compare(NAMES, quick, out, seeds or (2 if quick else 4))


def deliveries(quick: bool, out: Path, *, seeds: int = 3) -> list[Row]:
    """The same with what the paper's ranks do: take the newest result only, and the mean of all replicas now and then, or never."""
    return compare(DELIVERIES, quick, out, seeds)


VARIANTS: Final = {"deliveries": deliveries}


def compare(rules: Mapping[str, str], quick: bool, out: Path, seeds: int) -> list[Row]:
    """Train under these rules, by what they are called in the figure; speeds are the first seed's, accuracies means with ranges."""
    epochs, lengths = (16, ("speech",)) if quick else (50, ("speech", "video"))
    jobs = [Job(sync, whose, SEED + seed, epochs) for whose in lengths for sync in rules for seed in range(seeds)]
    results = dict(zip(jobs, side_by_side(run_one, jobs), strict=True))
    note = f"mean of {seeds} seeds, {epochs} epochs"
    rows = []
    for whose in lengths:
        first = {job.sync: result for job, result in results.items() if (job.lengths, job.seed) == (whose, SEED)}
        rows += speed_rows(first, SPEEDUP, f"lengths as of {whose}", f"{whose}: ")
        for sync in rules:
            last = [result.values[-1] for job, result in results.items() if (job.sync, job.lengths) == (sync, whose)]
            deviation = f"; standard deviation {stdev(last):.2f}, {spread(last)}" if seeds > 1 else ""
            rows.append(Row(f"{whose}: {sync}, accuracy", ACCURACY.get(sync), fmean(last), "%", note + deviation))
    picture(results, rules, lengths, out)
    return rows


def picture(results: dict[Job, Learned], rules: Mapping[str, str], lengths: tuple[str, ...], out: Path) -> None:
    """Test accuracy against time, a panel for each kind of lengths."""
    figure = new_figure(4.5 * (1 + len(lengths)), 4.0)
    for number, whose in enumerate(lengths, start=1):
        axes = figure.add_subplot(1, len(lengths), number)
        for colour, (sync, name) in zip(COLOURS, rules.items(), strict=False):
            runs = [result for job, result in results.items() if (job.sync, job.lengths) == (sync, whose)]
            for run_number, result in enumerate(runs):
                axes.plot(result.times, result.values, color=colour, linewidth=1, label=None if run_number else name)
        label(axes, title=f"lengths as of {whose}", x="simulated seconds", y="test accuracy, %")
    save(figure, out / "eager_fig13.png")
