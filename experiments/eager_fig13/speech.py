"""Spoken digits in batches of about one length, and how long each batch takes: what makes this task unbalanced by nature.

As the paper does with videos, sequences of similar lengths are put into one batch, which is padded to the longest of them. A batch is what
is drawn as one sample then, and a simulated iteration takes as long as the batch that it draws.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.data import locate
from offbeat.sim.latency.registry import Law, Sampler
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.workload import Step
from offbeat.types import Clock, Seconds, WorkerId

BATCH: Final = 16
"""Sequences for each rank: the paper's 128 for eight."""
MEAN_S, MOST_S = 1.235, 3.410
"""Of the times of a batch in the paper's figure 2."""
HELD_OUT: Final = 5
"""The first so many recordings of each digit by each speaker are for testing: the split of those who made the data set."""


class Speech(NamedTuple):
    """Batches of recorded digits; what follows a sequence's end is zeros."""

    x: Tensor
    """(batches, sequences, frames, 40) float32: log-mel features, each band normalised."""
    lengths: Tensor
    """(batches, sequences) int64, in frames; ascending."""
    y: Tensor
    """(batches, sequences) int64: digits."""
    test_x: Tensor
    """(sequences, frames, 40)."""
    test_lengths: Tensor
    test_y: Tensor


@cache
def load() -> Speech:
    """The Free Spoken Digit Dataset. The shortest recordings, too few for a batch, are left out.

    Raises:
        MissingDataError: it is not there.
    """
    with np.load(locate("fsdd/fsdd_logmel40.npz"), allow_pickle=False) as stored:
        frames, offsets = stored["feat"].astype(np.float32), stored["offsets"]
        label, test = stored["label"].astype(np.int64), stored["index"] < HELD_OUT
    frames = (frames - frames.mean(axis=0)) / frames.std(axis=0)
    lengths = np.diff(offsets)

    def padded(which: NDArray[np.intp]) -> tuple[Tensor, Tensor, Tensor]:
        x = np.zeros((len(which), int(lengths.max()), frames.shape[1]), np.float32)
        for place, number in enumerate(which):
            x[place, : lengths[number]] = frames[offsets[number] : offsets[number + 1]]
        return torch.from_numpy(x), torch.from_numpy(lengths[which].astype(np.int64)), torch.from_numpy(label[which])

    learning = np.flatnonzero(~test)
    learning = learning[np.argsort(lengths[learning], kind="stable")][len(learning) % BATCH :]
    x, n, y = (tensor.unflatten(0, (-1, BATCH)) for tensor in padded(learning))
    return Speech(x, n, y, *padded(np.flatnonzero(test)))


def speech_times() -> NDArray[np.float64]:
    """Seconds of each batch: as its longest sequence, with the paper's mean, and none longer than the paper's longest."""
    return _seconds(load().lengths.max(dim=1).values.double().numpy())


def video_times() -> NDArray[np.float64]:
    """The same if batches had videos: the shortest batch has the length of the shortest one of UCF101's, and so on to the longest.

    Raises:
        MissingDataError: the lengths are not there.
    """
    longest = video_frames()[BATCH - 1 :: BATCH].astype(np.float64)
    count = len(load().x)
    chosen = np.quantile(longest, (np.arange(count) + 0.5) / count)
    return _seconds(chosen)


def video_frames() -> NDArray[np.int64]:
    """The frames of each of UCF101's videos in the training set of its first split, ascending.

    Raises:
        MissingDataError: the lengths are not there.
    """
    with gzip.open(locate("ucf101-lengths/ucf101_lengths.csv.gz"), "rt", encoding="utf-8") as source:
        return np.sort(np.array([int(row["frames"]) for row in csv.DictReader(source) if row["split1"] == "train"], dtype=np.int64))


def _seconds(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = np.minimum(MOST_S, MEAN_S * lengths / lengths.mean())
    return seconds


@dataclass(frozen=True, kw_only=True)
class AsLong(Law):
    """An iteration takes as long as the batch that the simulator draws for it."""

    seconds: tuple[Seconds, ...]
    """Of each batch."""
    drawn: int
    """The seed from which batches are drawn: the cluster's."""

    @property
    def spelling(self) -> str:
        return f"as_long(batches={len(self.seconds)}, mean={sum(self.seconds) / len(self.seconds):.3f})"

    def start(self, seed: int, workers: int) -> Sampler:
        return _AsLong(self)


class _AsLong(Sampler):
    def __init__(self, law: AsLong) -> None:
        self._seconds, self._batches = law.seconds, Batches(len(law.seconds), law.drawn)

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        return self._seconds[int(self._batches.of(WorkerId(worker), Step(clock, 1)))]
