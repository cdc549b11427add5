"""Read and check the script of a simulation's faults: which worker or server dies, stops or joins, and when. ``simulation.py`` applies it.

One fault per line, or separated by ``;`` on a command line; ``#`` begins a comment. Times are seconds since the job began::

    kill worker=2 at=12.5                   # the process ends, what it has not pushed is lost, its connection closes
    vanish worker=3 at=20                   # the same, but the connection stays open: only the timeout detects it
    restart worker=2 at=30                  # the next incarnation of a dead worker joins
    freeze worker=1 at=5 for=20             # the process stands still and sends nothing, as under SIGSTOP
    slow worker=0 at=3 for=10 factor=4      # computing takes four times as long during this time
    join worker=7 at=40                     # a worker absent until now joins: one of the job's workers, or an additional one
    stop server=1 at=8 for=3                # the server stands still; messages to it wait
    kill server=1 at=8 for=0.3              # its process dies, and after this time another one goes on where it was
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.sim.fault_kinds import FAULTS, SETTINGS, Fault, Freeze, Join, Kill, KillServer, Restart, Slow, Stop, Vanish, spelled
from offbeat.spec import hint
from offbeat.types import Seconds, WorkerId

NEEDS: Final[dict[type[Fault], str]] = {Restart: "dead", Join: "absent"}
BECOMES: Final[dict[type[Fault], str]] = {Kill: "dead", Vanish: "dead", Restart: "present", Join: "present"}
"""NEEDS: the state a worker must be in for a fault ("present" for kinds not listed); BECOMES: its state afterwards."""


@dataclass(frozen=True)
class Script:
    """Faults ordered by time; faults of one time in the order in which they were written."""

    faults: tuple[Fault, ...] = ()

    @property
    def spelling(self) -> str:
        """The script on one line, in the syntax that `script` parses."""
        return "; ".join(spelled(fault) for fault in self.faults)

    @property
    def absent(self) -> frozenset[WorkerId]:
        """The workers that are absent at the start because they join later."""
        return frozenset(fault.worker for fault in self.faults if isinstance(fault, Join))

    def total(self, workers: int) -> int:
        """Return the number of workers after all joins, for a job configured with ``workers``."""
        return max([workers, *(worker + 1 for worker in self.absent)])

    def windows(self, worker: WorkerId) -> list[tuple[Seconds, Seconds, float]]:
        """Return when this worker is slow or frozen: (start, stop, factor) for `latency.base.stretched`; frozen is an infinite factor.

        Killing a frozen process ends its freeze. Slowness belongs to the machine and outlasts the process.
        """
        windows: list[tuple[Seconds, Seconds, float]] = []
        for fault in self.faults:
            if isinstance(fault, Slow | Freeze) and fault.worker == worker:
                windows.append((fault.at_s, fault.at_s + fault.for_s, fault.factor if isinstance(fault, Slow) else math.inf))
            elif isinstance(fault, Kill | Vanish) and fault.worker == worker and windows and math.isinf(windows[-1][2]):
                start, stop, factor = windows[-1]
                windows[-1] = (start, min(stop, fault.at_s), factor)
        return windows

    def check(self, workers: int, servers: int) -> None:
        """Check that every fault can happen in a job of this size.

        A worker that joins is one of the job's 0 .. workers - 1, absent until then, or has the next number after these, without a gap.

        Raises:
            ConfigurationError: there is no such worker or server, or it is not in the state that the fault needs: a restart of one that
                is not dead, or two windows of one worker, or of one server, that overlap.
        """
        for place, joiner in enumerate(sorted(worker for worker in self.absent if worker >= workers)):
            if joiner != workers + place:
                raise ConfigurationError(
                    f"faults: join worker={joiner}: additional workers must be numbered from {workers} without a gap, "
                    f"and no fault joins worker {workers + place}; number the joining workers from {workers}"
                )
        total = self.total(workers)
        for fault in self.faults:
            what, number, size = ("server", fault.server, servers) if isinstance(fault, Stop) else ("worker", fault.worker, total)
            if number >= size:
                raise ConfigurationError(
                    f"faults: {spelled(fault)}: there is no {what} {number}; the job's {what}s are numbered 0 to {size - 1}"
                )
        self._check_states()
        self._check_overlaps()

    def _check_states(self) -> None:
        states = dict.fromkeys(self.absent, "absent")
        for fault in self.faults:
            if isinstance(fault, Stop):
                continue
            state, needed = states.get(fault.worker, "present"), NEEDS.get(type(fault), "present")
            if state != needed:
                raise ConfigurationError(f"faults: {spelled(fault)}: worker {fault.worker} is {state} then, and must be {needed} for this")
            states[fault.worker] = BECOMES.get(type(fault), state)

    def _check_overlaps(self) -> None:
        last: dict[str, Slow | Freeze | Stop] = {}
        for fault in self.faults:
            target = f"server {fault.server}" if isinstance(fault, Stop) else f"worker {fault.worker}"
            before = last.get(target)
            if isinstance(fault, Kill | Vanish) and isinstance(before, Freeze):
                del last[target]
            if not isinstance(fault, Slow | Freeze | Stop):
                continue
            if before is not None and fault.at_s < before.at_s + before.for_s:
                raise ConfigurationError(f"faults: {spelled(fault)}: {target} is still in {spelled(before)} then; leave no overlap")
            last[target] = fault


def script(spec: str | Path | Script) -> Script:
    """Return the script given as text, as the path of a file, or as a `Script`.

    >>> script("restart worker=2 at=30; kill worker=2 at=12.5").faults
    (Kill(at_s=12.5, worker=2), Restart(at_s=30.0, worker=2))
    >>> script("").faults
    ()

    Raises:
        ConfigurationError: it does not parse; the message names the line, the character and what was expected.
    """
    if isinstance(spec, Script):
        return spec
    where, text = "faults", str(spec)
    if isinstance(spec, Path) or _is_file(text):
        where = str(spec)
        try:
            text = Path(spec).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the faults in {spec}: {error}") from error
    elif text.strip() and not re.search(r"[=;#\n]", text) and text.split()[0].lower() not in FAULTS:
        raise ConfigurationError(f"faults {text!r}: neither a file nor a fault; write for instance 'kill worker=2 at=12.5'")
    faults = [
        _parse(f"{where}, line {number}", statement.group(), statement.start())
        for number, line in enumerate(text.splitlines(), start=1)
        for statement in re.finditer(r"[^;]+", line.partition("#")[0])
        if statement.group().strip()
    ]
    return Script(tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a script of several lines may be too long for a file's name
        return False


def _parse(where: str, statement: str, offset: int) -> Fault:
    """Parse one fault. ``offset`` is the column at which the statement begins in its line, from 0."""
    verb, *settings = re.finditer(r"\S+", statement)
    kind = FAULTS.get(verb.group().lower())
    if kind is None:
        raise ConfigurationError(
            f"{where}, character {offset + verb.start() + 1}: there is no fault {verb.group()!r}{hint(verb.group(), FAULTS)}; "
            f"expected one of {', '.join(FAULTS)}"
        )
    if any(setting.group().startswith("server=") for setting in settings):
        kind = FAULTS.get(f"{verb.group().lower()} server", kind)
    known = [key for key, (field, _) in SETTINGS.items() if field in kind._fields]
    values: dict[str, Any] = {}
    for setting in settings:
        here = f"{where}, character {offset + setting.start() + 1}"
        key, equals, value = setting.group().partition("=")
        if not equals or key not in known:
            meant = hint(key, known) if equals else ""
            expected = " ".join(f"{name}=..." for name in known)
            raise ConfigurationError(f"{here}: cannot use {setting.group()!r}{meant}; expected {verb.group()} {expected}")
        if SETTINGS[key][0] in values:
            raise ConfigurationError(f"{here}: {key} is given a second time")
        values[SETTINGS[key][0]] = _value(f"{where}, character {offset + setting.start() + len(key) + 2}", key, value)
    if missing := [key for key in known if SETTINGS[key][0] not in values]:
        end = offset + len(statement.rstrip()) + 1
        raise ConfigurationError(f"{where}, character {end}: {verb.group()} needs {' '.join(f'{key}=...' for key in missing)} too")
    return kind(**values)


def _value(where: str, key: str, text: str) -> int | float:
    if key in ("worker", "server"):
        if re.fullmatch(r"\d+", text, re.ASCII):
            return int(text)
    else:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if 0.0 <= number < math.inf and (key == "at" or number > 0.0):
            return number
    raise ConfigurationError(f"{where}: {key}={text} is not {SETTINGS[key][1]}")


__all__ = ["FAULTS", "Fault", "Freeze", "Join", "Kill", "KillServer", "Restart", "Script", "Slow", "Stop", "Vanish", "script", "spelled"]
