"""``offbeat report``: its options, and what is shown of journals that are cut, growing, contradictory or not there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat import __version__
from offbeat.commands.advise import rows_of
from offbeat.errors import MISTAKE, ConfigurationError
from offbeat.files import write_result
from offbeat.guarded import fail, say
from offbeat.journal.arrivals import Record
from offbeat.journal.file import Records
from offbeat.journal.summary import Tally
from offbeat.report import chrome, tables_csv
from offbeat.report.lanes import Chart
from offbeat.report.table import comparison, console, job_tables
from offbeat.report.waits import WaitStory
from offbeat.report.why import story
from offbeat.view.content import Source
from offbeat.view.of_journal import Reading
from offbeat.view.page import render

WAIT = "wait"


def report(
    journals: Annotated[list[Path], typer.Argument(help="Journals of one or more jobs.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(help="Write one journal as a page to this file, for any browser; it needs no network.")
    ] = None,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Add to the page what other rules would have done, simulated on this run's times, in about 10 s."),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw a timeline of the workers' states to this PNG file.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline of one journal to this JSON file, for ui.perfetto.dev and chrome://tracing."),
    ] = None,
    tables: Annotated[Path | None, typer.Option("--csv", help="Write one journal as CSV tables into this folder (docs/tools.md).")] = None,
    why: Annotated[
        str | None,
        typer.Option(
            help="wait: for whom workers waited, in groups; or the causes, the latest first, of push=WORKER@CLOCK, of the end of "
            "wait=WORKER@SECONDS, or of a record."
        ),
    ] = None,
) -> None:
    """Summarize the journals of jobs: finished ones, running ones, and what is left of others."""
    screen = console()
    for option, path, what in (("--trace", trace, "a trace is"), ("--csv", tables, "tables are"), ("--html", html, "a page is")):
        if path is not None and len(journals) > 1:
            raise ConfigurationError(f"{option} {path}: {what} of one job, but {len(journals)} journals are given; give one")
    if replay and html is None:
        raise ConfigurationError("--replay: the simulated rules are a part of the page; give --html FILE, or see offbeat advise")
    if html is not None and any(path.exists() and html.exists() and html.samefile(path) for path in journals):
        raise ConfigurationError(f"--html {html}: this is the journal itself; choose another file for the page")
    if why is not None:
        for path in journals:
            lines = _waits(path) if why == WAIT else story(Records(path), why)
            # A terminal breaks a line at any letter; what a file or another program gets stays a line each.
            screen.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=not screen.is_terminal)
        return
    if html is not None:
        _page(journals[0], html, replay=replay)
        screen.print(f"page: {html}", markup=False, highlight=False, soft_wrap=True)
    jobs, failures = [], []
    for path in journals if html is None or picture is not None else ():
        try:
            jobs.append(_read(path, drawn=picture is not None))
        except ConfigurationError as error:
            failures.append(str(error))
    if html is None:
        for one, _ in jobs:
            screen.print(*job_tables(one, screen.width), sep="\n", highlight=False)
        if len(jobs) > 1:
            screen.print(comparison([one for one, _ in jobs], screen.width))
    if trace is not None:
        chrome.write(Records(journals[0]), trace)
        screen.print(f"trace: {trace}")
    if tables is not None:
        names = tables_csv.write(Records(journals[0]), tables)
        screen.print(f"tables: {tables}: {', '.join(names)}")
    if picture is not None and jobs:
        from offbeat.report.timeline import draw  # matplotlib is optional, and slow to load

        draw(jobs, picture)
        screen.print(f"picture: {picture}")
    for failure in failures:
        fail(failure)
    if failures:
        raise typer.Exit(MISTAKE)


def _read(path: Path, *, drawn: bool) -> tuple[dict[str, Any], Chart]:
    """Return the summary of a journal, or of what can be read of it, and its chart if this is drawn."""
    tally, chart = Tally(), Chart()

    def add(record: Record) -> None:
        tally.add(record)
        if not record.get("optimizer"):
            chart.add(record)

    _feed(path, add if drawn else tally.add)
    chart.end()
    found = tally.summary()
    if found["ok"] is None:
        say(f"warning: {path} has no end: the job goes on, or was killed; its last record is of {found['elapsed_s']:,.1f} s")
    return found, chart


def _feed(path: Path, add: Callable[[Record], None]) -> Records:
    """Hand what can be read of a journal to a function; what is missing is said."""
    records = Records(path, tolerant=True)
    records.feed(add)
    if records.cut is not None:
        say(f"warning: {records.cut}")
    return records


def _waits(path: Path) -> Iterator[str]:
    """Tell for whom workers waited, according to what can be read of a journal."""
    waits = WaitStory()
    _feed(path, waits.add)
    return waits.lines()


def _page(path: Path, html: Path, *, replay: bool) -> None:
    """Write the page of a journal."""
    reading = Reading(path.name)
    records = _feed(path, reading.add)
    reading.end()
    made = f"offbeat {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    digest = _digest(path, records.nbytes)
    source = Source(path.name, records.nbytes, digest, records.cut, made, reading.tally.problems())
    if replay:
        reading.view.advise(rows_of(path))
    write_result(html, render(reading.view, source))


def _digest(path: Path, nbytes: int) -> str:
    """Return the SHA-256 of the first bytes of a file: those that were read, though the job may go on to write."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while nbytes > 0 and (data := file.read(min(nbytes, 1 << 20))):
            found.update(data)
            nbytes -= len(data)
    return found.hexdigest()
