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


class Go(NamedTuple):
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


class Halt(NamedTuple):
    """To all ranks: a new view begins. Forget what is under way, and `Decider.report` what you have."""

    view: int
    ranks: tuple[WorkerId, ...]
    starts: tuple[Version, ...]
    """Of each the version that it has come with. Earlier results are none of its: where they would lie there may be later ones by now."""
    floor: Version
    """Results from this round on are needed."""


class Hand(NamedTuple):
    """To a rank: hand these ones the result of a round."""

    holder: WorkerId
    view: int
    number: Version
    to: tuple[WorkerId, ...]


class Hold(NamedTuple):
    """To a rank: nobody of your host has the memory that is to be shared there. Make it."""

    rank: WorkerId


class Say(NamedTuple):
    """To ranks: say when you have the results of all rounds before ``through``."""

    ranks: tuple[WorkerId, ...]
    through: Version


class Fence(NamedTuple):
    """To a rank: it does not take part any more, or is not let in."""

    rank: WorkerId
    why: str


Order: TypeAlias = Answer | Go | Halt | Hand | Hold | Say | Fence
