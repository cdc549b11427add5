"""Define the interface between a simulation, which computes times, and the contents of its contributions.

`Workload` itself is the time-only mode with empty contributions. `noise.py` draws norms from a model, `gradients.py` trains a real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from offbeat.core.effects import Adopt, Fold, Mix, Pair, Settle, Share, WrittenOff
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.types import Clock, Epoch, Incarnation, Seconds, Version, WorkerId

Exchanged: TypeAlias = Adopt | Share | Mix | Pair | WrittenOff
"""The effects by which ranks of the gossip family exchange parameters."""


class Step(NamedTuple):
    """One iteration of one worker."""

    number: int
    """The number of the worker's iteration, from 0. All random draws of the iteration depend on (worker, number) only."""
    samples: int
    epoch: Epoch | None = None
    """None: samples are not dealt out."""
    start: int = 0
    stop: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """``start``, ``stop`` and ``parts`` are positions of the sample order, as in `effects.Grant`."""


class Load(NamedTuple):
    """The moment at which a worker takes blocks that have come."""

    steps: int
    """The number of steps since its last push."""
    versions: tuple[Version, ...]
    """The version of each block from then on."""
    whole: bool
    """True: the whole model replaces what it has; False: new blocks are mixed with what it has."""


class Handed(NamedTuple):
    """A contribution as its worker hands it in."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    """The worker's clock after this push."""
    version: Version
    """The version it was computed from; under rules of shard scope the worker's timestamp."""
    held: tuple[Version, ...]
    """Under rules of shard scope: the version of each block that it was computed from."""
    steps: tuple[Step, ...]
    shard: int | None = None
    """The fragment that is pushed, under rules that average fragments."""
    loads: tuple[Load, ...] = ()
    """Under rules of shard scope: the blocks taken since the last push."""


class Workload:
    """Contributions without content."""

    empty: bool = True
    """Whether the simulation calls only `start`, `fold`, `gone` and `finish`."""

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        """Begin a run.

        Raises:
            ConfigurationError: this rule, or cluster, does not go with this content.
        """

    def released(self, worker: WorkerId, version: Version) -> None:
        """Note that the servers send this worker their present parameters, which have this version."""

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:
        """Note that a server sends these workers its present block."""

    def gone(self, worker: WorkerId) -> None:
        """Note that a worker has left or died. Contributions that it has handed in stay valid."""

    def handed_in(self, push: Handed) -> float | None:
        """Take a contribution that is sent to the servers; return its loss if the rule uses losses."""
        return None

    def exchanged(self, effect: Exchanged) -> None:
        """Exchange parameters between ranks of the gossip family."""

    def fold(self, effect: Fold) -> Folded:
        """Make a new version of the parameters, or of one shard; return the measured norms."""
        return Folded(effect.version, (), 0.0, 0.0)

    def settled(self, effect: Settle) -> None:
        """Note the fate of a contribution."""

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float] | None:
        """Return the metrics of the version just made, for the journal; None: there are none."""
        return None

    def finish(self) -> None:
        """End the run."""

    def reached(self, values: Mapping[str, float]) -> bool:
        """Return whether these metrics of `evaluate` end the run."""
        return False
