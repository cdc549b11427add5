"""The synchronization rules, one paper per file. All modules here are imported in the order of their names, and each class that defines
``about`` is a rule: its name on the command line, its public name and its place in tests and tables follow, without any list of rules."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeVar

from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.spec import build

if TYPE_CHECKING:  # for type checkers and editors; `python -m tests.generate` writes these lines
    # rules: begin
    from offbeat.policies.adacomm import AdaComm as AdaComm
    from offbeat.policies.asp import ASP as ASP
    from offbeat.policies.auto import Auto as Auto
    from offbeat.policies.backup import Backup as Backup
    from offbeat.policies.bsp import BSP as BSP
    from offbeat.policies.dbw import BDBW as BDBW
    from offbeat.policies.dbw import DBW as DBW
    from offbeat.policies.decoupled import Decoupled as Decoupled
    from offbeat.policies.diloco import DiLoCo as DiLoCo
    from offbeat.policies.eager import AllOf as AllOf
    from offbeat.policies.eager import FirstOf as FirstOf
    from offbeat.policies.eager import Full as Full
    from offbeat.policies.eager import Majority as Majority
    from offbeat.policies.eager import Quorum as Quorum
    from offbeat.policies.eager import Solo as Solo
    from offbeat.policies.elastic import ElasticBSP as ElasticBSP
    from offbeat.policies.ensemble import EnsembleSync as EnsembleSync
    from offbeat.policies.gossip import ADPSGD as ADPSGD
    from offbeat.policies.gossip import DPSGD as DPSGD
    from offbeat.policies.gossip import SGP as SGP
    from offbeat.policies.psp import PSP as PSP
    from offbeat.policies.rennala import Rennala as Rennala
    from offbeat.policies.ringmaster import Ringmaster as Ringmaster
    from offbeat.policies.ssp import DSSP as DSSP
    from offbeat.policies.ssp import SSP as SSP
    # rules: end


def _rules() -> Iterator[type[Policy]]:
    """Yield the rules, module by module, each module's in the order of their definition."""
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = import_module(f"{__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__ and "about" in vars(value):
                yield value


R = TypeVar("R", bound=Policy)

RULES: Final[dict[str, type[Policy]]] = {rule.called(): rule for rule in _rules()}
"""Every rule by its name on the command line."""

# At run time, what the imports above declare to type checkers.
globals().update(
    {rule.__name__: rule for rule in RULES.values()}, __all__=["RULES", "rule", "rule_of", *(rule.__name__ for rule in RULES.values())]
)


def rule(spec: str | Policy) -> Policy:
    """Return the rule that the text ``spec`` describes, or ``spec`` itself if it is a rule.

    >>> rule("ssp(staleness=3)")
    SSP(staleness=3)
    >>> rule(BSP())
    BSP()

    Raises:
        ConfigurationError: there is no such rule, or one of its settings is wrong.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise ConfigurationError(f"sync={spec!r} is not a rule: pass one such as offbeat.SSP(staleness=3), or text: 'ssp(staleness=3)'")
    if spec.strip().lower() == "allreduce":
        raise ConfigurationError(
            "there is no synchronization rule 'allreduce' any more: full computes the same mean, and goes on when a worker dies; "
            "to compare with torch.distributed, run the script with DistributedDataParallel (DDP) and without offbeat"
        )
    return build(spec, RULES, "synchronization rule")


def rule_of(base: type[R], spec: str | Policy) -> R:
    """Return the rule that ``spec`` describes, which must extend ``base``, the base class of a family.

    >>> from offbeat.core.policy import ServerRule
    >>> rule_of(ServerRule, "asp")
    ASP(discount='none')

    Raises:
        ConfigurationError: there is no such rule, or it is one of another family.
    """
    found = rule(spec)
    if not isinstance(found, base):
        known = ", ".join(word for word, kind in RULES.items() if issubclass(kind, base))
        raise ConfigurationError(
            f"{found.spelling} is a rule of the {found.family} family, but a {base.__name__} is required: use one of {known}"
        )
    return found
