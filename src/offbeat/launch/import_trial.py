"""Try imports in the process that workers are forked from, and leave out those that would do harm.

An import that starts a thread, opens CUDA or seeds random numbers has effects that do not survive a fork, or that each worker needs for
itself. They are not known before the import, and cannot be undone. So a fork of this process imports one module after another, and checks
itself after each. If all is well, the fork continues as the process that workers are forked from, and this process only waits for its end.
If not, the fork ends, and another one begins again without that module. So without trouble nothing is imported twice.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from offbeat.launch.environment import TORCHRUN
from offbeat.launch.process_exit import end_as
from offbeat.launch.processes import describe, die_with_parent
from offbeat.types import Seconds

IMPORT_S: Seconds = 30.0
"""Most seconds for the import of one module."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Prefixes of the devices that a GPU's library opens."""


def import_all(found: Sequence[str], keep: int) -> list[tuple[str, str]]:
    """Import modules in a fork of this process. This returns in the fork only; the process that called it ends with the fork.

    Args:
        found: as in `ScriptImports.modules`.
        keep: a descriptor whose end others await: only the fork keeps it open.

    Returns:
        The modules that were left out, each with the reason.
    """
    left_out: dict[str, str] = {}
    while rest := [item for item in found if _top(item) not in map(_top, left_out)]:
        reading, writing = os.pipe()
        prepare = die_with_parent()
        pid = quiet_fork()
        if pid == 0:
            os.close(reading)
            prepare()
            with os.fdopen(writing, "w", buffering=1) as log:
                _import_each(rest, log)
            break
        os.close(writing)
        trouble = _watch(pid, reading)
        os.close(reading)
        if trouble is None:
            _end_with(pid, keep)
        left_out[trouble[0]] = trouble[1]
    return [(item.partition(":")[0], why) for item, why in left_out.items()]


def _top(item: str) -> str:
    """Return the top package of a module. If one of its modules is left to the workers, all are."""
    return item.partition(":")[0].partition(".")[0]


def quiet_fork() -> int:
    """Fork without Python's warning about threads: libraries handle forks of their own threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _watch(pid: int, reading: int) -> tuple[str, str] | None:
    """Follow a fork's imports until all are done, and return None; else end it, and return the first import with trouble and why."""
    item, text, deadline = "", b"", time.monotonic() + IMPORT_S
    why = f"it was not done within {IMPORT_S:g} s"
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(reading, 1 << 12)
        text += block
        *lines, text = text.split(b"\n")
        for line in lines:
            mark, word = chr(line[0]), line[1:].decode(errors="replace")
            if mark == ".":
                return None
            item, why, deadline = (word, why, time.monotonic() + IMPORT_S) if mark == "?" else (item, word, deadline)
            if mark == "!":
                break
        else:
            if block:
                continue
            why = "it ends the process"
        break
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    ended = os.waitstatus_to_exitcode(status)
    return item, f"{why} ({describe(ended)})" if why.startswith("it ends") else why


def _end_with(pid: int, keep: int) -> NoReturn:
    os.close(keep)
    _, status = os.waitpid(pid, 0)
    end_as(os.waitstatus_to_exitcode(status))


def _import_each(items: Sequence[str], log: Any) -> None:
    """Import all modules, and report each; the first with trouble ends this process."""

    def stop(why: str) -> NoReturn:
        log.write(f"!{' '.join(why.split())[:500]}\n")
        log.flush()
        os._exit(1)

    def missing(name: str) -> None:  # at once: a framework may read it at the beginning of an import of seconds
        if name in TORCHRUN or name.startswith("OFFBEAT_"):
            stop(f"it reads {name}, of which each worker has its own")

    for item in items:
        log.write(f"?{item}\n")
        why = _import(item, missing)
        if why is not None:
            stop(why)
    log.write(".\n")


def _import(item: str, missing: Callable[[str], None]) -> str | None:
    """Import one module. Returns the reason for which it must be left to the workers; None: it may stay.

    ``missing``: told of each variable that is read and is not set.
    """
    _draw()
    before = _Standing.now()
    loaded = len(sys.modules)
    with _captured() as printed, _watched_variables(missing):
        try:
            _as_the_program(item)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        if len(sys.modules) > loaded:
            pid = quiet_fork()  # libraries that handle forks (OpenBLAS) end their threads before one
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
    if printed:
        return f"it prints {printed[0]!r}"
    return _Standing.now().trouble(before)


def _as_the_program(item: str) -> None:
    """Import a module, and take names from it as ``from module import name`` does, since some packages import submodules on demand."""
    module, _, names = item.partition(":")
    found = importlib.import_module(module)
    for name in names.split(",") if names else ():
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


class _Standing(NamedTuple):
    """Properties of a process that do not survive a fork, or that forks would share."""

    threads: int
    children: int
    opened: frozenset[tuple[int, str]]
    cuda: bool
    randomness: tuple[Any, ...]

    @classmethod
    def now(cls) -> _Standing:
        tasks = list(Path("/proc/self/task").iterdir())
        children = 0
        opened = []
        for task in tasks:
            with contextlib.suppress(OSError):
                children += len((task / "children").read_text().split())
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                opened.append((int(link.name), os.readlink(link)))
        torch = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_initialized()
        return cls(len(tasks), children, frozenset(opened), cuda, _randomness())

    def trouble(self, before: _Standing) -> str | None:
        """Return the harm that an import has done since ``before``, in words; None: none."""
        new = [name for _, name in self.opened - before.opened]
        devices = sorted(name for name in new if name.startswith(DEVICES))
        if self.cuda and not before.cuda:
            return "it opens CUDA"
        if devices:
            return f"it opens {devices[0]}"
        if self.threads > before.threads:
            return f"it starts {'a thread' if self.threads == before.threads + 1 else f'{self.threads - before.threads} threads'}"
        if self.children > before.children:
            return "it starts a process"
        if any(name.startswith("socket:") for name in new):
            return "it opens a socket"
        known = [(now, then) for now, then in zip(self.randomness, before.randomness, strict=True) if then is not None]
        return "it seeds the random numbers that all modules share" if any(now != then for now, then in known) else None


def _randomness() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators, without their positions, so that a few draws do not change the result, and the
    seed of PyTorch's. Each fork seeds all three anew.
    """
    numpy, generator = sys.modules.get("numpy"), getattr(sys.modules.get("torch"), "default_generator", None)
    return (
        random.getstate()[1][:-1],
        None if numpy is None else numpy.random.get_state()[1].tobytes(),
        None if generator is None else generator.initial_seed(),
    )


def _draw() -> None:
    """Draw from these generators: the first draw after seeding changes the whole state, each of the next 600 only the position."""
    random.random()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random()


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Capture what any library prints to stdout and stderr. Afterwards the list has the lines."""
    lines: list[str] = []
    memory = os.memfd_create("printed")
    saved = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(memory, number)
    try:
        yield lines
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        text = os.pread(memory, 1 << 12, 0).decode(errors="replace")
        lines += [line for line in text.splitlines() if line.strip()]
        os.close(memory)


class _Watched(dict[Any, Any]):
    """A dictionary that tells of lookups of missing keys."""

    def __init__(self, values: dict[Any, Any], missing: Callable[[str], None]) -> None:
        super().__init__(values)
        self._missing = missing

    def __missing__(self, key: Any) -> Any:
        self._missing(os.fsdecode(key))
        raise KeyError(key)


@contextlib.contextmanager
def _watched_variables(missing: Callable[[str], None]) -> Iterator[None]:
    """Tell ``missing`` the names of variables that are read through ``os.environ`` and are not set."""
    table: Any = os.environ
    values = table._data
    watched = table._data = _Watched(values, missing)
    try:
        yield
    finally:
        table._data = values
        values.clear()
        values.update(watched)
