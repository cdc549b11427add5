"""Define latency models (`Law`), their draws in one run (`Sampler`), and the random numbers behind the draws.

Each random number has a fixed position, given by (seed, worker, clock), in the stream of a counter-based generator, so that a draw does
not depend on the order of draws. Two rules under one seed therefore meet the same cluster (common random numbers), and equal seeds give
equal journals, byte for byte. The distributions are in ``distributions.py``; ``registry.py`` parses the text form of a law.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.core.phases import NOT_SEPARATED
from offbeat.errors import ConfigurationError
from offbeat.types import Clock, Seconds

SHIFT: Final = 6
BLOCK: Final = 1 << SHIFT
"""The numbers drawn at once for one worker. Larger blocks make a draw no faster, and each of 10,000 workers keeps a block, of 2 KB."""
MASK: Final = BLOCK - 1

Block: TypeAlias = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Returns the given number of independent draws, in seconds."""


class Draw(Protocol):
    """Returns the seconds that an iteration, or a message, takes. Equal arguments give equal results."""

    def __call__(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        """Draw.

        Args:
            worker: 0 .. workers - 1, as passed to `Law.start`. For the delays of messages: ``server * workers + worker``.
            clock: the number of the iteration or message, from 0.
            now: when it begins, in seconds since the job began. Only laws with windows use it.
        """


class Sampler(NamedTuple):
    """The draws of one law in one run."""

    draw: Draw
    shares: Callable[[int, Clock], Sequence[tuple[str, float]]] = lambda worker, clock: NOT_SEPARATED
    """Returns an iteration's phases, by the names of `core.phases.Phase`, with their shares of the draw, which add up to 1."""


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """A latency model. Subclasses are frozen dataclasses, which check their settings when they are made."""

    @classmethod
    def word(cls) -> str:
        """Return the law's name on the command line: the class name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def spelling(self) -> str:
        """The law as it is written on the command line, in the syntax that `registry.law` parses. A law within a law is quoted."""
        return f"{self.word()}({', '.join(f'{f.name}={_spelled(getattr(self, f.name))!r}' for f in fields(self))})"

    def check(self, workers: int) -> None:  # noqa: B027 - most laws suit any number of workers
        """Check that the law can serve this number of workers.

        Raises:
            ConfigurationError: it cannot, for instance because a trace has fewer workers.
        """

    @abstractmethod
    def start(self, seed: int, workers: int) -> Sampler:
        """Return the sampler of one run.

        Args:
            seed: any whole number. Each use of a law in one run needs a seed of its own; see `derived`.
            workers: the number of workers, numbered from 0; for the delays of messages ``servers * workers``.
        """

    def _check_number(self, name: str, least: float = 0.0, above: bool = False, finite: bool = True) -> None:
        """Check that a setting is a number of at least ``least`` (``above``: greater), and store it as a float.

        As floats, equal settings have the same text form: ``1`` and ``1.0`` are the same law.

        Raises:
            ConfigurationError: it is not.
        """
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or (finite and math.isinf(value)) or value < least or (above and value == least):
            kind = "a finite number" if finite else "a number"
            raise ConfigurationError(
                f"{self.word()}({name}={value!r}): {name} must be {kind} {'greater than' if above else 'of at least'} {least:g}"
            )
        object.__setattr__(self, name, float(value))


def _spelled(value: Any) -> Any:
    return value.spelling if isinstance(value, Law) else value


def derived(seed: int, purpose: str) -> int:
    """Return a seed for one purpose. Without it worker 3's delays would be the same random numbers as its computations.

    >>> derived(0, "delay") == derived(0, "delay"), derived(0, "delay") == derived(1, "delay")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=16).digest(), "big")


def stretched(work_s: Seconds, now: Seconds, windows: Iterable[tuple[Seconds, Seconds, float]]) -> Seconds:
    """Return the seconds that work takes which begins at ``now`` and runs ``factor`` times slower within windows of time.

    Args:
        work_s: the seconds that the work takes outside of all windows.
        now: when the work begins.
        windows: (start, stop, factor), in order and not overlapping. With an infinite factor work stands still until ``stop``.

    >>> stretched(2.0, 9.0, [(10.0, 20.0, 5.0)])  # one second before the window, one second's work within it
    6.0
    >>> stretched(2.0, 9.0, [(10.0, 20.0, float("inf"))])
    12.0
    """
    spent = 0.0
    for start, stop, factor in windows:
        if stop <= now + spent:
            continue
        free = start - (now + spent)
        if free > 0.0:
            if work_s <= free:
                break
            spent, work_s = spent + free, work_s - free
        room = (stop - (now + spent)) / factor
        if work_s < room:
            return spent + work_s * factor
        spent, work_s = stop - now, work_s - room
    return spent + work_s


class Drawn:
    """Independent draws of one distribution. Draw ``clock`` of ``worker`` is entry ``clock % 64`` of block ``clock // 64``.

    A block begins at the value (0, block, worker, 0) of the generator's 256-bit counter, under a key derived from the seed, so that it can
    be computed without the blocks before it. Setting the counter is five times cheaper than making a new generator.
    """

    __slots__ = ("_blocks", "_generator", "_key", "_make", "_numbers")

    def __init__(self, seed: int, workers: int, make: Block) -> None:
        self._generator = np.random.Generator(np.random.Philox(0))
        self._key = np.frombuffer(derived(seed, "law").to_bytes(16, "big"), dtype=">u8").astype(np.uint64)
        self._make = make
        self._numbers = [-1] * workers
        self._blocks: list[list[float]] = [[]] * workers

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        """Return this draw."""
        if self._numbers[worker] != clock >> SHIFT:
            self._fetch(worker, clock >> SHIFT)
        return self._blocks[worker][clock & MASK]

    def _fetch(self, worker: int, number: int) -> None:
        self._generator.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, number, worker, 0], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._blocks[worker] = self._make(self._generator, BLOCK).tolist()
        self._numbers[worker] = number
