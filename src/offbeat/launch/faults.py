"""Parse the faults to inject from the command line."""

from __future__ import annotations

import re

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import ANY, InjectedKill, InjectedSlowdown, Late
from offbeat.types import WorkerId

_SLOW = re.compile(r"(any|\d+)=(\d+(?:\.\d*)?|\.\d+)(?:@(\d+)-(\d+))?")
_KILL = re.compile(r"(\d+)@(\d+)")
_LATE = re.compile(r"(any|\d+)=(\d+(?:\.\d*)?|\.\d+)(?:@(\d+(?:\.\d*)?|\.\d+)%)?")


def parse_slow(text: str, workers: int) -> InjectedSlowdown:
    """Parse a slowdown: ``WORKER=SECONDS`` or ``any=SECONDS``, optionally ``@FROM-TO``, the first and last version it applies to.

    >>> parse_slow("2=0.2@50-100", workers=4)
    InjectedSlowdown(worker=2, seconds=0.2, start=50, stop=100)

    Raises:
        ConfigurationError: the text does not have this form, or there is no such worker.
    """
    match = _SLOW.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--slow {text}: write WORKER=SECONDS or any=SECONDS, for instance 2=0.2, or 2=0.2@50-100 for versions 50 to 100"
        )
    who, seconds, start, stop = match.groups()
    worker = WorkerId(ANY if who == "any" else _existing("worker", int(who), workers, f"--slow {text}"))
    if stop is not None and int(stop) < int(start):
        raise ConfigurationError(f"--slow {text}: the last version, {stop}, comes before the first, {start}")
    return InjectedSlowdown(worker=worker, seconds=float(seconds), start=int(start or 0), stop=None if stop is None else int(stop))


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
