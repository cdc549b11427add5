"""The spellings that rules bring as examples of their settings (`About.examples`), for tests of all rules or of one family."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.policy import Policy
from offbeat.policies import RULES, rule


def spelled(*bases: type[Policy], where: Callable[[Policy], bool] = lambda policy: True) -> list[str]:
    """Return the examples of the rules that extend one of ``bases`` (none: of all rules), as far as ``where`` is true of them."""
    return [
        spelling
        for kind in RULES.values()
        if issubclass(kind, bases or Policy)
        for spelling in kind.about.examples
        if where(rule(spelling))
    ]
