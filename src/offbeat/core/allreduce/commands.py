"""The orders that the sequencer sends to ranks on several hosts. Plain numbers, so that they fit into the headers of messages."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from offbeat.types import Version, WorkerId


class Answer(NamedTuple):
    """Tell a rank the outcome of its arrival. It goes on when it has the results of all rounds before ``through``."""

    rank: WorkerId
    number: Version
    late: bool
    closed: bool
    through: Version


class Start(NamedTuple):
    """Tell all leaders to sum a closed round. The first leader gets this order, and passes it on to the others."""

    number: Version
    view: int
    parts: tuple[tuple[WorkerId, WorkerId, int, float], ...]
    """For each gradient: the leader of its host, its rank, its buffer, its factor."""
    divisor: int
    leaders: tuple[WorkerId, ...]
    floor: Version
    """Results of rounds before this one are not needed any more."""
    slot: int
    """Where each host keeps the result. Another round uses it once this result is not needed any more."""


class Prepare(NamedTuple):
    """Tell all ranks to halt for a new view: abandon sums under way, and send what `Sequencer.report` takes."""

    view: int
    ranks: tuple[WorkerId, ...]
    starts: tuple[Version, ...]
    """For each rank the version with which it entered. It has no earlier results: their slots may hold later ones by now."""
    floor: Version
    """Results from this round on are still needed."""


class Transfer(NamedTuple):
    """Tell rank ``holder`` to send the result of a round to the ranks ``to``."""

    holder: WorkerId
    view: int
    number: Version
    to: tuple[WorkerId, ...]


class Allocate(NamedTuple):
    """Tell a rank to make the memory that its host's ranks share, because no rank of the host has it."""

    rank: WorkerId


class ReportProgress(NamedTuple):
    """Tell ranks to report when they have the results of all rounds before ``through``."""

    ranks: tuple[WorkerId, ...]
    through: Version


class Exclude(NamedTuple):
    """Tell a rank that it does not take part any more, or is not admitted."""

    rank: WorkerId
    why: str


Order: TypeAlias = Answer | Start | Prepare | Transfer | Allocate | ReportProgress | Exclude
