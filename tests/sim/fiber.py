"""A thread that runs only while its owner waits for it: real code that blocks, in a job that is driven one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stopped(BaseException):
    """Ends a fiber where it waits."""


class Fiber:
    """Run a function in a thread of its own, by turns with the owner.

    Args:
        body: what to run, from the first `resume` on.

    >>> fiber = Fiber(lambda: print(fiber.wait()))
    >>> fiber.resume()
    >>> fiber.resume("hello")
    hello
    >>> fiber.over
    True
    """

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._word: str | None = ""
        self._error: BaseException | None = None
        self.over = False

    def resume(self, word: str = "") -> None:
        """Let it run until it waits or ends. An error that ends it is raised here. ``word``: what its `wait` returns."""
        self._give_turn(word)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> str:
        """Give the turn back, from inside of the function, and return the word with which it comes again."""
        self._back.release()
        self._turn.acquire()
        if self._word is None:
            raise Stopped
        return self._word

    def stop(self) -> None:
        """End it where it waits. It runs its cleanup."""
        while self._thread.is_alive():
            self._give_turn(None)
            if self.over:
                self._thread.join()

    def _give_turn(self, word: str | None) -> None:
        self._word = word
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()

    def _run(self) -> None:
        try:
            self._body()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.over = True
            self._back.release()
