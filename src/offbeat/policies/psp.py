"""Partially synchronous parallel: a shard folds without the slowest workers, a worker continues without the slowest shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from offbeat.core.about import About, Row
from offbeat.core.block_cache import Blocks
from offbeat.core.policy import Contribution, Decision, ObsoleteWork, ServerRule, View
from offbeat.core.settings import is_number, one_of, seconds, whole_number, yes_or_no
from offbeat.errors import ConfigurationError
from offbeat.policies.deadline import Learning
from offbeat.types import Seconds


@dataclass(frozen=True, kw_only=True)
class PSP(ServerRule):
    """Fold at a shard once c gradients for its iteration are in; continue at a worker once it holds the fraction b of the blocks.

    Update rule, per shard i at its version t: ``w_i[t+1] = step(w_i[t], mean of d gradients; learning rate d * eta)``, d >= c. A gradient
    of an earlier iteration than t is dropped. A worker whose iteration is t needs ``ceil(b * shards)`` blocks of version t or later, and
    computes with older values of the others; see `core.block_cache`. ``psp(c=n, b=1.0, scaling="none")`` with n workers is BSP.

    If fewer than c workers are left, a shard folds when each active worker has responded, so that no shard waits for the dead. A gradient
    that a worker sent before its death is folded. With b < 1 the parameters that a worker pulls may lack its own last gradient, which may
    still be in transit. A small c together with a small b adds noise: in the paper the error doubles at c = 20 of 32 and b = 75 %.

    Source: "Partially Synchronous Parallelism SGD" (PSP-SGD), Algorithm 1. Departures, which prevent its deadlocks and repeated work: a
    worker counts every block that it holds and skips to the shards' iteration; each worker counts once per fold, with its newest gradient.

    >>> PSP(c=28, b=0.9).spelling
    'psp(c=28, b=0.9, tau1=0.0, tau2=0.0, future=accept, scaling=linear, interrupt=False, max_skew=None, tau_max=None)'
    """

    about = About(
        examples=(
            "psp(c=2)",
            "psp(c=2, b=0.5, tau1=0.2, tau2=0.1)",
            "psp(c=1, b=0.5, future=hold, interrupt=True)",
            "psp(c=2, b=0.5, future=drop, max_skew=1, tau_max=2.0, scaling=none)",
            "psp(c=3, tau_max=auto)",
        ),
        draws=lambda workers: [
            {
                "c": range(1, workers + 1),
                "b": (0.3, 0.5, 0.6, 0.75, 0.9, 1.0, 1.0),
                "tau1": (0.0, 0.0, 0.0, 1.0, 3.0),
                "tau2": (0.0, 0.0, 0.0, 1.0, 3.0),
                "future": ("accept", "accept", "hold", "drop"),
                "scaling": ("linear", "none"),
                "interrupt": (False, False, False, True),
                "max_skew": (None, None, 0, 1, 2),
                "tau_max": (None, None, None, 0.0, 2.0, 5.0, "auto"),
            }
        ],
        row=Row(
            "`psp(c=3, b=0.75)`",
            "each shard by itself: the first c gradients",
            "workers that have the fraction b of the blocks",
            "several servers, and late messages",
        ),
    )

    c: int
    """How many gradients a shard waits for; at least 1, at most the number of workers."""
    b: float = 1.0
    """The fraction of the blocks that a worker waits for; more than 0, at most 1."""
    tau1: Seconds = 0.0
    """How long a shard waits for more gradients once c are in, in seconds; at least 0."""
    tau2: Seconds = 0.0
    """How long a worker waits for more blocks once the fraction b is in, in seconds; at least 0."""
    future: Literal["accept", "hold", "drop"] = "accept"
    """What a shard does with a gradient of a later iteration than its own, from a worker that has continued without this shard: fold it
    now, keep it for its own iteration, or drop it at the fold. If no other gradient can arrive, it is folded in any case."""
    scaling: Literal["linear", "none"] = "linear"
    """linear: the learning rate is meant for one gradient and multiplied by d. none: it is meant for the mean."""
    interrupt: bool = False
    """Whether a worker aborts an iteration once it could begin the next one; otherwise a lag of less than one iteration persists."""
    max_skew: int | None = None
    """Workers wait for a shard that is more than this number of versions, at least 0, behind their iteration; None: they do not."""
    tau_max: Seconds | Literal["auto"] | None = None
    """Fold with fewer than c gradients this long after the first, in seconds, at least 0; ``auto``: learned from arrivals, see
    `deadline.Deadline`; None: never."""

    def __post_init__(self) -> None:
        whole_number("psp", "c", self.c, least=1)
        if not is_number(self.b) or not 0.0 < self.b <= 1.0:
            raise ConfigurationError(f"psp(b={self.b!r}): b must be a fraction of the blocks, more than 0 and at most 1, such as b=0.9")
        for name in ("tau1", "tau2"):
            value = getattr(self, name)
            if not (is_number(value) and 0.0 <= value < inf):
                raise ConfigurationError(f"psp({name}={value!r}): {name} must be a time in seconds, at least 0")
        seconds("psp", "tau_max", self.tau_max)
        one_of("psp", "future", self.future, ("accept", "hold", "drop"))
        one_of("psp", "scaling", self.scaling, ("linear", "none"))
        yes_or_no("psp", "interrupt", self.interrupt)
        if self.max_skew is not None:
            whole_number("psp", "max_skew", self.max_skew, least=0)

    def check(self, workers: int) -> None:
        if self.c > workers:
            raise ConfigurationError(
                f"psp(c={self.c}) with {workers} workers waits for more gradients than there are: c must be at most {workers}"
            )

    @property
    def scope(self) -> Literal["job", "shard"]:
        return "shard"

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return "push_and_interrupt" if self.interrupt else "push_and_wait"

    def blocks(self, shards: int) -> Blocks:
        return Blocks(shards, fraction=self.b, timeout_s=self.tau2, max_skew=self.max_skew, interrupt=self.interrupt)

    def start(self) -> ServerRule:
        return Learning(self, "tau_max") if self.tau_max == "auto" else self

    def fold(self, view: View) -> Decision | None:
        if not view.pending:
            return None
        useless = self._useless(view)
        if useless is not None:
            return useless
        counted, later = self._counted(view)
        due = self._due(counted)
        if due is not None and view.now >= due:
            reason = f"{len(counted)} gradients are in, {self.c} awaited"
        elif not view.missing:
            reason = f"all {len(view.active)} active workers have responded"
        else:
            return None
        if not counted:  # all workers are beyond this iteration, so that no gradient for it can arrive
            first = min(c.version for c in later)
            counted, later = tuple(c for c in later if c.version == first), tuple(c for c in later if c.version != first)
        scale = float(len(counted)) if self.scaling == "linear" else 1.0
        return Decision(counted, reason, drop=later if self.future == "drop" else (), scale=scale)

    def wake_at(self, view: View) -> Seconds | None:
        if not view.pending or (self.tau1 == 0.0 and self.tau_max is None):
            return None
        return self._due(self._counted(view)[0])

    def _useless(self, view: View) -> Decision | None:
        """Return a decision to drop gradients that can never be folded; None if there are none."""
        late = tuple(c for c in view.pending.values() if c.version < view.version)
        if late:
            return Decision((), f"of an earlier iteration than {view.version}, this shard's", drop=late)
        if not view.gathered:
            return None
        replaced = tuple(c for c in view.gathered if self._replaced(view, c))
        return Decision((), "its worker has sent a newer gradient", drop=replaced) if replaced else None

    def _replaced(self, view: View, earlier: Contribution) -> bool:
        """Return whether a newer gradient of the same worker replaces one that the shard holds."""
        if self.future == "accept" or view.pending[earlier.worker].version == earlier.version:
            return True
        return self.future == "drop" and earlier.version > view.version

    def _counted(self, view: View) -> tuple[tuple[Contribution, ...], tuple[Contribution, ...]]:
        """Return the gradients for this shard's iteration, in the order of arrival, and those for later iterations."""
        if not view.gathered and self.future == "accept":
            return tuple(view.pending.values()), ()
        everything = sorted([*view.gathered, *view.pending.values()], key=lambda c: c.arrived)
        if self.future == "accept":
            return tuple(everything), ()
        return tuple(c for c in everything if c.version <= view.version), tuple(c for c in everything if c.version > view.version)

    def _due(self, counted: tuple[Contribution, ...]) -> Seconds | None:
        """Return when to fold if no further gradient arrives; None: not before one does."""
        enough = counted[self.c - 1].arrived + self.tau1 if len(counted) >= self.c else None
        if self.tau_max is None or self.tau_max == "auto" or not counted:
            return enough
        last = counted[0].arrived + self.tau_max
        return last if enough is None else min(enough, last)
