"""What a law of seconds is, and where its random numbers come from.

A law is a frozen configuration; what it gives to one run is a `Sampler`. This file owns the contract of both and the random numbers: each
number has a place of its own, named by (seed, worker, clock), in the stream of a counter-based generator, so that it does not matter who
asks first. Two rules under one seed therefore meet the same cluster (common random numbers), and a trace is equal byte for byte.
It knows no distribution (``distributions.py`` does) and does not read spellings (``registry.py`` does).
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.types import Clock, Seconds, WorkerId

SHIFT: Final = 6
BLOCK: Final = 1 << SHIFT
"""Numbers drawn at once for one worker. More would make a draw no faster, and 10,000 workers keep a block each: 2 KB apiece."""
MASK: Final = BLOCK - 1

Block: TypeAlias = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Makes that many independent draws."""


class Sampler(ABC):
    """What a law gives to one run."""

    @abstractmethod
    def draw(self, worker: WorkerId, clock: Clock, now: Seconds) -> Seconds:
        """How long what ``worker`` begins at ``now`` takes, in seconds; the same answer whenever the same is asked.

        Args:
            worker: 0 .. workers - 1 as told to `Law.start`. For the delays of messages: ``server * workers + worker``.
            clock: iterations that the worker has completed, or the number of the message; from 0.
            now: seconds since the job began. Only laws with windows look at it.
        """


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """How long computations, or messages, take. Subclasses are frozen dataclasses, checked when made and spelled like rules."""

    @classmethod
    def word(cls) -> str:
        """The word that spells this law: its class name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def spelling(self) -> str:
        """The law as it is written on the command line; ``laws.law`` reads it back. A law within a law is a quoted string."""
        return f"{self.word()}({', '.join(f'{f.name}={_spelled(getattr(self, f.name))!r}' for f in fields(self))})"

    def check(self, workers: int) -> None:  # noqa: B027 - most laws suit any number of workers
        """Whether the law can serve that many workers.

        Raises:
            ConfigurationError: it cannot; for instance a trace that has fewer.
        """

    @abstractmethod
    def start(self, seed: int, workers: int) -> Sampler:
        """The draws of one run.

        Args:
            seed: any whole number. Give each use of a law in one run a seed of its own, with `derived`.
            workers: how many there are, numbered from 0; for the delays of messages ``servers * workers``.
        """

    def _check_number(self, name: str, least: float = 0.0, above: bool = False, finite: bool = True) -> None:
        """Refuse a setting that is no number from ``least`` (``above`` it) up; make it a float, so that equal laws are spelled equally."""
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
    """A seed of its own for another purpose: without it worker 3's delays would be the same random numbers as its computations.

    >>> derived(0, "delay") == derived(0, "delay"), derived(0, "delay") == derived(1, "delay")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=16).digest(), "big")


def stretched(work_s: Seconds, now: Seconds, windows: Iterable[tuple[Seconds, Seconds, float]]) -> Seconds:
    """How long work takes that begins at ``now`` and runs ``factor`` times slower within windows of time.

    Args:
        work_s: how long it takes outside of every window.
        now: when it begins.
        windows: (start, stop, factor) in order and not overlapping. An infinite factor stands still until ``stop``.

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


class DrawnSampler(Sampler):
    """Independent draws, all of one distribution. Number ``clock`` of ``worker`` is place ``clock % 64`` of block ``clock // 64``.

    A block begins where the generator's 256-bit counter says (0, block, worker, 0) under the key that the seed gives, so it can be made
    without the blocks before it, and setting the counter is five times cheaper than a new generator.
    """

    __slots__ = ("_blocks", "_generator", "_key", "_make", "_numbers")

    def __init__(self, seed: int, workers: int, make: Block) -> None:
        self._generator = np.random.Generator(np.random.Philox(0))
        self._key = np.frombuffer(derived(seed, "law").to_bytes(16, "big"), dtype=">u8").astype(np.uint64)
        self._make = make
        self._numbers = [-1] * workers
        self._blocks: list[list[float]] = [[]] * workers

    def draw(self, worker: WorkerId, clock: Clock, now: Seconds) -> Seconds:
        if self._numbers[worker] != clock >> SHIFT:
            self._fetch(worker, clock >> SHIFT)
        return self._blocks[worker][clock & MASK]

    def _fetch(self, worker: WorkerId, number: int) -> None:
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
