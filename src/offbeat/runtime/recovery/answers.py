"""Return to the next process of a server what messages do not tell it: what it has seen in, and done to, memory that others change too.

The next process handles the messages of its predecessor again (``recorder.py``). Where handling them calls for something that messages do
not determine, the call is numbered, and its result is an *answer*. One word of the log counts the calls that are over; answers are records
of the log, but for the most frequent one, which is implied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

ANSWER: Final = "answer"
"""The kind of a record with the number of a call and its answer."""


class Answers:
    """The answers of one server's calls, through all of its processes.

    Args:
        write: writes a record.
        word: one unsigned 64-bit number that outlives this process: how many calls are over.

    A process may die at any of these points; the next one finds, for the call in which it happened:

    ==========================  =======================================================================================================
    before the record           nothing: the call is made again. Nothing has followed from its answer
    after the record            the answer, which is given again; for `change`, see there
    without a record, after     the call counts as not over, and is made again: what it does must come to the same when it is done twice
    what the call does
    after the word is written   that the call is over: the answer of its record, or the implied one
    ==========================  =======================================================================================================

    >>> word, records = memoryview(bytearray(8)).cast("Q"), []
    >>> first = Answers(records.append, word)
    >>> first.ask(lambda: 17, 0), first.ask(lambda: 0, 0)
    (17, 0)
    >>> records
    [['answer', 0, 17]]
    >>> again = Answers(records.append, word)
    >>> again.given = {number: answer for _, number, answer in records}
    >>> again.ask(lambda: 18, 0), again.ask(lambda: 19, 0), again.ask(lambda: 20, 0)
    (17, 0, 20)
    """

    def __init__(self, write: Callable[[list[Any]], None], word: memoryview) -> None:
        self._write, self._word = write, word
        self.given: dict[int, Any] = {}
        """By number of the call: the answers that an earlier process has written."""
        self.count = 0
        """Calls begun in the life of this server, as far as the messages handled by this process come to."""

    def ask(self, live: Callable[[], T], implied: T) -> Any:
        """Make a call, or return its answer if an earlier process has made it.

        Args:
            live: returns the answer, as plain data. If it changes something, a second call in another process must change nothing more.
            implied: the answer that is not written.
        """
        number = self._begun()
        if number in self.given or number < self._word[0]:
            return self.given.pop(number, implied)
        found = live()
        if found != implied:
            self._note(number, found)
        self._word[0] = self.count
        return found

    def change(self, live: Callable[[Callable[[Any], None]], T], implied: T, is_made: Callable[[], bool]) -> Any:
        """Make a change whose answer cannot be found out later, or return the answer if an earlier process has made it.

        Args:
            live: makes the change, and before it is complete calls its argument with the answer, unless that is ``implied``.
            implied: the answer that is not written.
            is_made: returns True if an earlier process, which has written the answer and then died, has completed the change. Otherwise the
                change is made now, and its own answer counts.
        """
        number = self._begun()
        if number < self._word[0] or (number in self.given and is_made()):
            return self.given.pop(number, implied)
        self.given.pop(number, None)
        found = live(partial(self.note_lost, number))
        self._word[0] = self.count
        return found

    def note_lost(self, number: int, answer: Any) -> None:
        """Write the answer of a change that is about to be complete."""
        self._note(number, answer)

    def _begun(self) -> int:
        self.count += 1
        return self.count - 1

    def _note(self, number: int, answer: Any) -> None:
        self._write([ANSWER, number, answer])
