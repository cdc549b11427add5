"""Stale synchronous parallel and its dynamic form: a worker may be ahead of the slowest by a bounded number of iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Decision, Hold, ServerRule, View
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.asp import each_by_itself
from offbeat.types import Clock, WorkerId

WITHIN: Final = Admit("within the staleness bound")


@dataclass(frozen=True, kw_only=True)
class SSP(ServerRule):
    """Fold each contribution as it arrives; hold a worker that is more than ``staleness`` iterations ahead of the slowest.

    Worker p, having pushed t_p times, may continue if and only if ``t_p - min(t) <= staleness``. A worker in iteration c (from 0) thus
    sees all its own updates and every update of other workers from their iterations up to c - staleness - 1, and the numbers of completed
    iterations never differ by more than staleness + 1. ``staleness=0`` is a barrier without summing: every push is folded by itself.

    If one worker is *always* slow, the others reach the bound after a few iterations and then proceed at its pace; SSP helps when
    slowness moves from worker to worker.

    Source: Ho et al. 2013, as described in Zhao et al., "ElasticBSP", section I, which uses ``staleness=3``. Dead workers do not count;
    a returning worker starts at the slowest clock.

    >>> SSP(staleness=3).spelling
    'ssp(staleness=3)'
    """

    about = About(
        examples=("ssp(staleness=1)", "ssp(staleness=3)"),
        draws=lambda workers: [{"staleness": range(4)}],
        row=Row(
            "`ssp(staleness=3)`",
            "each push as it arrives",
            "workers at most 3 iterations ahead of the slowest",
            "slowness that moves from worker to worker",
        ),
    )

    staleness: int
    """The largest lead over the slowest worker, in completed iterations, with which a worker may continue; at least 0."""

    def __post_init__(self) -> None:
        whole_number("ssp", "staleness", self.staleness, least=0)

    def fold(self, view: View) -> Decision | None:
        return each_by_itself(view)

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return within(view, worker, self.staleness)


def within(view: View, worker: WorkerId, bound: int) -> Admit | Hold:
    """Admit a worker at most ``bound`` iterations ahead of the slowest."""
    clock = view.clock(worker)
    lead = clock - view.slowest
    if lead <= bound:
        return WITHIN
    return Hold(f"{lead} iterations ahead of the slowest worker, {bound} allowed", slowest=clock - bound)


@dataclass(frozen=True, kw_only=True)
class DSSP(ServerRule):
    """SSP with a bound between ``lower`` and ``upper``, chosen each time the fastest worker would be held.

    The fastest worker p gets r extra iterations, such that its predicted push is nearest to a predicted push of the slowest worker q:
    with last push times A and last intervals I, ``r = argmin_r min_j |A_q + j*I_q - A_p - r*I_p|``, 0 <= r <= upper - lower and j >= 1,
    the smallest r on ties. ``lower == upper`` is SSP.

    Source: Zhao et al. 2019, "Dynamic Stale Synchronous Parallel" (arXiv 1908.11848), and its authors' notes; the defaults are those of
    its experiments. Departure: ``t_p - min(t) <= upper`` holds always, not only at the time of a grant.

    >>> DSSP(lower=1, upper=4).spelling
    'dssp(lower=1, upper=4)'
    """

    about = About(
        examples=("dssp(lower=1, upper=3)",),
        draws=lambda workers: [{"lower": range(4), "upper": range(7)}],
        row=Row(
            "`dssp(lower=3, upper=15)`",
            "each push as it arrives",
            "as SSP, with a bound chosen from predicted arrivals",
            "as `ssp`, when you cannot guess the bound",
        ),
    )

    lower: int = 3
    """The lead that is always allowed; at least 0."""
    upper: int = 15
    """The lead that is never exceeded; at least ``lower``."""

    def __post_init__(self) -> None:
        whole_number("dssp", "lower", self.lower, least=0)
        whole_number("dssp", "upper", self.upper, least=0)
        if self.upper < self.lower:
            raise ConfigurationError(f"dssp(lower={self.lower}, upper={self.upper}): upper must be at least lower")

    def start(self) -> ServerRule:
        return _Run(self)


class _Run(ServerRule):
    """The state of DSSP in one run."""

    def __init__(self, rule: DSSP) -> None:
        self._rule = rule
        self._credits: dict[WorkerId, Clock] = {}
        """How many more iterations each worker may run beyond ``lower``."""

    def fold(self, view: View) -> Decision | None:
        return each_by_itself(view)

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        inside = within(view, worker, self._rule.lower)
        if isinstance(inside, Admit):
            return inside
        lead = view.clock(worker) - view.slowest
        credit = self._credits.get(worker, 0)
        if credit == 0 and view.clock(worker) == view.fastest:
            credit = self._grant(view, worker)
        if credit == 0 or lead > self._rule.upper:
            return inside
        self._credits[worker] = credit - 1
        return Admit(f"{lead} ahead of the slowest worker, granted: their pushes are predicted to meet {credit} iterations on")

    def _grant(self, view: View, worker: WorkerId) -> int:
        slow = view.slowest_worker()
        last_fast, step_fast = view.pushed_at(worker), view.interval(worker)
        last_slow, step_slow = view.pushed_at(slow), view.interval(slow)
        if last_fast is None or step_fast is None or last_slow is None or step_slow is None or step_slow <= 0.0:
            return 0

        def distance(r: int) -> float:
            ahead = last_fast + r * step_fast - last_slow
            j = max(1, round(ahead / step_slow))
            return min(abs(ahead - i * step_slow) for i in (max(1, j - 1), j, j + 1))

        return min(range(self._rule.upper - self._rule.lower + 1), key=distance)
