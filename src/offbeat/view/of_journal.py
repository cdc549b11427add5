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
from offbeat.journal.arrivals import Record
from offbeat.journal.growing import Growing, Replaced
from offbeat.journal.summary import Tally
from offbeat.types import Seconds
from offbeat.view.dashboard import bound, page_server
from offbeat.view.happenings import cut
from offbeat.view.job_view import UNREADABLE, JobView
from offbeat.view.listening import exposed

LOOK_S: Final[Seconds] = 0.5
"""Seconds between two looks at a journal that may grow."""
FIGURES: Final = 300
"""About how often the job's figures are worked out while a journal is read that is there already: points of the curves."""
RECORDS: Final = 10
"""Figures are worked out after so many records for each worker, at least."""
LOCKED: Final = 500
"""Records that are taken at once; between them, the page is served."""
STILL_S: Final[Seconds] = 15.0
"""Seconds after which a journal without an end that has not grown counts as one of a job that no longer runs."""


class Reading:
    """Hands the records of a journal to what the page shows, and now and then the job's figures.

    Args:
        name: of the journal.
    """

    def __init__(self, name: str) -> None:
        self.tally = Tally()
        self.view = JobView(name, live=False, costs=self.tally.costs)
        self.step_s: Seconds = 0.0
        """Seconds of the job between two figures, at least."""
        self._figures_at: Seconds = 0.0
        self._left = 0
        """How many records come before the next figures, which take the longer, the more workers there are."""

    def add(self, record: Record) -> None:
        """Take the next record. Raises what a record leads to that offbeat has not written."""
        self.tally.add(record)
        self.view.add(record)
        self._left -= 1
        if self._left <= 0 and record["t"] - self._figures_at >= self.step_s:
            self.figures()

    def figures(self, *, brief: bool = True) -> None:
        """Work out the job's figures."""
        self._figures_at = self.view.t
        self.view.status(self.tally.summary(brief=brief))
        # How long the whole will be is not known: the steps are longer, the more has been read.
        self.step_s = max(self.step_s, self.view.t / FIGURES)
        self._left = RECORDS * len(self.tally.costs.workers)

    def end(self) -> None:
        """Close what is under way: nothing more will come."""
        self.view.end()
        self.figures(brief=False)


class JournalPage(Reading):
    """Reads a journal that may grow into what the page shows.

    Args:
        path: the journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.name)
        self._path, self._growing = path, Growing(path)
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
                    self.figures()
                self._say()

    def _stop(self, lock: AbstractContextManager[object], why: str) -> None:
        self.over = True
        with lock:
            self.view.note("journal", why)

    def _take(self, lock: AbstractContextManager[object]) -> None:
        large = self._path.stat().st_size - self._growing.place > 1 << 20
        records = self._growing.read()
        more = True
        while more:
            more = False
            with lock:
                for record in islice(records, LOCKED):
                    more = True
                    try:
                        self.add(record)
                    except UNREADABLE:
                        self.view.unreadable()
                if large:
                    self.view.note("journal", f"{self._path.name} is being read, and is at {self.view.t:,.0f} s.")
            time.sleep(0)  # lets a thread that waits for the lock have it
        if not large:
            self.step_s = 1.0

    def _say(self) -> None:
        view = self.view
        if view.over:
            self.over = True
            self.end()
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
    page = JournalPage(path)
    page.first()
    view = page.view
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
