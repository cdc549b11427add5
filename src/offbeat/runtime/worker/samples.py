"""Ask for a worker's samples: follow the epochs that it takes part in, and translate the coordinator's answers for its script.

The session (``job_session.py``) pushes or drops the samples that the worker holds; ``core/leases.py`` decides which worker gets which
samples, and ``core/worker.py`` when the worker pushes, asks again or joins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.core.batch_sizes import Deal
from offbeat.core.worker_messages import Compute, EpochEndWanted, SamplesWanted
from offbeat.session import LeasedRange
from offbeat.types import Epoch, LeaseId


class WorkerSamples:
    """Take part in epochs, in one at a time for each of the worker's samplers. A pool is the samples of one sampler.

    Args:
        ask: sends a question to the coordinator and returns the answer once the script has control again.
        leave: gives up the worker's leases of a pool, except those in its gradient, which it returns; True: the epoch has no more for it.
    """

    def __init__(
        self, *, ask: Callable[[SamplesWanted | EpochEndWanted], Compute], leave: Callable[[int, bool], tuple[LeaseId, ...]]
    ) -> None:
        self._ask, self._leave = ask, leave
        self._open: dict[int, tuple[Epoch, int | None]] = {}
        """By pool: the epoch whose end this worker has not seen, and its number of samples (None: not given)."""
        self._dealt_out: set[int] = set()
        """Pools that have no more samples for this worker in the open epoch, while the worker holds some that are not pushed."""

    @property
    def any_open(self) -> bool:
        """True if this worker has taken part in an epoch, of any sampler, whose end it has not seen."""
        return bool(self._open)

    @property
    def dealt_out(self) -> bool:
        """True if an epoch whose end this worker has not seen has no more samples for it."""
        return bool(self._dealt_out)

    def over(self, pool: int) -> None:
        """Stop expecting the end of a pool's epoch: the end has come, or the worker holds none of its samples and gets none."""
        self._open.pop(pool, None)
        self._dealt_out.discard(pool)

    def leaves(self, pool: int, epoch: Epoch) -> bool:
        """Return True if taking samples of this epoch means leaving another open epoch of the pool."""
        return pool in self._open and self._open[pool][0] != epoch

    def take(
        self, pool: int, epoch: Epoch, size: int | None, batch: int, rest: Sequence[Sequence[int]] | None, held: int, deal: Deal
    ) -> LeasedRange | None:
        """Return an epoch's next samples; None: it has no more for this worker. Another open epoch of the pool is finished first.

        Args:
            pool, epoch, size, batch, rest, held, deal: see `core.worker_messages.SamplesWanted`.
        """
        if self.leaves(pool, epoch):
            self._finish(pool)
        self._open[pool] = (epoch, size)
        while True:
            turn = self._ask(SamplesWanted(pool, epoch, size, batch, rest, held, deal))
            if turn.grant is not None:
                return LeasedRange(pool, turn.grant.lease, turn.grant.start, turn.grant.stop, turn.grant.parts)
            if turn.over:
                if pool in self._open:  # else the answer has brought its end
                    self._dealt_out.add(pool)
                return None

    def finish(self) -> bool:
        """Wait for the end of every epoch that has no more samples for this worker, and return True if there was one.

        An epoch that has more samples stays open: the caller may be in the middle of a loop over it.
        """
        pools = list(self._dealt_out)
        for pool in pools:
            self._finish(pool)
        return bool(pools)

    def leave_all(self) -> None:
        """Give up leases in epochs that have no more samples for this worker, without waiting for their end. The script has ended."""
        for pool in self._dealt_out:
            self._leave(pool, True)

    def _finish(self, pool: int) -> None:
        """Give up a pool's leases, and wait for the end of its epoch."""
        epoch, size = self._open.pop(pool)
        kept = self._leave(pool, pool in self._dealt_out)
        self._dealt_out.discard(pool)
        while not self._ask(EpochEndWanted(pool, epoch, size, kept)).over:
            pass
