"""Run a worker's part of a rule of shard scope: the blocks that it holds, their versions, and when it continues.

One state machine per worker and incarnation. A shell tells it what arrives, asks whether the worker may begin its next iteration, and
begins it; the values of the blocks are the shell's. Versions of a block are iterations of its shard, and the worker's own iteration t is
counted on the same scale: a gradient of iteration t is meant for the fold that makes version t + 1 of every block.

Source: PSP-SGD, Algorithm 1 (worker), whose deadlocks `Blocks` mends: a block that is held counts, whenever it came, and a worker that is
behind jumps to where the shards are.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from offbeat.types import Seconds, Version

if TYPE_CHECKING:
    from offbeat.core.policy import Plan


class Blocks:
    """Keep the blocks that one worker holds, one of each shard.

    With h the held versions and K the ``ceil(fraction * shards)``-th largest of them, iteration t may begin when K >= t, and then
    ``timeout_s`` has passed or every h >= t. It begins as iteration ``max(t, K)``: a worker does not make gradients that come too late
    for most shards. The first needs every block.

    A shell drives it so: `received` for each block that arrives, `released` when all blocks of a `Release` are in, and, while the
    worker has nothing to compute, `ready` after each of these and at `wake_at`; then `advance`, compute with the blocks of `used`, push.

    Args:
        shards: how many blocks there are.
        fraction: how much of them an iteration needs, more than 0, at most 1.
        timeout_s: how long to wait for the others once those are in.
        max_skew: no iteration is more than this ahead of any held block; None: no bound.
        interrupt: whether the worker breaks off an iteration that is `overtaken`.

    >>> blocks = Blocks(4, fraction=0.75)
    >>> for shard in range(4):
    ...     blocks.received(shard, 0, now=0.0)
    >>> blocks.ready(now=0.0), blocks.advance(), blocks.used
    (True, 0, (0, 0, 0, 0))
    >>> blocks.received(0, 1, now=1.0), blocks.received(1, 1, now=1.0), blocks.ready(now=1.0)
    (None, None, False)
    >>> blocks.received(3, 2, now=1.5), blocks.ready(now=1.5), blocks.advance(), blocks.used
    (None, True, 1, (1, 1, 0, 2))
    """

    def __init__(
        self,
        shards: int,
        *,
        fraction: float = 1.0,
        timeout_s: Seconds = 0.0,
        max_skew: int | None = None,
        interrupt: bool = False,
    ) -> None:
        self._need = max(1, ceil(fraction * shards - 1e-9))  # 0.29 * 100 is a little more than 29
        self._timeout_s = timeout_s
        self._max_skew = max_skew
        self._interrupt = interrupt
        self._next: Version = 0
        self._count = 0
        """Number of held blocks at version ``_next`` or later."""
        self._enough_at: Seconds | None = None
        """When the worker first held as many such blocks as the iteration needs."""
        self._heard_at: Seconds = 0.0
        self.held: list[Version] = [-1] * shards
        """The newest version of each block; -1: none yet."""
        self.t: Version = -1
        """The iteration that the worker computes, or has computed last; -1 before the first."""
        self.used: tuple[Version, ...] = ()
        """The versions that iteration computes from: `events.Pushed.held`."""
        self.alpha = 0.0
        """What remains of the worker's own parameters where a block replaces them."""

    @property
    def needed(self) -> int:
        """Number of blocks that the next iteration needs."""
        return self._need if self._next else len(self.held)

    def received(self, shard: int, version: Version, now: Seconds) -> None:
        """Take a block that has arrived. A block older than the held one is ignored."""
        before = self.held[shard]
        if version <= before:
            return
        self.held[shard] = version
        self._heard_at = now
        if before < self._next <= version:
            self._count += 1
            self._look(now)

    def released(self) -> None:
        """Note that every block of a `Release` has arrived: the worker may continue from its blocks, even if none is newer than before."""
        assert min(self.held) >= 0, f"released without all blocks: {self.held}"
        self._begin_waiting(0)

    def ready(self, now: Seconds) -> bool:
        """Return True if a worker without a computation may begin its next iteration."""
        if self._enough_at is None or not self._within_skew():
            return False
        return self._count == len(self.held) or now >= self._enough_at + self._timeout_s

    def wake_at(self) -> Seconds | None:
        """Return the time at which to ask `ready` again even if no block arrives, in seconds; None: never."""
        if self._enough_at is None or self._count == len(self.held) or not self._within_skew():
            return None
        return self._enough_at + self._timeout_s

    def advance(self) -> Version:
        """Begin the next iteration, which must be `ready`; returns its number."""
        assert self._enough_at is not None and self._within_skew(), f"not ready: {self.held} held, {self._next} awaited"
        self.t = max(self._next, sorted(self.held)[-self._need])
        if self._max_skew is not None:
            self.t = min(self.t, min(self.held) + self._max_skew)
        self.used = tuple(self.held)
        self._begin_waiting(self.t + 1)
        return self.t

    @property
    def overtaken(self) -> bool:
        """True if the running iteration is to be broken off, since enough newer blocks have arrived for the next one."""
        return self._interrupt and self._enough_at is not None and self._within_skew()

    # Of rules that average parameters; see `core.fragments`.

    def planned(self, plan: Plan) -> Plan:
        """Return the plan until the next push."""
        return plan

    def pushed(self) -> int | None:
        """Note a push, and return the one shard that gets it; None: each shard gets its part."""
        return None

    def pauses(self, steps: int) -> bool:
        """Return True if the worker, so many steps after its last push, takes what has come before it computes on."""
        return False

    def leg(self, steps: int, left: int) -> int:
        """Return after how many of the steps that are ``left`` until the next push it does that, or pushes."""
        return left

    def _begin_waiting(self, t: Version) -> None:
        self._next = t
        self._count = sum(version >= t for version in self.held)
        self._enough_at = None
        self._look(self._heard_at)

    def _look(self, now: Seconds) -> None:
        if self._enough_at is None and self._count >= self.needed:
            self._enough_at = now

    def _within_skew(self) -> bool:
        return self._max_skew is None or min(self.held) + self._max_skew >= self._next
