"""Rennala SGD: a batch of gradients of one version, from any workers, in the order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.about import About, Row
from offbeat.core.policy import Decision, ServerRule, View
from offbeat.core.settings import whole_number
from offbeat.policies.fresh import fresh, outdated


@dataclass(frozen=True, kw_only=True)
class Rennala(ServerRule):
    """Fold the mean of the first ``batch`` gradients of the newest version, several of which may be one worker's; drop older ones.

    Update rule: ``w[t+1] = step(w[t], mean of the first B gradients computed at w[t])``. A worker that has pushed continues at once, with
    the same version while the batch is not full, so that a fast worker gives several gradients and a slow one perhaps none. Staleness in a
    fold is always 0: a version equals that of one process with a batch of B pushes. With the authors' ``B = max(1, ceil(sigma^2 / eps))``
    the time to a stationary point has the optimal order for these workers, for any speeds.

    When all workers have paused, as at the end of an epoch, a batch that is not full is folded too. The samples of a dropped gradient are
    lost; the epoch report counts them.

    Source: Tyurin and Richtarik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed Computation Model",
    NeurIPS 2023, arXiv 2305.12387. Departure: pushes are weighted by their samples, as under every rule here.

    >>> Rennala(batch=8).spelling
    'rennala(batch=8)'

    Raises:
        ConfigurationError: a batch below 1.
    """

    about = About(
        examples=("rennala(batch=1)", "rennala(batch=3)"),
        draws=lambda workers: [{"batch": range(1, 2 * workers + 1)}],
        row=Row(
            "`rennala(batch=8)`",
            "the first 8 gradients of one version, several of which may be one worker's",
            "all workers, at once",
            "as `ringmaster`, without any staleness",
        ),
    )

    batch: int
    """B, the number of pushes in a fold; at least 1."""

    def __post_init__(self) -> None:
        whole_number("rennala", "batch", self.batch, least=1)

    def fold(self, view: View) -> Decision | None:
        stale = outdated(view)
        if stale is not None:
            return stale
        come = len(view.gathered)
        if come == self.batch:
            return self._all_of(view, f"{self.batch} gradients of version {view.version} are in")
        first = fresh(view)[: self.batch - come]
        if first:
            return Decision((), f"kept until {self.batch} gradients of version {view.version} are in", gather=first)
        if come and not view.active:
            return self._all_of(view, f"{come} gradients of version {view.version} are in, and nobody computes")
        return None

    def _all_of(self, view: View, reason: str) -> Decision:
        gathered = tuple(view.gathered)
        samples = [c.mass for c in gathered]  # a push without a count of samples weighs as one sample
        return Decision(gathered, reason, weights=tuple(number / sum(samples) for number in samples))
