"""The parts of an integration that do not depend on the library: an optimizer that can be saved, and batches for a loop.

A library's training loop saves the model, the optimizer and the place in the data by separate calls, while other workers push. All three
must be of one version: `LoopOptimizer.hold` takes a snapshot, which later calls of ``state_dict`` return until `LoopOptimizer.release`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offbeat import session as sessions
from offbeat.gradient_watch import life_of
from offbeat.loaders import ElasticStream, elastic
from offbeat.optimizer import DistributedOptimizer
from offbeat.sampler import ElasticBatchSampler, Passes
from offbeat.session import Snapshot


class MissingExtraError(ImportError):
    """A library that an integration needs is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed: pip install 'offbeat[{extra}]'")


class LoopOptimizer(DistributedOptimizer):
    """A `DistributedOptimizer` whose ``state_dict`` can be that of a snapshot."""

    snapshot: Snapshot | None = None
    """The snapshot that is held; None: ``state_dict`` asks the job."""

    def takes_means(self) -> None:
        """Say that each gradient is the mean over its samples, also where a group has fewer batches than others."""
        self._session.takes_means = True

    def keeps_place(self) -> None:
        """Say that the library's counters follow the place in the job's data, in a restarted worker too."""
        self._session.keeps_place = True

    def hold(self) -> None:
        """Take a snapshot: the model gets the parameters of its version, and `state_dict` returns its optimizer state."""
        self.snapshot = self._session.snapshot()

    def release(self) -> None:
        """Forget the snapshot."""
        self.snapshot = None

    def save_elsewhere(self) -> None:
        """Tell the chief, which saves at this place of the script, not to wait for a part of the checkpoint from this worker."""
        self._session.hand_in({})

    def leave(self) -> None:
        """Leave the job. The chief keeps the last state, for a checkpoint after the end of the training."""
        if sessions.chief():
            self.hold()
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot's optimizer state while one is held, otherwise the job's newest."""
        return super().state_dict() if self.snapshot is None else self.snapshot.optimizer


class DealtBatches:
    """The batches that the job deals to this worker, one pass for each epoch, for a loop that cannot know their number.

    Args:
        data: a loader or stream; one that is not elastic is made so with `offbeat.elastic`.
        optimizer: the optimizer in whose job the batches are dealt out.
        seed: the seed of the orders; None: the job's.
        ahead: the loop takes each batch before it has used the one before, to know which is the last.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = LoopOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> batches = DealtBatches(torch.utils.data.DataLoader(range(5), batch_size=2), optimizer)
    >>> [(batch.tolist(), batches.position) for batch in batches]
    [([0, 1], 1), ([2, 3], 2), ([4], 3)]
    """

    def __init__(self, data: Any, optimizer: LoopOptimizer, *, seed: int | None = None, ahead: bool = False) -> None:
        is_elastic = isinstance(data, ElasticStream) or isinstance(getattr(data, "batch_sampler", None), ElasticBatchSampler)
        self.loader: Any = data if is_elastic else elastic(data, seed=seed, optimizer=optimizer)
        self.passes.reports_deliveries = True
        self._optimizer, self._ahead = optimizer, ahead
        self._passed = 0
        """Batches of the present pass that the loop has got."""
        self._over = False
        """Whether the pass has ended and the worker has not waited for the end of the epoch."""

    @property
    def passes(self) -> Passes:
        """The source of the batches: a batch sampler or a stream."""
        passes: Passes = self.loader if isinstance(self.loader, ElasticStream) else self.loader.batch_sampler
        return passes

    @property
    def dataset(self) -> Any:
        """The loader's data set; None for a stream."""
        return getattr(self.loader, "dataset", None)

    @property
    def batches_max(self) -> int:
        """The number of batches of an epoch, all workers' together: a worker gets all of them if the others are dead."""
        sampler = self.passes
        assert isinstance(sampler, ElasticBatchSampler)
        return sampler.batches_max

    @property
    def position(self) -> int:
        """The number of batches of all epochs that the job had dealt out with this worker's newest: its place in the data."""
        sampler = self.passes
        assert isinstance(sampler, ElasticBatchSampler)
        return sampler.position_of(self._passed - 1)

    def __iter__(self) -> Iterator[Any]:
        self._passed, self._over = 0, False
        for batch in self.loader:
            self._passed += 1
            if not self._ahead:
                self._deliver(batch)
            yield batch
            if self._ahead:
                self._deliver(batch)
            del batch
        self._over = True

    def _deliver(self, batch: Any) -> None:
        """Count the newest batch as delivered: the next step may be over it."""
        passes = self.passes
        passes.session.deliver(passes.dealt[self._passed - 1], life_of(batch))

    def finish(self) -> None:
        """After the last batch of a pass has been used: wait for the end of the epoch, with the newest parameters."""
        if self._over:
            self._over = False
            self._optimizer.pull()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, that of the optimizer's snapshot while one is held."""
        passes, snapshot = self.passes, self._optimizer.snapshot
        return passes.state_dict() if snapshot is None else passes.state_at(snapshot.places.get(passes.pool))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`; see `Passes.load_state_dict`."""
        self.passes.load_state_dict(state)
