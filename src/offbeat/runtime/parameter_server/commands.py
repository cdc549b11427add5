"""Turn effects into orders for the shards: plain maps that every server gets, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from offbeat.core.effects import Fold, Release
from offbeat.core.events import Folded
from offbeat.errors import ProtocolError
from offbeat.tensors.shard import SquaredNorms
from offbeat.types import Version, WorkerId

Order: TypeAlias = dict[str, Any]


def fold_order(effect: Fold, hyper: Any) -> Order:
    """Return the order of a fold. ``hyper``: the settings of each parameter group from now on; None: as before.

    A worker's gathered contributions are one sum, whose parts already have the factors of their gathering; one more factor gives them their
    weight.
    """
    parts = [(part.worker, part.weight) for part in effect.parts if not part.gathered]
    sums = {part.worker: part.weight / part.gathered for part in effect.parts if part.gathered}
    return {"do": "fold", "version": effect.version, "parts": parts, "sums": list(sums.items()), "hyper": hyper, "scale": effect.scale}


def release_order(effect: Release, serial: int, chief: WorkerId | None, *, begins: bool, exact: bool, anew: bool) -> Order:
    """Return the order of a release.

    Args:
        serial: counts this worker's releases.
        chief: the worker that evaluates and saves.
        begins: True if the job began with this worker's process; False if the process came later.
        exact: True if the parameters travel as float32 whatever the wire format.
        anew: True if the parameters travel even if the worker has been sent the same before: its copy may be damaged, or not its own.
    """
    return {
        "do": "release",
        "worker": effect.worker,
        "serial": serial,
        "version": effect.version,
        "incarnation": effect.incarnation,
        "chief": chief,
        "begins": begins,
        "exact": exact,
        "anew": anew,
        "plan": list(effect.plan),
    }


class Measurements:
    """Collect what the shards have measured at folds, until every shard has reported.

    Args:
        shards: the number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._lr: dict[Version, float] = {}
        self._seen: dict[Version, list[SquaredNorms]] = {}

    def ordered(self, version: Version, lr: float) -> None:
        """Note that a fold has been ordered; ``lr`` is the learning rate of its step."""
        self._lr[version] = lr

    def note(self, version: Version, norms: SquaredNorms) -> None:
        """Add one shard's measurement of a fold. Raises `ProtocolError` if no such measurement is awaited."""
        if version not in self._lr:
            raise ProtocolError(f"a measurement of version {version} came (expected one of a fold that is not measured by all servers yet)")
        seen = self._seen.setdefault(version, [])
        if seen and len(seen[0].parts) != len(norms.parts):
            raise ProtocolError(f"a measurement of version {version} has {len(norms.parts)} parts (expected {len(seen[0].parts)})")
        seen.append(norms)

    def complete(self) -> list[Folded]:
        """Return the measurements that have become complete, by version, each once."""
        if not self._seen:  # as after most events, and always under rules that measure nothing
            return []
        done = sorted(version for version, seen in self._seen.items() if len(seen) == self._shards)
        return [_summed(version, self._seen.pop(version), self._lr.pop(version)) for version in done]


def _summed(version: Version, norms: Sequence[SquaredNorms], lr: float) -> Folded:
    squares = tuple(sum(column) for column in zip(*(shard.parts for shard in norms), strict=True))
    differences = [shard.difference for shard in norms if shard.difference is not None]
    return Folded(version, squares, sum(shard.total for shard in norms), lr, sum(differences) if len(differences) == len(norms) else None)
