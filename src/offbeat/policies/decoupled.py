"""Decoupled DiLoCo: local steps; a fragment is averaged once a quorum of workers has pushed it, and no worker waits for anything."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from offbeat.core.about import About, Row
from offbeat.core.fragments import Fragments
from offbeat.core.policy import Averaging, Contribution, Decision, ServerRule, View
from offbeat.core.settings import number, whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.diloco import check_fragments
from offbeat.types import Seconds, WorkerId


@dataclass(frozen=True, kw_only=True)
class Decoupled(ServerRule):
    """Let each worker make local steps on its own clock, and average a fragment once K workers have pushed it and a grace window is over.

    Update rule, of fragment p at its version v: ``d = w_p[v] - sum_j a_j * theta_jp``, with a_j in proportion to ``tokens_j * tokens_j /
    steps_j``, over the K or more workers j that have pushed it; the outer step and the mixing are those of `DiLoCo`. A worker pushes
    fragment after fragment, one every H / P steps, and never waits: ``delay`` steps after the push of a fragment it takes the fragment's
    newest version, if there is one that it has not had; its own push is in that one, or will be in a later one.

    Window: from the K-th push for ``grace`` times the median time between two pushes of one worker to this fragment, as measured; it ends
    sooner when all active workers have pushed, and before a worker in it is expected to push again. If fewer than K workers are active,
    all of them are enough. A push that its worker has followed by a newer one is carried: the newer has its steps too. What was computed
    from an older version is folded like the rest.

    Source: "Decoupled DiLoCo for Resilient Distributed Pre-training" (Douillard et al. 2026, arXiv 2604.21428), of which we had the
    abstract and summaries: a minimum quorum, an adaptive grace window, weights by tokens processed times tokens per step, the outer
    Nesterov step for each fragment, learners with clocks of their own. The formula of the window and its bounds are ours, as are the
    defaults. Of the weights ``tokens`` and ``steps`` are those of the last H / P steps, in proportion to those of the last H while batches
    keep their size; equal weights if samples are not known.

    >>> Decoupled(steps=50, quorum=3).spelling
    'decoupled(steps=50, quorum=3)'

    Raises:
        ConfigurationError: a setting is out of its range.
    """

    about = About(
        examples=("decoupled(steps=5, quorum=2)", "decoupled(steps=10, quorum=1, delay=1, alpha=0.5, grace=0.0)"),
        draws=lambda workers: [
            {"steps": range(5, 8), "quorum": range(1, workers + 1), "grace": (0.0, 0.2, 1.0)},
            {"steps": range(10, 14), "quorum": range(1, workers + 1), "delay": (0, 1), "alpha": (0.0, 0.5)},
        ],
        row=Row(
            "`decoupled(steps=100, quorum=4)`",
            "each fragment by itself: the first K workers' parameters, and who else comes in a short window",
            "everybody, at once, always",
            "machines that come and go, or differ in speed: no step waits for another worker",
        ),
    )

    word = "decoupled"
    always_spelled = ("steps", "quorum")

    steps: int = 100
    """H, the local steps between two pushes of one fragment; at least the number of servers."""
    quorum: int = 1
    """K, the workers that a fragment waits for; at least 1, at most the number of workers."""
    grace: float = 0.25
    """The longest grace window, in times between two pushes of one worker to a fragment; at least 0, at most 1."""
    delay: int = 0
    """tau, the local steps from a push until the worker takes the fragment's newest version; less than ``steps / servers``. As long as the
    way there and back, or the worker's own push is never in what it takes."""
    alpha: float = 0.0
    """The share of the worker's own parameters in the mixture, from 0 to 1."""
    outer_lr: float = 0.7
    """eta, above 0."""
    outer_momentum: float = 0.9
    """mu, Nesterov's momentum as torch has it; at least 0, at most 0.999."""

    def __post_init__(self) -> None:
        check_fragments(self)
        whole_number("decoupled", "quorum", self.quorum, least=1)
        number("decoupled", "grace", self.grace, least=0.0, most=1.0)

    @property
    def scope(self) -> Literal["job", "shard"]:
        return "shard"

    @property
    def averaging(self) -> Averaging:
        return Averaging(outer_lr=float(self.outer_lr), outer_momentum=float(self.outer_momentum))

    def blocks(self, shards: int) -> Fragments:
        return Fragments(shards, owner=self.called(), steps=self.steps, delay=self.delay, alpha=float(self.alpha), waits=False)

    def check(self, workers: int) -> None:
        if self.quorum > workers:
            raise ConfigurationError(
                f"decoupled(quorum={self.quorum}) with {workers} workers waits for more pushes than there can be: "
                f"quorum must be at most {workers}"
            )

    def start(self) -> ServerRule:
        return _Fragment(self)


class _Fragment(ServerRule):
    """The state of one fragment: how long its workers take from push to push.

    Args:
        rule: the configuration.
    """

    def __init__(self, rule: Decoupled) -> None:
        self.rule = rule
        self._last: dict[WorkerId, Contribution] = {}
        """The newest push of each worker."""
        self._turns: dict[WorkerId, Seconds] = {}
        """The time between the last two pushes of one process of the worker."""

    def fold(self, view: View) -> Decision | None:
        if view.gathered:
            return Decision((), "its worker has pushed this fragment again", carry=tuple(view.gathered))
        self._measure(view)
        if not view.pending:
            return None
        due = self._due(view)
        if view.missing and (due is None or view.now < due):
            return None
        parts = tuple(view.pending.values())
        reason = f"{len(parts)} workers have pushed this fragment, {self.rule.quorum} awaited"
        return Decision(parts, reason, weights=by_tokens(parts))

    def wake_at(self, view: View) -> Seconds | None:
        return self._due(view) if view.pending and view.missing else None

    def _measure(self, view: View) -> None:
        for worker, c in view.pending.items():
            last = self._last.get(worker)
            if last is not None and last.incarnation == c.incarnation and last.arrived < c.arrived:
                self._turns[worker] = c.arrived - last.arrived
            self._last[worker] = c

    def _due(self, view: View) -> Seconds | None:
        """Return when the window ends; None: the quorum is not there."""
        arrived = sorted(c.arrived for c in view.pending.values())
        if len(arrived) < self.rule.quorum:
            return None
        enough = arrived[self.rule.quorum - 1]
        if not self._turns:
            return enough
        window = enough + self.rule.grace * median(self._turns.values())
        again = [c.arrived + self._turns[worker] for worker, c in view.pending.items() if worker in self._turns]
        return max(enough, min([window, *again]))


def by_tokens(parts: tuple[Contribution, ...]) -> tuple[float, ...]:
    """Return weights in proportion to tokens times tokens per step, or equal ones if the number of some worker's samples is not known.

    >>> from offbeat.core.policy import Contribution
    >>> by_tokens(tuple(Contribution(w, 1, 1, 0, samples, 0.0, 1.0, None, (), steps=2) for w, samples in enumerate((10, 20))))
    (0.2, 0.8)
    """
    scores = [c.samples * c.samples / c.steps for c in parts]
    if not all(scores):
        return (1.0 / len(parts),) * len(parts)
    return tuple(score / sum(scores) for score in scores)
