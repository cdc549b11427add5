"""What static and dynamic backup workers have in common: the first fresh gradients count, later ones are dropped, and how that scales eta.

How many are waited for is the rule's own matter: `backup` has a fixed number of spare workers, `dbw` chooses anew for each version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from offbeat.core.policy import Admit, Contribution, Decision, Hold, ObsoleteWork, ServerRule, View, short_spelling
from offbeat.errors import ConfigurationError
from offbeat.types import WorkerId

LrRule: TypeAlias = Literal["constant", "proportional", "table"]


@dataclass(frozen=True, kw_only=True)
class FirstFresh(ServerRule):
    """Rules that fold the first k gradients of the newest version. Staleness in a fold is always 0."""

    always_spelled: ClassVar[frozenset[str]] = frozenset()
    """The settings that the spelling names even at their defaults."""

    lr_rule: LrRule = "constant"
    """How the learning rate depends on k. The script's is meant for a fold of all n: ``constant`` keeps it, ``proportional`` takes
    ``k / n`` of it, ``table`` looks the factor up in ``lr_table``."""
    lr_table: tuple[float, ...] = ()
    """``table`` only: the factor for k = 1, 2, ...; at least as many as there are workers, the last one for more."""
    obsolete: ObsoleteWork = "push_and_wait"
    """What workers do with a computation whose version has been overtaken: ``push_and_wait`` finishes it and hands it in, to be
    dropped; ``pull_and_wait`` finishes it and goes on with the newest version; ``push_and_interrupt`` breaks it off."""

    def __post_init__(self) -> None:
        one_of(self.called(), "lr_rule", self.lr_rule, get_args(LrRule))
        one_of(self.called(), "obsolete", self.obsolete, get_args(ObsoleteWork))
        if not isinstance(self.lr_table, list | tuple):
            raise ConfigurationError(f"{self.called()}(lr_table={self.lr_table!r}): lr_table must be a tuple of factors")
        object.__setattr__(self, "lr_table", tuple(self.lr_table))
        if bool(self.lr_table) != (self.lr_rule == "table"):
            raise ConfigurationError(
                f"{self.called()}(lr_rule={self.lr_rule}, lr_table={self.lr_table}): give factors with lr_rule=table, and with no other"
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

    @property
    def spelling(self) -> str:
        """Only what differs from the defaults, and ``always_spelled``; what a running rule remembers is no setting."""
        return short_spelling(self, self.always_spelled)

    def scale(self, k: int, n: int) -> float:
        """The factor of the learning rate for a fold of k gradients where n workers could have contributed."""
        if self.lr_rule == "proportional":
            return k / n
        return self.lr_table[min(k, len(self.lr_table)) - 1] if self.lr_table else 1.0

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return Hold("its gradient waits for the fold")
        return Admit("the newest version is out")


def fresh(view: View) -> tuple[Contribution, ...]:
    """The pending gradients of the newest version, in the order of arrival."""
    return tuple(c for c in view.pending.values() if c.version == view.version)


def outdated(view: View) -> Decision | None:
    """Drop the pending gradients of older versions; None: there are none."""
    stale = tuple(c for c in view.pending.values() if c.version != view.version)
    return Decision((), f"computed from an older version than {view.version}", drop=stale) if stale else None


def number(owner: str, name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float | None = None) -> None:
    """Check one setting of a rule that is a number: greater than ``above``, at least ``least``, at most ``most``.

    Raises:
        ConfigurationError: it is not.
    """
    bounds = (("above", above), ("at least", least), ("at most", most))
    limits = " and ".join(f"{words} {limit:g}" for words, limit in bounds if limit is not None)
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if right:
        right = (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)
        right = right and abs(value) < float("inf")
    if not right:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be a number, {limits}")


def one_of(owner: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Check one setting of a rule that is a word.

    Raises:
        ConfigurationError: it is none of ``known``.
    """
    if value not in known:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be one of {', '.join(known)}")
