"""Take part in a partial allreduce among ranks of several hosts: the calls of a rank's process, the same as `OneHostRounds` on one host.

The rank's process hands in gradients and takes results; a second thread sums them with those of other hosts (``executor.py``). One process
of the job, the *sequencer* (``core/allreduce/sequencer.py``), closes rounds: one of the ranks or, better, a process that outlives them,
such as the coordinator's.

One lock protects all state that the two threads share. The holder of the lock does all work that is ready: an arrival at the sequencer is
processed, and the orders are sent, before the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat.core.allreduce.commands import Answer
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.rounds import Arrival
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import Entry, Fenced
from offbeat.errors import ConfigurationError, JobError
from offbeat.runtime.allreduce.multi_host.connections import SEQUENCER, PeerConnections, SequencerCall
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.rounds import RoundOutcome
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES
from offbeat.transport.base import Address, Hub, Message
from offbeat.transport.shm import available_nbytes
from offbeat.types import FIRST_WORKER, Version, WorkerId, worker_ids

_UNBOUNDED_SLOTS, _SPARE_SLOTS = 256, 4


def slots_of(rule: RoundRule, nbytes: int) -> int:
    """Return how many results to keep: as many as the rule's staleness needs, in at most a quarter of this machine's memory."""
    wanted = _UNBOUNDED_SLOTS if rule.staleness is None else rule.staleness + _SPARE_SLOTS
    return min(wanted, max(2, (available_nbytes() or 1 << 30) // 4 // max(1, nbytes)))


class SequencerLost(Fenced, JobError):
    """The connection between a rank and the sequencer has ended: one of the two is dead or is taken for dead."""


class MultiHostRounds:
    """Take part in the rounds of a job whose ranks are on several hosts.

    After `listen` and `connect` a rank's step is as on one host: ``send()``, write the gradient there, ``arrive()``, ``wait()``, apply each
    of ``results()``, ``read()``. `allreduce` does all but the last two. A rank calls `drain` before it leaves.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        numel: elements of a gradient.
        rank: this process's rank; None: it is the sequencer only.
        sequencer_peer: the rank that is the sequencer; `SEQUENCER`: a process that is no rank.
        hub: for the connections to the other processes only; closed with this object.
        dtype: float32 or float64.
        seed: seed of the rule's draws.
        slots: how many results each host keeps for ranks that are behind; the same in all processes. None: as many as the rule's staleness
            needs, in at most a quarter of this machine's memory.
        call: how to reach the sequencer if it is in server 0; None: it is a peer like the others.

    Raises:
        ConfigurationError: ``dtype`` is not supported.
    """

    def __init__(
        self,
        rule: RoundRule,
        ranks: int,
        numel: int,
        *,
        rank: WorkerId | None,
        hub: Hub,
        sequencer_peer: WorkerId = FIRST_WORKER,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        slots: int | None = None,
        call: SequencerCall | None = None,
    ) -> None:
        assert rank is not None or sequencer_peer == SEQUENCER, (
            f"rank is None and rank {sequencer_peer} is the sequencer: this process has nothing to do"
        )
        self.rule, self.ranks, self.numel, self.dtype, self.rank = rule, ranks, numel, dtype, rank
        if dtype not in VECTOR_DTYPES:
            known = ", ".join(map(str, VECTOR_DTYPES))
            raise ConfigurationError(f"gradients of {dtype} cannot be summed across hosts; use one of {known}")
        self.slots = slots if slots is not None else slots_of(rule, numel * dtype.itemsize)
        self._sequencer_peer, self._call = sequencer_peer, call
        self._me = SEQUENCER if rank is None else rank
        self._seed = seed
        self._lock = threading.Condition()
        self._connections = PeerConnections(self._me, hub, self._lock, self._on_message, self._on_connected, self._on_cut, self._place)
        memory = HostMemory(ranks, numel, dtype, self.slots)
        connections = self._connections
        self._node = Node(
            self._me,
            sequencer_peer,
            memory,
            connections.send,
            connections.drop,
            expect=connections.expect,
            leave_memory=connections.leave_memory,
            recycle=connections.recycle,
        )
        self._writing: int | None = None
        self._awaited: Version | None = None
        """This rank waits for the results of all rounds before this one; None: it does not wait."""
        self._delivered = range(0)
        self._version: Version = 0
        self._draining = False
        self._drain_version: Version | None = None
        """While the rank drains: the version up to which it must take results before it may leave."""

    def listen(self, host: str | None = None, port: int = 0) -> Address:
        """Accept connections of the other processes. Returns the address for them."""
        return self._connections.listen(host, port)

    def connect(self, addresses: Mapping[WorkerId, Address], timeout_s: float | None = 30.0, *, later: bool = False) -> None:
        """Connect to the other processes of the job. Unless ``later``, the job begins, with the ranks in ``addresses``.

        Nothing waits until all processes are connected; a rank only waits for the first rank of its host, which owns the shared memory.

        Args:
            addresses: by rank, and `SEQUENCER`, what `listen` returned there; without ranks that come later.
            timeout_s: how long to wait for the memory; None: until this rank is excluded.
            later: True if the job is running. This rank then takes part after `enter`, or `entered` if another rank admits it.

        Raises:
            JobError: the sequencer cannot be reached, or the memory did not come in time.
            Fenced: this rank does not take part any more.
            ConfigurationError: there is not enough memory.
        """
        here, node, connections = self._connections.hub.host, self._node, self._connections
        ranks = sorted(peer for peer in addresses if peer != SEQUENCER)
        if self._me == self._sequencer_peer:
            hosts = [addresses[rank].host if rank in addresses else f"rank {rank}" for rank in worker_ids(self.ranks)]
            node.requests.sequencer = sequencer = Sequencer(self.rule, hosts, clock_ns=time.monotonic_ns, seed=self._seed, slots=self.slots)
            sequencer.begin(ranks)
        with self._lock:
            if not later:
                node.present = frozenset(ranks)
            if self.rank is not None:
                node.has_memory = False
                if not later and not any(addresses[rank].host == here for rank in ranks if rank < self.rank):
                    node.allocate()
            connections.connect(addresses, self._sequencer_peer, later=later, call=self._call)
            node.local_peers = connections.local_peers() - {SEQUENCER}
            if not node.has_memory:
                before = set(node.local_peers)
                node.ask_state(*before)
                # When the job begins, the sequencer makes sure that one rank of each host allocates the memory.
                if not self._wait_for(lambda: node.has_memory or (later and not before & node.local_peers), timeout_s):
                    raise JobError(f"rank {self.rank}: no other rank of host {here} has shared its memory within {timeout_s} s")
                node.allocate()

    def expect(self, rank: WorkerId, address: Address) -> None:
        """At the sequencer: let a new process of this rank connect from this address, and drop the connection of an earlier one."""
        with self._lock:
            self._local_sequencer()
            self._connections.drop(rank)
            self._connections.expect([*self._connections.expected, rank])
            self._node.requests.hosts[rank] = address.host

    def ticket(self, rank: WorkerId) -> int:
        """At the sequencer: return a number that authorises another rank to admit `rank`'s current process. It voids the one before."""
        with self._lock:
            return self._node.requests.ticket(rank)

    def forget(self, rank: WorkerId) -> None:
        """At the sequencer: the rank's process is gone; withdraw its ticket."""
        with self._lock:
            self._node.requests.tickets.pop(rank, None)

    @property
    def number(self) -> Version:
        """Return the number of the open round, as far as this process knows."""
        with self._lock:
            return self._node.executor.upto if self._node.sequencer is None else self._node.sequencer.number

    @property
    def done(self) -> Version:
        """Return how many rounds are done at this host."""
        with self._lock:
            return self._node.executor.upto

    def version(self, rank: WorkerId) -> Version:
        """Return how many results this rank has taken. ``rank`` must be this process's."""
        assert rank == self.rank, f"version of rank {rank} was asked of rank {self.rank} (expected its own)"
        return self._version

    # A rank's step.

    def send(self) -> torch.Tensor:
        """Return the buffer for this rank's next gradient, shape (numel,); the same one until `arrive`. Waits until one is free.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        with self._lock:
            self._check()
            if self._writing is None:
                self._wait_for(self._buffer_taken, None)
            assert self._writing is not None
            return self._node.memory.buffer(self._me, self._writing)

    def arrive(self, gradient: bool = True, clip: float | None = None, samples: int = 0) -> Arrival:
        """Hand in the gradient in ``send()``.

        Args:
            gradient: False: there is none; the rank waits for results as if it had one.
            clip: largest norm of a late gradient; a longer one is scaled down to this norm.
            samples: of the gradient; see `Rounds.arrive`.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        assert self._awaited is None, f"rank {self.rank} arrived while it waits for round {self._awaited}; wait() must be True first"
        with self._lock:
            buffer, factor = None, 1.0
            if gradient:
                mine = self.send()
                buffer, self._writing = self._writing, None
                if clip is not None:
                    factor = clip_factor(mine, clip)
            answer = self._request(lambda: self._node.arrive(buffer, factor, samples))
            self._delivered = range(self._version, self._version)
            self._awaited = answer.through
            return Arrival(answer.number, answer.late, answer.closed, answer.through)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the results for this rank are here: that of its round or, if it was late, those of the rounds before.

        Returns:
            True once they are here, or if nothing is awaited; False if ``timeout_s`` seconds have passed.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        with self._lock:
            through = self._awaited
            if through is None:
                return True
            if not self._wait_for(lambda: self._node.executor.upto >= through, timeout_s):
                return False
            self._delivered = range(self._delivered.start if self._delivered else self._version, through)
            self._version, self._awaited = through, None
            return True

    def results(self) -> list[tuple[Version, torch.Tensor]]:
        """Return the results that this rank has received and not read yet: pairs of round and vector, in order; do not write to them.

        A round whose mean is not finite is void: its result begins with NaN, and no rank may apply it.
        """
        with self._lock:
            return [(number, self._node.executor.results[number]) for number in self._delivered]

    def read(self) -> None:
        """Declare that the results are not needed any more. After a single result, the next arrival says so, and nothing is sent."""
        with self._lock:
            tells = len(self._delivered) > 1 or self.slots <= 8 or self._draining
            self._delivered = range(self._version, self._version)
            if tells:
                self._node.notify({"k": "read", "n": self._version})

    def catch_up(self, timeout_s: float = 0.0, *, newest: bool = False, upto: Version | None = None) -> list[tuple[Version, torch.Tensor]]:
        """Return the results that are available, for a rank that computes no gradient: one that is idle, or has just entered.

        Args:
            timeout_s: how long to wait for a result if none is here.
            upto: only the results of the rounds before this one; None: of all.
            newest: ask the sequencer, and wait for all rounds that are closed by now, on whatever host they are summed.
        """
        assert self._awaited is None, f"rank {self.rank} waits for round {self._awaited}; call wait() until it returns True"
        with self._lock:
            if upto is not None and upto <= self._version:
                return self.results()
            if newest or self._wait_for(lambda: self._node.executor.upto > self._version, timeout_s):
                limit = {} if upto is None else {"n": min(upto, self._node.executor.upto)}
                self._awaited = self._request(lambda: self._node.notify({"k": "catch", **limit})).through
                self.wait()
            return self.results()

    def allreduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> RoundOutcome:
        """Hand in a gradient, wait if it is on time, and return the results. Nothing is copied if ``tensor`` is what ``send()`` returned.

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

    # Called for a rank by itself, by the rank that admits it, or at the sequencer.

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part with the parameters of ``version``; it gets the results from there on.

        Called by the rank itself, or at the sequencer for another rank, whose host is known from `expect`, and whose ticket is void then.

        Raises:
            Fenced: this rank itself needs results that are gone.
            TooOld: at the sequencer: the other rank needs results that are gone.
        """
        with self._lock:
            if rank == self.rank:
                self._start_at(version)
                self._request(lambda: self._node.enter(version, self._connections.hub.host))
            else:
                requests = self._node.requests
                requests.dispatch(self._local_sequencer().enter(rank, version, requests.hosts.get(rank)))
                requests.tickets.pop(rank, None)

    def admit(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Let another rank take part with the parameters of ``version``, which this rank has. Returns at once.

        If the other rank needs results that are gone, it gets `Fenced`. If it has been admitted before with an earlier ticket, it has not
        begun, and now begins at this version, unless ``pause`` is False.

        Args:
            ticket: what `ticket` returned at the sequencer. Nothing happens if the rank's process is not the one of the ticket any more.
            pause: no round waits for the rank before it calls `resume`.
        """
        with self._lock:
            self._node.notify({"k": "let", "rank": rank, "version": version, "ticket": ticket, "pause": pause})

    def entered(self) -> Version:
        """Begin at the version at which another rank has admitted this one last, which is returned. No rank may admit this one anew after
        this call: the caller has the parameters of that version.

        Raises:
            Fenced: this rank was not admitted.
        """
        with self._lock:
            through = self._request(lambda: self._node.notify({"k": "catch", "n": 0})).through
            self._start_at(through)
            return through

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait, for at most ``timeout_s`` seconds, until this rank may leave gracefully.

        It may leave when the other ranks have all results that it has received, and a result includes every gradient that only its host
        holds. If it left before, the others might sum a round without it although it has had the result. After it has admitted another
        rank, it must drain again, since that rank may lack some of its results.

        Returns:
            True if the rank may leave; `results` may still return some. False if the time is up, or new `results` are there: read them,
                since rounds may wait for their slots, and call this again.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        with self._lock:
            self._check()
            if not self._draining:
                self._draining = True
                self._node.notify({"k": "part"})
            node = self._node
            self._wait_for(lambda: bool(node.answers) or node.executor.upto > self._version, timeout_s)
            if node.answers:
                self._drain_version = node.answers.pop(0).through
            self._delivered = range(self._delivered.start if self._delivered else self._version, node.executor.upto)
            self._version = node.executor.upto
            if self._drain_version is None or self._version < self._drain_version:
                return False
            self._draining, self._drain_version = False, None
            return True

    def leave(self, rank: WorkerId) -> None:
        """Remove a rank. Rounds that waited for it go on."""
        self._notify(rank, "leave")

    def pause(self, rank: WorkerId) -> None:
        """Let rounds not wait for a rank that has nothing to compute until the epoch ends. If all pause, pending gradients are folded."""
        self._notify(rank, "pause")

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again. For this process's rank, return once the sequencer has confirmed it.

        Without the confirmation the sequencer could get this after something that the rank sends later on another connection: the
        coordinator, for example, may already have paused the rank again.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        if rank != self.rank:
            self._notify(rank, "resume")
            return
        with self._lock:
            self._request(lambda: self._node.notify({"k": "resume"}))

    def follow(self, start: int) -> list[Entry]:
        """At the sequencer: return the log from entry ``start`` on."""
        with self._lock:
            self._check()
            return self._local_sequencer().follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part, as far as this process knows; the sequencer always knows."""
        with self._lock:
            return rank in (self._node.present if self._node.sequencer is None else self._node.sequencer.present)

    def close(self) -> None:
        """Close all connections: to the other processes this one is gone."""
        self._connections.close()
        with self._lock:
            self._lock.notify_all()
        self._node.memory.close()

    # Implementation.

    def _local_sequencer(self) -> Sequencer:
        assert self._node.sequencer is not None, (
            f"only the sequencer, peer {self._sequencer_peer}, may do this for other ranks; this is peer {self._me}"
        )
        return self._node.sequencer

    def _notify(self, rank: WorkerId, kind: str) -> None:
        with self._lock:
            self._check()
            self._node.notify({"k": kind, "rank": rank})

    def _start_at(self, version: Version) -> None:
        self._version, self._delivered = version, range(version, version)
        self._awaited = self._writing = None

    def _request(self, ask: Callable[[], None]) -> Answer:
        self._check()
        ask()
        self._wait_for(lambda: bool(self._node.answers), None)
        return self._node.answers.pop(0)

    def _buffer_taken(self) -> bool:
        self._writing = self._node.buffer()
        return self._writing is not None

    def _check(self) -> None:
        if self._connections.failure is not None:
            raise JobError(f"the communication thread of rank {self._me} has failed") from self._connections.failure
        if self._connections.ended:
            raise JobError(f"rank {self._me} has closed its connections and does not take part any more")
        if self._node.fenced is not None:
            raise Fenced(self._node.fenced)
        if self._node.sequencer is None and not self._connections.is_connected(self._sequencer_peer):
            raise SequencerLost(f"rank {self._me} has lost its connection to the sequencer, peer {self._sequencer_peer}")

    def _wait_for(self, what: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not what():
            self._check()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                return False
            self._lock.wait(left_s)
        return True

    def _on_message(self, peer: WorkerId, message: Message | None) -> None:
        """Called in the thread, under the lock."""
        self._node.local_peers = self._connections.local_peers() - {SEQUENCER}
        before = self._node.awaited
        if message is not None:
            self._node.on_message(peer, message.header, message.payload, message.memory)
            if self._node.fenced is not None and peer == self._sequencer_peer:
                self._connections.drop(peer)  # the sequencer closes it too, and it must not be made anew
            if self._node.awaited == before:
                return  # a rank that waits would wake up, and find nothing
        else:
            self._node.on_closed(peer)
        self._lock.notify_all()

    def _place(self, peer: WorkerId, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """Called in the thread, without the lock."""
        return self._node.executor.place(peer, header, nbytes)

    def _on_cut(self, peer: WorkerId, reason: str) -> None:
        """Called in the thread, under the lock."""
        self._node.on_cut(peer, reason)
        self._lock.notify_all()

    def _on_connected(self, peer: WorkerId) -> None:
        """Called in the thread, under the lock."""
        self._node.local_peers = self._connections.local_peers() - {SEQUENCER}
        if peer in self._node.local_peers and not self._node.has_memory:
            self._node.ask_state(peer)
        self._lock.notify_all()
