"""``offbeat view``: the page of a job from its journal, which may have ended, still grow, or be cut off."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.journal.growing import Growing, Replaced
from offbeat.journal.summary import Tally
from offbeat.types import Seconds
from offbeat.view.dashboard import bound, page_server
from offbeat.view.happenings import cut
from offbeat.view.job_view import JobView
from offbeat.view.listening import exposed

LOOK_S: Final[Seconds] = 0.5
"""Seconds between two looks at a journal that may grow."""
FIGURES: Final = 300
"""About how often the job's figures are worked out while a journal is read that is there already: points of the curves."""
LOCKED: Final = 500
"""Records that are taken at once; between them, the page is served."""
STILL_S: Final[Seconds] = 15.0
"""Seconds after which a journal without an end that has not grown counts as one of a job that no longer runs."""


class JournalPage:
    """Reads a journal into what the page shows.

    Args:
        path: the journal.
        view: what the page shows.
    """

    def __init__(self, path: Path, view: JobView) -> None:
        self._path, self._view = path, view
        self._growing, self._tally = Growing(path), Tally()
        self._figures_at: Seconds = 0.0
        self._step_s: Seconds = 0.0
        self.over = False
        """True if nothing more will come."""

    def first(self) -> None:
        """Check that this is a journal. Raises `ConfigurationError` as `Growing.read` does."""
        for _ in Growing(self._path).read():
            return
        if self._path.stat().st_size == 0 or Growing(self._path).rest is None:
            raise ConfigurationError(f"{self._path}: not a journal: no whole record is in it yet")

    def look(self, lock: AbstractContextManager[object]) -> None:
        """Read what has come; ``lock``: held while the view is used."""
        before = self._growing.place
        try:
            self._take(lock)
        except Replaced:
            self._stop(lock, f"{self._path.name} is another journal now: start offbeat view again to see it.")
        except ConfigurationError as error:
            self._stop(lock, f"{cut(error)}.")
        else:
            with lock:
                if self._growing.place != before:
                    self._figures()
                self._say()

    def _stop(self, lock: AbstractContextManager[object], why: str) -> None:
        self.over = True
        with lock:
            self._view.note("journal", why)

    def _take(self, lock: AbstractContextManager[object]) -> None:
        large = self._path.stat().st_size - self._growing.place > 1 << 20
        records = self._growing.read()
        more = True
        while more:
            more = False
            with lock:
                for record in islice(records, LOCKED):
                    more = True
                    self._tally.add(record)
                    self._view.record(record)
                    if record["t"] - self._figures_at >= max(1.0, self._step_s):
                        self._figures()
                if large:
                    self._view.note("journal", f"{self._path.name} is being read, and is at {self._view.t:,.0f} s.")
            time.sleep(0)  # lets a thread that waits for the lock have it
            # How long the whole will be is not known: the steps are longer, the more has been read.
            self._step_s = max(self._step_s, self._view.t / FIGURES) if large else 1.0

    def _figures(self) -> None:
        self._figures_at = self._view.t
        self._view.status(self._tally.summary(brief=True))

    def _say(self) -> None:
        view = self._view
        if view.over:
            self.over = True
            view.note("journal", None)
            return
        still_s = time.time() - self._path.stat().st_mtime
        view.live = still_s < STILL_S
        rest = f" {self._growing.rest}" if self._growing.rest is not None and not view.live else ""
        grows = "it is read as it grows" if view.live else f"nothing was written to it for {still_s:,.0f} s: the job was killed, or hangs"
        view.note("journal", None if view.live and not rest else f"{self._path.name} has no end yet; {grows}.{rest}")


def show(path: Path, host: str, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve the page of a journal until Ctrl-C.

    Args:
        path: the journal.
        host: where to listen.
        port: None: the usual one, or another.
        tell: prints a sentence.

    Raises:
        ConfigurationError: it is no journal, the port is in use, or the extra is not installed.
    """
    view = JobView(path.name, live=False)
    page = JournalPage(path, view)
    page.first()
    secret = secrets.token_urlsafe(16)
    try:
        listener = bound(host, port, secret)
    except ConfigurationError as error:
        raise ConfigurationError(f"--port {port}: {error}") from error
    server = page_server(view, listener, secret, path)
    server.start()
    if (warning := exposed(host)) is not None:
        tell(warning)
    tell(f"{path}: {server.address} (Ctrl-C ends it)")
    asked = False
    try:
        while True:
            if not page.over:
                page.look(server.hub.lock)
            if not asked and not view.live and view.t > 0.0:  # while the job runs, it takes no core from it without having been asked
                asked = server.hub.ask()
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        server.close()
