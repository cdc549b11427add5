"""Ringmaster ASGD: asynchronous steps that drop gradients above a staleness threshold."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.about import About, Row
from offbeat.core.policy import Decision, ServerRule, View
from offbeat.core.settings import whole_number


@dataclass(frozen=True, kw_only=True)
class Ringmaster(ServerRule):
    """Fold each gradient by itself if its staleness is below a threshold, drop it otherwise; admit every worker at once.

    Update rule: ``w[v+1] = step(w[v], g_i(w[v - s]))`` for a staleness ``s < threshold``. With ``threshold=1`` the first gradient of each
    version is folded; with a threshold above every staleness the rule is `ASP`. The authors' threshold is ``max(1, ceil(sigma^2 / eps))``,
    the variance of a gradient over the squared gradient norm that training is to reach; with it the time to a stationary point has the
    optimal order among asynchronous methods, for any speeds of the workers.

    The samples of a dropped gradient are lost; the epoch report counts them.

    Source: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity", ICML 2025, arXiv
    2501.16168. Departure: the variant that aborts a computation as soon as its version is too stale is not implemented; the gradient is
    computed and dropped.

    >>> Ringmaster(threshold=8).spelling
    'ringmaster(threshold=8)'

    Raises:
        ConfigurationError: a threshold below 1.
    """

    about = About(
        examples=("ringmaster(threshold=1)", "ringmaster(threshold=2)"),
        draws=lambda workers: [{"threshold": range(1, 2 * workers + 1)}],
        row=Row(
            "`ringmaster(threshold=8)`",
            "each push as it arrives, unless it is too stale",
            "all workers, at once",
            "speeds so different that the slowest workers' gradients do harm",
        ),
    )

    threshold: int
    """The least staleness at which a gradient is dropped; at least 1."""

    def __post_init__(self) -> None:
        whole_number("ringmaster", "threshold", self.threshold, least=1)

    def fold(self, view: View) -> Decision | None:
        first = next(iter(view.pending.values()), None)
        if first is None:
            return None
        staleness = view.version - first.version
        if staleness < self.threshold:
            return Decision((first,), f"its staleness of {staleness} is below {self.threshold}")
        return Decision((), f"its staleness of {staleness} is not below {self.threshold}", drop=(first,))
