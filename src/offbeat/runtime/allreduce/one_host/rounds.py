"""Partial allreduce among the ranks of one host, in shared memory: what each rank's process, and the coordinator's, calls.

A gradient is written where it is sent from, and a result is read where it was summed, so nothing is copied. Whoever arrives decides,
under a lock, with the table of `core/allreduce/rounds.py`; whoever closes a round sums it, and those who wait help. Absent processes are
not asked for anything. What happened is in a log, for the coordinator to follow.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import torch

from offbeat.core.allreduce.policy import IDLE, RoundRule
from offbeat.core.allreduce.rounds import Arrival, RoundPart
from offbeat.errors import JobError
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.layout import planned
from offbeat.runtime.allreduce.one_host.seats import OneHostMembers
from offbeat.runtime.allreduce.one_host.shared_state import Shared
from offbeat.runtime.allreduce.one_host.state import State
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import process_state, started_at
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Version, WorkerId


class RoundOutcome(NamedTuple):
    """What has become of a gradient that was handed to `OneHostRounds.allreduce`."""

    included: bool
    """It is in the last of the results. If not, it is carried."""
    number: Version
    """The round that it is in, or will be."""
    staleness: int
    """How many rounds that round is from the version which the gradient was computed from."""
    results: list[tuple[Version, torch.Tensor]]
    """The results that this rank had missed, in order, each with its round. Valid until the next call."""


class OneHostRounds(OneHostMembers):
    """One process's hold on the rounds of its host. Made by `create` and `attach`.

    A rank's step is ``send()``, the gradient written there, ``arrive()``, ``wait()``, each of ``results()`` applied, ``read()``.
    `allreduce` does all of it but the last two.

    >>> from offbeat.policies import rule
    >>> host = OneHostRounds.create(rule("solo"), ranks=2, numel=3)
    >>> ranks = [OneHostRounds.attach(host.block, rank) for rank in range(2)]
    >>> _ = [rank.enter(number, 0) for number, rank in enumerate(ranks)]
    >>> ranks[0].allreduce(torch.tensor([2.0, 4.0, 6.0])).results
    [(0, tensor([1., 2., 3.]))]
    >>> ranks[1].allreduce(torch.ones(3))[:3]  # too late for round 0: carried into the next
    (False, 1, 1)
    """

    def __init__(self, block: SharedMemory, shared: Shared, rank: WorkerId | None) -> None:
        super().__init__(shared)
        self.block = block
        self.rank = rank
        layout, folder = shared.layout, shared.folder
        self.ranks, self.numel, self.slots, self.dtype = layout.ranks, layout.numel, layout.slots, layout.dtype
        self.rule = shared.rule
        self._results = [torch.from_numpy(row[: layout.numel]) for row in folder.results]
        self._send = [] if rank is None else [torch.from_numpy(row[: layout.numel]) for row in folder.send[rank]]
        self._token = 0
        self._version = self._came_with = 0
        """How many results this rank has been given; and how many when it last arrived, before those that it got there."""
        self._buffer: int | None = None
        self._awaited: Version | None = None
        self._given: list[tuple[Version, int]] = []
        """What it has not read: of each result its round, and its slot."""

    @classmethod
    def create(
        cls,
        rule: RoundRule,
        ranks: int,
        numel: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        slots: int | None = None,
        followed: bool = False,
    ) -> OneHostRounds:
        """A new block, for a job in which nobody takes part yet. `block` is what other processes `attach` to.

        Args:
            rule: when a round closes.
            ranks: how many there may be.
            numel: elements of a gradient.
            dtype: float32 or float64.
            seed: of what the rule draws.
            slots: how many results are kept for ranks that are behind; None: what the rule's staleness asks for, within a quarter of the
                memory that can be had.
            followed: whether somebody calls `follow`: ranks then wait rather than overwrite what he has not read.

        Raises:
            ConfigurationError: there is not so much memory, or no such dtype.
        """
        layout = planned(rule, ranks, numel, dtype, seed, slots=slots, followed=followed)
        block = MemoryBlock.allocate(layout.offsets()["end"], "rounds", sparse=True)
        return cls(block, Shared(block, rule, layout), None)

    @classmethod
    def attach(cls, block: SharedMemory, rank: WorkerId | None = None, rule: RoundRule | None = None) -> OneHostRounds:
        """The rounds in a block that somebody has created.

        Args:
            rank: as which the process takes part; from now on no other process is it. One that still runs is killed, since it could
                write into the buffers that are this one's now. None: it only looks on, lets ranks enter and leave, and follows.
            rule: what the block was created with, where it is a rule of the user's own; None: the one that the block names.

        Raises:
            ProtocolError: the block is none of these.
            ConfigurationError: there is no rule of that name.
        """
        found = cls(block, Shared(block, rule, None), rank)
        if rank is not None:
            assert 0 <= rank < found.ranks, f"rank {rank} of {found.ranks}"
            if isinstance(block, MemoryBlock):
                block.populate(*found._shared.layout.populated)
            found._succeed(rank)
        return found

    def _succeed(self, rank: WorkerId) -> None:
        owner = self._shared.owners[rank]
        pid, started = int(owner[0]), int(owner[1])
        if pid not in (0, os.getpid()) and started_at(pid) == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            while process_state(pid) not in (None, "Z", "X") and started_at(pid) == started:
                time.sleep(0.0005)
        owner[:] = os.getpid(), started_at(os.getpid())
        self._token = self._shared.change(State.issue, rank)

    # What a rank does.

    def send(self) -> torch.Tensor:
        """Where this rank's next gradient goes, shape (numel,): a view of shared memory, the same until `arrive`."""
        if self._buffer is None:
            rank = self._mine()
            self._buffer = self._shared.look(lambda state: self._checked(state).rounds.free_buffer(rank))
            assert self._buffer is not None, "both buffers are in use; call wait() first, until it returns True"
        return self._send[self._buffer]

    def arrive(self, gradient: bool = True, clip: float | None = None) -> Arrival:
        """Hand in what is in ``send()``.

        Args:
            gradient: False: there is none; the rank waits, or gets its results, as it would with one.
            clip: scale the gradient down to this norm, if it is longer and late.

        Returns:
            The round that the gradient is for, and whether it is late: then `wait` returns at once, or after the fold that is under way.

        Raises:
            Fenced: this rank does not take part any more.
            JobError: nobody follows the log, though somebody should.
        """
        assert self._awaited is None, f"rank {self.rank} arrived while it waits for round {self._awaited - 1}; call wait() until it is True"
        rank, buffer = self._mine(), None
        self._shared.make_room()
        if gradient:
            if self._buffer is None:
                self.send()
            buffer = self._buffer
        clips = clip is not None and gradient
        if clips and clip is not None and self._late():
            self.send().mul_(clip_factor(self.send(), clip))
            clips = False
        made = self._shared.change(State.arrive, rank, self._token, buffer, clips)
        if made is None:
            # A round was closed between the look and the lock, so it is late after all; and that lasts.
            return self.arrive(gradient, clip)
        arrival, self._came_with, self._given = made
        self._buffer = None
        self._version = self._came_with + len(self._given)
        if arrival.through > self._version:
            self._awaited = arrival.through
            if arrival.closed:
                self.help()
        return arrival

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this rank may go on, and help with the folds until then; at most so many seconds (None: for ever).

        Returns:
            Whether it may, so that `results` are there; True also if there is nothing to wait for.

        Raises:
            Fenced: this rank does not take part any more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._awaited is not None:
            events = self._shared.events.value
            folding, given = self._shared.look(self._waited)
            if given is not None:
                self._take(given)
                self._awaited = None
                break
            if folding and self.help():
                continue
            if not self._sleep(events, deadline):
                return False
        return True

    def results(self) -> list[tuple[Version, torch.Tensor]]:
        """The results that this rank has been given and has not read: each with its round, in order; views, to be left as they are.

        A round whose mean is beyond the range of the numbers is void: its result begins with NaN, and no rank may use it.
        """
        return [(number, self._results[slot]) for number, slot in self._given]

    def read(self) -> None:
        """This rank has done with its results. While room is plenty it is enough that its next arrival says so.

        Raises:
            Fenced: this rank does not take part any more, and what it has read may have been of later rounds.
        """
        if self.slots > 8 and len(self._given) <= 2 and self._awaited is None and not self._idle():
            self._given = []
            return
        self._given = []
        rank = self._mine()
        self._shared.change(lambda state: self._checked(state).read(rank))
        self._look_after()

    def catch_up(self, timeout_s: float = 0.0) -> list[tuple[Version, torch.Tensor]]:
        """The results that there are, for a rank that is not computing a gradient: one that is idle, or has just entered.

        Args:
            timeout_s: how long to wait for one, if there is none.
        """
        assert self._awaited is None, f"rank {self.rank} waits for round {self._awaited - 1}"
        rank, deadline = self._mine(), time.monotonic() + timeout_s
        while True:
            events = self._shared.events.value
            version, number, done = self._shared.look(
                lambda state: (self._checked(state).rounds.version(rank), state.rounds.number, state.rounds.done)
            )
            if done > version:
                self._shared.make_room()
                self._version = version
                self._take(self._shared.change(lambda state: self._checked(state).catch_up(rank)))
                break
            if number > done and self.help():
                continue
            if self._given or not self._sleep(events, deadline):
                break
        return self.results()

    def allreduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> RoundOutcome:
        """Hand in a gradient, wait if it is on time, and take what there is. Nothing is copied if ``tensor`` is what ``send()`` gave.

        Raises:
            JobError: the round was not done in time.
            Fenced: this rank does not take part any more.
        """
        mine = self.send()
        if tensor is not mine and tensor.data_ptr() != mine.data_ptr():
            mine.copy_(tensor.reshape(-1))
        arrival = self.arrive()
        if self._awaited is not None and not self.wait(timeout_s):
            raise JobError(f"round {arrival.number} was not done in {timeout_s} s: its rule waits for a rank that has not arrived")
        results = self.results()
        included = bool(results) and results[-1][0] >= arrival.number
        return RoundOutcome(included, arrival.number, arrival.number - self._came_with, results)

    def enter(self, rank: WorkerId, version: Version) -> tuple[RoundPart, ...]:
        if rank == self.rank:
            self._shared.make_room()
            self._token = self._shared.change(State.issue, rank)
            self._version, self._buffer, self._awaited, self._given = version, None, None, []
        return super().enter(rank, version)

    def close(self) -> None:
        """This process has done with the block; it keeps a rank from taking part no more than a process's end would: `leave` does."""
        if self.rank is not None and int(self._shared.owners[self.rank, 0]) == os.getpid():
            self._shared.owners[self.rank] = 0
        self._send, self._results = [], []
        self.block.close()

    # How it is done.

    def _mine(self) -> WorkerId:
        assert self.rank is not None, "attach(block, rank=...) gives rounds that a rank can take part in; these only look on"
        return self.rank

    def _checked(self, state: State) -> State:
        state.check(self._mine(), self._token)
        return state

    def _waited(self, state: State) -> tuple[bool, list[tuple[Version, int]] | None]:
        """Whether a round is being folded; and what this rank has waited for, if it is there."""
        assert self._awaited is not None
        rounds, given = self._checked(state).rounds, None
        done = rounds.done
        if done >= self._awaited:
            given = state.slots_of(range(self._version, self._awaited))
        return rounds.number > done, given

    def _late(self) -> bool:
        rank = self._mine()
        return self._shared.look(lambda state: self._checked(state).rounds.version(rank) < state.rounds.number)

    def _idle(self) -> bool:
        rank = self._mine()
        return self._shared.look(lambda state: self._checked(state).rounds.state(rank) == IDLE)

    def _take(self, given: list[tuple[Version, int]]) -> None:
        self._given += given
        self._version += len(given)
