"""Keep the fragments that one worker holds under rules that average parameters shard by shard: a fragment is the part of one shard.

A worker makes local steps with an optimizer of its own. In turn it pushes its parameters of one fragment to that fragment's shard, goes on
computing while the shard collects them, and mixes the shard's new version into its own parameters some steps later. So the transfers are
spread over time, and hidden behind the computation.

Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): fragments with offsets, the overlap tau and the mixing factor alpha; the
offsets ``floor(H * (p + 1) / P)`` and that tau is less than H / P are torchft's (``local_sgd.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.block_cache import Blocks
from offbeat.errors import ConfigurationError
from offbeat.types import Seconds, Version

if TYPE_CHECKING:
    from offbeat.core.policy import Plan


class Fragments(Blocks):
    """Keep the fragments of one worker, and say when it pushes which and when it takes what has come.

    With P shards and H steps the worker pushes fragment p, 0 <= p < P, at its local steps ``floor(H * (p + 1) / P)`` modulo H. ``delay``
    steps after the push it takes the newest version of that fragment, if it has come; if the worker ``waits``, as soon as it has. What it
    takes is mixed: ``w <- alpha * w + (1 - alpha) * new``. Other fragments stay as they are, with the steps since their own last push.

    The first fragment after a `Release` is the one with the oldest version. Workers that wait always push that one, so that all of them
    push the same.

    Args:
        shards: how many fragments there are.
        owner: the rule's name, for messages.
        steps: H, local steps between two pushes of one fragment.
        delay: tau, local steps from a push until the worker takes the fragment; less than ``steps / shards``.
        alpha: what remains of the worker's own parameters.
        waits: False: the worker takes what is there, and never waits.

    >>> own = Fragments(2, owner="diloco", steps=6, delay=1)
    >>> for shard in range(2):
    ...     own.received(shard, 0, now=0.0)
    >>> own.released(), own.ready(0.0), own.advance(), own.turn
    (None, True, 0, 3)
    >>> own.pushed(), own.ready(0.0), own.advance(), own.turn    # it goes on at once, to the next push
    (0, True, 0, 3)
    >>> own.pauses(1), own.ready(0.0)    # one step later it waits for fragment 0
    (True, False)
    >>> own.received(0, 1, now=1.0), own.ready(1.0), own.advance(), own.used
    (None, True, 0, (1, 0))
    >>> own.pushed()
    1

    Raises:
        ConfigurationError: there are more shards than steps, or ``delay`` is as long as the steps between two pushes.
    """

    def __init__(self, shards: int, *, owner: str, steps: int, delay: int = 0, alpha: float = 0.0, waits: bool = True) -> None:
        super().__init__(shards)
        if steps < shards:
            raise ConfigurationError(
                f"{owner}(steps={steps}) with {shards} servers: each server has a fragment of the model, and a worker pushes at most one a "
                f"step; give steps={shards} or more, or fewer servers"
            )
        if delay >= steps // shards and delay:
            raise ConfigurationError(
                f"{owner}(steps={steps}, delay={delay}) with {shards} servers: a worker pushes a fragment every {steps // shards} steps "
                f"and must have taken one before the next; give delay={steps // shards - 1} or less, or more steps"
            )
        self._steps, self._delay, self._waits = steps, delay, waits
        self.alpha = alpha
        self._last = -1
        """The fragment pushed last; -1: none since the last `Release`."""
        self._awaited: Version = -1
        """The worker waits until it holds a later version of that one than this."""
        self._open = False
        """True from a push until the worker takes its fragment."""
        self._takes = False
        """Whether the next `advance` takes what has come."""

    def received(self, shard: int, version: Version, now: Seconds) -> None:
        self.held[shard] = max(self.held[shard], version)

    def released(self) -> None:
        assert min(self.held) >= 0, f"released without all fragments: {self.held}"
        self._last, self._awaited = -1, -1
        self._open, self._takes = False, True

    def ready(self, now: Seconds) -> bool:
        waits = self._waits and self._open and self._takes
        return not waits or self.held[self._last] > self._awaited

    def wake_at(self) -> Seconds | None:
        return None

    def advance(self) -> Version:
        if self._takes:
            taken = range(len(self.held)) if self._last < 0 else (self._last,)
            self.used = tuple(self.held[shard] if shard in taken else version for shard, version in enumerate(self.used or self.held))
            self._open = self._takes = False
        self.t = min(self.used)
        return self.t

    @property
    def target(self) -> int:
        """The fragment that the worker pushes next."""
        if not self._waits and self._last >= 0:
            return (self._last + 1) % len(self.held)
        # What was pushed last will have a later version by then.
        expected = [max(version, self._awaited + 1) if shard == self._last else version for shard, version in enumerate(self.held)]
        return expected.index(min(expected))

    @property
    def turn(self) -> int:
        """Local steps from the last push to the next."""
        shards, p = len(self.held), self.target
        return self._steps * (p + 1) // shards - self._steps * p // shards

    def planned(self, plan: Plan) -> Plan:
        return plan._replace(steps=self.turn)

    def pushed(self) -> int | None:
        self._last = self.target
        self._awaited = self.used[self._last]
        self._open, self._takes = True, not self._delay
        return self._last

    def pauses(self, steps: int) -> bool:
        self._takes = self._takes or (self._open and steps >= self._delay)
        return self._takes

    def leg(self, steps: int, left: int) -> int:
        return min(left, self._delay - steps) if self._open and steps < self._delay else left
