"""Follow which of a worker's batches are in the gradient that its model has now: *a sample counts in the step whose gradient contains it*.

A batch goes this way::

    deliver -> fresh -- backward -> in the gradient -- step  -> taken: the push is computed over it
                 ^                        |
                 +-- thrown away ---------+  zero_grad without a step

A batch is *left out* if the script goes on without it: it takes another batch and computes the gradient of that, having thrown away this
batch's gradient or having dropped the batch itself; or it comes to the end of the epoch. Neither is a call of the library, so both are
noticed with the next backward pass, or when the worker asks for the epoch's end.

A backward pass does not say which batches it was over. A batch that the script does not hold any more is not in it, where that can be known
(``alive``): while a gradient is computed autograd holds the input, and the script the batch of its loop. So the pass is over all batches
that are alive. If the newest is not alive, the script has copied it (to another device), and the pass is over the oldest batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offbeat.types import LeaseId


@dataclass(slots=True)
class _Batch:
    pool: int
    lease: LeaseId
    alive: Callable[[], bool] | None
    """Tells whether the script still holds the batch; None: it cannot be known."""
    thrown: bool = False
    """The script has thrown a gradient of this batch away."""


class GradientContents:
    """The batches that a script has been given, until a step has taken them or the script has left them out.

    >>> contents = GradientContents()
    >>> contents.deliver(0, 10, alive=lambda: False)  # the script leaves this batch out,
    >>> contents.deliver(0, 11, alive=lambda: True)  # and computes a gradient of this one
    >>> contents.backward()
    >>> contents.step(), contents.left_out()
    ((11,), (10,))
    """

    def __init__(self) -> None:
        self._fresh: dict[int, list[_Batch]] = {}
        """By sampler, oldest first: batches that the gradient does not contain."""
        self._used: list[_Batch] = []
        self._left_out: list[LeaseId] = []
        self.pending = False
        """True if batches have come since the last backward pass: the next one may be over them."""

    def deliver(self, pool: int, lease: LeaseId, alive: Callable[[], bool] | None = None) -> None:
        """Note that the script has received a batch."""
        self._fresh.setdefault(pool, []).append(_Batch(pool, lease, alive))
        self.pending = True

    def backward(self) -> None:
        """Note that a backward pass has added to the gradient, of each sampler's batches that are in use."""
        for batches in self._fresh.values():
            if batches:
                self._claim(batches)
        self.pending = False

    @property
    def waiting(self) -> bool:
        """Return whether batches have been delivered that no gradient contains: a further pass may be over them."""
        return any(self._fresh.values())

    def _claim(self, batches: list[_Batch]) -> None:
        seen = tuple(batches)  # a thread that fetches batches may deliver one meanwhile
        newest = seen[-1]
        informed = newest.alive is not None and newest.alive()
        in_use = []
        for batch in seen:
            if batch is not newest and (batch.thrown or (informed and batch.alive is not None and not batch.alive())):
                self._left_out.append(batch.lease)
            else:
                in_use.append(batch)
        taken = in_use if informed else in_use[:1]
        for batch in taken:
            batch.thrown = False
        self._used += taken
        batches[: len(seen)] = in_use[len(taken) :]

    def clear(self) -> None:
        """Note that the script has thrown the gradient away. A later pass over the same batches still counts them."""
        for batch in reversed(self._used):
            batch.thrown = True
            self._fresh.setdefault(batch.pool, []).insert(0, batch)
        self.pending = self.pending or bool(self._used)
        self._used.clear()

    def step(self, *, written: bool = False) -> tuple[LeaseId, ...]:
        """Return the batches in the gradient, which a step uses now.

        A gradient that no backward pass has computed (the script has written it, or an interrupt came before the pass) is of the batches
        that the next pass would have been over.

        Args:
            written: there is a gradient where the script has thrown one away: it has made it of those that it had computed.
        """
        if not self._used and any(batch and (written or not batch[-1].thrown) for batch in self._fresh.values()):
            self.backward()
        taken = tuple(batch.lease for batch in self._used)
        self._used.clear()
        return taken

    def leave(self, pool: int, *, exhausted: bool) -> tuple[LeaseId, ...]:
        """Note that the script takes no more batches of a sampler's epoch. Return those whose gradient it keeps for a later step.

        Args:
            pool: the sampler's number.
            exhausted: the script has taken all that the epoch had for it, so that it has left out what no gradient contains. False: it has
                left its loop, and others may take over the samples.
        """
        for batch in self._fresh.pop(pool, ()):
            if exhausted or batch.thrown:
                self._left_out.append(batch.lease)
        return tuple(batch.lease for batch in self._used if batch.pool == pool)

    def left_out(self) -> tuple[LeaseId, ...]:
        """Return the batches that the script has left out since the last call."""
        if not self._left_out:
            return ()
        found = tuple(self._left_out)
        self._left_out.clear()
        return found

    def take_back(self, pool: int) -> None:
        """Forget the sampler's batches that no gradient contains: they will be delivered again."""
        self._fresh.pop(pool, None)

    def contains(self, lease: LeaseId) -> bool:
        """Return whether the gradient contains this batch."""
        return any(batch.lease == lease for batch in self._used)

    def current(self) -> tuple[LeaseId, ...]:
        """Return the batches that the script works on: those in the gradient, or each sampler's newest."""
        if self._used:
            return tuple(batch.lease for batch in self._used)
        return tuple(batches[-1].lease for batches in self._fresh.values() if batches)

    @property
    def size(self) -> int:
        """The number of batches in the gradient."""
        return len(self._used)
