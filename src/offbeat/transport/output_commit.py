"""Hold back what a server sends until its standby has the records from which it follows.

A server handles one record after another, and the standby handles the same ones. What other processes see of the server must not go beyond
what the standby knows: then the standby can go on in its place, and nobody notices. So the links of a server share one `OutputCommit`: a
message that is sent while record *p* is handled leaves once *p* is committed.

With ``early`` some messages go before: those after which a worker can be brought back to what the standby knows. They leave at once as long
as the standby lacks one version at most, so a takeover undoes no more than that one.

Source: Strom and Yemini, Optimistic Recovery in Distributed Systems, 1985 (output commit).
"""

from __future__ import annotations

from collections import deque
from typing import Final

UNBOUND: Final = 1 << 62
"""The position up to which everything is committed where there is no standby."""


class OutputCommit:
    """How far the records of one server have come, and how far its standby has them.

    >>> commit = OutputCommit()
    >>> commit.holds(commit.position)
    False
    >>> commit.committed = 0
    >>> commit.holds(commit.position)
    True

    With ``early`` the first version that the standby lacks may be seen, and the second may not.

    >>> commit.early = True
    >>> commit.folded()
    >>> commit.holds(commit.position), commit.holds(commit.position, early=True)
    (True, False)
    >>> commit.position += 1
    >>> commit.folded()
    >>> commit.holds(commit.position, early=True)
    True
    >>> commit.committed = 1
    >>> commit.holds(commit.position, early=True)
    False
    """

    def __init__(self) -> None:
        self.position = 1
        """The number of the record that is handled, or of the next one."""
        self.committed = UNBOUND
        """The newest record that the standby has; `UNBOUND`: there is no standby."""
        self.sent = 0
        """How many messages the links were given: the standby's have the same number after the same record."""
        self.early = False
        """True if messages that may be early leave before their record is committed (``--ack leader``)."""
        self._folds: deque[int] = deque()
        """With ``early``: for each version that the standby may lack, the record with its fold."""

    def folded(self) -> None:
        """Note that a version is made while the present record is handled."""
        if self.early and self.committed != UNBOUND:
            self._folds.append(self.position)

    def holds(self, position: int, *, early: bool = False) -> bool:
        """Return True if what follows from this record must wait; ``early``: it may be early."""
        if position <= self.committed:
            return False
        if not (early and self.early):
            return True
        while self._folds and self._folds[0] <= self.committed:
            self._folds.popleft()
        return len(self._folds) > 1 and position >= self._folds[1]
