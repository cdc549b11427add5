"""What is inside the contributions of a simulated job: the interface between the world, which only knows times, and gradients.

`Workload` itself is the time-only mode: contributions are empty. `noise.py` gives their norms by a law, `gradients.py` has real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from offbeat.core.effects import Adopt, Fold, Mix, Pair, Settle, Share, WrittenOff
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.types import Clock, Epoch, Incarnation, Seconds, Version, WorkerId

Exchanged: TypeAlias = Adopt | Share | Mix | Pair | WrittenOff
"""What ranks that gossip do with each other."""


class Step(NamedTuple):
    """One iteration of one worker."""

    number: int
    """Counts the worker's iterations, from 0; with it and the worker's number goes everything that is drawn for it."""
    samples: int
    epoch: Epoch | None = None
    """None: samples are not dealt out."""
    start: int = 0
    stop: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """Positions, as in `effects.Grant`."""


class Handed(NamedTuple):
    """A contribution as its worker hands it in."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    """The worker's clock after this push."""
    version: Version
    """The version it was computed from; in rules of shard scope the worker's timestamp."""
    held: tuple[Version, ...]
    """Shard scope: the version of each block that it was computed from."""
    steps: tuple[Step, ...]


class Workload:
    """Contributions without content."""

    empty: bool = True
    """Whether there is nothing to be told but folds."""

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        """A run begins.

        Raises:
            ConfigurationError: this rule, or cluster, does not go with this content.
        """

    def released(self, worker: WorkerId, version: Version) -> None:
        """The servers send this worker the parameters that they have now, of this version."""

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:
        """A server sends these workers the block that it has now."""

    def gone(self, worker: WorkerId) -> None:
        """A worker's process has ended, and what it held is lost, but for what it has handed in."""

    def handed_in(self, push: Handed) -> float | None:
        """A contribution is on its way to the servers. Returns its loss, where somebody asks for it."""
        return None

    def exchanged(self, effect: Exchanged) -> None:
        """Ranks of the gossip family mix their parameters."""

    def fold(self, effect: Fold) -> Folded:
        """The servers, or one shard, make a new version; what they measure."""
        return Folded(effect.version, (), 0.0, 0.0)

    def settled(self, effect: Settle) -> None:
        """A contribution has its fate."""

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float] | None:
        """What is to be noted in the journal of the version just made."""
        return None

    def finish(self) -> None:
        """The run is over."""

    def reached(self, values: Mapping[str, float]) -> bool:
        """Whether what was evaluated is what the run was for."""
        return False
