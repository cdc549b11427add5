"""Hold back what a server sends until its standby has the records from which it follows.

A server handles one record after another, and the standby handles the same ones. What other processes see of the server must not go beyond
what the standby knows: then the standby can go on in its place, and nobody notices. So the links of a server share one `OutputCommit`: a
message that is sent while record *p* is handled leaves once *p* is committed.

Source: Strom and Yemini, Optimistic Recovery in Distributed Systems, 1985 (output commit).
"""

from __future__ import annotations

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
    """

    def __init__(self) -> None:
        self.position = 1
        """The number of the record that is handled, or of the next one."""
        self.committed = UNBOUND
        """The newest record that the standby has; `UNBOUND`: there is no standby."""
        self.sent = 0
        """How many messages the links were given: the standby's have the same number after the same record."""

    def holds(self, position: int) -> bool:
        """Return True if what follows from this record must wait."""
        return position > self.committed
