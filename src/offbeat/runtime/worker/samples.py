"""A worker's questions about samples: the epochs that it takes part in, and what their answers mean for its script.

What the worker then holds is the session's, to push or to drop (``session.py``); who gets which samples is decided in ``core/leases.py``,
and when the worker pushes, asks again or joins again in ``core/worker.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.core.batch_sizes import Deal
from offbeat.core.worker_messages import Compute, EpochEndWanted, SamplesWanted
from offbeat.session import LeasedRange
from offbeat.types import Epoch, LeaseId


class WorkerSamples:
    """The epochs that one worker takes part in, one at a time for each of its samplers.

    Args:
        ask: asks the coordinator, and waits until the script has control again, with the answer.
        leave: gives up what the worker holds of one sampler's samples, and returns what it keeps; True: the epoch has no more for it.
    """

    def __init__(
        self, *, ask: Callable[[SamplesWanted | EpochEndWanted], Compute], leave: Callable[[int, bool], tuple[LeaseId, ...]]
    ) -> None:
        self._ask, self._leave = ask, leave
        self._open: dict[int, tuple[Epoch, int | None]] = {}
        """The epoch, and its number of samples, whose end this worker has not seen; by pool."""
        self._dealt_out: set[int] = set()
        """Pools of which this worker gets no more samples in the epoch, while it still has some."""

    @property
    def any_open(self) -> bool:
        """True if this worker has taken part in an epoch of any sampler and has not seen its end."""
        return bool(self._open)

    @property
    def dealt_out(self) -> bool:
        """True if this worker gets no more samples of an epoch whose end it has not seen."""
        return bool(self._dealt_out)

    def over(self, pool: int) -> None:
        """Note that there is no end to wait for: it has come, or the worker holds none of the epoch's samples and will get none."""
        self._open.pop(pool, None)
        self._dealt_out.discard(pool)

    def leaves(self, pool: int, epoch: Epoch) -> bool:
        """Return whether taking samples of this epoch means leaving another that is open."""
        return pool in self._open and self._open[pool][0] != epoch

    def take(
        self, pool: int, epoch: Epoch, size: int | None, batch: int, rest: Sequence[Sequence[int]] | None, held: int, deal: Deal
    ) -> LeasedRange | None:
        """Return the next samples of an epoch, None once it is over for this worker. Another epoch of this pool is finished first.

        Args:
            pool, epoch, size, batch, rest, held, deal: see `core.worker.SamplesWanted`.
        """
        if self.leaves(pool, epoch):
            self._finish(pool)
        self._open[pool] = (epoch, size)
        while True:
            turn = self._ask(SamplesWanted(pool, epoch, size, batch, rest, held, deal))
            if turn.grant is not None:
                return LeasedRange(pool, turn.grant.lease, turn.grant.start, turn.grant.stop, turn.grant.parts)
            if turn.over:
                self._dealt_out.add(pool)
                return None

    def finish(self) -> bool:
        """Wait for the end of every epoch that has no more samples for this worker; returns whether there was one.

        An epoch that has more goes on, since the call may come from the middle of a loop over it.
        """
        pools = list(self._dealt_out)
        for pool in pools:
            self._finish(pool)
        return bool(pools)

    def leave_all(self) -> None:
        """Give up the samples of the epochs that have no more for this worker, without waiting for their end: its script has ended."""
        for pool in self._dealt_out:
            self._leave(pool, True)

    def _finish(self, pool: int) -> None:
        """Wait for the end of an epoch of which this worker takes no more samples."""
        epoch, size = self._open.pop(pool)
        kept = self._leave(pool, pool in self._dealt_out)
        self._dealt_out.discard(pool)
        while not self._ask(EpochEndWanted(pool, epoch, size, kept)).over:
            pass
