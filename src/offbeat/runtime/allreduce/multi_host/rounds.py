"""Partial allreduce among ranks of different hosts: what each rank's process calls, as `OneHostRounds` on one host.

A rank's process hands in gradients and takes results; a thread of its own sums them with the other hosts' (``executor.py``). One process
decides (``core/allreduce/sequencer.py``): the *seat*, which is one of the ranks or, better, a process that outlives them, such as the
coordinator's.

All that the two threads share is under one lock. Whoever has it does what there is to do, so that an arrival at the seat is decided and
on its way before the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from offbeat.core.allreduce.commands import Answer
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.rounds import Arrival
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import Entry, Fenced
from offbeat.errors import ConfigurationError, JobError
from offbeat.runtime.allreduce.multi_host.connections import SEAT, PeerConnections
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.rounds import RoundOutcome
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES
from offbeat.transport.base import Address, Hub, Message
from offbeat.transport.shm import available_nbytes
from offbeat.types import Version, WorkerId

_UNBOUNDED_SLOTS, _SPARE_SLOTS = 256, 4


def _slots(rule: RoundRule, nbytes: int) -> int:
    """What the rule's staleness asks for, within a quarter of this machine's memory."""
    wanted = _UNBOUNDED_SLOTS if rule.staleness is None else rule.staleness + _SPARE_SLOTS
    return min(wanted, max(2, (available_nbytes() or 1 << 30) // 4 // max(1, nbytes)))


class SeatLost(Fenced, JobError):
    """A rank has lost its connection to the one who decides: either of them is gone, or is thought to be."""


class MultiHostRounds:
    """One process's hold on the rounds of a job whose ranks are on different hosts.

    After `listen` and `connect` a rank's step is as on one host: ``send()``, the gradient written there, ``arrive()``, ``wait()``, each of
    ``results()`` applied, ``read()``; or `allreduce` for all but the last two. Before it leaves it says `part`.

    Args:
        rule: when a round closes.
        ranks: how many there may be.
        numel: elements of a gradient.
        rank: which one this process is; None: none, it is the seat and nothing else.
        seat: the rank that decides; `SEAT`: a process that is no rank.
        hub: for the connections with the other processes, and nothing else; closed with this.
        dtype: float32 or float64.
        seed: of what the rule draws.
        slots: how many results are kept for ranks that are behind, at every host; all processes must say the same. None: what the
            rule's staleness asks for, within a quarter of the memory that this machine has.
        followed: at the seat, whether somebody calls `follow` and `leave`: nothing is forgotten before he has had it, and a rank takes
            part until he says otherwise. False: until its connection with the seat ends.

    Raises:
        ConfigurationError: no such dtype.
    """

    def __init__(
        self,
        rule: RoundRule,
        ranks: int,
        numel: int,
        *,
        rank: WorkerId | None,
        hub: Hub,
        seat: WorkerId = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        slots: int | None = None,
        followed: bool = False,
    ) -> None:
        assert rank is not None or seat == SEAT, f"this process is no rank, and rank {seat} decides: it has nothing to do"
        self.rule, self.ranks, self.numel, self.dtype, self.rank = rule, ranks, numel, dtype, rank
        if dtype not in VECTOR_DTYPES:
            known = ", ".join(map(str, VECTOR_DTYPES))
            raise ConfigurationError(f"gradients of {dtype}: what is summed across hosts must be one of {known}")
        self.slots = slots if slots is not None else _slots(rule, numel * dtype.itemsize)
        self._seat = seat
        self._me = SEAT if rank is None else rank
        self._seed, self._followed = seed, followed
        self._lock = threading.Condition()
        self._mesh = PeerConnections(self._me, hub, self._lock, self._heard, self._met, self._cut)
        memory = HostMemory(ranks, numel, dtype, self.slots)
        self._node = Node(self._me, seat, memory, self._mesh.send, self._mesh.drop, expect=self._mesh.expect)
        self._filling: int | None = None
        self._awaited: Version | None = None
        """All rounds before this one are waited for."""
        self._given = range(0)
        self._version: Version = 0
        self._parting = False
        self._leaves_with: Version | None = None
        """While it waits to leave: the version that the others have, by the seat's word."""
        self._tickets = 0

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Let the others connect; give them the address."""
        return self._mesh.listen(host, port)

    def connect(self, addresses: Mapping[WorkerId, Address], timeout_s: float | None = 30.0, *, later: bool = False) -> None:
        """Connect with the other processes of the job, and, if nobody has begun (``later`` False), begin: these ranks are there.

        Nobody waits until all are connected: a rank waits for the first of its host alone, which has the memory that they share.

        Args:
            addresses: by rank, and `SEAT`, what `listen` gave there; of those who come later none.
            timeout_s: how long to wait for the memory; None: until this rank does not take part any more.
            later: the job is under way. `enter`, or `entered` if another rank has seen to that, is when this one takes part.

        Raises:
            JobError: the seat is not there, or no memory within this time.
            Fenced: this rank does not take part any more.
            ConfigurationError: there is not so much memory.
        """
        here, node, mesh = self._mesh.hub.host, self._node, self._mesh
        ranks = sorted(peer for peer in addresses if peer != SEAT)
        if self._me == self._seat:
            hosts = [addresses[rank].host if rank in addresses else f"rank {rank}" for rank in range(self.ranks)]
            node.decider = Sequencer(
                self.rule, hosts, clock_ns=time.monotonic_ns, seed=self._seed, slots=self.slots, followed=self._followed
            )
            node.decider.begin(ranks)
        with self._lock:
            if not later:
                node.present = frozenset(ranks)
            if self.rank is not None:
                node.has_memory = False
                if not later and not any(addresses[rank].host == here for rank in ranks if rank < self.rank):
                    node.hold()
            mesh.connect(addresses, self._seat, later=later)
            node.mates = mesh.mates() - {SEAT}
            if not node.has_memory:
                before = set(node.mates)
                node.ask(*before)
                # Of those who begin together somebody always gets it, and the seat sees to it.
                if not self._wait_for(lambda: node.has_memory or (later and not before & node.mates), timeout_s):
                    raise JobError(f"rank {self.rank}: no other rank of {here} has handed over its memory within {timeout_s} s")
                node.hold()

    def expect(self, rank: WorkerId, address: Address) -> None:
        """At the seat: a process that is this rank is about to connect, from there; any before it is not heard any more."""
        with self._lock:
            self._at_the_seat()
            self._mesh.drop(rank)
            self._mesh.expect([*self._mesh.expected, rank])
            self._node.hosts[rank] = address.host

    def ticket(self, rank: WorkerId) -> int:
        """At the seat: what another rank needs to let in the process that is this one now."""
        with self._lock:
            self._tickets += 1
            self._node.tickets[rank] = self._tickets
            return self._tickets

    def forget(self, rank: WorkerId) -> None:
        """At the seat: the process of a rank is gone, and nobody lets it in any more."""
        with self._lock:
            self._node.tickets.pop(rank, None)

    @property
    def number(self) -> Version:
        """Of the open round, as far as it is known here."""
        with self._lock:
            return self._node.executor.upto if self._node.decider is None else self._node.decider.number

    @property
    def done(self) -> Version:
        """How many rounds are done at this host."""
        with self._lock:
            return self._node.executor.upto

    def version(self, rank: WorkerId) -> Version:
        """How many results this rank has taken."""
        assert rank == self.rank, f"this is rank {self.rank}, and was asked about {rank}"
        return self._version

    # What a rank does.

    def send(self) -> torch.Tensor:
        """Where this rank's next gradient goes, shape (numel,): the same until `arrive`.

        Raises:
            Fenced: this rank does not take part any more.
            SeatLost: the seat is gone.
        """
        with self._lock:
            self._check()
            if self._filling is None:
                self._wait_for(self._buffer_taken, None)
            assert self._filling is not None
            return self._node.memory.buffer(self._me, self._filling)

    def arrive(self, gradient: bool = True, clip: float | None = None) -> Arrival:
        """Hand in what is in ``send()``.

        Args:
            gradient: False: there is none; the rank waits, or gets its results, as it would with one.
            clip: scale the gradient down to this norm, if it is longer and late.

        Raises:
            Fenced: this rank does not take part any more.
            SeatLost: the seat is gone.
        """
        assert self._awaited is None, f"rank {self.rank} arrived while it waits for round {self._awaited}; call wait() until it is True"
        with self._lock:
            buffer, factor = None, 1.0
            if gradient:
                mine = self.send()
                buffer, self._filling = self._filling, None
                if clip is not None:
                    factor = clip_factor(mine, clip)
            answer = self._answered(lambda: self._node.arrive(buffer, factor))
            self._given = range(self._version, self._version)
            self._awaited = answer.through
            return Arrival(answer.number, answer.late, answer.closed, answer.through)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what this rank is to have is here: its round, or if it was late those before; at most so many seconds.

        Returns:
            Whether it is; True also if there is nothing to wait for.

        Raises:
            Fenced: this rank does not take part any more.
            SeatLost: the seat is gone.
        """
        with self._lock:
            through = self._awaited
            if through is None:
                return True
            if not self._wait_for(lambda: self._node.executor.upto >= through, timeout_s):
                return False
            self._given = range(self._given.start if self._given else self._version, through)
            self._version, self._awaited = through, None
            return True

    def results(self) -> list[tuple[Version, torch.Tensor]]:
        """The results that this rank has been given and has not read: each with its round, in order; views, to be left as they are.

        A round whose mean is beyond the range of the numbers is void: its result begins with NaN, and no rank may use it.
        """
        with self._lock:
            return [(number, self._node.executor.results[number]) for number in self._given]

    def read(self) -> None:
        """This rank has done with its results. After a single one it is enough that its next arrival says so."""
        with self._lock:
            tells = len(self._given) > 1 or self.slots <= 8 or self._parting
            self._given = range(self._version, self._version)
            if tells:
                self._node.tell({"k": "read", "n": self._version})

    def catch_up(self, timeout_s: float = 0.0, *, newest: bool = False) -> list[tuple[Version, torch.Tensor]]:
        """The results that there are, for a rank that is not computing a gradient: one that is idle, or has just entered.

        Args:
            timeout_s: how long to wait for one, if there is none here.
            newest: ask the seat, and wait for all that are closed by now, wherever they are.
        """
        assert self._awaited is None, f"rank {self.rank} waits for round {self._awaited}"
        with self._lock:
            if newest or self._wait_for(lambda: self._node.executor.upto > self._version, timeout_s):
                self._awaited = self._answered(lambda: self._node.tell({"k": "catch"})).through
                self.wait()
            return self.results()

    def allreduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> RoundOutcome:
        """Hand in a gradient, wait if it is on time, and take what there is. Nothing is copied if ``tensor`` is what ``send()`` gave.

        Raises:
            JobError: the round was not done in time.
            Fenced: this rank does not take part any more.
        """
        mine = self.send()
        if tensor.data_ptr() != mine.data_ptr():
            mine.copy_(tensor.reshape(-1))
        version = self._version
        arrival = self.arrive()
        if not self.wait(timeout_s):
            raise JobError(f"round {arrival.number} was not done in {timeout_s} s: its rule waits for a rank that has not arrived")
        results = self.results()
        included = bool(results) and results[-1][0] >= arrival.number
        return RoundOutcome(included, arrival.number, arrival.number - version, results)

    # What may be said for a rank: by itself, by another that has what it needs, or at the seat.

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part, with the parameters of this version; it gets the results from there on.

        Only the rank itself, or the seat for it, which knows from `expect` where it is.

        Raises:
            Fenced: this rank itself, and results that it would need are gone.
            TooOld: the same, at the seat for another.
        """
        with self._lock:
            if rank == self.rank:
                self._begin_with(version)
                self._answered(lambda: self._node.enter(version, self._mesh.hub.host))
            else:
                self._node.do(self._at_the_seat().enter(rank, version, self._node.hosts.get(rank)))

    def let_in(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Another rank takes part, with the parameters of this version, which this one has itself: it goes on only after this.

        If results are gone that the other would need, it is `Fenced`.

        Args:
            ticket: what the seat gave for it. If its process is gone by then nothing happens.
            pause: nobody waits for it before it says `resume`.
        """
        with self._lock:
            self._node.tell({"k": "let", "rank": rank, "version": version, "ticket": ticket, "pause": pause})

    def entered(self) -> Version:
        """Another has said that this rank takes part: wait until that is so. Returns the version from which on it does.

        Raises:
            Fenced: it does not.
        """
        with self._lock:
            version = self._answered(lambda: None).through
            self._begin_with(version)
            return version

    def part(self, timeout_s: float | None = None) -> bool:
        """This rank is about to leave: wait until the others can do without it; at most so many seconds.

        They can when they have all results that this rank has been given, and when what it has handed in, and its host alone has, is in
        one of them. If it left before, they could have to sum a round without it of which it has had the result. If it lets somebody in
        after that, it parts again: the newcomer may lack what it has.

        Returns:
            Whether it may leave. If not, the time is up, or there are `results`: others may wait for their room, so it is to read them
            and to call this again. Also if it may, there may be `results`.

        Raises:
            Fenced: this rank does not take part any more.
            SeatLost: the seat is gone.
        """
        with self._lock:
            self._check()
            if not self._parting:
                self._parting = True
                self._node.tell({"k": "part"})
            node = self._node
            self._wait_for(lambda: bool(node.answers) or node.executor.upto > self._version, timeout_s)
            if node.answers:
                self._leaves_with = node.answers.pop(0).through
            self._given = range(self._given.start if self._given else self._version, node.executor.upto)
            self._version = node.executor.upto
            if self._leaves_with is None or self._version < self._leaves_with:
                return False
            self._parting, self._leaves_with = False, None
            return True

    def leave(self, rank: WorkerId) -> None:
        """A rank is gone. Rounds that waited for it go on."""
        self._say(rank, "leave")

    def pause(self, rank: WorkerId) -> None:
        """A rank has nothing to compute until the epoch ends. If that is so for all, what is pending is folded."""
        self._say(rank, "pause")

    def resume(self, rank: WorkerId) -> None:
        """A rank computes again. If it is this one, the seat knows it when this returns: else it could hear of it after what this rank has
        then gone on to say on other ways, such as to the coordinator, who may have let it pause again by then.

        Raises:
            Fenced: this rank does not take part any more.
            SeatLost: the seat is gone.
        """
        if rank != self.rank:
            self._say(rank, "resume")
            return
        with self._lock:
            self._answered(lambda: self._node.tell({"k": "resume"}))

    def follow(self, start: int) -> list[Entry]:
        """At the seat: what has happened, the log from this entry on."""
        with self._lock:
            self._check()
            return self._at_the_seat().follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part, as far as it is known here; at the seat everything is."""
        with self._lock:
            return rank in (self._node.present if self._node.decider is None else self._node.decider.present)

    def close(self) -> None:
        """This process goes: to the others it is gone."""
        self._mesh.close()
        with self._lock:
            self._lock.notify_all()
        self._node.memory.close()

    # How it is done.

    def _at_the_seat(self) -> Sequencer:
        assert self._node.decider is not None, (
            f"only the seat, {self._seat}, knows this and may do this for other ranks; this is {self._me}"
        )
        return self._node.decider

    def _say(self, rank: WorkerId, kind: str) -> None:
        with self._lock:
            self._check()
            self._node.tell({"k": kind, "rank": rank})

    def _begin_with(self, version: Version) -> None:
        self._version, self._given = version, range(version, version)
        self._awaited = self._filling = None

    def _answered(self, ask: Callable[[], None]) -> Answer:
        self._check()
        ask()
        self._wait_for(lambda: bool(self._node.answers), None)
        return self._node.answers.pop(0)

    def _buffer_taken(self) -> bool:
        self._filling = self._node.buffer()
        return self._filling is not None

    def _check(self) -> None:
        if self._mesh.failure is not None:
            raise JobError(f"the thread of rank {self._me} that talks with other hosts has failed") from self._mesh.failure
        if self._mesh.ended:
            raise JobError(f"rank {self._me} has closed its connections: it takes part no more")
        if self._node.fenced is not None:
            raise Fenced(self._node.fenced)
        if self._node.decider is None and not self._mesh.knows(self._seat):
            raise SeatLost(f"rank {self._me} has lost its connection to {self._seat}, which decides when rounds close")

    def _wait_for(self, what: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not what():
            self._check()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                return False
            self._lock.wait(left_s)
        return True

    def _heard(self, peer: WorkerId, message: Message | None) -> None:
        """In the thread, with the lock."""
        self._node.mates = self._mesh.mates() - {SEAT}
        if message is not None:
            self._node.heard(peer, message.header, message.payload, message.memory)
        elif not self._followed:
            self._node.gone(peer)
        self._lock.notify_all()

    def _cut(self, peer: WorkerId, reason: str) -> None:
        """In the thread, with the lock."""
        self._node.cut(peer, reason)
        self._lock.notify_all()

    def _met(self, peer: WorkerId) -> None:
        """In the thread, with the lock."""
        self._node.mates = self._mesh.mates() - {SEAT}
        if peer in self._node.mates and not self._node.has_memory:
            self._node.ask(peer)
        self._lock.notify_all()
