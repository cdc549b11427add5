"""Memory in two halves: a change is written into the half that nobody reads, so that a death in the middle of it loses nothing."""

from __future__ import annotations

from typing import Any

from offbeat.tensors.layout import Memory


class Halves:
    """One memory, twice: `now` is read, and `before` is what it was before the last change.

    A change turns the halves, and writes what is new into `now`, computed from `before`. With one half both are the same memory, and a
    change is made in place: nothing is left of it after a death.

    Args:
        views: one or two memories of one size.

    >>> halves = Halves(bytearray(b"old"), bytearray(b"???"))
    >>> halves.turn()
    >>> halves.now[:] = halves.before.replace(b"l", b"d")
    >>> bytes(halves.now), bytes(halves.before)
    (b'odd', b'old')
    """

    def __init__(self, *views: Memory) -> None:
        self.views = views
        self.half = 0
        """The number of the half that is `now`."""
        self._spare = False
        """True if only this process has a second half."""

    def __getstate__(self) -> dict[str, Any]:
        return {"views": (self.now,), "half": 0, "_spare": False} if self._spare else vars(self)

    def add_spare(self, view: Memory) -> None:
        """Add a second half. A process that goes on elsewhere gets the half that is read, and not this one."""
        self.views, self._spare = (*self.views, view), True

    @property
    def now(self) -> Memory:
        """Return what is read."""
        return self.views[self.half]

    @property
    def before(self) -> Memory:
        """Return what it was before the last change; with one half the same memory as `now`."""
        return self.views[len(self.views) - 1 - self.half]

    def turn(self) -> None:
        """Begin a change: the half that has been `now` is `before` from now on."""
        self.half = len(self.views) - 1 - self.half
