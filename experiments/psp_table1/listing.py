"""Algorithm 1 of PSP-SGD as printed, which the paper's table measures. It can wait for ever; `offbeat.policies.PSP` mends that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offbeat.core.block_cache import Blocks
from offbeat.core.policy import Contribution, View
from offbeat.policies import PSP
from offbeat.types import Seconds, Version


@dataclass(frozen=True, kw_only=True)
class Listing(PSP):
    """PSP in which a worker may count twice in a fold, and each worker has `ListingBlocks`.

    Of the settings only c, b, tau1, tau2 and scaling are the listing's; the others must keep their defaults.
    """

    def blocks(self, shards: int) -> Blocks:
        return ListingBlocks(shards, fraction=self.b, timeout_s=self.tau2)

    def _replaced(self, view: View, earlier: Contribution) -> bool:
        return False


class ListingBlocks(Blocks):
    """Blocks that are taken in the order of arrival, and only while the worker waits.

    A block counts in the iteration in which it is taken, if its version is t or later; an older one is dropped. No iteration is skipped.
    """

    def __init__(self, shards: int, *, fraction: float = 1.0, timeout_s: Seconds = 0.0) -> None:
        super().__init__(shards, fraction=fraction, timeout_s=timeout_s)
        self._inbox: deque[tuple[int, Version]] = deque()
        self._taken: set[int] = set()
        """The shards whose blocks count in the iteration that is waited for."""

    def received(self, shard: int, version: Version, now: Seconds) -> None:
        self._inbox.append((shard, version))

    def released(self) -> None:
        while self._inbox:
            self._take()
        assert min(self.held) >= 0, f"released without all blocks: {self.held}"
        self._next = min(self.held)
        self._taken = set(range(len(self.held)))

    def ready(self, now: Seconds) -> bool:
        while self._inbox and not self._enough(now):
            self._take()
        return self._enough(now)

    def wake_at(self) -> Seconds | None:
        return None if self._enough_at is None else self._enough_at + self._timeout_s

    def advance(self) -> Version:
        self.t, self.used = self._next, tuple(self.held)
        self._next += 1
        self._taken.clear()
        self._enough_at = None
        return self.t

    def _take(self) -> None:
        shard, version = self._inbox.popleft()
        if version >= self._next:
            self.held[shard] = version
            self._taken.add(shard)

    def _enough(self, now: Seconds) -> bool:
        if len(self._taken) == len(self.held):
            return True
        if len(self._taken) < self.needed:
            return False
        if self._enough_at is None:
            self._enough_at = now
        return now >= self._enough_at + self._timeout_s
