"""ElasticBSP: each barrier is placed where the workers' predicted pushes lie closest together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Averaging, Contribution, Decision, Hold, Plan, ServerRule, View
from offbeat.core.settings import is_number, one_of, whole_number, yes_or_no
from offbeat.errors import ConfigurationError
from offbeat.policies.prediction import averaged, meet
from offbeat.policies.superstep import Superstep
from offbeat.policies.zipline import OBJECTIVES, Objective, Times, ZipLine, zipline
from offbeat.types import Seconds, WorkerId

MODES = ("async", "bulk", "local")
WEIGHTINGS = ("gradients", "workers")


_DRAWN = {"R": range(1, 5), "grace": (0.5, 1.0, 3.0, float("inf")), "history": range(1, 5), "monitor": range(4)}
_WAYS = {"weighting": ("gradients", "workers"), "objective": ("range", "sum")}


@dataclass(frozen=True, kw_only=True)
class ElasticBSP(ServerRule):
    """Place each barrier where the workers wait least for each other, and let each worker push as often as fits before it.

    After a barrier each worker's interval I_p is measured over its next ``monitor`` pushes. Then its pushes are predicted from the last
    one, at L_p: ``e[p, i] = L_p + i * I_p``, i = i0 .. i0 + R - 1, with ``i0 = max(1, ceil((now - L_p) / I_p))``, so that none is in the
    past. ZipLine chooses one prediction of each worker such that ``max(Z) - min(Z)`` of the chosen set Z is least. Worker p makes
    ``q_p = i - i0 + 1`` more pushes and waits. When all wait, all continue with the same version. Within a superstep the workers' numbers
    of iterations differ by at most 2R - 1: R - 1 when the last interval has been measured, and R more by the plan. (2R where one joins.)

    Three modes. ``async``: each push is folded as it arrives. ``bulk``: all pushes of a superstep are folded at the barrier.
    ``local``: worker p makes q_p local optimizer steps, and the parameters are averaged at the barrier; intervals are measured from these
    pushes, and the first superstep has one step per worker.

    If a worker is later than predicted by more than ``grace`` intervals, a new plan is made, in which that worker is expected to take as
    long again as it has been computing. (In mode ``local`` a plan is not changed.) Dead and paused workers are not waited for. A worker
    that joins during a superstep computes until the planned barrier.

    Source: Zhao et al. 2019, "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning", sections II and III, and the
    authors' notes. Departures, on points that the paper leaves open: while intervals are measured no worker gets R pushes ahead of the
    slowest; and a late worker does not get additional pushes for those that it has missed.

    >>> ElasticBSP(R=30).spelling
    'elastic(R=30, mode=async, grace=3.0, history=1, monitor=2, weighting=gradients, objective=range, length_penalty=False)'

    Raises:
        ConfigurationError: R or history is below 1, ``monitor`` is negative, ``grace`` is not above 0, a word is unknown, or ``weighting``
            is set in mode ``async``.
    """

    about = About(
        examples=(
            "elastic(R=4)",
            "elastic(R=6, history=3, monitor=1, grace=0.5, objective=sum)",
            "elastic(R=4, mode=bulk)",
            "elastic(R=4, mode=bulk, weighting=workers, length_penalty=True)",
            "elastic(R=4, mode=local)",
        ),
        draws=lambda workers: [_DRAWN, _DRAWN | _WAYS | {"mode": ("bulk",)}, _DRAWN | _WAYS | {"mode": ("local",)}],
        row=Row(
            "`elastic(R=15)`",
            "each push (`mode=bulk`: a superstep's at once; `mode=local`: averaged parameters)",
            "up to a quota, so that all reach the barrier together",
            "lasting speed differences",
        ),
    )

    word = "elastic"

    R: int = 15
    """The number of predicted pushes of each worker, and so the most that it makes between plan and barrier; at least 1."""
    mode: Literal["async", "bulk", "local"] = "async"
    """Fold each gradient as it arrives, or all gradients of a superstep at its end, or average parameters after local steps."""
    grace: float = 3.0
    """How late a worker may be, in its own intervals, before a new plan is made; more than 0; inf: never."""
    history: int = 1
    """The number of intervals to average over, roughly: the newest has weight 2 / (history + 1). At least 1: then only the last interval
    counts."""
    monitor: int = 2
    """How many pushes of each worker are measured after a barrier before the next is planned; at least 0. With 0 the plan is made at once,
    from known intervals; but as all workers leave a barrier together, many workers then rarely meet later than after one push."""
    weighting: Literal["gradients", "workers"] = "gradients"
    """What counts alike in a fold of many. ``gradients``: each gradient, by its samples; in mode ``local`` parameters have equal weights,
    as those of a fast worker are already more steps away. ``workers``: each worker, however many gradients it made; in mode ``local``
    parameters have weights in inverse proportion to steps."""
    objective: Objective = "range"
    """What ZipLine minimises: the wait of the first to arrive (``range``, the paper's), or the ``sum`` of all waits."""
    length_penalty: bool = False
    """Divide the objective by the time to the barrier, so that a small gain does not choose a distant barrier."""

    def __post_init__(self) -> None:
        for name, value, least in (("R", self.R, 1), ("history", self.history, 1), ("monitor", self.monitor, 0)):
            whole_number("elastic", name, value, least=least)
        if not is_number(self.grace) or not self.grace > 0.0:
            raise ConfigurationError(f"elastic(grace={self.grace!r}): grace must be a number of intervals above 0; inf: never plan anew")
        one_of("elastic", "mode", self.mode, MODES)
        one_of("elastic", "weighting", self.weighting, WEIGHTINGS)
        one_of("elastic", "objective", self.objective, OBJECTIVES)
        yes_or_no("elastic", "length_penalty", self.length_penalty)
        if self.mode == "async" and self.weighting == "workers":
            raise ConfigurationError(
                "elastic(mode='async', weighting='workers'): each gradient is folded by itself; weighting needs mode='bulk' or mode='local'"
            )

    @property
    def averaging(self) -> Averaging | None:
        return Averaging() if self.mode == "local" else None

    def start(self) -> ServerRule:
        return _Local(self) if self.mode == "local" else _Counted(self)

    def barrier(self, ends: Times) -> ZipLine:
        """Choose the barrier among the predicted pushes (workers x R), in seconds from now."""
        return zipline(ends, objective=self.objective, length_penalty=self.length_penalty)


class _Counted(ServerRule):
    """One run in mode ``async`` or ``bulk``: hold a worker that has reached its limit of pushes."""

    def __init__(self, rule: ElasticBSP) -> None:
        self.rule = rule
        self.superstep = Superstep(rule)

    def fold(self, view: View) -> Decision | None:
        arrived = next(iter(view.pending.values()), None)
        if arrived is not None:
            self.superstep.pushed(view, arrived)
            if self.rule.mode == "bulk":
                return Decision((), "kept for the barrier", gather=(arrived,))
            return Decision((arrived,), "each push is folded as it arrives")
        self.superstep.look(view)
        if self.superstep.over(view):
            self.superstep.begin(view)
            if view.gathered:
                parts = tuple(view.gathered)
                reason = f"barrier: {len(parts)} gradients of {len({c.worker for c in parts})} workers"
                return Decision(parts, reason, weights=shares(parts, equal=self.rule.weighting == "workers"))
        return None

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return self.superstep.admit(view, worker)

    def plan(self, view: View, worker: WorkerId) -> Plan:
        self.superstep.released(view, worker)
        return Plan()

    def wake_at(self, view: View) -> Seconds | None:
        return self.superstep.wake_at(view)


class _Local(ServerRule):
    """One run in mode ``local``: a worker's plan has its number of local steps, and it pushes once per superstep."""

    def __init__(self, rule: ElasticBSP) -> None:
        self.rule = rule
        self._intervals: dict[WorkerId, Seconds] = {}
        self._steps: dict[WorkerId, int] = {}
        """The local steps of the workers that the barrier will release."""
        self._barrier: Seconds = 0.0

    def fold(self, view: View) -> Decision | None:
        if view.missing or not view.pending:
            return None
        parts = tuple(view.pending.values())
        for c in parts:
            self._intervals[c.worker] = averaged(self.rule, self._intervals.get(c.worker), c.compute_s / c.steps)
        self._plan(view)
        # Parameters after q steps are q steps away from the barrier's: equal weights count each gradient alike, weights of 1/q each worker.
        # Weights in proportion to q would count speed twice.
        counts = [1.0 / c.steps if self.rule.weighting == "workers" else 1.0 for c in parts]
        weights = tuple(count / sum(counts) for count in counts)
        return Decision(parts, f"barrier: {sum(c.steps for c in parts)} local steps of {len(parts)} workers", weights=weights)

    def _plan(self, view: View) -> None:
        present = [worker for worker in view.active if worker in self._intervals]
        if present:
            _, line = meet(self.rule, [0.0] * len(present), [self._intervals[worker] for worker in present])
            self._steps = {worker: chosen + 1 for worker, chosen in zip(present, line.choice, strict=True)}
            self._barrier = view.now + line.barrier

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return Hold(f"barrier: {view.missing} of {len(view.active)} active workers are still computing")
        return Admit("the barrier is open")

    def plan(self, view: View, worker: WorkerId) -> Plan:
        steps = self._steps.pop(worker, None)
        if steps is None:  # the worker joins, or starts again, during a superstep: as many steps as fit
            if view.pushed_at(worker) is None:
                self._intervals.pop(worker, None)  # measured of an earlier process
            interval = self._intervals.get(worker)
            left = max(0.0, self._barrier - view.now)
            steps = 1 if interval is None else max(1, int(min(left / interval, self.rule.R)))
        return Plan(steps=steps)


def shares(parts: Iterable[Contribution], *, equal: bool) -> tuple[float, ...]:
    """Return the weights of the contributions of a fold to which workers contribute several each.

    A worker's share is that of its samples, or of its contributions if any of them has no count of samples. Within a worker's share
    contributions are weighted by samples.

    Args:
        parts: the contributions of a fold.
        equal: give every worker the same share.

    >>> from offbeat.core.policy import Contribution
    >>> def made(worker, samples):
    ...     return Contribution(worker, 1, 1, 0, samples, 0.0, 1.0, None, ())
    >>> shares([made(0, 30), made(0, 10), made(1, 40)], equal=False)
    (0.375, 0.125, 0.5)
    >>> shares([made(0, 30), made(0, 30), made(1, 20)], equal=True)
    (0.25, 0.25, 0.5)
    """
    parts = tuple(parts)
    counted = all(c.samples > 0 for c in parts)
    samples: Counter[WorkerId] = Counter()
    made: Counter[WorkerId] = Counter()
    for c in parts:
        samples[c.worker] += c.samples or 1
        made[c.worker] += 1
    size = dict.fromkeys(made, 1) if equal else samples if counted else made
    total = sum(size.values())
    factor = {worker: size[worker] / total / samples[worker] for worker in made}
    return tuple((c.samples or 1) * factor[c.worker] for c in parts)
