"""A link delivers each message once and in order, however often its socket ends, and one end in another process too."""

from __future__ import annotations

import copy
import random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork
from tests.tiers import examples

from offbeat.errors import ProtocolError
from offbeat.transport import link as link_module
from offbeat.transport.base import Connection, Message
from offbeat.transport.link import CONFIRM_EVERY, RESUME, Link
from offbeat.transport.output_commit import OutputCommit
from offbeat.transport.wire import EMPTY


class Ends:
    """Two ends, and the sockets between them; what is under way when a socket ends is lost."""

    def __init__(self) -> None:
        self.links = [Link("session", "the other"), Link("session", "the one")]
        self.heard: list[list[int]] = [[], []]
        self.said = [0, 0]
        self.cut()

    def cut(self) -> None:
        """End the socket, and make another one."""
        network = MemoryNetwork()
        self.hubs = [MemoryHub(network, "token"), MemoryHub(network, "token")]
        for link in self.links:
            link.cut()
        self.links[0].resume(self.hubs[0].connect(self.hubs[1].listen()))

    def say(self, end: int) -> None:
        self.said[end] += 1
        self.links[end].send({"kind": "word", "number": self.said[end]}, payload=(b"text",))

    def hear(self, end: int, most: int = 1000) -> None:
        for connection, item in self.hubs[end].poll(0.0)[:most]:
            assert isinstance(item, Message)
            self.take(end, connection, item)

    def take(self, end: int, connection: Connection, message: Message) -> None:
        link = self.links[end]
        if message.header["kind"] == "resume":
            RESUME.check(message.header, "the other")
            if end == 1:
                link.resume(connection)
            link.resumed(message.header["received"])
        elif (taken := link.take(message)) is not None:
            assert bytes(taken.payload) == b"text"
            self.heard[end].append(taken.header["number"])

    def another_process(self, end: int) -> None:
        """Go on with what a snapshot has kept."""
        self.links[end] = copy.deepcopy(self.links[end])
        self.cut()


@examples(300)
@given(st.integers(0, 2**32), st.sampled_from((1, 3, CONFIRM_EVERY)))
def test_each_message_comes_once_and_in_order(seed: int, confirm_every: int) -> None:
    with patch.object(link_module, "CONFIRM_EVERY", confirm_every):
        come_once_and_in_order(random.Random(seed))


def come_once_and_in_order(chance: random.Random) -> None:
    ends = Ends()
    for _ in range(chance.randrange(80)):
        end = chance.randrange(2)
        what = chance.choice([ends.say] * 4 + [ends.hear] * 4 + [lambda _: ends.cut(), ends.another_process])
        what(end)
    ends.cut()
    for _ in range(4):
        ends.hear(0)
        ends.hear(1)
    for end in (0, 1):
        ends.say(end)
        ends.hear(1 - end)
        assert ends.heard[1 - end] == list(range(1, ends.said[end] + 1))
    assert not ends.links[0]._kept, "what the other end has, as its last message says, is not kept"


def test_nothing_is_kept_for_long_if_one_end_says_nothing() -> None:
    ends = Ends()
    ends.hear(1)
    ends.hear(0)
    most = 0
    for _ in range(20 * CONFIRM_EVERY):
        ends.say(0)
        ends.hear(1)
        ends.hear(0)
        most = max(most, len(ends.links[0]._kept))
    assert CONFIRM_EVERY <= most <= CONFIRM_EVERY + 1


def test_a_standby_keeps_no_account_of_what_it_has_handled() -> None:
    """It sends nothing."""
    link = Link("session", "worker 0", shares_memory=False, commit=OutputCommit())
    for number in range(1, 10 * CONFIRM_EVERY):
        link.note(number)
    assert len(link._confirmable) <= CONFIRM_EVERY


def test_a_confirmation_that_cannot_be_is_refused() -> None:
    link = Link("session", "worker 1")
    with pytest.raises(ProtocolError, match="has received 1 messages \\(expected at most 0"):
        link.take(Message({"kind": "confirm", "received": 1}, EMPTY, ()))
    with pytest.raises(ProtocolError, match="confirm"):
        link.take(Message({"kind": "confirm", "received": "x"}, EMPTY, ()))


def test_what_is_sent_before_the_other_end_goes_on_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    ends.say(0)
    unsent = [ends.links[0].unsent]
    ends.hear(1)
    assert ends.heard[1] == []
    ends.hear(0)
    monkeypatch.setattr(MemoryConnection, "unsent", 5)
    unsent.append(ends.links[0].unsent)
    assert unsent == [1, 5], "a message, and then what the operating system has not taken of it"
    ends.hear(1)
    assert ends.heard[1] == [1]


@pytest.mark.parametrize(
    ("stamp", "words"), [("x", "a list"), ([1], "2 items"), ([1, -1], "integer"), ([3, 0], "none to be missing"), ([1, 7], "at most 0")]
)
def test_a_stamp_that_cannot_be_is_refused(stamp: object, words: str) -> None:
    link = Link("session", "worker 1")
    with pytest.raises(ProtocolError, match=words):
        link.take(Message({"kind": "word", "at": stamp}, EMPTY, ()))
    assert link.received == 0


def test_a_lent_payload_is_not_copied() -> None:
    link, data = Link("session", "the other"), memoryview(bytearray(b"text"))
    link.send({"kind": "word"}, payload=(data,))
    link.send({"kind": "word"}, payload=(data,), lent=True)
    data[:] = b"else"
    copied, lent = link._kept
    assert copied.payload == [b"text"] and lent.payload[0] is data


def test_a_message_is_kept_for_its_region_alone() -> None:
    """As long as one is kept, so are those after it: a rank without regions would keep all that it has ever sent."""
    commit = OutputCommit()
    link = Link("session", "worker 0", shares_memory=False, commit=commit)
    link.note(1)
    link.keep_carried()
    assert link.confirmed == 1
    link.bind("push", memoryview(bytearray(4)))
    link.note(2)
    link.keep_carried()
    assert link.confirmed == 1
    link.release_carried()
    assert link.confirmed == 2
