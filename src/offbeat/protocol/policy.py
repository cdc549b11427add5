"""The contract of a synchronization rule: two questions, and what the rule may look at to answer them.

A rule never sees a tensor, a socket or a clock. It sees who has pushed what, and says which contributions become the next
version now (`Policy.fold`) and whether a waiting worker may go on (`Policy.admit`). The ledger asks after each event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from offbeat.errors import ConfigurationError
from offbeat.types import Clock, Incarnation, LeaseId, Seconds, Version, WorkerId


class Contribution(NamedTuple):
    """A pushed gradient, as far as a rule is concerned."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    """The worker's clock after this push."""
    version: Version
    """The version it was computed from."""
    samples: int
    arrived: Seconds
    compute_s: Seconds
    loss: float | None
    leases: tuple[LeaseId, ...]


class Decision(NamedTuple):
    """An answer to *fold*: what becomes the next version, and what is of no more use. An empty ``fold`` makes no version."""

    fold: tuple[Contribution, ...]
    reason: str
    drop: tuple[Contribution, ...] = ()


class Admit(NamedTuple):
    """An answer to *admit*: go on, with the newest version."""

    reason: str


class Hold(NamedTuple):
    """An answer to *admit*: wait. The rule is asked again when the worker's contribution is settled, when the slowest active
    clock has reached ``slowest``, and whenever an active worker comes or goes."""

    reason: str
    slowest: Clock | None = None


class View(Protocol):
    """What a rule may look at. Every attribute costs O(1)."""

    @property
    def now(self) -> Seconds: ...

    @property
    def version(self) -> Version: ...

    @property
    def active(self) -> Collection[WorkerId]:
        """Workers the rule may wait for: alive, admitted or waiting for it, and not idle at the end of an epoch."""

    @property
    def pending(self) -> Mapping[WorkerId, Contribution]:
        """Contributions without a fate, in the order of arrival. A dead worker's stay until they are settled."""

    @property
    def missing(self) -> int:
        """How many active workers have nothing pending."""

    @property
    def slowest(self) -> Clock:
        """The least clock of the active workers; 0 where there are none."""

    @property
    def fastest(self) -> Clock:
        """The greatest clock of the active workers; 0 where there are none."""

    def slowest_worker(self) -> WorkerId:
        """The active worker with the least clock, the lowest number among equals. This one costs O(active)."""

    def clock(self, worker: WorkerId) -> Clock: ...

    def pushed_at(self, worker: WorkerId) -> Seconds | None:
        """When the worker's last push arrived; None before its first."""

    def interval(self, worker: WorkerId) -> Seconds | None:
        """Between the worker's last two pushes; None before its second."""


class Policy:
    """One synchronization rule. Subclasses are frozen dataclasses: the configuration, checked when it is made.

    A rule that keeps state during a run returns a fresh object from `start`; the others are their own rule.
    """

    lockstep: bool = False
    """True promises that nothing folds while an active worker computes, so that one copy of the parameters serves all."""

    def start(self) -> Policy:
        """The rule of one run."""
        return self

    def check(self, workers: int) -> None:
        """Raise `ConfigurationError` if the rule cannot work with this number of workers."""

    def fold(self, view: View) -> Decision | None:
        """Which contributions become the next version now? None: nothing to do yet. Asked again until it says so."""
        raise TypeError(f"{type(self).__name__} does not say what to fold")

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        """May this waiting worker go on?"""
        raise TypeError(f"{type(self).__name__} does not say whom to admit")

    def wake_at(self, view: View) -> Seconds | None:
        """When the rule wants to be asked again even if nothing happens; None: never."""
        return None

    @property
    def spelling(self) -> str:
        """How the rule is written in a script or on the command line, for instance ``ssp(staleness=3)``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        arguments = ", ".join(f"{name}={_spell(value)}" for name, value in values.items())
        name = type(self).__name__.lower()
        return f"{name}({arguments})" if arguments else name


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def whole_number(owner: str, name: str, value: Any, *, least: int) -> None:
    """Check one setting of a rule.

    Raises:
        ConfigurationError: it is no whole number, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be a whole number, at least {least}")
