"""Make a rank's steps in gossip, whatever way its neighbours' parameters take: what is common to one host and to several.

A rank's parameters are private; its neighbours get copies as of a number of steps. The `GossipTable` decides who exchanges; it counts a
step before the rank has what it mixes. A rank waits for another only as its rule says, and never for a rank that was reported dead.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Mixture
from offbeat.core.gossip.table import Request, Stepped
from offbeat.errors import JobError
from offbeat.types import Clock, Seconds, WorkerId

T = TypeVar("T")


class Wait(NamedTuple):
    """What a rank yields when it must wait for other ranks."""

    told: int
    """The number of changes before the rank looked; it looks again when there have been more."""
    what: str
    """What the rank waits for, in words."""


class Exchanged(NamedTuple):
    """The result of a step."""

    steps: Clock
    """Steps of this rank, this one included."""
    sources: tuple[WorkerId, ...]
    """Ranks whose parameters were mixed in."""
    mass: float
    """push-sum: this rank's mass after the step."""


class GossipRank(ABC):
    """Take part in a job's gossip as one rank.

    A step: compute a gradient with ``model``, let an optimizer compute the change, and call `step` with it. `step` changes ``model``.

    Args:
        rule: decides which ranks exchange parameters.
        numel: parameters of the model.
        dtype: float32 or float64.
        rank: which one.
    """

    def __init__(self, rule: GossipRule, numel: int, dtype: torch.dtype, rank: WorkerId) -> None:
        self.rule, self.rank = rule, rank
        self.model = torch.zeros(numel, dtype=dtype, device="cpu")
        """The parameters that this rank computes with, shape (numel,); private, and always the same memory."""
        self._own = torch.zeros_like(self.model)
        """This rank's parameters before the division by its mass."""
        self._spare = torch.zeros_like(self.model if rule.exchange == "average" else self.model[:0])
        self.meanwhile: Callable[[], None] | None = None
        """Called now and then while this rank waits; if it raises, the step is abandoned. None: nothing is."""

    def step(self, moved: torch.Tensor | None, timeout_s: Seconds | None = None) -> Exchanged:
        """Make a step and exchange parameters. Changes ``model``.

        Args:
            moved: what the optimizer would add to ``model``, shape (numel,); None: there is no gradient.
            timeout_s: longest wait for neighbours; None: for ever. After a timeout the rank must leave.

        Raises:
            Fenced: this rank does not take part any more.
            JobError: a neighbour was not there in time.
        """
        return self._run(self.stepping(moved), timeout_s)

    def stepping(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        """Do what `step` does, as a generator: yields a `Wait` whenever this rank has to wait. Resuming it too early does no harm."""
        exchange = {"push": self._push, "average": self._average, "pair": self._pair}[self.rule.exchange]
        return (yield from exchange(moved))

    def catch_up(self) -> bool:
        """Mix in the messages for this rank if it is paused. Returns True if ``model`` has changed.

        Raises:
            Fenced: this rank does not take part any more.
        """
        if self.rule.exchange != "push":
            self._check()
            return False
        sources, mass = self._run(self._mix("rest"))
        if sources:
            torch.div(self._own, mass, out=self.model)
        return bool(sources)

    def _run(self, work: Generator[Wait, None, T], timeout_s: Seconds | None = None) -> T:
        """Do some work, and wait where it has to."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                wait = next(work)
            except StopIteration as over:
                result: T = over.value
                return result
            if self.meanwhile is not None:
                self.meanwhile()
            if not self._sleep(wait.told, deadline):
                raise JobError(f"rank {self.rank} has waited too long for {wait.what}; report ranks that are dead, or give it more time")

    def _push(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        stepped: Stepped = yield from self._ask("step", moved is not None)
        if moved is not None:
            self._own.add_(moved)
        self._publish(stepped.steps)
        sources, mass = yield from self._mix("take")
        torch.div(self._own, mass, out=self.model)
        return Exchanged(stepped.steps, sources, mass)

    def _mix(self, request: Request) -> Generator[Wait, None, tuple[tuple[WorkerId, ...], float]]:
        """Mix in the messages that are due. Returns their senders, and the rank's mass after it."""
        mixture: Mixture = yield from self._ask(request)
        if mixture.own == 1.0 and not mixture.messages:
            return (), mixture.mass
        self._own.mul_(mixture.own)
        got: list[GossipMessage] = []
        self._request(mixture.messages)
        for message in mixture.messages:
            if (yield from self._add(message, self._own)):
                got.append(message)
        self._took(mixture, got)
        missed = sum(message.mass for message in mixture.messages if message not in got)
        return tuple(message.sender for message in got), mixture.mass - missed

    def _average(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        stepped: Stepped = yield from self._ask("step", moved is not None)
        own, left = stepped.mixture.own, list(stepped.mixture.messages)
        self._request(left)
        complete = False
        while not complete:  # again without a neighbour whose parameters are gone; their weight is this rank's own
            complete = True
            torch.mul(self._own, own, out=self._spare)
            for message in left:
                if not (yield from self._add(message, self._spare)):
                    left.remove(message)
                    own, complete = own + message.weight, False
                    break
        if moved is not None:
            self._spare.add_(moved)
        self._own, self._spare = self._spare, self._own
        self._publish(stepped.steps)
        self.model.copy_(self._own)
        return Exchanged(stepped.steps, tuple(message.sender for message in left), 1.0)

    def _pair(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        stepped: Stepped = yield from self._ask("step", moved is not None)
        mixed = yield from self._exchange(stepped, moved)
        return Exchanged(stepped.steps, (stepped.partner,) if stepped.partner is not None and mixed else (), 1.0)

    # How a rank reaches the table and the other ranks.

    @abstractmethod
    def _ask(self, request: Request, *arguments: bool) -> Generator[Wait, None, Any]:
        """Return what the table says to a request, once this rank is not blocked. Raises `Fenced`."""

    @abstractmethod
    def _took(self, mixture: Mixture, got: Sequence[GossipMessage]) -> None:
        """Tell the table which messages of a mixture this rank has mixed in; it cannot get the others."""

    @abstractmethod
    def _publish(self, steps: Clock) -> None:
        """Let others have this rank's parameters as those of this step."""

    def _request(self, messages: Sequence[GossipMessage]) -> None:  # noqa: B027 - shared memory has them
        """Ask for parameters that `_add` will be called for."""

    @abstractmethod
    def _add(self, message: GossipMessage, into: torch.Tensor) -> Generator[Wait, None, bool]:
        """Add a message, times its weight. Returns False if it cannot be had any more: its sender is dead, or is too far ahead."""

    @abstractmethod
    def _exchange(self, stepped: Stepped, moved: torch.Tensor | None) -> Generator[Wait, None, bool]:
        """Average with the partner, if there is one and it can be reached, then add ``moved``. Sets ``model``. Returns False if alone."""

    @abstractmethod
    def _check(self) -> None:
        """Raise `Fenced` if this rank does not take part any more."""

    @abstractmethod
    def _sleep(self, told: int, deadline: Seconds | None) -> bool:
        """Sleep until there have been more changes than ``told``, or for a short time. Returns False if the deadline has passed."""

    @property
    @abstractmethod
    def steps(self) -> Clock:
        """Return how many steps all ranks had made together when this rank last heard of it."""

    @abstractmethod
    def begin(self, parameters: torch.Tensor) -> None:
        """Become the process of a rank that has entered, with a copy of these parameters, shape (numel,). Raises `Fenced`."""

    @abstractmethod
    def resume(self) -> None:
        """Let other ranks wait for this one. If neighbours read its parameters, these count as those of its new step."""

    @abstractmethod
    def admit(self, rank: WorkerId, ticket: int) -> None:
        """Let another rank take part. No rank waits for it before its `resume`. Does nothing if the ticket is void."""

    @abstractmethod
    def close(self) -> None:
        """Release what this process has. The rank still takes part, as after the end of this process, until it is removed."""
