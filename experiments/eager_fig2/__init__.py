"""Where imbalance comes from in training on videos: their lengths, and how long batches of similar lengths take.

The lengths are those of UCF101's own files. A batch takes as long as its longest video, in proportion, with the paper's mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from experiments.claims import Claim, near
from experiments.eager_fig13.speech import BATCH, MEAN_S, video_frames
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "Eager-SGD (Li et al. 2020), figure 2: lengths of UCF101's 9,537 training videos, and seconds of a batch of an LSTM"
LENGTHS: Final = {"videos": 9537, "shortest": 29, "longest": 1776, "mean": 187, "standard deviation": 97}
BATCHES: Final = {"batches of two epochs": 1192, "shortest": 201, "longest": 3410, "mean": 1235, "standard deviation": 706}
"""In milliseconds, and their number."""
SECONDS: Final = "batch, ms: "

CLAIMS: Final = (
    *(Claim(row=f"frames: {name}", at_least=value - 0.5, at_most=value + 0.5, why="paper, to a frame") for name, value in LENGTHS.items()),
    near(f"{SECONDS}batches of two epochs", 1192, 0.0, "paper: 16 videos in each, and no smaller one"),
    near(f"{SECONDS}standard deviation", 706, 0.12, "paper; in proportion to the longest video of a batch, 10 % below"),
    Claim(row=f"{SECONDS}shortest", at_least=300, at_most=330, why="in proportion: 316; the paper's is 201"),
    Claim(row=f"{SECONDS}longest", at_least=5400, at_most=5700, why="in proportion: 5,565; the paper's is 3,410"),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Read the lengths, put them into batches, draw both distributions."""
    frames = video_frames()
    longest = frames[: len(frames) // BATCH * BATCH].reshape(-1, BATCH).max(axis=1)
    ms = 1000 * MEAN_S * longest / longest.mean()
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    left.hist(frames, bins=90, color=COLOURS[0])
    label(left, title="lengths", x="frames of a video", y="videos", legend=False)
    right.hist(ms / 1000, bins=60, color=COLOURS[1])
    label(right, title=f"batches of {BATCH} videos of similar lengths", x="seconds", y="batches of an epoch", legend=False)
    save(figure, out / "eager_fig2.png")
    lengths = [len(frames), frames.min(), frames.max(), frames.mean(), frames.std()]
    batches = [2 * len(ms), ms.min(), ms.max(), ms.mean(), ms.std()]
    note = "in proportion to the longest video of the batch, with the paper's mean"
    return [Row(f"frames: {name}", paper, float(value), "") for (name, paper), value in zip(LENGTHS.items(), lengths, strict=True)] + [
        Row(f"{SECONDS}{name}", paper, float(value), "", note) for (name, paper), value in zip(BATCHES.items(), batches, strict=True)
    ]
