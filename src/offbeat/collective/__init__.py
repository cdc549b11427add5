"""Partial allreduce without servers: among the ranks of one host, in shared memory, and of several, over TCP (``across.py``)."""

from offbeat.collective.host import HostRounds, Outcome
from offbeat.collective.state import Entry, Fenced, Kind, TooOld

__all__ = ["Entry", "Fenced", "HostRounds", "Kind", "Outcome", "TooOld"]
