"""Base class of static and dynamic backup workers: fold the first fresh gradients, drop later ones, scale the learning rate.

Subclasses choose the number of gradients: `backup` leaves out a fixed number of workers, `dbw` chooses for each version.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Final, Literal, TypeAlias, cast, get_args

from offbeat.core.policy import Admit, Contribution, Decision, Hold, ObsoleteWork, ServerRule, View
from offbeat.core.settings import number, one_of
from offbeat.errors import ConfigurationError
from offbeat.types import WorkerId

LrRule: TypeAlias = Literal["constant", "proportional", "sqrt", "table"]

WAITS: Final = Hold("its gradient waits for the fold")
OUT: Final = Admit("the newest version is out")


@dataclass(frozen=True, kw_only=True)
class FirstFresh(ServerRule):
    """Rules that fold the first k gradients of the newest version. Staleness in a fold is always 0."""

    always_spelled: ClassVar[Collection[str] | None] = ()

    lr_rule: LrRule = "constant"
    """The factor of the script's learning rate, which is meant for a fold of all n gradients: ``constant``, 1; ``proportional``,
    ``k / n``; ``sqrt``, ``sqrt(k / n)``; ``table``, taken from ``lr_table``."""
    lr_table: tuple[float, ...] = ()
    """With ``table`` only: the factors for k = 1, 2, ..., at least one per worker; the last one holds for larger k too."""
    obsolete: ObsoleteWork = "push_and_wait"
    """What workers do with a computation from an older version than the newest: ``push_and_wait`` finishes and pushes it, to be dropped;
    ``pull_and_wait`` finishes it and continues with the newest version; ``push_and_interrupt`` aborts it."""

    def __post_init__(self) -> None:
        one_of(self.called(), "lr_rule", self.lr_rule, get_args(LrRule))
        one_of(self.called(), "obsolete", self.obsolete, get_args(ObsoleteWork))
        if not isinstance(self.lr_table, list | tuple):
            raise ConfigurationError(f"{self.called()}(lr_table={self.lr_table!r}): lr_table must be a tuple of factors")
        object.__setattr__(self, "lr_table", tuple(self.lr_table))
        if bool(self.lr_table) != (self.lr_rule == "table"):
            raise ConfigurationError(
                f"{self.called()}(lr_rule={self.lr_rule}, lr_table={self.lr_table}): lr_rule=table needs factors in lr_table; "
                "the other lr_rules take none"
            )
        for factor in self.lr_table:
            number(self.called(), "lr_table", factor, above=0.0)

    def check(self, workers: int) -> None:
        if self.lr_table and len(self.lr_table) < workers:
            raise ConfigurationError(
                f"{self.called()}: lr_table has {len(self.lr_table)} factors for {workers} workers: give one for each k up to {workers}"
            )

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return self.obsolete

    def scale(self, k: int, n: int) -> float:
        """Return the factor of the learning rate for a fold of k gradients where n workers could have contributed."""
        if self.lr_rule == "proportional":
            return k / n
        if self.lr_rule == "sqrt":
            return sqrt(k / n)
        return self.lr_table[min(k, len(self.lr_table)) - 1] if self.lr_table else 1.0

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return WAITS
        return OUT


def fresh(view: View) -> tuple[Contribution, ...]:
    """Return the pending gradients of the newest version, in the order of arrival."""
    return tuple(c for c in view.pending.values() if c.version == view.version)


def outdated(view: View) -> Decision | None:
    """Return a decision to drop the pending gradients of older versions; None if there are none."""
    pending = cast("dict[WorkerId, Contribution]", view.pending)
    # A fold leaves only outdated ones behind, which are dropped at once, and the ledger asks after each push: while the oldest is of the
    # newest version, only the one that came last can be outdated.
    if not pending or all(pending[next(ends)].version == view.version for ends in (iter(pending), reversed(pending))):
        return None
    stale = tuple(c for c in view.pending.values() if c.version != view.version)
    return Decision((), f"computed from an older version than {view.version}", drop=stale) if stale else None
