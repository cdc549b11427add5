"""What a worker has done since its last push: one gradient, or some local steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.types import LeaseId


@dataclass(slots=True)
class LocalWork:
    """Steps that are not pushed yet, added up."""

    steps: int = 0
    samples: int = 0
    """0 if it is not known of every step."""
    leases: list[LeaseId] = field(default_factory=list)
    nonfinite: str | None = None
    """The tensor in which a gradient was not finite: what the steps have come to must not be used then."""
    ending: bool = False
    """The epoch has no more samples for this worker than those it holds."""
    _losses: list[float] = field(default_factory=list)
    _known: bool = True

    @property
    def loss(self) -> float | None:
        """The mean of the steps' losses, of those that were logged."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def add(self, leases: tuple[LeaseId, ...], samples: int, loss: float | None) -> None:
        """One more step."""
        self.steps += 1
        self._known = self._known and samples > 0
        self.samples = self.samples + samples if self._known else 0
        self.leases += leases
        if loss is not None:
            self._losses.append(loss)
