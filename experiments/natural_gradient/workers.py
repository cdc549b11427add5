"""A few workers that train apart and then average, one after the other in one process, and what is measured just before they do.

No runtime and no server: EnsembleSync's arithmetic in a healthy cluster is a mean of parameters every T steps, and that is a loop.
Workers own disjoint parts of the training set, keep their optimizer's state over averaging points, and draw the same batches whatever the
optimizer.

Letters: M workers, T local steps between averaging points, P parameters, B samples of a held-out batch, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from experiments.data import MissingDataError, mnist

WORKERS: Final = 4
STEPS: Final = 30
"""Between averaging points: a tenth of an epoch of 37,500 examples in batches of 128, which is EnsembleSync's setting, makes 29."""
BATCH: Final = 64
HIDDEN: Final = 100
HELD_OUT: Final = 2000

Make = Callable[[Iterator[nn.Parameter], float], torch.optim.Optimizer]
Batches = Iterator[Tensor]


class Task(NamedTuple):
    """Flattened images and labels; nothing is in two of the three sets but the probe, which is a part of the training set."""

    name: str
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    """Where divergence is measured and learning rates are chosen."""
    test: tuple[Tensor, Tensor]
    parts: tuple[Tensor, ...]
    """Which training samples each worker owns."""

    @property
    def probe(self) -> tuple[Tensor, Tensor]:
        """Training samples on which the decrease of the loss is measured."""
        return self.train[0][:HELD_OUT], self.train[1][:HELD_OUT]


class Measured(NamedTuple):
    """Four workers after their T steps, just before they average, and the average."""

    decrease: float
    """Of the training loss over the round, in nats: from the average that the workers started from to the one they end in."""
    divergence: float
    """Mean over workers and held-out samples of KL(worker's softmax output || mean of the workers' outputs), in nats."""
    l2: float
    """The same of the Euclidean distance between these outputs."""
    parameters: float
    """Mean distance of the workers' parameters from their mean."""
    worker_accuracy: float
    """On the test set: the workers' mean before averaging."""
    accuracy: float
    """On the test set: of the averaged parameters."""
    loss: float
    """On the held-out samples: of the averaged parameters."""


def load() -> Task:
    """MNIST where it is, else scikit-learn's digits."""
    try:
        images = mnist()
    except MissingDataError:
        return _digits()
    x, y = images.train_x.flatten(1), images.train_y
    cut = len(x) - HELD_OUT
    return Task("MNIST", (x[:cut], y[:cut]), (x[cut:], y[cut:]), (images.test_x.flatten(1), images.test_y), _dealt(cut))


def _digits() -> Task:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (torch.from_numpy(pixels).float()[order] / 8 - 1), torch.from_numpy(labels).long()[order]
    train, held_out, test = ((x[a:b], y[a:b]) for a, b in ((0, 1200), (1200, 1450), (1450, len(y))))
    return Task("scikit-learn's digits", train, held_out, test, _dealt(1200))


def _dealt(samples: int) -> tuple[Tensor, ...]:
    """Parts of equal distribution: dealt out at random."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tensor_split(WORKERS)


def unequal(task: Task) -> Task:
    """Every fourth sample to each worker. In MNIST, odd and even positions are not alike, so that parts differ."""
    return task._replace(parts=tuple(torch.arange(worker, len(task.train[1]), WORKERS) for worker in range(WORKERS)))


def make_model(task: Task, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(task.train[0].shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)]
        return nn.Sequential(*layers)


def batches(task: Task, worker: int, seed: int) -> Batches:
    """Indices of a worker's batches for ever: its own part of the training set, shuffled anew each time round."""
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    own = task.parts[worker]
    while True:
        shuffled = own[torch.randperm(len(own), generator=generator)]
        yield from shuffled.split(BATCH)


class Cluster:
    """M workers that start from one model.

    Args:
        task: the data.
        start: the model's parameters, (P,).
        make: a worker's optimizer from its parameters and the learning rate.
        lr: that learning rate.
        seed: of the batches.
    """

    def __init__(self, task: Task, start: Tensor, make: Make, lr: float, seed: int) -> None:
        self.task, self.start = task, start
        self.models = [make_model(task, 0) for _ in range(WORKERS)]
        for model in self.models:
            vector_to_parameters(start.clone(), model.parameters())
        self.optimizers = [make(model.parameters(), lr) for model in self.models]
        self.batches = [batches(task, worker, seed) for worker in range(WORKERS)]

    def round(self) -> Measured:
        """T local steps on each worker; what there is to measure; and the average, from which all go on."""
        for model, optimizer, own in zip(self.models, self.optimizers, self.batches, strict=True):
            for _ in range(STEPS):
                index = next(own)
                optimizer.zero_grad()
                F.cross_entropy(model(self.task.train[0][index]), self.task.train[1][index]).backward()
                optimizer.step()
        with torch.no_grad():
            return self._average()

    def _average(self) -> Measured:
        vectors_MP = torch.stack([parameters_to_vector(model.parameters()) for model in self.models])
        mean_P = vectors_MP.mean(dim=0)
        logs_MBC = torch.stack([F.log_softmax(model(self.task.held_out[0]), dim=1) for model in self.models])
        worker_accuracy = sum(_accuracy(model, self.task.test) for model in self.models) / WORKERS
        average = self.models[0]
        vector_to_parameters(self.start.clone(), average.parameters())
        before = float(_loss(average, self.task.probe))
        for model in self.models:
            vector_to_parameters(mean_P.clone(), model.parameters())
        self.start = mean_P
        return Measured(
            decrease=before - float(_loss(average, self.task.probe)),
            divergence=divergence(logs_MBC),
            l2=float((logs_MBC.exp() - logs_MBC.exp().mean(dim=0)).norm(dim=2).mean()),
            parameters=float((vectors_MP - mean_P).norm(dim=1).mean()),
            worker_accuracy=worker_accuracy,
            accuracy=_accuracy(average, self.task.test),
            loss=float(_loss(average, self.task.held_out)),
        )


def divergence(logs_MBC: Tensor) -> float:
    """Mean of KL(p_m || mean of p) over workers m and samples, from log-probabilities.

    >>> divergence(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).clamp(min=1e-30).log()) / torch.tensor(2.0).log().item()
    1.0
    """
    mean_BC = logs_MBC.logsumexp(dim=0) - torch.tensor(float(len(logs_MBC))).log()
    return float((logs_MBC.exp() * (logs_MBC - mean_BC)).sum(dim=2).mean())


def _loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def _accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float((model(data[0]).argmax(dim=1) == data[1]).float().mean())


def train(task: Task, make: Make, lr: float, *, rounds: int, seed: int) -> tuple[list[Measured], list[Tensor]]:
    """Train from a fresh model: what each round measured, and the parameters before each round and after the last."""
    start = parameters_to_vector(make_model(task, seed).parameters()).detach()
    cluster = Cluster(task, start, make, lr, seed)
    measured, starts = [], [start]
    for _ in range(rounds):
        measured.append(cluster.round())
        starts.append(cluster.start)
    return measured, starts


def sweep(task: Task, start: Tensor, make: Make, lrs: Sequence[float], *, seed: int) -> list[Measured]:
    """One round from ``start`` at each learning rate, always with the same batches and a fresh optimizer."""
    return [Cluster(task, start, make, lr, seed).round() for lr in lrs]
