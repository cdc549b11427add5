"""Send a server's records to its standby, and let the standby's shards change their memory as the leader's shards did.

The leader sends each record once it has handled it, and before it the bytes that the standby needs: a fold's sum, not its gradients. So
when a record arrives, the standby has everything to repeat its handling. What the leader sends to others meanwhile waits (`OutputCommit`)
until the standby acknowledges the record.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, section 4.3 (replication after aggregation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

import msgpack  # type: ignore[import-untyped]

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.recovery.answers import Answers
from offbeat.runtime.recovery.sessions import SessionLinks
from offbeat.runtime.recovery.survival import Survival
from offbeat.transport.base import Connection, Message
from offbeat.transport.link import Link
from offbeat.transport.output_commit import UNBOUND, OutputCommit
from offbeat.transport.shm import PrivateBlock
from offbeat.transport.wire import EMPTY
from offbeat.types import Seconds

PIECE_NBYTES: Final = 64 << 20
"""Most bytes of memory in one message: larger memory is sent in several."""
BYTES_MAX: Final = 1 << 40
"""Most bytes of one sum that a standby accepts."""
NEAR: Final = 8
"""Records that a standby which came later may lack when messages begin to wait for it."""
CATCH_UP_S: Final[Seconds] = 10.0
"""Seconds after which messages wait for a standby that has the state and lacks more records: the leader keeps these for it meanwhile."""
Fold: TypeAlias = Mapping[str, Any]
"""Description of a fold, which a standby needs beside the sum: ``hyper``, ``scale``, and the workers ``released`` with the new version."""
CARRYING: Final = ("push", "initial")
"""Kinds of a worker's messages with a region that is not in the log record."""


class Coming(NamedTuple):
    """A sum that is arriving from the leader, before the record of its fold."""

    fold: Fold
    total: memoryview
    come: int
    """Number of its bytes that have arrived."""


class Follower(Protocol):
    """A standby's shard that can begin a fold before the whole sum has arrived."""

    def fold_ahead(self, coming: Coming) -> None:
        """Use the part of a sum that has arrived."""

    def abandon(self) -> None:
        """Undo the fold begun with a sum: no record will use it."""


class Replica(Survival):
    """Pass memory from a leader's shards to those of its standby.

    Args:
        commit: the server's output commit.
    """

    follows = True

    def __init__(self, commit: OutputCommit) -> None:
        self._commit = commit
        self.answered: list[list[Any]] = []
        """At the leader: answers since the last record."""
        self.answers: Answers = Answers(self.answered.append)
        self.replays = False
        """True at the standby, until it leads."""
        self.standby: Connection | None = None
        """At the leader: the connection to its standby; None: it has none."""
        self.count = 0
        """Number of memory changes passed on so far; after the same record it is the same at the leader and at the standby."""
        self._came: deque[memoryview] = deque()
        """At the standby: complete blocks from the leader that no shard has used yet."""
        self._coming = EMPTY
        """At the standby: the block of which only a part has been received; empty: none."""
        self._come = 0
        """Bytes received of that block."""
        self._of_fold: Coming | None = None
        """At the standby: the sum that is arriving, if its fold is the next change of memory; None: it is not."""
        self.gets_ahead = False
        """True at a standby whose leader is on another machine, and sends the first bytes of a sum ahead."""
        self.followers: list[Follower] = []
        """At the standby: shards that can use a sum before all of it has arrived."""
        self._gone = 0
        """At the leader: bytes sent of the sum being computed."""
        self._placing = EMPTY
        """At the standby: memory that `place` has reserved for the newest block, which the transport receives or has received."""
        self._placed: deque[memoryview] = deque()
        """At the standby: memory reserved for blocks of which `on_bytes` has handled no part yet."""
        self._free: deque[tuple[int, memoryview]] = deque()
        """Memory for sums, each with the position of the record that must be committed before the memory is reused; 0: no record must."""

    def give_up(self, reason: str, *, lack: bool = True) -> NoReturn:
        """Refuse the job. Raises `ConfigurationError`."""
        raise ConfigurationError(f"--replicas 1: {reason}; leave --replicas out")

    def carried(self, memory: memoryview) -> None:
        """At the leader: send these bytes to the standby; at the standby: overwrite them with the leader's."""
        if self.replays:
            memory[:] = came = self.total(len(memory))
            self.done_with(came)
        else:
            self._send(memory, lent=False)

    def total(self, nbytes: int) -> memoryview:
        """At the leader: return memory for a sum, which `done_with` takes back; at the standby: return the leader's sum.

        Raises:
            ProtocolError: the leader has sent nothing, or a block of another size.
        """
        self._gone, self._of_fold = 0, None
        if not self.replays:
            return self._memory(nbytes)
        if not self._came or len(self._came[0]) != nbytes:
            seen = f"{len(self._came[0])} bytes" if self._came else "none"
            raise ProtocolError(f"the leader sent {seen} where {nbytes} bytes of memory were to come")
        return self._came.popleft()

    @property
    def sends_ahead(self) -> bool:
        """True at a leader that sends the first bytes of a sum while it computes the rest: to a standby on another machine."""
        # Between two processes of one machine it made steps a tenth slower: they wait for the processors and not for the network.
        return self.standby is not None and not self.standby.within_host and self._commit.committed != UNBOUND

    def send_ahead(self, total: memoryview, nbytes: int, fold: Fold) -> None:
        """At the leader: send the first ``nbytes`` of a sum to the standby, with the description of its fold."""
        self._send_pieces(total[:nbytes], self._gone, len(total), lent=True, fold=fold)
        self._gone = nbytes

    def done_with(self, total: memoryview) -> None:
        """At the leader: send the rest of the sum to the standby, and release it; at the standby: release a sum that has been used."""
        if self.replays:
            self.count += 1
            self._free.append((0, total))
        else:
            self._send(total, gone=self._gone, lent=True)
            self._free.append((self._commit.position, total))

    def _send(self, memory: memoryview, *, lent: bool, gone: int = 0) -> None:
        self.count += 1
        if self.standby is not None and (not gone or gone < len(memory)):
            # While no message waits for the standby, memory is reused before it has been sent, so the transport needs a copy.
            self._send_pieces(memory, gone, len(memory), lent=lent and self._commit.committed != UNBOUND)

    def _send_pieces(self, memory: memoryview, start: int, whole: int, *, lent: bool, fold: Fold | None = None) -> None:
        """Send ``memory`` from byte ``start`` on; it is all, or the beginning, of a block of ``whole`` bytes."""
        assert self.standby is not None
        for at in range(start, max(1, len(memory)), PIECE_NBYTES):
            about = {} if fold is None or at else {"fold": fold}
            self.standby.send({"kind": "bytes", "start": at, "nbytes": whole, **about}, payload=[memory[at : at + PIECE_NBYTES]], lent=lent)

    def give(self, blocks: Sequence[memoryview]) -> None:
        """At the leader: send the standby blocks that belong to no record."""
        for block in blocks:
            self._send_pieces(block, 0, len(block), lent=False)

    def given(self, count: int) -> list[memoryview]:
        """At the standby: return the blocks that `give` has sent. Raises `ProtocolError` if their number is not ``count``."""
        if len(self._came) != count:
            raise ProtocolError(f"the leader sent {len(self._came)} blocks of memory (expected {count})")
        blocks = list(self._came)
        self._came.clear()
        return blocks

    def _memory(self, nbytes: int) -> memoryview:
        """Return memory of this size that is not in use. Raises `ConfigurationError` if there is not enough."""
        for place, (position, memory) in enumerate(self._free):
            if len(memory) == nbytes and not self._commit.holds(position):
                del self._free[place]
                return memory
        return PrivateBlock.allocate(nbytes, "sum of gradients").view

    # At the standby.

    def follow(self) -> None:
        """Repeat what the leader does, until `lead`."""
        self.replays = True
        self.answers.follow()

    def place(self, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """Return memory for a payload about to be received, see `Connection.place_with`. Earlier payloads may not be handled yet."""
        start, whole = header.get("start"), header.get("nbytes")
        if header.get("kind") != "bytes" or type(start) is not int or type(whole) is not int or not 0 <= start <= start + nbytes <= whole:
            return None
        if whole > BYTES_MAX or (start and whole != len(self._placing)):
            return None
        if start == 0:
            try:
                self._placing = self._memory(whole)
            except ConfigurationError:  # there is too little memory; `on_bytes` reports it
                self._placing = EMPTY
                return None
            self._placed.append(self._placing)
        return self._placing[start : start + nbytes]

    def on_bytes(self, message: Message) -> None:
        """Keep received bytes, which are mostly in the memory from `place` already.

        Raises:
            ProtocolError: they do not follow the bytes before, or there is not enough memory.
        """
        start, nbytes, payload = message.header["start"], message.header["nbytes"], message.payload
        stop = start + len(payload)
        if start != (self._come if start else 0) or stop > nbytes or nbytes > BYTES_MAX or (start and nbytes != len(self._coming)):
            raise ProtocolError(f"the leader sent bytes {start} to {stop} of {nbytes} out of order (expected byte {self._come})")
        if start == 0:  # an incomplete block before may be of a fold that has failed, and is dropped
            placed = bool(self._placed) and payload.obj is self._placed[0].obj
            try:
                self._coming = self._placed.popleft() if placed else self._memory(nbytes)
            except ConfigurationError as error:
                raise ProtocolError(f"the leader sent bytes for which there is no memory: {error}") from error
            if not self._came:
                fold = message.header.get("fold")
                self._of_fold = None if fold is None else Coming(fold, self._coming, 0)
        if payload.obj is not self._coming.obj:
            self._coming[start:stop] = payload  # this transport does not call `place`
        self._come = stop
        if self._of_fold is not None and self._of_fold.total is self._coming:
            self._of_fold = self._of_fold._replace(come=stop)
        if stop == nbytes:
            self._came.append(self._coming)
            self._coming, self._come = EMPTY, 0

    def fold_ahead(self) -> None:
        """Let the shard, if it is the only one, use the received part of a fold's sum. All earlier records must have been handled."""
        if self._of_fold is not None and len(self.followers) == 1:
            self.followers[0].fold_ahead(self._of_fold)

    def lead(self) -> None:
        """At the standby: send bytes from now on. The leader's remaining bytes are not used: their record will not come."""
        self.replays, self._of_fold = False, None
        self.answers.lead()
        for follower in self.followers:
            follower.abandon()


class StreamRecorder(SessionLinks):
    """Keep the links of a server with a standby, and send its records to the standby.

    Args:
        supervisor: the connection to the supervisor.
        replays: True at the standby, until it leads.
    """

    def __init__(self, supervisor: Connection, *, replays: bool) -> None:
        self.commit = OutputCommit()
        super().__init__(supervisor)
        self.survival = Replica(self.commit)
        if replays:
            self.survival.follow()
        self.withdraws: Callable[[], bool] = lambda: False
        """Returns True if the job can continue without a gradient that only its worker and this process have."""
        self._batch: list[bytes] = []
        self._acknowledged = 0
        """The newest record that the standby has acknowledged."""
        self._behind: int | None = None
        """The record without which a standby that came later cannot lead; None: it has it, or no message waits for the standby yet."""
        self._joined_at: Seconds | None = None
        """When a standby that came later got the state, in seconds since the job began; None: it has not got it."""
        self._pack = msgpack.Packer().pack

    def _new(self, session: str, peer: str, *, shares_memory: bool = False) -> Link:
        return Link(session, peer, shares_memory=False, commit=self.commit)

    def _beside(self, connection: Connection) -> bool:
        standby = self.survival.standby
        return standby is not None and connection.within_host and not standby.within_host and not self.withdraws()

    # At the leader.

    def write(self, record: list[Any]) -> None:
        """Pack a record and keep it until `flush`. It is packed now, since its handling may change it."""
        if not self.survival.replays:
            self._batch.append(self._pack(record))

    def message(self, now: Seconds, link: Link, message: Message) -> Message:
        """Record a message before it is handled. Returns the message."""
        if message.header.get("kind") in CARRYING:
            link.keep_carried()
        self.write(["message", now, link.session, link.received, link.delivered, message.header, bytes(message.payload)])
        return message

    def flush(self) -> None:
        """Send the standby the records since the last call, all of which have been handled."""
        if not self._batch:
            return
        standby, answered = self.survival.standby, self.survival.answered
        if standby is not None:
            payload = [*map(self._pack, answered), *self._batch]
            standby.send({"kind": "record", "at": self.commit.position, "done": self._done}, payload=payload)
        answered.clear()
        self._batch = []
        self.commit.position += 1

    def follow(self, standby: Connection) -> None:
        """Send all records to this standby from now on, and hold messages back until it has the records before them."""
        self.survival.standby = standby
        self.commit.committed = self._acknowledged = self.commit.position - 1

    def let_join(self, standby: Connection, state: Any, parts: Mapping[str, Any], now: Seconds) -> None:
        """Send a standby that comes later the present state of the server, and all records from now on.

        Until the standby has the state, messages leave at once, as without a standby.

        Raises:
            TypeError: something in the state is not plain data.
        """
        from offbeat.runtime.recovery.plain_graph import dumps  # imports torch, which this process has imported by now

        self.survival.standby = standby
        for link in self.sessions.values():
            # The state includes gradients that have arrived and are in no version yet.
            link.release_carried()
            link.servable = True
            link.beside = link.socket is not None and self._beside(link.socket)
        whole = {"links": self._own, "sessions": self.sessions, "answers": self.survival.answers.count, "server": state}
        try:
            table, blocks = dumps(whole, {**parts, "commit": self.commit, "replica": self.survival})
        except TypeError:
            self.survival.standby = None
            raise
        self.survival.give([memoryview(table), *blocks])
        self._joined_at = None
        self._acknowledged = at = self.commit.position - 1
        standby.send({"kind": "state", "at": at, "now": now, "done": self._done, "blocks": 1 + len(blocks)})

    def lose_standby(self) -> None:
        """Note that the connection to the standby has ended. No message leaves until `go_on_alone`: the standby may lead by now.

        A standby that did not have the server's state yet cannot lead: then messages do not wait.
        """
        self.survival.standby = self._behind = None
        for link in self.sessions.values():
            link.served = False

    def serve(self, session: str) -> None:
        """Let the standby send messages with a region to a worker on its machine, from this record on: it has their content."""
        link = self.sessions.get(session)
        if link is not None and not link.closed and link.servable and not link.served:
            link.served = True
            self.write(["served", session])

    @property
    def is_alone(self) -> bool:
        """True if a standby may come: there is none, and no message waits for one."""
        return self.survival.standby is None and self.commit.committed == UNBOUND

    def go_on_alone(self) -> None:
        """Continue without a standby: send waiting and future messages at once."""
        self.survival.standby = self._behind = None
        self.commit.committed = UNBOUND
        self._advance()

    def acknowledged(self, at: int, now: Seconds) -> bool:
        """Send the messages that have waited for this record. Returns True if from now on a standby that came later could lead.

        Messages begin to wait for such a standby once it has nearly all records, or after `CATCH_UP_S`: it may be slower than this process.

        Raises:
            ProtocolError: the standby cannot have this record.
        """
        if not self._acknowledged <= at < self.commit.position:
            raise ProtocolError(
                f"the standby has record {at} (expected {self._acknowledged} to {self.commit.position - 1}, the newest that was sent)"
            )
        self._acknowledged = at
        if self.commit.committed == UNBOUND:
            self._joined_at = now if self._joined_at is None else self._joined_at
            if self.commit.position - at > NEAR and now < self._joined_at + CATCH_UP_S:
                return False
            # What has been sent so far follows from earlier records, which the standby has once it has this one.
            self.commit.committed = self._behind = self.commit.position - 1
        if at >= self.commit.committed:
            self.commit.committed = at
            self._advance()
        if self._behind is None or at < self._behind:
            return False
        self._behind = None
        return True

    def _advance(self) -> None:
        for link in list(self._at.values()):
            link.advance()

    @property
    def _done(self) -> list[int]:
        return [self.commit.sent, self.survival.count]

    # At the standby.

    def received(self, at: int, payload: memoryview) -> Iterator[list[Any]]:
        """Yield the leader's log records in one message. Raises `ProtocolError` if they cannot be read."""
        if at != self.commit.position:
            raise ProtocolError(f"the leader sent record {at} after record {self.commit.position - 1}")
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(1, len(payload)))
        unpacker.feed(payload)
        try:
            for record in unpacker:
                if not self.survival.answers.take(record):
                    yield record
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the leader sent a record that cannot be read: {type(error).__name__}") from None

    def joined(self, header: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
        """Restore the links from what `let_join` has sent, and return the server's state. Raises `ProtocolError` if it cannot be read."""
        from offbeat.runtime.recovery.plain_graph import loads

        table, *blocks = self.survival.given(header["blocks"])
        whole = loads(table, blocks, {**parts, "commit": self.commit, "replica": self.survival})
        self._take_over(whole["links"], whole["sessions"])
        self.commit.position = header["at"] + 1
        self.commit.sent, self.survival.count = header["done"]
        self.survival.answers.count = whole["answers"]
        return whole["server"]

    def handled(self, done: list[int]) -> None:
        """Note that a record has been handled. Raises `ProtocolError` if the leader's counts of messages and memory changes differ."""
        if done != self._done:
            raise ProtocolError(
                f"after record {self.commit.position} the leader had sent {done[0]} messages and changed memory {done[1]} times (expected "
                f"{self._done[0]} and {self._done[1]}, as this standby): a rule or an optimizer whose result is not the same each time"
            )
        self.commit.position += 1

    def again(self, record: list[Any]) -> tuple[Link, Message]:
        """Return the link and the message of a record that `message` has written, and bring the link to that message."""
        link, (header, payload) = self._brought_to(record)
        if header.get("kind") in CARRYING:
            link.keep_carried()
        return link, Message(header, memoryview(bytearray(payload)), ())

    def lead(self) -> None:
        """Write records from now on, and note which regions the workers must send again."""
        self.survival.lead()
        for link in self.sessions.values():
            link.served = False
            link.go_aside(None)
            link.lacks_carried = link.kept_carried is not None

    @property
    def lacking(self) -> list[Link]:
        """The links over which a region is awaited once more."""
        return [link for link in self.sessions.values() if link.lacks_carried and not link.closed]
