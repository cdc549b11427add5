"""List the laws by name, and parse their text form: ``shifted_exponential(shift=0.3, scale=0.7)``, the syntax of rules.

To add a law, write its class (see ``base.py``) and name it in `LAWS`.
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
"""Every law by its name on the command line."""


def law(spec: str | Law) -> Law:
    """Return the law that the text ``spec`` describes, or ``spec`` itself if it is a law.

    >>> law("uniform(low=0.1, high=0.2)")
    Uniform(low=0.1, high=0.2)
    >>> law(law("constant(seconds=1)").spelling).spelling
    'constant(seconds=1.0)'

    Raises:
        ConfigurationError: there is no such law, or one of its settings is wrong.
    """
    if isinstance(spec, Law):
        return spec
    if not isinstance(spec, str):
        raise ConfigurationError(f"{spec!r} is not a latency model: pass one such as Constant(seconds=1), or text: 'constant(seconds=1)'")
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
