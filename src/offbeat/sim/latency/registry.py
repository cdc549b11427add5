"""The laws by name, and how a spelling becomes a law: ``shifted_exponential(shift=0.3, scale=0.7)``, as rules are spelled.

The contract is in ``base.py``; laws that stand by themselves are in ``distributions.py`` and ``lognormal.py``, laws around another law in
``modifiers.py``, measured times in ``traces.py``. To add a law, write its class and name it in `LAWS`.
"""

from __future__ import annotations

from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import Law, Sampler, derived, stretched
from offbeat.sim.latency.distributions import Constant, Pareto, Rotating, ShiftedExponential, Sometimes, Uniform
from offbeat.sim.latency.lognormal import Lognormal
from offbeat.sim.latency.modifiers import OneOf, PerWorker, Plus, Windows
from offbeat.sim.latency.traces import Trace
from offbeat.spec import build

LAWS: Final[dict[str, type[Law]]] = {
    kind.word(): kind
    for kind in (
        Constant,
        Uniform,
        ShiftedExponential,
        Pareto,
        Lognormal,
        Sometimes,
        Rotating,
        Windows,
        PerWorker,
        OneOf,
        Plus,
        Trace,
    )
}
"""Every law by the word that spells it."""


def law(spec: str | Law) -> Law:
    """The law that ``spec`` spells, or ``spec`` itself if it is one.

    >>> law("uniform(low=0.1, high=0.2)")
    Uniform(low=0.1, high=0.2)
    >>> law(law("constant(seconds=1)").spelling).spelling
    'constant(seconds=1.0)'

    Raises:
        ConfigurationError: there is no such law, or it refuses its settings.
    """
    if isinstance(spec, Law):
        return spec
    if not isinstance(spec, str):
        raise ConfigurationError(f"{spec!r} is no law: pass one such as Constant(seconds=1), or its spelling 'constant(seconds=1)'")
    return build(spec, LAWS, "latency model")


__all__ = [
    "LAWS",
    "Constant",
    "Law",
    "Lognormal",
    "OneOf",
    "Pareto",
    "PerWorker",
    "Plus",
    "Rotating",
    "Sampler",
    "ShiftedExponential",
    "Sometimes",
    "Trace",
    "Uniform",
    "Windows",
    "derived",
    "law",
    "stretched",
]
