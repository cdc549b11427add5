"""Show one job on a terminal until the user leaves or the job ends, and act on keys."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

from offbeat.errors import BY_SIGNAL, FAILED
from offbeat.guarded import fail, say
from offbeat.top.reach import Link, first_answer
from offbeat.top.screens import History, job_screen, worker_screen
from offbeat.transport.schema import readable
from offbeat.types import Seconds

DRAW_S: Final[Seconds] = 0.5
ANSWER_S: Final[Seconds] = 10.0
"""Seconds that a job has for its first answer."""
PAGE: Final = 40
"""Lines of a screen where there is no terminal."""
KEYS: Final = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "down", b"\x1b[D": "up", b"\r": "enter", b"\n": "enter"}
BACK: Final = frozenset({"\x1b", "\x7f", "\x08", "b"})


class Screen:
    """What is shown, and what keys change of it.

    Args:
        workers: how many the job has.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.worker: int | None = None
        """The worker that is shown; None: the job is."""
        self.typed = ""
        self.stacks: list[str] = []
        self.only_stacks = False
        """True while a worker's stacks have the whole screen."""
        self.over = False

    def press(self, key: str, order: list[int]) -> bool:
        """Act on a key. Returns True if a worker's stacks are wanted.

        Args:
            key: a character, or ``up``, ``down``, ``enter``.
            order: the workers, as the screen lists them.

        >>> screen = Screen(12)
        >>> [screen.press(key, [3, 1]) for key in "1"], screen.worker, screen.press("enter", [3, 1]), screen.worker
        ([False], None, True, 1)
        >>> screen.press("down", [1, 3]), screen.worker, screen.press("b", [1, 3]), screen.worker
        (True, 3, False, None)
        """
        if key == "q":
            self.over = True
        elif key.isdecimal() and key.isascii():
            self.typed += key
            if int(self.typed) >= self._workers:
                self.typed = ""
            elif int(self.typed) * 10 >= self._workers or self.typed == "0":
                return self._open(int(self.typed))
        elif key == "enter":
            if self.typed:
                return self._open(int(self.typed))
            if self.worker is None and order:
                return self._open(order[0])
        elif key in ("up", "down") and self.worker in order:
            return self._open(order[(order.index(self.worker) + (1 if key == "down" else -1)) % len(order)])
        elif key == "s" and self.worker is not None:
            self.only_stacks = True
            return True
        elif key in BACK:
            self.worker = self.worker if self.only_stacks else None
            self.typed, self.only_stacks = "", False
        return False

    def _open(self, worker: int) -> bool:
        self.typed, self.worker, self.stacks = "", worker, ["its stacks are on their way"]
        return True

    def draw(self, history: History, width: int, height: int, silent_s: Seconds = 0.0) -> RenderableType:
        """Return what is to be seen. ``height``: of the terminal."""
        view = history.view(silent_s)
        if view is None:
            return "the job has not answered yet"
        typed = f"worker {self.typed}_  " if self.typed else ""
        if self.worker is not None:
            foot = f"{typed}b: back   up, down: another worker   s: its stacks, anew   q: leave"
            return worker_screen(view, self.worker, self.stacks, width, height, foot, only_stacks=self.only_stacks)
        return job_screen(view, width, height, f"{typed}a worker's number, or Enter for the first: its phases and stacks   q: leave")


def show(link: Link, name: str, console: Console, *, once: bool) -> int:
    """Show a job until the user leaves or the job ends; ``once``: print one screen of it. Returns the exit status."""
    answer = first_answer(link, ANSWER_S)
    if answer is None:
        why = f"does not answer within {ANSWER_S:g} s: its supervisor is stopped or hangs" if link.closed is None else link.closed
        fail(f"{name}: {readable(why)}")
        return FAILED
    history = History()
    history.add(answer)
    ended = once or _follow(link, history, Screen(answer["about"]["workers"]), console)
    if ended and (view := history.view()) is not None:
        console.print(job_screen(view, console.width, PAGE))
    if ended and not once:
        say(f"{name}: the connection is closed: {readable(link.closed or '')}")
    return 0


def _follow(link: Link, history: History, screen: Screen, console: Console) -> bool:
    """Redraw the screen until the user leaves. Returns True if the job has ended before."""
    heard_at, wanted = time.monotonic(), screen.worker
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while not screen.over and link.closed is None:
            live.update(screen.draw(history, console.width, console.height, time.monotonic() - heard_at), refresh=True)
            for message in link.poll(DRAW_S, (keys,)):
                heard_at = time.monotonic()
                if message["kind"] == "watched":
                    history.add(message)
                elif message["worker"] == screen.worker:
                    screen.stacks = message["lines"] or [f"no stacks: {message['why_not']}"]
            for key in _read(keys):
                if screen.press(key, history.order()):
                    wanted = screen.worker
            if wanted is not None and link.ask_for_stacks(wanted):  # or else once the answer that is awaited has come
                wanted = None
    return not screen.over


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Return a descriptor from which single keys can be read, for as long as the context lasts; the terminal is as before afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(BY_SIGNAL + number)


def _read(descriptor: int) -> list[str]:
    """Return the keys that were pressed. A terminal sends the bytes of one key together."""
    if not select.select([descriptor], [], [], 0.0)[0]:
        return []
    try:
        data = os.read(descriptor, 1024)
    except OSError:
        data = b""
    if not data:
        return ["q"]  # the terminal is gone
    if data.startswith(b"\x1b") and data != b"\x1b":
        return [KEYS[data]] if data in KEYS else []
    return [KEYS.get(bytes([one]), chr(one)) for one in data]
