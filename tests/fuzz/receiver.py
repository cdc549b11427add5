"""What the receivers have in common: the code of the package that takes messages of one conversation, and what may come of a message."""

from __future__ import annotations

import logging
import random
import traceback
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Final

from tests.fuzz import frames
from tests.support.hand_driven_coordinator import Line

from offbeat.errors import ProtocolError
from offbeat.transport.base import Message

SENTENCE_MAX: Final = 3000


class Outcome(StrEnum):
    """What has come of a frame."""

    TAKEN = "taken"
    REFUSED = "refused"
    """With a sentence, and the connection's end."""
    UNFINISHED = "unfinished"
    """More bytes are awaited."""
    ENDED = "ended"
    """The receiver has ended, with a sentence: the sender may end it, or it cannot live without the sender."""


class Finding(Exception):
    """A receiver has done something else."""


class Tracebacks(logging.Handler):
    """Keeps what the package logs of errors of its own: its last guard has caught them, but a check is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            where = "".join(traceback.format_tb(record.exc_info[2])[-2:])
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}\n{where}")

    def __enter__(self) -> Tracebacks:
        logger = logging.getLogger("offbeat")
        logger.addHandler(self)
        self._before, logger.propagate = logger.propagate, False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("offbeat")
        logger.removeHandler(self)
        logger.propagate = self._before

    def check(self) -> None:
        """Raise `Finding` if there was one since the last call."""
        seen, self.seen = self.seen, []
        if seen:
            raise Finding("the last guard has caught: " + "".join(seen))


class Mute(Line):
    """A connection that keeps whether it was closed, and of what was sent only the last reason."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Receiver(ABC):
    """One end of a conversation.

    Args:
        draw: decides everything.
    """

    name: str
    """Of the conversation and of its corpus."""
    lasts = 400
    """Messages after which the state is made anew, so that it does not drift away from what is worth attacking."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.frames = frames.corpus(self.name)
        self._taken = 0
        self._made = False

    @abstractmethod
    def begin(self) -> None:
        """Make the receiver, and a connection of a peer that has done all that is asked of it."""

    @abstractmethod
    def receive(self, message: Message) -> Outcome:
        """Let the receiver have a message. Any exception but `ProtocolError` is a finding."""

    def end(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what `begin` has made."""

    def feed(self, data: bytes) -> Outcome:
        """Let the receiver have bytes of a peer that has the token. Raises `Finding`, or what the receiver has raised."""
        try:
            found, unfinished = frames.decoded(data)
        except ProtocolError as error:
            checked(error)
            return Outcome.REFUSED
        outcome = Outcome.UNFINISHED if unfinished else Outcome.TAKEN
        for frame in found:
            if not self._made or self._taken >= self.lasts:
                self.close()
                self._made = True
                self.begin()
            self._taken += 1
            try:
                outcome = self.receive(Message(frame.header, frame.payload, ()))
            except ProtocolError as error:
                checked(error)
                outcome = Outcome.REFUSED
            if outcome is Outcome.ENDED:
                self.close()
            elif outcome is Outcome.REFUSED:
                self.again()
            if outcome is not Outcome.TAKEN:
                break
        return outcome

    def again(self) -> None:
        """Bring the receiver a new peer in place of the refused one."""
        self.close()

    def close(self) -> None:
        """Release everything; the next frame begins anew."""
        if self._made:
            self._made, self._taken = False, 0
            self.end()


def checked(error: Exception | str) -> None:
    """Raise `Finding` unless an error is a sentence for people: long enough, of a bounded length, on one line and printable."""
    text = str(error)
    if not 12 <= len(text) <= SENTENCE_MAX or not text.isprintable():
        raise Finding(f"no sentence for people: {text[:200]!r} ({len(text)} characters)")
