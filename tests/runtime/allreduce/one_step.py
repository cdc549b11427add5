"""A rank's step in one call: hand in a gradient, wait if it is on time, and take the results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.types import Version


class Outcome(NamedTuple):
    """What a rank gets."""

    included: bool
    """True: the last of the results contains the gradient. False: it is carried into a later round."""
    number: Version
    """The round that contains the gradient, or will."""
    staleness: int
    """The round's number minus the version that the gradient was computed from."""
    results: list[tuple[Version, torch.Tensor]]
    """Those that this rank had not received before, each with its round. Valid until the next call."""


def step(rounds: OneHostRounds | MultiHostRounds, tensor: torch.Tensor, timeout_s: float | None = None) -> Outcome:
    """Make one. Nothing is copied if ``tensor`` is what ``send()`` returned. Raises `TimeoutError` if the round was not done in time."""
    assert rounds.rank is not None
    mine = rounds.send()
    if tensor.data_ptr() != mine.data_ptr():
        mine.copy_(tensor.reshape(-1))
    version = rounds.version(rounds.rank)
    arrival = rounds.arrive()
    if not rounds.wait(timeout_s):
        raise TimeoutError(f"round {arrival.number} was not done in {timeout_s} s")
    results = rounds.results()
    included = bool(results) and results[-1][0] >= arrival.number
    return Outcome(included, arrival.number, arrival.number - version, results)
