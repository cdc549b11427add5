"""Means of parameters: whoever gets its replica from a rank that waits for a mean takes part in this mean first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import ModelMeans, means_numel
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.allreduce.round_member import OneHostMember
from offbeat.runtime.ranks.replica import Replica

SIZE = 6


@pytest.mark.parametrize("call", ["contribute", "catch_up"])
def test_who_joins_by_a_rank_that_waits_for_a_mean_takes_part_in_it(call: str) -> None:
    """Otherwise it would wait for a round of gradients, or for the end of an epoch, that the waiting rank alone could bring about."""
    host = OneHostRounds.create(Full(), ranks=2, numel=means_numel(SIZE))
    done: list[str] = []
    gradients = SimpleNamespace(
        arrive=lambda *_, **__: done.append("gradient"),
        wait=lambda _: True,
        results=list,
        send=lambda: None,
        waits=False,
        catch_up=lambda **_: [],
    )

    def means(number: int) -> tuple[ModelMeans, Replica]:
        fake = SimpleNamespace(
            shares=1,
            aim=lambda _: None,
            read_share=lambda _, vector: vector[:SIZE].fill_(float(number)),
            write_share=lambda _, vector: done.append(f"rank {number} has the mean {float(vector[0])}"),
        )
        replica = cast(Replica, fake)
        rounds = OneHostRounds.attach(host.block, number)
        rounds.enter(number, 0)
        return ModelMeans(rounds, number, 3, replica, hear), replica

    class Joiner(OneHostMember):
        def attach(self) -> None:
            self._rounds, self._means = cast(OneHostRounds, gradients), joined[0]

    def hear() -> None:
        assert "joined" not in done, "the rank that has joined waits for the one that waits for it"
        done.append("joined")
        joiner = Joiner(1, Full(), joined[1], hear, lambda _: None)
        joiner.version = 3
        joiner.contribute(True, 0) if call == "contribute" else joiner.catch_up()

    joined, (waiting, _) = means(1), means(0)
    waiting.keep(3)
    assert done == ["joined", "rank 1 has the mean 0.5", *(["gradient"] if call == "contribute" else []), "rank 0 has the mean 0.5"]
