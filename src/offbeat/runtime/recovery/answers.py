"""Repeat to another process the results that messages do not determine: what a server has measured, or read in or done to memory that
others change too.

A server's next process handles its predecessor's messages again (``recorder.py``), and its standby those of the leader (``replica.py``).
Where a result depends on more than messages, the server makes a numbered call, whose result is an *answer*. Each answer is a record, in the
log or for the standby, except the most frequent one, which is implied. One word counts the completed calls: for the next process a word of
the log. A standby takes all calls for completed until it leads: the leader has made them, and sends the answers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

ANSWER: Final = "answer"
"""The kind of a record that holds the number of a call and its answer."""
ALL: Final = (1 << 64) - 1
"""More calls than a server makes."""


class Answers:
    """Number one server's calls, over all of its processes, and keep their answers.

    Args:
        write: writes a record.
        word: the number of completed calls, one unsigned 64-bit integer that outlives this process; None: there is no next process.

    A process may die at any point of a call. The next process finds:

    ==========================  =======================================================================================================
    before the record           nothing: it makes the call again. Nothing has followed from the answer
    after the record            the answer, which it uses; for `change`, see there
    without a record, after     the call incomplete, so it makes the call again: twice must have the same effect as once
    what the call does
    after the word is written   the call complete, with the answer in its record or else the implied one
    ==========================  =======================================================================================================

    >>> word, records = memoryview(bytearray(8)).cast("Q"), []
    >>> first = Answers(records.append, word)
    >>> first.ask(lambda: 17, 0), first.ask(lambda: 0, 0)
    (17, 0)
    >>> records
    [['answer', 0, 17]]
    >>> again = Answers(records.append, word)
    >>> [again.take(record) for record in records]
    [True]
    >>> again.ask(lambda: 18, 0), again.ask(lambda: 19, 0), again.ask(lambda: 20, 0)
    (17, 0, 20)
    """

    def __init__(self, write: Callable[[list[Any]], object], word: memoryview | None = None) -> None:
        self._write, self._word = write, word or memoryview(bytearray(8)).cast("Q")
        self.given: dict[int, Any] = {}
        """By number of the call: the answers that earlier processes have written and this one has not used."""
        self.count = 0
        """Number of calls begun in this server's life, up to the message that this process is handling."""

    def take(self, record: list[Any]) -> bool:
        """Take an answer that another process has written. Returns False for any other record."""
        if record[0] != ANSWER:
            return False
        _, number, answer = record
        self.given[number] = answer
        return True

    def follow(self) -> None:
        """Take each call for completed by the leader, until `lead`."""
        self._word[0] = ALL

    def lead(self) -> None:
        """Make the calls from now on."""
        self._word[0] = self.count

    def ask(self, live: Callable[[], T], implied: T) -> Any:
        """Make a call, or return its answer if an earlier process has completed it.

        Args:
            live: returns the answer, as plain data. If it changes something, a second call in another process must change nothing more.
            implied: the most frequent answer, for which no record is written.
        """
        number = self._begun()
        if number in self.given or number < self._word[0]:
            return self.given.pop(number, implied)
        found = live()
        if found != implied:
            self._write([ANSWER, number, found])
        self._word[0] = self.count
        return found

    def change(self, live: Callable[[Callable[[Any], None]], T], implied: T, is_made: Callable[[], bool]) -> Any:
        """Make a change whose answer cannot be found out afterwards, or return the answer if an earlier process has made the change.

        Args:
            live: makes the change; before it is complete, passes the answer to its argument, unless the answer is ``implied``.
            implied: the most frequent answer, for which no record is written.
            is_made: returns True if an earlier process, which wrote the answer and died, had completed the change. If not, the change is
                made now, and has a new answer.
        """
        number = self._begun()
        if number < self._word[0] or (number in self.given and is_made()):
            return self.given.pop(number, implied)
        self.given.pop(number, None)
        found = live(partial(self.note_lost, number))
        self._word[0] = self.count
        return found

    def note_lost(self, number: int, answer: Any) -> None:
        """Write the answer of a change that is almost complete."""
        self._write([ANSWER, number, answer])

    def _begun(self) -> int:
        self.count += 1
        return self.count - 1
