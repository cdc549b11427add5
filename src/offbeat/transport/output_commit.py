"""Hold back a server's messages until its standby has the log records from which they follow.

A server handles one record after another, and its standby handles the same ones. Other processes must not see results of records that the
standby lacks: then the standby can take over without a difference that they could notice. So a server's links share one `OutputCommit`: a
message that is sent while record *p* is handled leaves once *p* is committed.

Source: Strom and Yemini, Optimistic Recovery in Distributed Systems, 1985 (output commit).
"""

from __future__ import annotations

from typing import Final

UNBOUND: Final = 1 << 62
"""The position up to which everything counts as committed where there is no standby."""


class OutputCommit:
    """Compare the position of a server in its log records with that of its standby.

    >>> commit = OutputCommit()
    >>> commit.holds(commit.position)
    False
    >>> commit.committed = 0
    >>> commit.holds(commit.position)
    True
    """

    def __init__(self) -> None:
        self.position = 1
        """Number of the record that is being handled, or else of the next one."""
        self.committed = UNBOUND
        """Number of the newest record that the standby has; `UNBOUND`: there is no standby."""
        self.sent = 0
        """Number of messages that the links were given; after the same record it is the same at the standby."""

    def holds(self, position: int) -> bool:
        """Return True if a message that follows from this record must wait."""
        return position > self.committed
