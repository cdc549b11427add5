"""Mix parameters among ranks of several hosts: the calls of a rank's process, the same as `OneHostGossip` on one host.

The `GossipTable` is in server 0 (``sequenced.py``), which a rank asks for each step. Ranks get parameters from each other: a second thread
of each rank answers while the first computes. One lock protects what the two threads share. Messages, by ``k``::

    want -> vector, none    the parameters as of a step; they are sent as soon as the step is made, or `none` if they are not kept any more
    pair -> mean, none      the sender's parameters; the receiver replaces its own by the mean, and returns that

An answer of server 0 also says what the rank's next step is going to mix if no rank comes or goes. The rank asks for that in this step, so
that parameters travel as soon as they are made, while it computes. What the next step does not mix is discarded. Under *pair* nothing is
asked for ahead: an average changes both ranks, and is taken of what they have when the gradient is there.

What comes from a rank that is gone comes never: server 0 says so, or the connection ends, and the step goes on without it. If only the
connection of two living ranks breaks, the two exchange nothing until one of them comes back as a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Mixture
from offbeat.core.gossip.table import Request, Stepped, slots_of
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.connections import ConnectedRank, SequencerCall
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.gossip.exchange import GossipRank, Waiting
from offbeat.runtime.gossip.messages import answered, kinds_of
from offbeat.runtime.ranks.member import LOOK_S
from offbeat.transport.base import Hub, Message
from offbeat.types import Clock, WorkerId

WANTED_MAX: Final = 64
"""Most steps of this rank whose parameters one peer may wait for: one of today's rules asks for one step at a time."""


class MultiHostGossip(ConnectedRank, GossipRank):
    """Take part in the gossip of a job whose ranks are on several hosts, after `listen` and `connect`.

    Args:
        rule: decides which ranks exchange parameters.
        ranks: the greatest number of ranks.
        numel: parameters of the model.
        rank: this process's rank.
        hub: for the connections to the other processes only; closed with this object.
        call: how to reach server 0.
        dtype: float32 or float64.
    """

    def __init__(
        self, rule: GossipRule, ranks: int, numel: int, *, rank: WorkerId, hub: Hub, call: SequencerCall, dtype: torch.dtype
    ) -> None:
        GossipRank.__init__(self, rule, numel, dtype, rank)
        ConnectedRank.__init__(self, rank, hub, call)
        self._slots, self._kinds = slots_of(rule), kinds_of(ranks)
        self._changes = 0
        """Counts what a rank that waits may wait for."""
        self._answers: list[Stepped] = []
        self._steps = 0
        self._kept: dict[Clock, torch.Tensor] = {}
        """This rank's parameters, by step."""
        self._wanted: list[tuple[WorkerId, Clock]] = []
        """Who has asked for parameters that are not made yet."""
        self._ahead: list[tuple[WorkerId, Clock]] = []
        """What the next step is going to mix, by the last answer: senders, and as of which of their steps."""
        self._open: set[tuple[WorkerId, Clock]] = set()
        """Parameters that were asked for and may still come."""
        self._got: dict[tuple[WorkerId, Clock], torch.Tensor | None] = {}
        """Parameters that came for this step or the next; None: they cannot be had."""
        self._gone: set[WorkerId] = set()
        """Ranks that have gone since the last answer."""
        self._ended: set[WorkerId] = set()
        """Ranks whose connection has ended."""
        self._averaged = 0
        """pair: how often others have averaged with this rank."""

    @property
    def steps(self) -> Clock:
        return self._steps

    def begin(self, parameters: torch.Tensor) -> None:
        steps = self._run(self._asked({"k": "begin"})).steps
        self.model.copy_(parameters.detach().reshape(-1))
        with self.lock:
            self._own.copy_(self.model)
            self._kept.clear()
            if self.rule.exchange != "push":  # with "push" no rank reads them
                self._keep(steps)

    def resume(self) -> None:
        self._run(self._asked({"k": "resume"}))
        self._request(())

    def admit(self, rank: WorkerId, ticket: int) -> None:
        with self.lock:
            self._connections.send(SEQUENCER, {"k": "let", "rank": rank, "ticket": ticket})

    # A rank's step.

    def _await(self, holds: Callable[[], bool]) -> Waiting[None]:
        """Wait until something holds, which is asked under the lock."""
        while True:
            with self.lock:
                if holds():
                    return
                self._check()
                told = self._changes
            yield told

    def _asked(self, header: Mapping[str, Any]) -> Waiting[Stepped]:
        with self.lock:
            self._check()
            self._answers.clear()
            self._connections.send(SEQUENCER, header)
        return (yield from self._answered())

    def _answered(self) -> Waiting[Stepped]:
        yield from self._await(lambda: bool(self._answers))
        return self._answers.pop(0)

    def _ask(self, request: Request, *arguments: bool) -> Waiting[Any]:
        if request == "step":
            return (yield from self._asked({"k": "step", "gradient": arguments[0]}))
        # After a step server 0 says without being asked what to take: a question would wait behind the bytes of what was published.
        return (yield from self._answered() if request == "take" else self._asked({"k": request})).mixture

    def _took(self, mixture: Mixture, got: Sequence[GossipMessage]) -> None:
        with self.lock:
            self._connections.send(SEQUENCER, {"k": "took", "got": [[message.sender, message.steps] for message in got]})

    def _publish(self, steps: Clock) -> None:
        with self.lock:
            self._keep(steps)

    def _keep(self, steps: Clock) -> None:
        """Keep this rank's parameters as those of a step, and send them to those who have asked."""
        self._kept[steps] = self._own.clone()
        for old in [kept for kept in self._kept if kept <= steps - self._slots]:
            del self._kept[old]
        wanted, self._wanted = self._wanted, []
        for peer, step in wanted:
            self._give(peer, step)

    def _give(self, peer: WorkerId, steps: Clock) -> None:
        if steps in self._kept:
            self._connections.send(peer, {"k": "vector", "n": steps}, self._kept[steps], lent=True)
        elif not self._kept or steps > max(self._kept):
            if sum(other == peer for other, _ in self._wanted) == WANTED_MAX:
                raise ProtocolError(f"rank {peer} wants the parameters of more than {WANTED_MAX} steps that rank {self.rank} has not made")
            self._wanted.append((peer, steps))
        else:
            self._connections.send(peer, {"k": "none", "n": steps})

    def _request(self, messages: Sequence[GossipMessage]) -> None:
        # Under "push" what the next step mixes may be made already: its bytes would delay those that this step waits for.
        ahead = [] if messages and self.rule.exchange == "push" else self._ahead
        with self.lock:
            for peer, steps in self._expect([*((message.sender, message.steps) for message in messages), *ahead]):
                self._connections.send(peer, {"k": "want", "n": steps})

    def _expect(self, names: Sequence[tuple[WorkerId, Clock]]) -> list[tuple[WorkerId, Clock]]:
        """Expect parameters, by sender and step, and no others. Returns those to ask for: not asked for before, and their sender is there.

        Messages to these ranks are queued until the ranks connect: server 0 may name a rank whose connection is not there yet.
        """
        names = [name for name in names if name[0] not in self._gone | self._ended]
        self._connections.expect({peer for peer, _ in names})
        self._got = {name: vector for name, vector in self._got.items() if name in names}
        asked, self._open = self._open, set(names) - self._got.keys()
        return sorted(self._open - asked)

    def _add(self, message: GossipMessage, into: torch.Tensor) -> Waiting[bool]:
        vector = yield from self._fetch(message.sender, message.steps)
        if vector is not None:
            into.add_(vector, alpha=message.weight)
        return vector is not None

    def _fetch(self, peer: WorkerId, steps: Clock) -> Waiting[torch.Tensor | None]:
        """Wait for what a peer was asked for. Returns None if it cannot be had."""
        yield from self._await(lambda: (peer, steps) not in self._open)
        return self._got.get((peer, steps))

    def _exchange(self, stepped: Stepped, moved: torch.Tensor | None) -> Waiting[bool]:
        partner, mean = stepped.partner, None
        if partner is not None:
            with self.lock:
                sent, before = self._own.clone(), self._averaged
                for peer, steps in self._expect([(partner, stepped.steps)]):
                    self._connections.send(peer, {"k": "pair", "n": steps}, sent, lent=True)
            mean = yield from self._fetch(partner, stepped.steps)
        with self.lock:
            if mean is not None:
                # Another rank may have averaged with this one meanwhile: then the change counts, so that the sum over the ranks stays.
                if self._averaged == before:
                    self._own.copy_(mean)
                else:
                    self._own.add_(mean.sub(sent))
            if moved is not None:
                self._own.add_(moved)
            self.model.copy_(self._own)
        return mean is not None

    def _sleep(self, told: int) -> None:
        with self.lock:
            if self._changes == told:
                self.lock.wait(LOOK_S)

    # Messages. All of this is called in the other thread, under the lock.

    def _changed(self) -> None:
        self._changes += 1
        self.lock.notify_all()

    def on_cut(self, peer: WorkerId, reason: str) -> None:
        self._changed()

    def on_connected(self, peer: WorkerId) -> None:
        self._ended.discard(peer)
        self._changed()

    def on_message(self, peer: WorkerId, message: Message | None) -> None:
        if message is None:
            self._ended.add(peer)
            self._forget(peer)
            self._wanted = [(other, steps) for other, steps in self._wanted if other != peer]
        else:
            header, nbytes = message.header, len(message.payload)
            kinds = self._kinds.orders if peer == SEQUENCER else self._kinds.between
            kind = kinds.check(header, f"peer {peer}", nbytes, len(message.memory))
            if kind in ("vector", "pair", "mean") and nbytes != self._own.nbytes:
                raise ProtocolError(f"peer {peer} sent {kind!r} with {nbytes} bytes (expected {self._own.nbytes})")
            if peer == SEQUENCER:
                self._on_order(kind, header)
            else:
                self._on_peer(peer, kind, header["n"], message.payload)
        self._changed()

    def _on_order(self, kind: str, header: Mapping[str, Any]) -> None:
        if kind == "answer":
            self._answers.append(answered(header))
            self._steps = header["all"]
            self._ahead = [(sender, steps) for sender, steps in header["ahead"]]
            self._gone.clear()
        elif kind == "gone":
            self._gone.add(header["rank"])
            self._forget(header["rank"])
        elif kind == "raised":
            if self._kept and self.rule.exchange == "average":
                self._keep(header["n"])
        else:
            self._fence(header["why"])

    def _forget(self, peer: WorkerId) -> None:
        """Expect nothing more of a process that is gone: a next one of its rank may come to the same step, and has to be asked."""
        self._open = {name for name in self._open if name[0] != peer}
        self._got = {name: vector for name, vector in self._got.items() if name[0] != peer}

    def _on_peer(self, peer: WorkerId, kind: str, steps: Clock, payload: Any) -> None:
        if kind == "want":
            self._give(peer, steps)
        elif kind == "pair":
            if not self._kept:  # this rank has entered and not begun
                self._connections.send(peer, {"k": "none", "n": steps})
                return
            self._own.add_(torch.frombuffer(payload, dtype=self._own.dtype)).mul_(0.5)
            self._averaged += 1
            self._connections.send(peer, {"k": "mean", "n": steps}, self._own)
        elif (peer, steps) in self._open:
            self._open.discard((peer, steps))
            self._got[peer, steps] = None if kind == "none" else torch.frombuffer(payload, dtype=self._own.dtype)
