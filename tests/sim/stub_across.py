"""Ranks of several hosts in one thread: each is a host of its own, with the real `Node`, and what its process does around that.

Where the real rank sleeps until its second thread has an answer or a result, this one yields `Shared`. Ranks send each other messages over
a network that the job delivers (``SteppedAcross``); their connections to the sequencer are `Links` to the real server 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import torch
from tests.runtime.allreduce.multi_host.network import carried
from tests.sim.stub_process import LR, Waits
from tests.sim.stub_ranks import StubRank
from tests.sim.with_fleet import LinkedHub

from offbeat.core.allreduce.commands import Answer
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Fence
from offbeat.core.rank_log import Fenced
from offbeat.runtime.allreduce.multi_host.connections import SequencerCall
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.transport.base import Address, Closed, Connection, SharedMemory
from offbeat.types import Version, WorkerId, WorkerState

if TYPE_CHECKING:
    from tests.sim.dying_sequencer import AcrossHosts

NOTHING = torch.empty(0)


class Sent(NamedTuple):
    """A message between two ranks that is on its way."""

    sender: StubAcross
    process: Node
    """Of the sender, at that time."""
    peer: WorkerId
    header: dict[str, Any]
    content: torch.Tensor


class StubAcross(StubRank):
    """A rank of the allreduce family, in `runtime.allreduce.multi_host`."""

    job: AcrossHosts

    def __init__(self, job: AcrossHosts, number: WorkerId, iteration: int) -> None:
        super().__init__(job, number, iteration)
        assert isinstance(self.policy, RoundRule)
        self._partial: RoundRule = self.policy
        self._welcome: Mapping[str, Any] = {}
        self.met: set[Node] = set()
        """The processes of other ranks with which this one is connected."""
        self.node: Node
        self._sequencer: Connection | None = None
        self._asked: deque[Callable[[Answer], None]] = deque()
        """What takes the answers of the sequencer, in order."""
        self._closed: Callable[[], None] = lambda: None
        self._lost = self._later = False
        self._postponed: list[Any] | None = None

    # Its connections.

    def attach(self) -> None:
        """Give up the connections of before, and wait for those of others."""
        self._closed()
        ranks, slots = self._welcome["ranks"], self._welcome["slots"][0]
        memory = HostMemory(ranks, 2, torch.float32, slots)
        self.met, self._lost, self._asked = set(), False, deque()
        hub = self.job.hub(lambda: None, self.number)
        assert isinstance(hub, LinkedHub)
        self.node = node = Node(self.number, memory, carried(self._send, self._leave_memory))
        hub._turn = partial(self._hear_sequencer, hub, node)
        hub.process = self
        self._sequencer_hub, self._sequencer = hub, None
        self._closed = hub.close

    @property
    def contact(self) -> dict[str, Any]:
        return {"addresses": [Address(f"host {self.number}", ("127.0.0.1", 1), "")]}

    def _connect(self, addresses: Sequence[Sequence[Any]], *, later: bool) -> None:
        [others] = addresses
        self._sequencer = self._sequencer_hub.connect(self.job.addresses[0])
        self._sequencer.send(SequencerCall(lambda links: links.connect(self.job.addresses[0], lasting=True)).hello(self.number))
        if not later:
            self.node.present = frozenset(peer for peer, _ in others)
        self.job.ring.meet(self, [peer for peer, _ in others if peer != self.number])

    def _send(
        self,
        peer: WorkerId,
        header: Mapping[str, Any],
        content: torch.Tensor | None = None,
        memory: tuple[SharedMemory, ...] = (),
        *,
        lent: bool = False,
    ) -> None:
        if peer == SEQUENCER:
            assert self._sequencer is not None
            self._sequencer.send(header)
        else:
            kept = NOTHING if content is None else content if lent else content.clone()
            self.job.ring.sent.append(Sent(self, self.node, peer, msgpack.unpackb(msgpack.packb(header)), kept))

    def _leave_memory(self) -> None:
        sent = self.job.ring.sent
        for index, message in enumerate(sent):
            if message.process is self.node:
                sent[index] = message._replace(content=message.content.clone())

    def _hear_sequencer(self, hub: Any, node: Node) -> None:
        """Something has come over the connection to the sequencer."""
        if self.gone or node is not self.node:
            hub.poll(0.0)
            return
        if self.thaw() > self.job.now:
            self.job.at(self.thaw(), partial(self._hear_sequencer, hub, node))
            return
        for _, item in hub.poll(0.0):
            if isinstance(item, Closed) or item.header.get("kind") == "refused":
                self._lost = True
            else:
                node.on_message(SEQUENCER, item.header, NOTHING)
        if (self._lost or node.fenced is not None) and self._sequencer is not None:
            self._sequencer.close()
        self._heed_answers()

    def _heed_answers(self) -> None:
        while self.node.answers:
            self._asked.popleft()(self.node.answers.pop(0))

    def end(self, reason: str) -> None:
        super().end(reason)
        self._closed()

    # What it asks the sequencer.

    def _check(self) -> None:
        if self.node.fenced is not None or self._lost:
            raise Fenced(self.node.fenced or "the sequencer is lost")

    def _until(self, ready: Callable[[], bool]) -> Generator[Any, None, None]:
        def there() -> bool:
            self._check()
            return ready()

        yield from self.wait(there)

    def _request(self, header: dict[str, Any]) -> Generator[Any, None, Answer]:
        answers: list[Answer] = []
        self._asked.append(answers.append)
        self.node.notify(header)
        yield from self._until(lambda: bool(answers))
        return answers[0]

    # What its family does.

    def _admitted(self) -> Waits:
        yield lambda: self._due
        if self.fenced:
            yield from self._tell(Fence(self.number, self.incarnation, ""))
            return
        self._release = self.serials[0]
        try:
            if self._enters:
                yield from self._begin_with()
            yield from self._take_up_to(self._goal)
            yield from self._request({"k": "resume"})
        except Fenced as error:
            self._fall_out(error)
        else:
            self.note()
            yield from self._resume()

    def _begin_with(self) -> Waits:
        self._enters, given, self._given = False, self._given, None
        if given is not None:
            self.parameters, self.version = torch.tensor(given[0]), given[1]
        if self._later:
            answer = yield from self._request({"k": "catch", "n": 0})
            self.version = answer.through

    def _take_up_to(self, goal: Version) -> Waits:
        """Take the results that are here, and wait for those up to this version."""
        while self.version < goal or self.node.executor.upto > self.version:
            yield from self._until(lambda: self.node.executor.upto > self.version)
            answer = yield from self._request({"k": "catch"})
            yield from self._until(partial(self._has, answer.through))
            self._apply(answer.through)

    def _has(self, through: Version) -> bool:
        return self.node.executor.upto >= through

    def contribute(self, gradient: torch.Tensor, samples: int) -> Generator[Any, None, None]:
        found: list[int] = []

        def buffer_taken() -> bool:
            buffer = self.node.buffer()
            found.extend([] if buffer is None else [buffer])
            return bool(found)

        yield from self._until(buffer_taken)
        vector = self.node.memory.buffer(self.number, found[0])
        vector.copy_(gradient)
        clip, answers = self._partial.carry_clip, list[Answer]()
        self._asked.append(answers.append)
        self.node.arrive(found[0], 1.0 if clip is None else clip_factor(vector, clip), samples)
        yield from self._until(lambda: bool(answers) and self._has(answers[0].through))
        self._apply(answers[0].through)

    def _apply(self, through: Version) -> None:
        numbers = range(self.version, through)
        results = [self.node.executor.results[number] for number in numbers]
        for result in results if self._partial.delivery == "replay" else results[-1:]:
            self.parameters = self.parameters - LR * result
        self.version = max(self.version, through)
        if len(numbers) > 1 or self._postponed is not None:
            self.node.notify({"k": "read", "n": self.version})

    def admit(self, rank: WorkerId, ticket: list[int]) -> None:
        self.node.notify({"k": "let", "rank": rank, "version": self.version, "ticket": ticket[0], "pause": True})

    def begin(self) -> None:
        raise AssertionError("see _begin_with")

    def catch_up(self) -> None:
        """Take nothing: results are kept for a rank that waits for the coordinator."""

    def resume(self) -> None:
        raise AssertionError("see _admitted")

    def _fall_out(self, why: Fenced) -> None:
        self._outside = True
        self.say("outside", incarnation=self.incarnation, reason=str(why))

    def note(self) -> None:
        """Note its parameters, unless it was declared dead and does not know it: it may have summed a round that is another one now."""
        coordinator = self.job.sequencing().state.job
        if coordinator is None:
            return  # of a process that has just begun
        member = coordinator.first.driver.core.membership[self.number]
        if member.state is WorkerState.ALIVE and member.incarnation == self.incarnation:
            super().note()

    # Its life.

    def live(self) -> Waits:
        yield from self._join()
        yield from self._work_through()
        yield from self._part()
        self.say("leaving")
        yield lambda: "farewell" in self.mail
        yield from self._part()
        self.say("left", incarnation=self.incarnation, noticed=False)
        self.end("end of stream")

    def _part(self) -> Waits:
        """Wait until the other ranks can do without this one."""
        self._postponed = []
        try:
            answers: list[Answer] = []
            self._asked.append(answers.append)
            self.node.notify({"k": "part"})
            while not (answers and self.version >= answers[0].through):
                yield from self._until(
                    lambda: self.node.executor.upto > self.version or (bool(answers) and self.version >= answers[0].through)
                )
                self._apply(self.node.executor.upto)
        except Fenced:
            pass
        finally:
            postponed, self._postponed = self._postponed, None
            for server, message in postponed:
                self._sort(server, message)

    def _sort(self, server: int, message: Any) -> None:
        header = message.header
        match header["kind"]:
            case "welcome":
                self._welcome = header
                super()._sort(server, message)
            case "meet":
                self._later = True
                self._connect(header["addresses"], later=True)
                self.say("met")
            case "parameters":
                super()._sort(server, message)
                if header["enters"] and self._sequencer is None:
                    self._later = False
                    self._connect(header["addresses"], later=False)
            case "donate" if self._postponed is not None:
                self._postponed.append((server, message))
            case _:
                super()._sort(server, message)


class Ring:
    """The connections between ranks: messages of two processes that have met arrive in order, one at a time."""

    def __init__(self) -> None:
        self.sent: deque[Sent] = deque()
        self.ranks: dict[WorkerId, StubAcross] = {}
        """The newest process of each rank that is connected."""
        self._early: list[Sent] = []
        """Messages to ranks that are expected and not connected yet."""

    def meet(self, rank: StubAcross, others: Sequence[WorkerId]) -> None:
        """Connect a rank's process with those of others."""
        self.ranks[rank.number] = rank
        for other in (self.ranks[number] for number in others if number in self.ranks):
            rank.met.add(other.node)
            other.met.add(rank.node)
        early, self._early = self._early, []
        self.sent.extend(early)

    def deliver(self) -> bool:
        """Let a rank handle one message. Returns False if there is none."""
        if not self.sent:
            return False
        message = self.sent.popleft()
        to = self.ranks.get(message.peer)
        if to is None:
            self._early.append(message)
        elif to.gone or message.process not in to.met:
            pass  # its connection has ended with one of the two processes
        elif to.thaw() > to.job.now:
            to.job.at(to.thaw(), partial(self._again, message))
        else:
            to.node.on_message(message.sender.number, message.header, message.content)
            to._heed_answers()
        return True

    def _again(self, message: Sent) -> None:
        self.sent.append(message)
