"""Across hosts: what the one place that decides has the ranks do. Plain numbers, so that they travel in the headers of messages."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from offbeat.types import Version, WorkerId


class Answer(NamedTuple):
    """To a rank: what its arrival has come to. It goes on when it has the results of all rounds before ``through``."""

    rank: WorkerId
    number: Version
    late: bool
    closed: bool
    through: Version


class Start(NamedTuple):
    """To all leaders: a round is closed, sum it."""

    number: Version
    view: int
    parts: tuple[tuple[WorkerId, WorkerId, int, float], ...]
    """Of each gradient: the leader of the host where it is, rank, buffer, and what it is scaled by."""
    divisor: int
    initiator: WorkerId
    """The leader that starts the activation: of the host that closed the round, or else the first."""
    leaders: tuple[WorkerId, ...]
    floor: Version
    """Results of rounds before this one are of no more use to anybody."""


class Prepare(NamedTuple):
    """To all ranks: a new view begins. Forget what is under way, and `Sequencer.report` what you have."""

    view: int
    ranks: tuple[WorkerId, ...]
    starts: tuple[Version, ...]
    """Of each the version that it has come with. Earlier results are none of its: where they would lie there may be later ones by now."""
    floor: Version
    """Results from this round on are needed."""


class Transfer(NamedTuple):
    """To a rank: hand these ones the result of a round."""

    holder: WorkerId
    view: int
    number: Version
    to: tuple[WorkerId, ...]


class Allocate(NamedTuple):
    """To a rank: nobody of your host has the memory that is to be shared there. Make it."""

    rank: WorkerId


class ReportProgress(NamedTuple):
    """To ranks: say when you have the results of all rounds before ``through``."""

    ranks: tuple[WorkerId, ...]
    through: Version


class Exclude(NamedTuple):
    """To a rank: it does not take part any more, or is not let in."""

    rank: WorkerId
    why: str


Order: TypeAlias = Answer | Start | Prepare | Transfer | Allocate | ReportProgress | Exclude
