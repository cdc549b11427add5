"""Run a partial allreduce among the ranks of one host in shared memory: the calls of each rank's process, and of the coordinator's.

A gradient is written into the send buffer and a result is read where it was summed, so nothing is copied. The arriving rank decides, under
a lock, with the table of `core/allreduce/rounds.py`; the rank that closes a round sums it, and waiting ranks help. No step waits for a
process that is absent. A log records what happened, for the coordinator.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from offbeat.core.allreduce.policy import ABSENT, IDLE, RoundRule
from offbeat.core.allreduce.rounds import Arrival
from offbeat.core.rank_log import Entry
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.layout import RoundsLayout
from offbeat.runtime.allreduce.one_host.memory import RoundsMemory
from offbeat.runtime.allreduce.one_host.state import RoundsState
from offbeat.runtime.shared_memory.state import Ts
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import process_state, started_at
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Version, WorkerId


class OneHostRounds:
    """One process's hold on the rounds of its host. Made by `create` and `attach`.

    A rank's step is ``send()``, the gradient written there, ``arrive()``, ``wait()``, each of ``results()`` applied, ``read()``.

    >>> from offbeat.policies import rule
    >>> host = OneHostRounds.create(rule("solo"), ranks=2, numel=3)
    >>> ranks = [OneHostRounds.attach(host.block, rank) for rank in range(2)]
    >>> _ = [rank.enter(number, 0) for number, rank in enumerate(ranks)]
    >>> ranks[0].send()[:] = torch.tensor([2.0, 4.0, 6.0])
    >>> arrival = ranks[0].arrive()
    >>> ranks[0].wait(), ranks[0].results()
    (True, [(0, tensor([1., 2., 3.]))])
    >>> arrival = ranks[1].arrive()  # too late for round 0: carried into the next
    >>> arrival.late, arrival.number
    (True, 1)
    """

    def __init__(self, block: SharedMemory, memory: RoundsMemory, rank: WorkerId | None) -> None:
        self.block, self._memory = block, memory
        self.rank = rank
        layout, folder = memory.layout, memory.folder
        self.ranks, self.numel, self.slots, self.dtype = layout.ranks, layout.numel, layout.slots, layout.dtype
        self.rule = memory.rule
        self._results = [torch.from_numpy(row[: layout.numel]) for row in folder.results]
        self._send = [] if rank is None else [torch.from_numpy(row[: layout.numel]) for row in folder.send[rank]]
        self.meanwhile: Callable[[], None] | None = None
        """Called now and then while this rank waits for the coordinator to read the log; it raises once the job is over."""
        self._token = 0
        self._version = 0
        """How many results this rank was given."""
        self._buffer: int | None = None
        self._awaited: Version | None = None
        self._given: list[tuple[Version, int]] = []
        """Results that were received and not read yet: round and slot of each."""

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
        """Make a new block, for a job in which no rank takes part yet. Other processes `attach` to the attribute ``block``.

        Args:
            rule: when a round closes.
            ranks: how many there may be.
            numel: elements of a gradient.
            dtype: float32 or float64.
            seed: of what the rule draws.
            slots: how many results are kept for ranks that are behind; None: what the rule's staleness asks for, within a quarter of the
                memory that is available.
            followed: whether the coordinator calls `follow`: ranks then wait rather than overwrite what it has not read.

        Raises:
            ConfigurationError: another dtype, or not enough memory.
        """
        layout = RoundsLayout.of(rule, ranks, numel, dtype, seed, slots=slots, followed=followed)
        block = MemoryBlock.allocate(layout.offsets()["end"], "rounds", sparse=True)
        return cls(block, RoundsMemory(block, rule, layout), None)

    @classmethod
    def attach(cls, block: SharedMemory, rank: WorkerId | None = None, rule: RoundRule | None = None) -> OneHostRounds:
        """Use the rounds in a block that another process created.

        Args:
            rank: as which this process takes part; from now on no other process is it. An earlier one that still runs is killed, since it
                could write into the buffers that are this process's now. None: only look on, let ranks enter and leave, and follow.
            rule: what the block was created with, where it is a rule of the user's own; None: the one that the block names.

        Raises:
            ProtocolError: the block is not one for rounds.
            ConfigurationError: there is no rule of that name.
        """
        found = cls(block, RoundsMemory(block, rule, None), rank)
        if rank is not None:
            assert 0 <= rank < found.ranks, f"rank {rank} of {found.ranks}"
            if isinstance(block, MemoryBlock):
                block.populate(*found._memory.layout.populated)
            found._succeed(rank)
        return found

    def _succeed(self, rank: WorkerId) -> None:
        owner = self._memory.owners[rank]
        pid, started = int(owner[0]), int(owner[1])
        if pid not in (0, os.getpid()) and started_at(pid) == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            while process_state(pid) not in (None, "Z", "X") and started_at(pid) == started:
                time.sleep(0.0005)
        owner[:] = os.getpid(), started_at(os.getpid())
        self._token = self._memory.change(RoundsState.issue, rank)

    # Who takes part: called by the coordinator, and by ranks for others.

    @property
    def number(self) -> Version:
        """The number of the open round."""
        return self._memory.look(lambda state: state.rounds.number)

    @property
    def done(self) -> Version:
        """Return the number of folded rounds: the newest version."""
        return self._memory.look(lambda state: state.rounds.done)

    def version(self, rank: WorkerId) -> Version:
        """Return how many results a rank has taken."""
        return self._memory.look(lambda state: state.rounds.version(rank))

    def state(self, rank: WorkerId) -> int:
        """Return `ABSENT`, `ACTIVE` or `IDLE`, as in `offbeat.core.allreduce.policy`."""
        return self._memory.look(lambda state: state.rounds.state(rank))

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self.state(rank) != ABSENT

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part, with the parameters of this version; it gets the results from there on.

        What the rank's earlier process had pending is dropped.

        Raises:
            TooOld: results that the rank would need are no longer kept.
        """
        self._unless_summed(_enter, rank, version)

    def ticket(self, rank: WorkerId) -> int:
        """Return a number with which another rank may `admit` the rank's current process, once. It voids the ticket before."""
        return self._memory.change(RoundsState.ticket, rank)

    def forget(self, rank: WorkerId) -> None:
        """Void the ticket of a rank whose process is gone: from now on no other rank can admit it."""
        self._memory.change(RoundsState.forget, rank)

    def admit(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Let another rank take part, with the parameters of this version. The caller has them, and goes on only after this call.

        If the rank has been admitted before with an earlier ticket, it has not begun, and now begins at this version: the process that
        admitted it is gone, and so are the parameters for it.

        Args:
            ticket: see `ticket`. If it is void, nothing happens.
            pause: no round waits for the rank before it calls `resume`.
        """
        self._unless_summed(_admit, rank, version, ticket, pause)

    def leave(self, rank: WorkerId) -> None:
        """Remove a rank. Its gradient stays in its round; rounds that waited for the rank go on."""
        self._memory.change(RoundsState.leave, rank)
        self._look_after()

    def pause(self, rank: WorkerId) -> None:
        """Let no round wait for a rank, which has nothing to compute until the epoch ends. If all pause, pending gradients are folded."""
        self._memory.change(RoundsState.pause, rank)
        self._look_after()

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again."""
        self._memory.change(RoundsState.resume, rank)

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on. Earlier entries may be overwritten from now on."""
        return self._memory.follow(start)

    # A rank's step.

    def send(self) -> torch.Tensor:
        """Return the buffer for this rank's next gradient, shape (numel,): a view of shared memory, the same until `arrive`."""
        if self._buffer is None:
            rank = self._mine()
            self._buffer = self._memory.look(lambda state: self._checked(state).rounds.free_buffer(rank))
            assert self._buffer is not None, "both buffers are in use; call wait() first, until it returns True"
        return self._send[self._buffer]

    def arrive(self, gradient: bool = True, clip: float | None = None, samples: int = 0) -> Arrival:
        """Hand in the gradient in ``send()``.

        Args:
            gradient: False: there is none; the rank waits, or gets its results, as it would with one.
            clip: scale the gradient down to this norm, if its norm is larger and it is late.
            samples: of the gradient; see `Rounds.arrive`.

        Returns:
            The round that the gradient is for, and whether it is late: then `wait` returns at once, or after the fold that is under way.

        Raises:
            Fenced: this rank does not take part any more.
            JobError: the coordinator should follow the log, and does not.
        """
        assert self._awaited is None, f"rank {self.rank} arrived while it waits for round {self._awaited - 1}; wait() must be True first"
        rank, buffer = self._mine(), None
        self._memory.make_room(self.meanwhile)
        if gradient:
            if self._buffer is None:
                self.send()
            buffer = self._buffer
        clips = clip is not None and gradient
        if clips and clip is not None and self._late():
            self.send().mul_(clip_factor(self.send(), clip))
            clips = False
        made = self._memory.change(RoundsState.arrive, rank, self._token, buffer, clips, samples)
        if made is None:
            # A round was closed after `_late` was checked: the gradient is late now, and stays late.
            return self.arrive(gradient, clip, samples)
        arrival, before, self._given = made
        self._buffer = None
        self._version = before + len(self._given)
        if arrival.through > self._version:
            self._awaited = arrival.through
            if arrival.closed:
                self.help()
        return arrival

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the awaited result is available, and help with folds until then; at most ``timeout_s`` seconds (None: for ever).

        Returns:
            True once `results` has it, or if nothing is awaited; False on timeout.

        Raises:
            Fenced: this rank does not take part any more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._awaited is not None:
            events = self._memory.events.value
            folding, given = self._memory.look(self._waited)
            if given is not None:
                self._take(given)
                self._awaited = None
                break
            if folding and self.help():
                continue
            if not self._memory.sleep(events, deadline):
                return False
        return True

    @property
    def waits(self) -> bool:
        """Return True if this rank has arrived in a round whose results `wait` has not found yet."""
        return self._awaited is not None

    def results(self) -> list[tuple[Version, torch.Tensor]]:
        """Return the results that this rank was given and has not read, in order, each with its round: views, not to be changed.

        A round whose mean is beyond the range of the numbers is void: its result begins with NaN, and no rank may use it.
        """
        return [(number, self._results[slot]) for number, slot in self._given]

    def read(self) -> None:
        """Give the slots of this rank's results back. While there are many slots this is left to the rank's next arrival.

        Raises:
            Fenced: this rank does not take part any more, and what it has read may have been the results of later rounds.
        """
        if self.slots > 8 and len(self._given) <= 2 and self._awaited is None and not self._idle():
            self._given = []
            return
        self._given = []
        rank = self._mine()
        self._memory.change(lambda state: self._checked(state).read(rank))
        self._look_after()

    def catch_up(self, timeout_s: float = 0.0, *, upto: Version | None = None) -> list[tuple[Version, torch.Tensor]]:
        """Return the results that there are, for a rank that is not computing a gradient: one that is idle, or has just entered.

        Args:
            timeout_s: how long to wait for one, if there is none.
            upto: only those of the rounds before this one; None: all.
        """
        assert self._awaited is None, f"rank {self.rank} waits for round {self._awaited - 1}"
        rank, deadline = self._mine(), time.monotonic() + timeout_s
        while True:
            events = self._memory.events.value
            version, number, done = self._memory.look(
                lambda state: (self._checked(state).rounds.version(rank), state.rounds.number, state.rounds.done)
            )
            if upto is not None and version >= upto:
                break
            if done > version:
                self._memory.make_room(self.meanwhile)
                self._version = version
                self._take(self._memory.change(lambda state: self._checked(state).catch_up(rank, upto)))
                break
            if number > done and self.help():
                continue
            if self._given or not self._memory.sleep(events, deadline):
                break
        return self.results()

    def close(self) -> None:
        """Release the block. The rank still takes part afterwards, as after the end of this process: `leave` removes it."""
        if self.rank is not None and int(self._memory.owners[self.rank, 0]) == os.getpid():
            self._memory.owners[self.rank] = 0
        self._send, self._results = [], []
        self.block.close()

    # Implementation.

    def help(self) -> bool:
        """Help with a fold that is under way. Returns True if anything was done."""
        return self._memory.help()

    def _unless_summed(self, enter: Callable[[RoundsState, *Ts], bool], *args: *Ts) -> None:
        """Make a change with ``enter``. While it returns False (the change is not possible yet), help with the fold that blocks it."""
        while not self._memory.change(enter, *args):
            events = self._memory.events.value
            if not self.help() and self._memory.look(lambda state: state.closing()) is not None:
                self._memory.sleep(events, None)

    def _look_after(self) -> None:
        """Fold a round that was closed by something other than an arrival, if no rank waits for it."""
        while self._memory.look(lambda state: state.closing() is not None and not state.rounds.awaited):
            if not self.help():
                break

    def _mine(self) -> WorkerId:
        assert self.rank is not None, "attach(block, rank=...) is needed for this call: it was attached without a rank"
        return self.rank

    def _checked(self, state: RoundsState) -> RoundsState:
        state.check(self._mine(), self._token)
        return state

    def _waited(self, state: RoundsState) -> tuple[bool, list[tuple[Version, int]] | None]:
        """Return whether a round is being folded; and the results that this rank waits for, None while they are missing."""
        assert self._awaited is not None
        rounds, given = self._checked(state).rounds, None
        done = rounds.done
        if done >= self._awaited:
            given = state.slots_of(range(self._version, self._awaited))
        return rounds.number > done, given

    def _late(self) -> bool:
        rank = self._mine()
        return self._memory.look(lambda state: self._checked(state).rounds.version(rank) < state.rounds.number)

    def _idle(self) -> bool:
        rank = self._mine()
        return self._memory.look(lambda state: self._checked(state).rounds.state(rank) == IDLE)

    def _take(self, given: list[tuple[Version, int]]) -> None:
        self._given += given
        self._version += len(given)


def _enter(state: RoundsState, rank: WorkerId, version: Version) -> bool:
    """Return False, and change nothing, while a gradient of the rank's earlier process is being summed."""
    closing = state.closing()
    if closing is not None and any(part.rank == rank for part in closing.round.parts):
        return False
    state.enter(rank, version)
    return True


def _admit(state: RoundsState, rank: WorkerId, version: Version, ticket: int, pause: bool) -> bool:
    """Do as `_enter` for the process with this ticket."""
    if ticket == 0 or state.tickets[rank] != ticket:
        return True
    entered = _enter(state, rank, version)
    if entered and pause:
        state.pause(rank)
    return entered
