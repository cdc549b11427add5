"""Take part in a partial allreduce among ranks of several hosts: the calls of a rank's process, the same as `OneHostRounds` on one host.

The rank's process hands in gradients and takes results; a second thread sums them with those of other hosts (``executor.py``). The
*sequencer* in server 0 (``sequenced_rounds.py``) closes rounds. One lock protects all state that the two threads share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat.core.allreduce.commands import Answer
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.rounds import Arrival
from offbeat.errors import ConfigurationError
from offbeat.runtime.allreduce.multi_host.connections import ConnectedRank, SequencerCall
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.layout import slots_of
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES
from offbeat.transport.base import Address, Hub, Message
from offbeat.types import Version, WorkerId


class MultiHostRounds(ConnectedRank):
    """Take part in the rounds of a job whose ranks are on several hosts.

    After `listen` and `connect` a rank's step is as on one host: ``send()``, write the gradient there, ``arrive()``, ``wait()``, apply each
    of ``results()``, ``read()``. A rank calls `drain` before it leaves.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        numel: elements of a gradient.
        rank: this process's rank.
        hub: for the connections to the other processes only; closed with this object.
        call: how to reach the sequencer.
        dtype: float32 or float64.
        slots: how many results each host keeps for ranks that are behind; the same in all processes. None: as many as the rule's staleness
            needs, in at most a quarter of this machine's memory.

    Raises:
        ConfigurationError: ``dtype`` is not supported.
    """

    def __init__(
        self,
        rule: RoundRule,
        ranks: int,
        numel: int,
        *,
        rank: WorkerId,
        hub: Hub,
        call: SequencerCall,
        dtype: torch.dtype = torch.float32,
        slots: int | None = None,
    ) -> None:
        self.rule, self.ranks, self.numel, self.dtype, self.rank = rule, ranks, numel, dtype, rank
        if dtype not in VECTOR_DTYPES:
            known = ", ".join(map(str, VECTOR_DTYPES))
            raise ConfigurationError(f"gradients of {dtype} cannot be summed across hosts; use one of {known}")
        self.slots = slots if slots is not None else slots_of(rule, numel * dtype.itemsize)
        super().__init__(rank, hub, call)
        memory = HostMemory(ranks, numel, dtype, self.slots)
        self._node = Node(rank, memory, self._connections)
        self._writing: int | None = None
        self._awaited: Version | None = None
        """This rank waits for the results of all rounds before this one; None: it does not wait."""
        self._delivered = range(0)
        self._version: Version = 0
        self._draining = False
        self._drain_version: Version | None = None
        """While the rank drains: the version up to which it must take results before it may leave."""

    def connect(self, addresses: Mapping[WorkerId, Address], *, later: bool = False) -> None:
        """Connect to the sequencer and to the other ranks. Unless ``later``, the job begins, with the ranks in ``addresses``.

        Nothing waits until all are connected; a rank only waits for the first rank of its host, which owns the shared memory.

        Args:
            addresses: by rank, what `listen` returned there; without ranks that come later.
            later: True if the job is running. This rank then takes part after `entered`, once another rank has admitted it.

        Raises:
            JobError: the sequencer cannot be reached.
            Fenced: this rank does not take part any more.
            ConfigurationError: there is not enough memory.
        """
        here, node, connections = self._connections.hub.host, self._node, self._connections
        with self.lock:
            node.has_memory = False
            if not later:
                node.present = frozenset(addresses)
                if not any(address.host == here for rank, address in addresses.items() if rank < self.rank):
                    node.allocate()
            connections.connect(addresses, self._call, later=later)
            node.local_peers = connections.local_peers()
            if not node.has_memory:
                before = set(node.local_peers)
                node.ask_state(*before)
                # When the job begins, the sequencer makes sure that one rank of each host allocates the memory.
                self._wait_for(lambda: node.has_memory or (later and not before & node.local_peers))
                node.allocate()

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
        with self.lock:
            self._check()
            if self._writing is None:
                self._wait_for(self._buffer_taken)
            assert self._writing is not None
            return self._node.memory.buffer(self.rank, self._writing)

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
        with self.lock:
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
        with self.lock:
            through = self._awaited
            if through is None:
                return True
            if not self._wait_for(lambda: self._node.executor.upto >= through, timeout_s):
                return False
            self._delivered = range(self._delivered.start if self._delivered else self._version, through)
            self._version, self._awaited = through, None
            return True

    @property
    def waits(self) -> bool:
        """Return True if this rank has arrived in a round whose results `wait` has not found yet."""
        return self._awaited is not None

    def results(self) -> list[tuple[Version, torch.Tensor]]:
        """Return the results that this rank has received and not read yet: pairs of round and vector, in order; do not write to them.

        A round whose mean is not finite is void: its result begins with NaN, and no rank may apply it.
        """
        with self.lock:
            return [(number, self._node.executor.results[number]) for number in self._delivered]

    def read(self) -> None:
        """Declare that the results are not needed any more. After a single result, the next arrival says so, and nothing is sent."""
        with self.lock:
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
        with self.lock:
            if upto is not None and upto <= self._version:
                return self.results()
            if newest or self._wait_for(lambda: self._node.executor.upto > self._version, timeout_s):
                limit = {} if upto is None else {"n": min(upto, self._node.executor.upto)}
                self._awaited = self._request(lambda: self._node.notify({"k": "catch", **limit})).through
                self.wait()
            return self.results()

    # Coming and going.

    def admit(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Let another rank take part with the parameters of ``version``, which this rank has. Returns at once.

        If the other rank needs results that are gone, it gets `Fenced`. If it has been admitted before with an earlier ticket, it has not
        begun, and now begins at this version, unless ``pause`` is False.

        Args:
            ticket: of the sequencer. Nothing happens if the rank's process is not the one of the ticket any more.
            pause: no round waits for the rank before it calls `resume`.
        """
        with self.lock:
            self._node.notify({"k": "let", "rank": rank, "version": version, "ticket": ticket, "pause": pause})

    def entered(self) -> Version:
        """Begin at the version at which another rank has admitted this one last, which is returned. No rank may admit this one anew after
        this call: the caller has the parameters of that version.

        Raises:
            Fenced: this rank was not admitted.
        """
        with self.lock:
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
        with self.lock:
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

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for this process's rank again, and return once the sequencer has confirmed it.

        Without the confirmation the sequencer could get this after something that the rank sends later on another connection: the
        coordinator, for example, may already have paused the rank again.

        Raises:
            Fenced: this rank does not take part any more.
            SequencerLost: the connection to the sequencer has ended.
        """
        assert rank == self.rank, f"rank {self.rank} resumes rank {rank} (expected itself)"
        with self.lock:
            self._request(lambda: self._node.notify({"k": "resume"}))

    def close(self) -> None:
        super().close()
        self._node.memory.close()

    # Implementation.

    def _start_at(self, version: Version) -> None:
        self._version, self._delivered = version, range(version, version)
        self._awaited = self._writing = None

    def _request(self, ask: Callable[[], None]) -> Answer:
        self._check()
        ask()
        self._wait_for(lambda: bool(self._node.answers))
        return self._node.answers.pop(0)

    def _buffer_taken(self) -> bool:
        self._writing = self._node.buffer()
        return self._writing is not None

    def _wait_for(self, what: Callable[[], bool], timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not what():
            self._check()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                return False
            self.lock.wait(left_s)
        return True

    def on_message(self, peer: WorkerId, message: Message | None) -> None:
        self._node.local_peers = self._connections.local_peers()
        before = self._node.awaited
        if message is not None:
            self._node.on_message(peer, message.header, message.payload, message.memory)
            if self._node.fenced is not None and peer == SEQUENCER:
                self._fence(self._node.fenced)
            if self._node.awaited == before:
                return  # a rank that waits would wake up, and find nothing
        self.lock.notify_all()

    def place(self, peer: WorkerId, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        return self._node.executor.place(peer, header, nbytes)

    def on_cut(self, peer: WorkerId, reason: str) -> None:
        self._node.on_cut(peer, reason)
        self.lock.notify_all()

    def on_connected(self, peer: WorkerId) -> None:
        self._node.local_peers = self._connections.local_peers()
        if peer in self._node.local_peers and not self._node.has_memory:
            self._node.ask_state(peer)
        self.lock.notify_all()
