"""Connect the processes of one worker: followers announce their calls to the group's leader, which makes each call and answers.

Messages are msgpack over a local socket that only these processes have. The end of a process is noticed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.group import messages, state
from offbeat.runtime.group.state import Entries
from offbeat.session import LEADERLESS, Place
from offbeat.transport.schema import Check
from offbeat.transport.shm import MemoryBlock


class _Link:
    """A socket connection to another process of this worker."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: Any) -> None:
        self._connection.send_bytes(msgpack.packb(message))

    def receive(self, sender: str, check: Check) -> Any:
        """Return the next message. Raises `EOFError` once the other process has ended, `ProtocolError` if the message fails the check."""
        try:
            packed = self._connection.recv_bytes(messages.NBYTES_MAX)
        except ConnectionResetError:
            raise EOFError from None
        except OSError as error:  # the message is too long
            raise ProtocolError(f"{sender} sent what cannot be read: {error} (expected at most {messages.NBYTES_MAX} bytes)") from None
        return messages.unpacked(packed, sender, check)

    def send_memory(self, block: MemoryBlock) -> None:
        reduction.send_handle(self._connection, block.descriptor, None)  # the receiver's process number matters on Windows only

    def receive_memory(self) -> MemoryBlock:
        """Return the next memory block from the other process. Raises what `receive` raises."""
        return MemoryBlock.receive(reduction.recv_handle(self._connection))


class Leader:
    """Hold the leader's end of the channel. The leader is rank 0 of the worker.

    Args:
        place: this process's place in the worker.
    """

    def __init__(self, place: Place) -> None:
        self.size = place.size
        self._links = [_Link(descriptor) for descriptor in place.links]

    def gather(self, call: str) -> list[dict[str, Any]]:
        """Wait until all followers have made this call. Returns the values that each has sent with it, by rank from 1.

        Raises:
            JobError: a follower has made another call, or has ended.
        """
        sent = []
        for rank, link in enumerate(self._links, start=1):
            try:
                theirs, values = link.receive(f"process {rank} of this worker", messages.CALL)
            except EOFError:
                raise JobError(f"process {rank} of this worker has ended, and process 0 calls {call}()") from None
            if "state" in values:
                values["state"] = state.from_memory(values["state"], link.receive_memory())
            if theirs != call:
                raise JobError(
                    f"process 0 of this worker calls {call}() and process {rank} calls {theirs}(): all {self.size} processes of a worker "
                    "must make the same calls of offbeat in the same order"
                )
            sent.append(values)
        return sent

    def answer(self, values: dict[str, Any], *blocks: MemoryBlock) -> None:
        """Answer the followers' call, which lets them go on; ``blocks``: memory for them to `receive_memory`."""
        for link in self._links:
            link.send(values)
            for block in blocks:
                link.send_memory(block)

    def hand_out(self, entries: Callable[[int], Entries]) -> None:
        """Send each follower its part of the optimizer's state, which ``entries`` returns for its rank."""
        for rank, link in enumerate(self._links, start=1):
            plain, block = state.to_memory(entries(rank))
            link.send({"state": plain})
            link.send_memory(block)


class Follower:
    """Hold a follower's end of the channel. Every process but the leader is a follower.

    Args:
        place: this process's place in the worker.
    """

    def __init__(self, place: Place) -> None:
        self.rank, self.size = place.rank, place.size
        self._link = _Link(place.links[0])

    def announce(self, call: str, values: dict[str, Any], entries: Entries | None = None) -> None:
        """Announce this process's call to the leader, with its values and, if given, its part of the optimizer's state.

        Raises:
            SystemExit: the leader has ended.
        """
        try:
            if entries is None:
                self._link.send([call, values])
            else:
                plain, block = state.to_memory(entries)
                self._link.send([call, {**values, "state": plain}])
                self._link.send_memory(block)
        except OSError:
            self._end()

    def await_answer(self, check: Check = messages.RESULT) -> dict[str, Any]:
        """Return the leader's answer, once the leader has made the call. Raises what `announce` raises.

        Raises:
                JobError: the call has failed in the leader.
                ProtocolError: the answer fails the check.
        """
        try:
            answer: dict[str, Any] = self._link.receive("process 0 of this worker", check)
        except EOFError:
            self._end()
        if "error" in answer:
            raise JobError(f"the call has failed in process 0 of this worker: {answer['error']}")
        return answer

    def receive_memory(self) -> MemoryBlock:
        """Return a memory block that comes with an answer of the leader. Raises what `announce` raises."""
        try:
            return self._link.receive_memory()
        except EOFError:
            self._end()

    def receive_state(self) -> Entries:
        """Return this process's part of the optimizer's state. Raises what `await_answer` raises."""
        plain = self.await_answer(messages.STATE)["state"]
        return state.from_memory(plain, self.receive_memory())

    def _end(self) -> NoReturn:
        raise SystemExit(LEADERLESS)  # the leader, or the process that has started both, prints why


@cache
def leader(place: Place) -> Leader:
    """Return the leader's end, the same for all optimizers of the process."""
    return Leader(place)


@cache
def follower(place: Place) -> Follower:
    """Return the follower's end, the same for all optimizers of the process."""
    return Follower(place)
