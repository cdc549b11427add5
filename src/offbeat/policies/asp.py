"""Asynchronous parallel: no worker waits, and every gradient is folded, however stale; stale gradients may be scaled down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Decision, ServerRule, View
from offbeat.core.settings import one_of
from offbeat.types import Version

Discount = Literal["none", "inverse", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class ASP(ServerRule):
    """Fold each contribution as it arrives; admit every worker at once.

    Update rule: ``w[v+1] = step(w[v], g_i(w[v - s]))``, the step's learning rate times ``1``, ``1 / (1 + s)`` or ``1 / sqrt(1 + s)`` for a
    staleness s. Nothing bounds the staleness: with n equal workers it is about n - 1, which acts like additional momentum. Lower the
    learning rate or the momentum if training is unstable, or discount stale gradients.

    Source: the asynchronous baseline of Zhao et al., "ElasticBSP", section I, and of the EnsembleSync paper. Division by the staleness:
    Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning". Departure: division by 1 + s, so that a fresh gradient
    has the script's learning rate.

    >>> ASP().spelling, ASP(discount="inverse").spelling
    ('asp', 'asp(discount=inverse)')
    >>> [round(ASP(discount="sqrt").scale(staleness), 2) for staleness in (0, 3)]
    [1.0, 0.5]

    Raises:
        ConfigurationError: ``discount`` is none of the three words.
    """

    about = About(
        examples=("asp", "asp(discount=inverse)"),
        draws=lambda workers: [{"discount": get_args(Discount)}],
        row=Row(
            "`asp`", "each push as it arrives", "all workers, at once", "permanent speed differences, and models that tolerate staleness"
        ),
    )

    always_spelled = ()

    discount: Discount = "none"
    """The divisor of the learning rate for a gradient of staleness s: 1 (``none``), 1 + s (``inverse``) or sqrt(1 + s) (``sqrt``)."""

    def __post_init__(self) -> None:
        one_of("asp", "discount", self.discount, get_args(Discount))

    def scale(self, staleness: Version) -> float:
        """Return the factor of the learning rate for a gradient of this staleness."""
        if self.discount == "none":
            return 1.0
        return 1.0 / (1 + staleness) if self.discount == "inverse" else 1.0 / sqrt(1 + staleness)

    def fold(self, view: View) -> Decision | None:
        return each_by_itself(view, self.scale)


def each_by_itself(view: View, scale: Callable[[Version], float] = lambda staleness: 1.0) -> Decision | None:
    """Return the decision to fold the oldest pending contribution by itself, None if none is pending.

    Args:
        view: the job.
        scale: returns the factor of the learning rate for a gradient of a staleness.
    """
    for first in view.pending.values():
        return Decision((first,), "each push is folded as it arrives", scale=scale(view.version - first.version))
    return None
