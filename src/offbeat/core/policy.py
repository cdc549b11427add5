"""Define the contract of a synchronization rule: its two questions, and the view of the job from which it answers them.

A rule never sees a tensor, a socket or a clock. It sees who has pushed what, and says which contributions become the next
version now (`ServerRule.fold`) and whether a waiting worker may go on (`ServerRule.admit`). The ledger asks after each event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from offbeat.core.block_cache import Blocks
from offbeat.types import Clock, Epoch, Incarnation, LeaseId, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from offbeat.core.about import About
    from offbeat.core.events import Folded

ObsoleteWork: TypeAlias = Literal["push_and_wait", "pull_and_wait", "push_and_interrupt"]
"""What a worker does with a computation from a version that a fold has overtaken: push the result all the same; finish the step,
discard the result and pull; or break the step off at once."""


Family: TypeAlias = Literal["server", "allreduce", "gossip"]
"""Who folds: servers, which hold the parameters; or the workers, called ranks then, each with a replica and an optimizer of its own, all
from the same sum of gradients (allreduce) or each from its own gradient, mixing parameters with a few neighbours (gossip)."""


class Contribution(NamedTuple):
    """Describe the content of one push, a gradient or parameters, to a rule."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    """The worker's clock after this push."""
    version: Version
    """The version from which the contribution was computed."""
    samples: int
    arrived: Seconds
    compute_s: Seconds
    loss: float | None
    leases: tuple[LeaseId, ...]
    steps: int = 1
    """The number of local optimizer steps in the contribution; 1 where gradients are exchanged."""
    sums: bool = False
    """The gradient is a sum over samples, and not their mean: it is added to others whatever their number of samples."""

    @property
    def mass(self) -> int:
        """The number to which its weight is in proportion: that of its samples; 1 if it is not known, or if the gradient is a sum."""
        return 1 if self.sums else self.samples or 1


class Decision(NamedTuple):
    """Answer *fold*: the contributions of the next version, and those to drop, gather or carry. An empty ``fold`` makes no version."""

    fold: tuple[Contribution, ...]
    reason: str
    drop: tuple[Contribution, ...] = ()
    gather: tuple[Contribution, ...] = ()
    """Pending contributions to add to their workers' sums, which a later fold uses. They have no fate yet, and their workers may be
    admitted."""
    weights: tuple[float, ...] | None = None
    """The weight of each contribution in ``fold``; the weights add up to 1. None: in proportion to the samples. Contributions gathered
    from one worker must keep that proportion among each other in any case, since the worker has only their sum."""
    scale: float = 1.0
    """The factor by which this one step multiplies the learning rate."""
    carry: tuple[Contribution, ...] = ()
    """Contributions, of parameters, whose steps are in a newer and pending one of the same worker: their samples share its fate."""
    becomes: str = ""
    """The spelling of another rule, as which this one decides from here on, for ``reason``: it is announced, and every waiting worker is
    asked for again."""


class Plan(NamedTuple):
    """Say how much an admitted worker computes until its next push."""

    steps: int = 1
    """Local optimizer steps; 1 where gradients are exchanged."""
    per_epoch: int = 0
    """More than 0: do not count steps, push at this many equal fractions of the worker's own share of an epoch."""
    batch: int | None = None
    """The batch size of its samplers from now on; None: the script's."""

    def due(self, since: int, done: int, batches: int, taken: int = 1) -> bool:
        """Return True if the worker pushes now: ``since`` local steps after the last push, ``done`` of ``batches`` batches into the epoch.

        With ``per_epoch`` the boundaries are ``round(i * batches / per_epoch)``, so that every worker has as many as every other,
        whatever the sizes of its share and its batches. A step over more batches than one, ``taken``, may go past some.

        >>> [done for done in range(1, 30) if Plan(per_epoch=10).due(1, done, 29)]
        [3, 6, 9, 12, 14, 17, 20, 23, 26, 29]
        >>> [done for done in range(4, 13, 4) if Plan(per_epoch=2).due(1, done, 12, taken=4)]
        [8, 12]
        >>> Plan(steps=4).due(3, 0, 0), Plan(steps=4).due(4, 0, 0)
        (False, True)
        """
        if self.per_epoch:
            return any(done - taken < round(i * batches / self.per_epoch) <= done for i in range(1, self.per_epoch + 1))
        return since >= self.steps


ONE_GRADIENT: Final = Plan()


class Averaging(NamedTuple):
    """Describe an exchange of parameters instead of gradients: workers make local steps, and shards fold the resulting parameters."""

    combine: Literal["mean", "median", "trimmed_mean"] = "mean"
    """Mean: weighted. Median and trimmed mean are taken for each coordinate, without weights."""
    trim: float = 0.0
    """Trimmed mean: the fraction cut off at each end."""
    outer_lr: float = 1.0
    """``w[v+1] = w[v] - outer_lr * (d + outer_momentum * m)``, ``d = w[v] - combined``, ``m = outer_momentum * m + d`` (Nesterov, as
    torch has it). 1 and 0: the combined parameters themselves."""
    outer_momentum: float = 0.0
    momentum: Literal["keep", "reset", "average"] = "keep"
    """At a fold, the state of the workers' own optimizers is kept, reset or averaged."""


class Admit(NamedTuple):
    """Answer *admit*: the worker continues with the newest version."""

    reason: str


NOBODY_WAITS: Final = Admit("nobody waits")


class Hold(NamedTuple):
    """Answer *admit*: the worker waits. The rule is asked again when the worker's contribution is settled or gathered, when the slowest
    active clock has reached ``slowest``, when every active worker waits, whenever an active worker comes or goes, and at
    `ServerRule.wake_at`.
    """

    reason: str
    slowest: Clock | None = None


class View(Protocol):
    """Show a rule the state of its job. Each attribute costs O(1)."""

    @property
    def now(self) -> Seconds: ...

    @property
    def version(self) -> Version: ...

    @property
    def active(self) -> Collection[WorkerId]:
        """Workers the rule may wait for: alive, admitted or waiting for it, and not idle at the end of an epoch."""

    @property
    def pending(self) -> Mapping[WorkerId, Contribution]:
        """Contributions not folded, dropped or gathered yet, in the order of arrival. A dead worker's stay until they are settled."""

    @property
    def gathered(self) -> Collection[Contribution]:
        """Contributions that have been gathered and wait for their fold, in the order of arrival."""

    @property
    def waiting(self) -> Collection[WorkerId]:
        """Active workers that wait to be admitted."""

    @property
    def epoch(self) -> Epoch:
        """Number of ended epochs of the job's first sampler; 0 where samples are not dealt out."""

    @property
    def missing(self) -> int:
        """Number of active workers without a pending contribution."""

    @property
    def slowest(self) -> Clock:
        """The least clock of the active workers; 0 where there are none."""

    @property
    def fastest(self) -> Clock:
        """The greatest clock of the active workers; 0 where there are none."""

    def slowest_worker(self) -> WorkerId:
        """Return the active worker with the least clock, the lowest number among equals. Costs O(active)."""

    def clock(self, worker: WorkerId) -> Clock: ...

    def pushed_at(self, worker: WorkerId) -> Seconds | None:
        """Return when the worker's last push arrived, in seconds; None before its first."""

    def interval(self, worker: WorkerId) -> Seconds | None:
        """Return the time between the worker's last two pushes, in seconds; None before its second."""

    def share(self, worker: WorkerId) -> int | None:
        """Return the number of samples in the worker's own split of this epoch; None: one pool for all workers, or no dealt samples."""


class Policy:
    """Base class of all synchronization rules: the questions that every family answers. A rule extends `ServerRule`, `RoundRule` or
    `GossipRule`.

    Subclasses are frozen dataclasses: the configuration, checked when it is made.
    """

    about: ClassVar[About]
    """Facts about the rule for tests and documents. Only classes with an ``about`` of their own can be spelled."""

    word: ClassVar[str] = ""
    """Name of the rule in a spelling; empty: the name of its class in lower case."""

    family: ClassVar[Family]
    """The family of the rule. Each of the three base classes sets it."""

    always_spelled: ClassVar[Collection[str] | None] = None
    """The settings that a spelling has even at their defaults; others are left out there. None: all settings."""

    in_step: ClassVar[bool] = False
    """True promises that active workers have made equally many steps whenever they compute: one that writes a checkpoint can wait until
    the others have come to the same line of the script."""

    @property
    def local_optimizer(self) -> bool:
        """True if each worker steps an optimizer of its own, which then may be of any class."""
        return True

    @property
    def entry(self) -> Literal["at_once", "next_epoch"]:
        """When a worker that joins a running job begins: at once, or, if samples are dealt out, with the next epoch."""
        return "at_once"

    @property
    def split_overlap(self) -> float | None:
        """Fraction of the data that is in every worker's split, where each worker has a split of its own; None: one pool for all."""
        return None

    @property
    def plans_batches(self) -> bool:
        """True if the rule sets the batch sizes of the workers in its plans."""
        return False

    def check(self, workers: int) -> None:
        """Raise `ConfigurationError` if the rule cannot work with this number of workers."""

    @classmethod
    def called(cls) -> str:
        """The word that spells the rule."""
        return cls.word or cls.__name__.lower()

    @property
    def spelling(self) -> str:
        """Spell the rule as in a script or on the command line, for instance ``ssp(staleness=3)``."""
        return self._spelled(self.always_spelled)

    def _spelled(self, always: Collection[str] | None) -> str:
        """Return the spelling with the settings in ``always`` and those that differ from their defaults; None: with all."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}  # type: ignore[arg-type]
        shown = {name: value for name, (value, default) in values.items() if always is None or name in always or value != default}
        arguments = ", ".join(f"{name}={value if isinstance(value, str) else repr(value)}" for name, value in shown.items())
        return f"{self.called()}({arguments})" if arguments else self.called()


class ServerRule(Policy):
    """Base class of the server family: a rule says what the servers fold and which waiting workers continue.

    ``core/server/ledger.py`` asks it. A rule that keeps state during a run returns a fresh object from `start`; another returns itself.
    That object is asked `fold`, `admit`, `plan`, `observe` and `wake_at`; everything else is asked of the rule.
    """

    family = "server"

    lockstep: ClassVar[bool] = False
    """True promises that nothing folds while an active worker computes, so that one copy of the parameters serves all."""

    @property
    def scope(self) -> Literal["job", "shard"]:
        """Whether one ledger decides for the whole job, or one for each shard (see ``core/server/per_shard_ledger.py``)."""
        return "job"

    @property
    def obsolete_work(self) -> ObsoleteWork:
        """What workers do with a computation from a version that a fold has overtaken."""
        return "push_and_wait"

    @property
    def averaging(self) -> Averaging | None:
        """The exchange of parameters; None: workers push gradients."""
        return None

    @property
    def local_optimizer(self) -> bool:
        """True if each worker steps an optimizer of its own, as it does where parameters are exchanged."""
        return self.averaging is not None

    @property
    def measures(self) -> Literal["nothing", "norms", "differences"]:
        """The norms that the shards measure at each fold for `observe`: of the gradients, and of ``g[t] - g[t-1]``."""
        return "nothing"

    @property
    def uses_loss(self) -> bool:
        """True if the rule reads the losses of contributions; the simulator computes losses only then."""
        return False

    def start(self) -> ServerRule:
        """Return the object that keeps the rule's state in one run; the rule itself where it has no state."""
        return self

    def fold(self, view: View) -> Decision | None:
        """Return the contributions of the next version, None if none is due. The ledger asks again until the answer is None."""
        raise NotImplementedError(f"{type(self).__name__} is a rule with servers: it must define fold(), or start() with a rule that does")

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        """Return whether this waiting worker continues. By default it does at once. Not asked under rules of shard scope."""
        return NOBODY_WAITS

    def blocks(self, shards: int) -> Blocks:
        """Return the part of a rule of shard scope that a worker runs: the blocks for which it waits, by default all."""
        return Blocks(shards)

    def plan(self, view: View, worker: WorkerId) -> Plan:
        """Return the work of a worker that is being released, until its next push."""
        return ONE_GRADIENT

    def observe(self, view: View, event: Folded) -> None:
        """Take what the shards have measured at a fold; called once all shards have made the version."""

    def wake_at(self, view: View) -> Seconds | None:
        """Return the time at which to ask the rule again even without an event, in seconds; None: never."""
        return None


def by_samples(contributions: Sequence[Contribution]) -> tuple[float, ...]:
    """Return weights in proportion to the samples, or equal weights if a worker does not know its number of samples."""
    if len(contributions) == 1:
        return (1.0,)
    known = all(c.samples > 0 and not c.sums for c in contributions)
    total = sum(c.samples for c in contributions) if known else len(contributions)
    return tuple((c.samples if known else 1) / total for c in contributions)


def place_in_sum(c: Contribution) -> tuple[tuple[LeaseId, ...], WorkerId, Clock]:
    """Return the key by which the gradients of a fold are sorted before they are added up: by batch, and where they have none by worker.

    So the bits of the sum depend neither on which gradient comes first nor on which worker was dealt which batch.
    """
    return c.leases, c.worker, c.clock


def terms_of(decision: Decision) -> list[tuple[Contribution, float]]:
    """Return the gradients in the fold of a decision with their factors, in the order in which they are added up.

    Gradients that are sums are added up: the rule's weights, which add up to 1, are then multiplied by the number of gradients.
    """
    if len(decision.fold) == 1:  # of rules that fold each push by itself; its factor is 1 also if it is a sum
        return [(decision.fold[0], 1.0 if decision.weights is None else decision.weights[0])]
    weights = decision.weights or by_samples(decision.fold)
    factor = len(weights) if decision.fold[0].sums else 1
    terms = ((c, weight * factor) for c, weight in zip(decision.fold, weights, strict=True))
    return sorted(terms, key=lambda term: place_in_sum(term[0]))
