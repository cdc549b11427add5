"""One run of DBW or its blind form: the measurements, and the number of gradients for which the present version waits.

k is chosen once per version, when the shards' measurements of the last fold arrive; the blind form needs none and chooses at the fold. If
workers join, leave or pause during a round, k is chosen again from the same estimates for the new number of workers.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offbeat.core.events import Folded
from offbeat.core.policy import Admit, Contribution, Decision, Hold, ServerRule, View, by_samples, place_in_sum
from offbeat.policies.bimonotone import Table
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.policies.dbw_time import ArrivalTimes
from offbeat.policies.fresh import after_fold, fresh, lr_factor, outdated
from offbeat.types import Epoch, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from offbeat.policies.dbw import BDBW, DBW


class VersionRound(NamedTuple):
    """The round of a version, from its publication to the fold onto it."""

    version: Version
    published: Seconds
    epoch: Epoch
    waited: int | None
    """The number of gradients for which the previous round waited; None in the first round."""


class Run(ServerRule):
    """The state of the rule in one run.

    Args:
        rule: the configuration.
        gain: estimates the gain of a fold; None: the gain of k gradients is k.
    """

    def __init__(self, rule: BDBW | DBW, gain: GainEstimator | None) -> None:
        self.rule = rule
        self._gain = gain
        self._times = ArrivalTimes(rule.gamma, pooled=rule.obsolete == "push_and_interrupt")
        self._round: VersionRound | None = None
        self._before: tuple[VersionRound, int] | None = None
        """The previous round, and the number of its gradients that have arrived."""
        self._rounds = 0
        self._chosen: Version | None = None
        """The version for which `_row` is valid."""
        self._row: Table | None = None
        """The expected arrival times of the present version's gradients, in seconds after its publication; None: wait for all."""
        self._blind = gain is None
        self._picked: dict[int, tuple[int, str]] = {}
        """For each number of workers, the chosen k and the reason."""
        self._losses: tuple[float | None, float | None] = (None, None)
        """The mean losses of the last two folds, the newer one first."""
        self._weights: tuple[float, ...] = ()
        self._scale = 1.0

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return after_fold(view, worker)

    def fold(self, view: View) -> Decision | None:
        stale = outdated(view)
        if stale is not None:
            self._note_late(stale)
            return stale
        if self._round is None:  # the first version: nothing is measured yet
            self._round = VersionRound(view.version, view.now, view.epoch, None)
            self._chosen = view.version
        elif self._gain is None and self._chosen != view.version:
            self._choose(view)
        come = len(view.pending)
        n = come + view.missing
        if not come or self._chosen != view.version:
            return None
        k, why = self._pick(n)
        if come < k:
            return None
        first = fresh(view)[:k]
        self._close(view, first, n)
        return Decision(first, f"k={k} of {n}: {why}", scale=self._scale)

    def observe(self, view: View, event: Folded) -> None:
        if self._gain is None or self._before is None or event.version != view.version:  # not a fold of this run, or not the last one
            return
        self._blind = not self._gain.add(event, self._weights, self._scale)
        self._choose(view)

    # A round.

    def _close(self, view: View, parts: tuple[Contribution, ...], n: int) -> None:
        """Measure the round that the fold of these contributions ends, and begin the next one."""
        assert self._round is not None
        waited = self._round.waited or n
        if view.epoch == self._round.epoch:  # otherwise the round includes the wait for the end of an epoch
            self._times.add(waited, [c.arrived - self._round.published for c in parts])
        losses = [c.loss for c in parts if c.loss is not None]
        self._losses = fmean(losses) if losses else None, self._losses[0]
        self._weights, self._scale = by_samples(sorted(parts, key=place_in_sum)), lr_factor(self.rule, len(parts), n)
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
        """Return the best k for n workers, and the reason."""
        gains = None if self._gain is None or self._blind else self._gain.gains([lr_factor(self.rule, k, n) for k in range(1, n + 1)])
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
