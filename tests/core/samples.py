"""The auditor's books of samples: no position is folded twice in an epoch, and an epoch's report says what became of each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from offbeat.core.effects import EpochEnded, Grant
from offbeat.core.events import Pushed
from offbeat.core.leases import adds_up
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
        self._lost: dict[Deck, set[int]] = defaultdict(set)
        """Positions that were kept over their epoch's end, and that no fold has."""

    def granted(self, effect: Grant) -> None:
        """Some positions, which are there."""
        assert bool(effect.parts) == self._apart
        assert effect.start < effect.stop and (not effect.parts or effect.stop <= size_of(effect.parts))
        self._ranges[effect.lease] = Held((effect.epoch, effect.worker if effect.parts else None), effect.start, effect.stop)

    def folded(self, push: Pushed) -> None:
        """Each position once."""
        for held in (self._ranges[lease] for lease in push.leases):
            positions = set(range(held.start, held.stop))
            again = positions & (self._folded[held.deck] | self._lost[held.deck])
            assert not again, f"positions of {held.deck} folded twice, or after their end: {sorted(positions)}"
            self._folded[held.deck] |= positions

    def report(self, effect: EpochEnded) -> None:
        """It adds up, and its exceptions are exactly the positions that were not folded, of each split."""
        report = effect.report
        assert adds_up(report), report
        before = sum(earlier["folded"] for earlier in self.reports)
        self.reports.append(report)
        assert report["folded"] == sum(len(positions) for positions in self._folded.values()) - before
        splits: list[tuple[int | None, int]] = [(None, report["indices"])]
        if self._apart:
            splits = [(split["worker"], split["indices"]) for split in report.get("splits", ())]
        kept = 0
        for worker, size in splits:
            used = [*self._folded[effect.epoch, worker]]
            listed = [e for e in report["exceptions"] if e.get("worker") == worker and "epoch" not in e]
            excepted = [p for e in listed for p in range(e["start"], e["stop"])]
            assert len({*used, *excepted}) == len(used) + len(excepted) and {*used, *excepted} <= {*range(size)}, report
            kept += size - len(used) - len(excepted)
        assert report.get("kept", 0) == kept and report["indices"] == sum(size for _, size in splits)
        for late in report["exceptions"]:
            if "epoch" in late:
                deck, positions = (late["epoch"], late.get("worker")), set(range(late["start"], late["stop"]))
                assert late["epoch"] < effect.epoch and not positions & (self._folded[deck] | self._lost[deck]), late
                self._lost[deck] |= positions
