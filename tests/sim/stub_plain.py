"""A stub rank of the rule ``allreduce``, and what stands in the place of `torch.distributed`, whose calls would block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any

import torch
from tests.sim.stub_process import LR
from tests.sim.stub_ranks import StubRank

from offbeat.types import Version, WorkerId


class Meeting:
    """The calls of all ranks: a round's are back when every member has made it."""

    def __init__(self, interface: str = "") -> None:
        self.address = (interface, 0)
        self.made: defaultdict[WorkerId, int] = defaultdict(int)
        self._given: defaultdict[Version, list[tuple[torch.Tensor, int]]] = defaultdict(list)

    def call(self, rank: WorkerId, gradient: torch.Tensor | None, samples: int = 0) -> Version:
        """Take part in this rank's next round, with a gradient or with nothing; returns its number."""
        number = self.made[rank]
        self.made[rank] += 1
        if gradient is not None:
            self._given[number].append((gradient, samples))
        return number

    def mean(self, number: Version) -> torch.Tensor:
        """Of those who have taken part with a gradient, by samples."""
        total = sum(samples for _, samples in self._given[number])
        return torch.stack([gradient * (samples / total) for gradient, samples in self._given[number]]).sum(dim=0)

    def close(self) -> None:
        """Nobody meets any more."""


class StubPlain(StubRank):
    """A rank of the rule ``allreduce``."""

    def attach(self) -> None:
        """There is nothing to attach to."""

    def begin(self) -> None:
        """All have met."""

    def resume(self) -> None:
        """Whether it computes is the coordinator's to say."""

    def catch_up(self) -> None:
        """Take the results of the rounds that it has sat out."""
        self._apply()

    def contribute(self, gradient: torch.Tensor, samples: int) -> Generator[Any, None, None]:
        number = self.job.meeting.call(self.number, gradient, samples)
        yield from self.wait(lambda: self._is_back(number))
        self._apply()

    def sit_out(self) -> None:
        self.job.meeting.call(self.number, None)

    def admit(self, rank: WorkerId, ticket: list[int]) -> None:
        raise AssertionError("nobody can come to a plain allreduce")

    def _is_back(self, number: Version) -> bool:
        return all(self.job.meeting.made[member] > number for member in self.members)

    def _apply(self) -> None:
        meeting = self.job.meeting
        while self.version < meeting.made[self.number] and self._is_back(self.version):
            self.parameters = self.parameters - LR * meeting.mean(self.version)
            self.version += 1
