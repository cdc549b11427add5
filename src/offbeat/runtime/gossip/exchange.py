"""Make a rank's steps in gossip, whatever way its neighbours' parameters take: what is common to one host and to several.

A rank's parameters are private; its neighbours get copies as of a number of steps. The `GossipTable` decides who exchanges; it counts a
step before the rank has what it mixes. A rank waits for another only as its rule says, and never for a rank that was reported dead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Mixture
from offbeat.core.gossip.table import Request, Stepped
from offbeat.types import Clock, WorkerId

T = TypeVar("T")


Waiting: TypeAlias = Generator[int, None, T]
"""Work that waits for other ranks: yields the number of changes before the rank looked; it looks again when there have been more."""


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

    def step(self, moved: torch.Tensor | None) -> tuple[WorkerId, ...]:
        """Make a step and exchange parameters. Changes ``model``.

        Args:
            moved: what the optimizer would add to ``model``, shape (numel,); None: there is no gradient.

        Returns:
            The ranks whose parameters were mixed in.

        Raises:
            Fenced: this rank does not take part any more.
        """
        return self._run(self.stepping(moved))

    def stepping(self, moved: torch.Tensor | None) -> Waiting[tuple[WorkerId, ...]]:
        """Do what `step` does, as a generator. Resuming it too early does no harm."""
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

    def _run(self, work: Waiting[T]) -> T:
        """Do some work, and wait where it has to."""
        while True:
            try:
                told = next(work)
            except StopIteration as over:
                result: T = over.value
                return result
            if self.meanwhile is not None:
                self.meanwhile()
            self._sleep(told)

    def _push(self, moved: torch.Tensor | None) -> Waiting[tuple[WorkerId, ...]]:
        stepped: Stepped = yield from self._ask("step", moved is not None)
        if moved is not None:
            self._own.add_(moved)
        self._publish(stepped.steps)
        sources, mass = yield from self._mix("take")
        self._request(())
        torch.div(self._own, mass, out=self.model)
        return sources

    def _mix(self, request: Request) -> Waiting[tuple[tuple[WorkerId, ...], float]]:
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

    def _average(self, moved: torch.Tensor | None) -> Waiting[tuple[WorkerId, ...]]:
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
        return tuple(message.sender for message in left)

    def _pair(self, moved: torch.Tensor | None) -> Waiting[tuple[WorkerId, ...]]:
        stepped: Stepped = yield from self._ask("step", moved is not None)
        mixed = yield from self._exchange(stepped, moved)
        return (stepped.partner,) if stepped.partner is not None and mixed else ()

    # How a rank reaches the table and the other ranks.

    @abstractmethod
    def _ask(self, request: Request, *arguments: bool) -> Waiting[Any]:
        """Return what the table says to a request, once this rank is not blocked. Raises `Fenced`."""

    @abstractmethod
    def _took(self, mixture: Mixture, got: Sequence[GossipMessage]) -> None:
        """Tell the table which messages of a mixture this rank has mixed in; it cannot get the others."""

    @abstractmethod
    def _publish(self, steps: Clock) -> None:
        """Let others have this rank's parameters as those of this step."""

    def _request(self, messages: Sequence[GossipMessage]) -> None:  # noqa: B027 - shared memory has them
        """Ask for parameters that `_add` will be called for, and for those that the next step is going to mix."""

    @abstractmethod
    def _add(self, message: GossipMessage, into: torch.Tensor) -> Waiting[bool]:
        """Add a message, times its weight. Returns False if it cannot be had any more: its sender is dead, or is too far ahead."""

    @abstractmethod
    def _exchange(self, stepped: Stepped, moved: torch.Tensor | None) -> Waiting[bool]:
        """Average with the partner, if there is one and it can be reached, then add ``moved``. Sets ``model``. Returns False if alone."""

    @abstractmethod
    def _check(self) -> None:
        """Raise `Fenced` if this rank does not take part any more."""

    @abstractmethod
    def _sleep(self, told: int) -> None:
        """Sleep until there have been more changes than ``told``, or for a short time."""

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
