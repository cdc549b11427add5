"""A stub rank of the gossip family."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from tests.sim.stub_process import LR
from tests.sim.stub_ranks import StubRank

from offbeat.runtime.gossip.exchange import Waiting
from offbeat.runtime.gossip.one_host import OneHostGossip
from offbeat.types import WorkerId


class StubGossip(StubRank):
    """A rank of the gossip family, in `runtime.gossip`."""

    _stepping: Waiting[tuple[WorkerId, ...]]
    _told: int | None = None
    _over = False
    on: WorkerId | None = None
    """For whom it waits, the first of them."""

    def attach(self) -> None:
        self._gossip = OneHostGossip(self.memory[0], self.number)

    def begin(self) -> None:
        self._gossip.begin(self.parameters)

    def catch_up(self) -> None:
        if self._gossip.catch_up():
            self.parameters = self._gossip.model.clone()
        self.version = self._gossip.steps

    def resume(self) -> None:
        self._gossip.resume()

    def contribute(self, gradient: torch.Tensor, samples: int) -> Generator[Any, None, None]:
        self._stepping, self._told, self._over = self._gossip.stepping(-LR * gradient), None, False
        if not self._go_further():
            self.on = self._first_behind()
            yield from self.wait(self._go_further)
        self.parameters, self.version = self._gossip.model.clone(), self._gossip.steps

    def look(self) -> bool:
        if self.thaw() > self.job.now and self._gossip.rule.exchange == "average" and self._first_behind() is None:
            self.job.finds_out()  # it would make its step now
        went = super().look()
        if not went and self.on != (on := self._first_behind()):
            self.on = on
            self.moves_on = True
        return went

    def admit(self, rank: WorkerId, ticket: list[int]) -> None:
        self._gossip.admit(rank, ticket[0])

    def _first_behind(self) -> WorkerId | None:
        return self._gossip._memory.read(
            lambda state: next(iter(state.gossip.behind(self.number)), None) if self.number in state.gossip.present else None
        )

    def _go_further(self) -> bool:
        """With its step, if anything has changed since it last looked. Returns whether the step is over."""
        if not self._over and self._gossip._memory.events.value != self._told:
            try:
                self._told = next(self._stepping)
            except StopIteration:
                self._over = True
        return self._over
