"""Log a server's messages, and return them to its next process.

The server hands every message, end of a connection and tick to the recorder before it handles it. If the recorder gives up, the server
continues without it, but can have no next process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.errors import ConfigurationError
from offbeat.runtime.recovery.answers import ANSWER, Answers
from offbeat.runtime.recovery.input_log import LOG_NBYTES, InputLog, LogFull
from offbeat.runtime.recovery.keeper import APART_NBYTES, LOG, Keeper
from offbeat.runtime.recovery.sessions import SessionLinks
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.transport.link import STAMP, Link
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds


class Recorder(SessionLinks):
    """Record one server's input on its own host.

    Args:
        supervisor: the connection to the supervisor.
        kept: the blocks that an earlier process of this server has left, by name.
    """

    def __init__(self, supervisor: Connection, kept: dict[str, MemoryBlock]) -> None:
        super().__init__(supervisor)
        self.survival = Keeper(supervisor, kept)
        self._log: InputLog | None = None
        """The log; None: there is no memory for it."""
        try:
            block = self.survival.sparse(LOG_NBYTES, LOG)
            self._log = InputLog(block.view, block.reserve)
        except ConfigurationError as error:
            self.survival.give_up(str(error))
        if self._log is not None:
            self.survival.answers = Answers(self.write, self._log.calls)

    # Writing.

    def write(self, record: list[Any]) -> None:
        if self._log is not None and self.survival.given_up is None:
            try:
                self._log.append(record, counts=record[0] != ANSWER)
            except (LogFull, ConfigurationError) as error:
                self.survival.give_up(f"what it was told does not fit into memory: {error}")

    def message(self, now: Seconds, link: Link, message: Message) -> Message:
        """Log a message before it is handled. Returns it; a large payload is moved to a separate block, outside snapshots."""
        names = []
        for number, block in enumerate(message.memory):
            assert isinstance(block, MemoryBlock)
            names.append(f"{link.session} {link.received} {number}")
            self.survival.keep(names[-1], block)
        payload: bytes | str = ""
        if len(message.payload) > APART_NBYTES and self.survival.given_up is None:
            payload = f"{link.session} {link.received} payload"
            try:
                message = message._replace(payload=self.survival.keep_apart(message.payload, payload))
            except ConfigurationError as error:
                self.survival.give_up(str(error))
        self.write(["message", now, link.session, link.received, link.delivered, message.header, payload or bytes(message.payload), names])
        return message

    # Snapshots, and reading.

    def save(self, state: Callable[[], Any], parts: Callable[[], Mapping[str, Any]]) -> None:
        """Write a snapshot in place of the records so far, if one is due. ``parts``: as for `restore`."""
        if self._log is None or self.survival.given_up is not None or not (self._log.due or self.survival.snapshot_due):
            return
        from offbeat.runtime.recovery import plain_graph  # imports torch, which this process has imported by now

        self.survival.snapshot_due = False
        for link in [link for link in self.sessions.values() if link.closed]:
            self.end(link)
        try:
            whole = self._own, self.sessions, self.ended, self.survival.made, self.survival.answers.count, state()
            data, names = plain_graph.freeze(whole, self._all(parts()), self.survival)
            self._log.begin(data)
        except LogFull:
            return  # for example, large replicas that ranks have not received yet; the snapshot is tried again later
        except (TypeError, ConfigurationError) as error:
            self.survival.give_up(str(error))
            return
        self.survival.drop_all_but({LOG, *names})

    def restore(self, parts: Callable[[], Mapping[str, Any]]) -> Any:
        """Restore the newest snapshot's links, and return its state; None: there is none. ``parts`` returns the parts of this process."""
        if self._log is None:
            return None
        for record in self._log.records():
            self.survival.answers.take(record)
        data = self._log.snapshot()
        if not len(data):
            return None
        from offbeat.runtime.recovery import plain_graph

        whole = plain_graph.thaw(data, self._all(parts()), self.survival)
        own, sessions, self.ended, self.survival.made, self.survival.answers.count, state = whole
        self._take_over(own, sessions)
        return state

    def _all(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {**parts, "keeper": self.survival}

    def records(self) -> Iterator[list[Any]]:
        """Return the records since the snapshot that the server has to handle again."""
        return (record for record in (self._log.records() if self._log is not None else ()) if record[0] != ANSWER)

    def again(self, record: list[Any]) -> tuple[Link, Message]:
        """Return the link and the message of a record that `message` has written, and bring the link to that message."""
        link, (header, payload, names) = self._brought_to(record)
        memory: tuple[SharedMemory, ...] = tuple(self.survival[name] for name in names)
        data = self.survival[payload].view if isinstance(payload, str) else memoryview(bytearray(payload))
        return link, Message(header, data, memory)


def is_bare(message: Message) -> bool:
    """Return True if a message has no number: it may be lost, or belongs to no link."""
    return STAMP not in message.header and message.header.get("kind") != "confirm"
