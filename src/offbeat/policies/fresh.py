"""What static and dynamic backup workers share: fold the first fresh gradients, drop later ones, scale the learning rate.

`backup` leaves out a fixed number of workers, `dbw` chooses the number of gradients for each version. Staleness in a fold is always 0.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast, get_args

from offbeat.core.policy import Admit, Contribution, Decision, Hold, ObsoleteWork, View
from offbeat.core.settings import number, one_of
from offbeat.errors import ConfigurationError
from offbeat.types import WorkerId

if TYPE_CHECKING:
    from offbeat.policies.backup import Backup
    from offbeat.policies.dbw import BDBW, DBW

LrRule: TypeAlias = Literal["constant", "proportional", "sqrt", "table"]

WAITS: Final = Hold("its gradient waits for the fold")
OUT: Final = Admit("the newest version is out")


def check_fresh(rule: Backup | BDBW | DBW) -> None:
    """Check the settings that the rules share, and make a tuple of ``lr_table``.

    Raises:
        ConfigurationError: a setting is out of its range, or needs or excludes another.
    """
    owner = rule.called()
    one_of(owner, "lr_rule", rule.lr_rule, get_args(LrRule))
    one_of(owner, "obsolete", rule.obsolete, get_args(ObsoleteWork))
    if not isinstance(rule.lr_table, list | tuple):
        raise ConfigurationError(f"{owner}(lr_table={rule.lr_table!r}): lr_table must be a tuple of factors")
    object.__setattr__(rule, "lr_table", tuple(rule.lr_table))
    if bool(rule.lr_table) != (rule.lr_rule == "table"):
        raise ConfigurationError(
            f"{owner}(lr_rule={rule.lr_rule}, lr_table={rule.lr_table}): lr_rule=table needs factors in lr_table; "
            "the other lr_rules take none"
        )
    for factor in rule.lr_table:
        number(owner, "lr_table", factor, above=0.0)


def check_table(rule: Backup | BDBW | DBW, workers: int) -> None:
    """Raise `ConfigurationError` if ``lr_table`` has fewer factors than there are workers."""
    if rule.lr_table and len(rule.lr_table) < workers:
        raise ConfigurationError(
            f"{rule.called()}: lr_table has {len(rule.lr_table)} factors for {workers} workers: give one for each k up to {workers}"
        )


def lr_factor(rule: Backup | BDBW | DBW, k: int, n: int) -> float:
    """Return the factor of the learning rate for a fold of k gradients where n workers could have contributed.

    >>> from offbeat.policies import Backup
    >>> lr_factor(Backup(b=4, lr_rule="proportional"), k=12, n=16)
    0.75
    """
    if rule.lr_rule == "proportional":
        return k / n
    if rule.lr_rule == "sqrt":
        return sqrt(k / n)
    return rule.lr_table[min(k, len(rule.lr_table)) - 1] if rule.lr_table else 1.0


def after_fold(view: View, worker: WorkerId) -> Admit | Hold:
    """Admit a worker once its gradient is in a fold or dropped."""
    return WAITS if worker in view.pending else OUT


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
