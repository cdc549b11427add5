"""Parse the faults to inject from the command line."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import ANY, InjectedKill, InjectedSlowdown, Late, ReplayedTrace
from offbeat.types import WorkerId

_SLOW = re.compile(r"(any|\d+)=(\d+(?:\.\d*)?|\.\d+)(?:@(\d+)-(\d+))?")
_TRACE = re.compile(r"trace=([^,]+?)((?:,[^,]*?)*)(?:@(\d+)-(\d+))?")
_POSITIVE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d*)?|\.\d+)")
_KILL = re.compile(r"(\d+)@(\d+)")
_LATE = re.compile(r"(any|\d+)=(\d+(?:\.\d*)?|\.\d+)(?:@(\d+(?:\.\d*)?|\.\d+)%)?")


def parse_slow(text: str, workers: int) -> InjectedSlowdown:
    """Parse a slowdown: ``WORKER=SECONDS``, ``any=SECONDS`` or ``trace=FILE``, optionally ``@FROM-TO``, its first and last version.

    After the file there may be ``,COLUMN``, the column that worker 0 replays, ``,median=SECONDS``, to which the trace is scaled, and
    ``,job=NAME``, of an npz file with several jobs. The file is read, to check it.

    >>> parse_slow("2=0.2@50-100", workers=4)
    InjectedSlowdown(worker=2, seconds=0.2, start=50, stop=100, trace=None)

    Raises:
        ConfigurationError: the text does not have this form, there is no such worker, or the trace does not fit the job.
    """
    if text.startswith("trace="):
        return _parse_trace(text, workers)
    match = _SLOW.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--slow {text}: write WORKER=SECONDS or any=SECONDS, for instance 2=0.2, or 2=0.2@50-100 for versions 50 to 100, or trace=FILE"
        )
    who, seconds, start, stop = match.groups()
    worker = WorkerId(ANY if who == "any" else _existing("worker", int(who), workers, f"--slow {text}"))
    first, last = _versions(text, start, stop)
    return InjectedSlowdown(worker=worker, seconds=float(seconds), start=first, stop=last)


def _versions(text: str, start: str | None, stop: str | None) -> tuple[int, int | None]:
    """Return the versions of ``@FROM-TO``. Raises `ConfigurationError` if they are in the wrong order."""
    first, last = int(start or 0), None if stop is None else int(stop)
    if last is not None and last < first:
        raise ConfigurationError(f"--slow {text}: the last version, {last}, comes before the first, {first}")
    return first, last


def _parse_trace(text: str, workers: int) -> InjectedSlowdown:
    from offbeat import traces  # NumPy is not loaded where no trace is replayed

    form = "write trace=FILE[,COLUMN][,median=SECONDS][,job=NAME][@FROM-TO], for instance trace=times.csv,2,median=0.05"
    match = _TRACE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"--slow {text}: {form}")
    file, more, start, stop = match.groups()
    first, last = _versions(text, start, stop)
    given: dict[str, str] = {}
    for word in more.split(",")[1:]:
        name, is_named, value = word.partition("=")
        name, value = (name, value) if is_named else ("column", word)
        fits = {"column": value.isdecimal() and not is_named, "median": bool(_POSITIVE.fullmatch(value)), "job": bool(value)}
        if name in given or not fits.get(name, False):
            raise ConfigurationError(f"--slow {text}: cannot read {word!r}: {form}; median is a number of seconds above 0, each once")
        given[name] = value
    job, column = given.get("job", ""), int(given.get("column", 0))
    try:
        times = traces.read(file, job)
    except ConfigurationError as error:
        raise ConfigurationError(f"--slow {text}: {error}") from error
    columns = times.shape[1]
    if column + workers > columns:
        raise ConfigurationError(
            f"--slow {text}: the trace has the columns 0 to {columns - 1}, and {workers} workers from column {column} on need {column} to "
            f"{column + workers - 1}: use fewer workers, a lower column, or a trace of more workers"
        )
    scale = 1.0
    if (median_s := given.get("median")) is not None:
        own = float(statistics.median(times.flat))
        if own == 0.0:
            raise ConfigurationError(
                f"--slow {text}: the median of the trace is 0, so that no scale makes it {median_s} s; leave median= out"
            )
        scale = float(median_s) / own
    replayed = ReplayedTrace(path=str(Path(file).absolute()), job=job, column=column, scale=scale)
    return InjectedSlowdown(worker=ANY, seconds=0.0, start=first, stop=last, trace=replayed)


def parse_kill(text: str, workers: int) -> InjectedKill:
    """Parse the death of a worker: ``WORKER@VERSION``.

    >>> parse_kill("1@200", workers=4)
    InjectedKill(worker=1, version=200)

    Raises:
        ConfigurationError: the text does not have this form, or there is no such worker.
    """
    match = _KILL.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"--kill {text}: write WORKER@VERSION, for instance 1@200")
    return InjectedKill(worker=WorkerId(_existing("worker", int(match[1]), workers, f"--kill {text}")), version=int(match[2]))


def parse_late(text: str, servers: int) -> Late:
    """Parse late replies of a server: ``SERVER=SECONDS`` or ``any=SECONDS``, optionally ``@PERCENT%``, the share of replies that are late.

    >>> parse_late("any=4@0.16%", servers=32)
    Late(server=-1, seconds=4.0, share=0.0016)

    Raises:
        ConfigurationError: the text does not have this form, or there is no such server.
    """
    match = _LATE.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--late {text}: write SERVER=SECONDS or any=SECONDS, for instance 1=0.5, or any=4@0.16% for 0.16 % of all replies"
        )
    who, seconds, percent = match.groups()
    server = ANY if who == "any" else _existing("server", int(who), servers, f"--late {text}")
    if percent is not None and float(percent) > 100.0:
        raise ConfigurationError(f"--late {text}: {percent} % of the replies are late; write at most 100 %")
    share = 1.0 if percent is None else float(percent) / 100.0
    return Late(server=server, seconds=float(seconds), share=share)


def _existing(role: str, number: int, count: int, where: str) -> int:
    """Return the number of a worker or a server. Raises `ConfigurationError` if the job has fewer of them."""
    if number >= count:
        raise ConfigurationError(f"{where}: there is no {role} {number}, {count} {role}s are numbered 0 to {count - 1}")
    return number
