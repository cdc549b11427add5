"""The auditor's books of samples: no position is folded twice in an epoch, and an epoch's report says what became of each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from offbeat.core.effects import EpochEnded, Grant
from offbeat.core.events import Pushed
from offbeat.core.partitions import size_of
from offbeat.core.policy import Policy
from offbeat.types import LeaseId

Deck = tuple[int, int | None]
"""What positions count along: an epoch's common order, or the split of one worker in it."""


class Held(NamedTuple):
    """A range of positions."""

    deck: Deck
    start: int
    stop: int


class Samples:
    """What has been granted and folded in the job's first sampler's epochs."""

    def __init__(self, policy: Policy) -> None:
        self._apart = policy.split_overlap is not None
        self._ranges: dict[LeaseId, Held] = {}
        self._folded: dict[Deck, set[int]] = defaultdict(set)
        self.reports: list[dict[str, Any]] = []

    def granted(self, effect: Grant) -> None:
        """Some positions, which are there."""
        assert bool(effect.parts) == self._apart
        assert effect.start < effect.stop and (not effect.parts or effect.stop <= size_of(effect.parts))
        self._ranges[effect.lease] = Held((effect.epoch, effect.worker if effect.parts else None), effect.start, effect.stop)

    def folded(self, push: Pushed) -> None:
        """Each position once."""
        for held in (self._ranges[lease] for lease in push.leases):
            positions = set(range(held.start, held.stop))
            assert not self._folded[held.deck] & positions, f"positions of {held.deck} folded twice: {sorted(positions)}"
            self._folded[held.deck] |= positions

    def report(self, effect: EpochEnded) -> None:
        """It adds up, and its exceptions are exactly the positions that were not folded, of each split."""
        report = effect.report
        self.reports.append(report)
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"], report
        splits: list[tuple[int | None, int]] = [(None, report["indices"])]
        if self._apart:
            splits = [(split["worker"], split["indices"]) for split in report["splits"]]
        folded = 0
        for worker, size in splits:
            mine = self._folded[effect.epoch, worker]
            excepted = [p for e in report["exceptions"] if e.get("worker") == worker for p in range(e["start"], e["stop"])]
            assert sorted([*mine, *excepted]) == list(range(size)), report
            folded += len(mine)
        assert report["folded"] == folded and report["indices"] == sum(size for _, size in splits)
