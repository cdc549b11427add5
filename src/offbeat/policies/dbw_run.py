"""One run of DBW or its blind form: what has been measured, and how many gradients the version under way waits for.

k is chosen once per version, when what the shards have measured of the last fold is known; the blind form needs nothing and chooses at
the fold. Where workers come, go or pause meanwhile, the same estimates are asked again for as many as there are then.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from offbeat.core.events import Folded
from offbeat.core.policy import Admit, Contribution, Decision, Hold, ObsoleteWork, ServerRule, View, by_samples
from offbeat.policies.bimonotone import Table
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.policies.dbw_time import ArrivalTimes
from offbeat.policies.fresh import fresh, outdated
from offbeat.types import Epoch, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from offbeat.policies.dbw import BDBW


class VersionRound(NamedTuple):
    """A version, from its publication to the fold onto it."""

    version: Version
    published: Seconds
    epoch: Epoch
    waited: int | None
    """For how many gradients the round before has; None: this is the first."""


class Run(ServerRule):
    """The rule of one run.

    Args:
        rule: its configuration.
        gain: what estimates the gain; None: it is k.
    """

    def __init__(self, rule: BDBW, gain: GainEstimator | None) -> None:
        self.rule = rule
        self._gain = gain
        self._times = ArrivalTimes(rule.gamma, pooled=rule.obsolete == "push_and_interrupt")
        self._round: VersionRound | None = None
        self._before: tuple[VersionRound, int] | None = None
        """The round before, and how many of its gradients have come by now."""
        self._rounds = 0
        self._chosen: Version | None = None
        """The version for which `_row` stands."""
        self._row: Table | None = None
        """For the version under way, when its gradients are expected; None: wait for all."""
        self._blind = gain is None
        self._picked: dict[int, tuple[int, str]] = {}
        """For this many workers, which k, and why."""
        self._losses: tuple[float | None, float | None] = (None, None)
        """Of the last two folds, the newer first."""
        self._weights: tuple[float, ...] = ()
        self._scale = 1.0

    @property
    def spelling(self) -> str:
        return self.rule.spelling

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return self.rule.obsolete_work

    @property
    def measures(self) -> Literal["nothing", "norms", "differences"]:
        return self.rule.measures

    @property
    def uses_loss(self) -> bool:
        return self.rule.uses_loss

    def start(self) -> ServerRule:
        return self.rule.start()

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return self.rule.admit(view, worker)

    def fold(self, view: View) -> Decision | None:
        stale = outdated(view)
        if stale is not None:
            self._note_late(stale)
            return stale
        if self._round is None:  # the first version, and nothing to choose by
            self._round = VersionRound(view.version, view.now, view.epoch, None)
            self._chosen = view.version
        elif self._gain is None and self._chosen != view.version:
            self._choose(view)
        first = fresh(view)
        n = len(first) + view.missing
        if not first or self._chosen != view.version:
            return None
        k, why = self._pick(n)
        if len(first) < k:
            return None
        self._close(view, first[:k], n)
        return Decision(first[:k], f"k={k} of {n}: {why}", scale=self._scale)

    def observe(self, view: View, event: Folded) -> None:
        if self._gain is None or self._before is None or event.version != view.version:  # of a fold that is not this run's, or not the last
            return
        self._blind = not self._gain.add(event, self._weights, self._scale)
        self._choose(view)

    # A round.

    def _close(self, view: View, parts: tuple[Contribution, ...], n: int) -> None:
        """These become the next version: measure the round, and begin the next."""
        assert self._round is not None
        waited = self._round.waited or n
        if view.epoch == self._round.epoch:  # else it has waited for an epoch to end, which is no worker's slowness
            self._times.add(waited, [c.arrived - self._round.published for c in parts])
        losses = [c.loss for c in parts if c.loss is not None]
        self._losses = fmean(losses) if losses else None, self._losses[0]
        self._weights, self._scale = by_samples(parts), self.rule.scale(len(parts), n)
        self._before = self._round._replace(waited=waited), len(parts)
        self._round = VersionRound(view.version + 1, view.now, view.epoch, len(parts))
        self._rounds += 1

    def _note_late(self, stale: Decision) -> None:
        if not self.rule.censored or self._before is None:
            return
        before, come = self._before
        for contribution in stale.drop:
            if contribution.version == before.version:
                come += 1
                assert before.waited is not None
                self._times.add_late(before.waited, come, contribution.arrived - before.published)
        self._before = before, come

    # The choice.

    def _choose(self, view: View) -> None:
        assert self._round is not None and self._round.waited is not None
        self._chosen = view.version
        self._picked.clear()
        most = max(len(view.pending) + view.missing, self._round.waited)
        warm = self._rounds >= self.rule.warm_up
        self._row = self._times.estimate(self._round.waited, most, self.rule.optimism) if warm else None

    def _pick(self, n: int) -> tuple[int, str]:
        if n not in self._picked:
            self._picked[n] = (n, "warm-up") if self._row is None else self._best(self._row, n)
        return self._picked[n]

    def _best(self, row: Table, n: int) -> tuple[int, str]:
        """Which k of n, and why."""
        gains = None if self._gain is None or self._blind else self._gain.gains([self.rule.scale(k, n) for k in range(1, n + 1)])
        why = "best gain per second"
        if gains is None:
            why = "most gradients per second" if self._gain is None else "most gradients per second, for want of norms"
            gains = np.arange(1.0, n + 1.0)
        least = min(self.rule.k_min, n)
        if float(gains[least - 1 :].max()) <= 0.0:
            return n, "no k promises a gain"
        rate = np.where(gains > 0.0, gains / row[np.minimum(np.arange(n), len(row) - 1)], -np.inf)[least - 1 :]
        k = n - int(np.argmax(rate[::-1]))
        assert self._round is not None and self._round.waited is not None
        raised = min(self._round.waited + 1, n)
        return (raised, "loss rose, k raised") if self._loss_rose() and k < raised else (k, why)

    def _loss_rose(self) -> bool:
        newer, older = self._losses
        if self.rule.beta is None or newer is None or older is None:
            return False
        return newer - older > (self.rule.beta - 1.0) * abs(older)
