"""Means of gradients near the limit of their numbers: finite where the mean is, equal at every rank, and void where it is not."""

from __future__ import annotations

import random
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.allreduce.played import play
from tests.core.allreduce.test_schedule import WAYS, bits
from tests.tiers import examples

from offbeat.core.allreduce.commands import Start
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import ModelMeans, means_numel
from offbeat.runtime.allreduce.multi_host.executor import Executor
from offbeat.runtime.allreduce.one_host.clipping import clip_factor
from offbeat.runtime.allreduce.one_host.reduce import mean
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.replica import Replica
from offbeat.tensors.running_sum import RunningSum

LIMIT = {dtype: float(np.finfo(dtype).max) for dtype in ("f4", "f8")}


def drawn(draws: random.Random, dtype: str, numel: int) -> list[float]:
    """Numbers up to the limit, and ordinary ones."""
    sizes = (1.0, 0.999, 0.6, 0.5, 1e-3, 1e-30, 1.0 / LIMIT[dtype], 0.0)
    return [draws.choice((-1, 1)) * draws.choice(sizes) * LIMIT[dtype] * draws.choice((1.0, draws.random())) for _ in range(numel)]


@examples(300)
@given(ranks=st.integers(1, 9), each=st.integers(1, 2), dtype=st.sampled_from(["f4", "f8"]), seed=st.integers(0, 2**30))
def test_a_mean_is_finite_where_it_can_be_and_its_bits_are_those_of_the_plain_sum(ranks: int, each: int, dtype: str, seed: int) -> None:
    draws = random.Random(seed)
    parts = [np.array(drawn(draws, dtype, 6), dtype) for _ in range(draws.randint(1, each * ranks))]
    out = np.empty(6, dtype)
    with np.errstate(over="raise", invalid="ignore"):
        finite = mean(parts, ranks, out)
    assert finite == bool(np.isfinite(out).all())
    with np.errstate(over="ignore", invalid="ignore"):
        plain = parts[0].copy()
        for part in parts[1:]:
            plain = plain + part
        plain /= plain.dtype.type(ranks)
    for i in range(6):
        if np.isfinite(plain[i]):
            assert out[i].tobytes() == plain[i].tobytes(), "where the sum does not overflow it is what it was"
            continue
        exact = sum((Fraction(float(part[i])) for part in parts), Fraction()) / ranks
        error = Fraction(float(np.finfo(dtype).eps)) * sum((abs(Fraction(float(part[i]))) for part in parts), Fraction())
        if abs(exact) + error < Fraction(LIMIT[dtype]):
            assert abs(Fraction(float(out[i])) - exact) <= error
        elif abs(exact) - error > Fraction(LIMIT[dtype]):
            assert not np.isfinite(out[i])


@examples(80)
@given(ranks=st.integers(1, 17), way=st.sampled_from(sorted(WAYS)), carried=st.booleans(), seed=st.integers(0, 2**30))
def test_across_hosts_no_sum_overflows_on_the_way(ranks: int, way: str, carried: bool, seed: int) -> None:
    """One gradient a rank, or two of some: results are equal bit by bit, and finite where the mean is."""
    draws = random.Random(seed)
    numel = draws.choice([1, 5, 40])
    parts = [[torch.tensor(drawn(draws, "f4", numel)) for _ in range(draws.randint(0, 1 + carried))] for _ in range(ranks)]
    terms, schedule = sum(map(len, parts)), WAYS[way](ranks, numel)
    vectors = [RunningSum(torch.empty(numel), parts[rank], ranks, terms, schedule[rank], rank) for rank in range(ranks)]
    play(schedule, lambda *_: draws.random(), vectors=vectors)
    assert len({bits(vector.out) for vector in vectors}) == 1
    exact = [sum((Fraction(float(part[i])) for own in parts for part in own), Fraction()) / ranks for i in range(numel)]
    for found, wanted in zip(vectors[0].out.tolist(), exact, strict=True):
        error = Fraction(1, 1 << 20) * Fraction(LIMIT["f4"]) * terms / ranks
        if abs(wanted) + error < Fraction(LIMIT["f4"]):
            assert abs(Fraction(found) - wanted) <= error


@examples(100)
@given(ranks=st.integers(1, 8), way=st.sampled_from(sorted(WAYS)), seed=st.integers(0, 2**30))
def test_ordinary_sums_across_hosts_are_the_same_bits_with_and_without_scaling(ranks: int, way: str, seed: int) -> None:
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parts = [[torch.randn(20, generator=generator) for _ in range(draws.randint(0, 2))] for _ in range(ranks)]
    schedule = WAYS[way](ranks, 20)
    found = []
    for terms in (1, sum(map(len, parts))):
        vectors = [RunningSum(torch.empty(20), parts[rank], ranks, terms, schedule[rank], rank) for rank in range(ranks)]
        play(schedule, lambda *_: 1.0, vectors=vectors)
        found.append(bits(vectors[0].out))
    assert found[0] == found[1]


@pytest.mark.parametrize("numel", [5, 200_000], ids=["at once", "in slices"])
def test_on_one_host_a_round_that_cannot_be_held_begins_with_nan_for_everybody(numel: int) -> None:
    host = OneHostRounds.create(Full(), ranks=3, numel=numel)
    ranks = [OneHostRounds.attach(host.block, rank) for rank in range(3)]
    for number, rank in enumerate(ranks):
        rank.enter(number, 0)

    def together(*of: int) -> list[torch.Tensor]:
        for number in of:
            ranks[number].send().zero_()[-1] = 3e38
            ranks[number].arrive()
        assert all(ranks[number].wait() for number in of)
        found = [ranks[number].results()[0][1].clone() for number in of]
        for number in of:
            ranks[number].read()
        return found

    for result in together(0, 1, 2):
        assert result[0] == 0.0 and float(result[-1]) == pytest.approx(3e38)
    ranks[2].send().zero_()[-1] = 3e38
    ranks[2].arrive()
    host.leave(2)  # its gradient stays in the round, which is divided by the two that are left
    ranks[0].send().zero_()[-1] = 3e38
    ranks[0].arrive()
    ranks[1].send().zero_()[-1] = 3e38
    ranks[1].arrive()
    for rank in ranks[:2]:
        assert rank.wait()
        ((number, result),) = rank.results()
        assert number == 1 and torch.isnan(result[0])
        rank.read()
    for result in together(0, 1):
        assert result[0] == 0.0 and float(result[-1]) == pytest.approx(3e38), "the next round is an ordinary one"


def test_across_hosts_a_round_that_cannot_be_held_begins_with_nan() -> None:
    results: list[torch.Tensor] = []
    executor = Executor(
        0,
        lambda *_: None,
        lambda number: torch.empty(4),
        lambda go: [torch.tensor([0.0, 0.0, 3e38, 0.0])] * 2,
        lambda number, floor: results.append(executor.results[number]),
    )
    executor.go(Start(0, 0, ((0, 0, 0, 1.0), (0, 1, 0, 1.0)), 2, (0,), 0, 0))
    executor.go(Start(1, 0, ((0, 0, 0, 1.0), (0, 1, 0, 1.0)), 1, (0,), 0, 1))
    assert results[0].tolist() == torch.tensor([0.0, 0.0, 3e38, 0.0]).tolist()
    assert torch.isnan(results[1][0])


@examples(100)
@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=8), st.sampled_from(["f4", "f8"]), st.floats(1e-3, 1e3))
def test_a_clipped_gradient_near_the_limit_keeps_its_direction(values: list[float], dtype: str, norm: float) -> None:
    gradient = torch.from_numpy(np.array(values, dtype) * np.dtype(dtype).type(LIMIT[dtype]))
    factor = clip_factor(gradient, norm)
    exact = float(sum(Fraction(float(x) / LIMIT[dtype]) ** 2 for x in gradient.tolist())) ** 0.5
    wanted = min(1.0, norm / LIMIT[dtype] / exact) if exact > 1e-18 else factor
    assert factor == pytest.approx(wanted, rel=1e-5, abs=0.0) and 0.0 < factor <= 1.0


def test_parameters_of_a_rank_that_died_before_the_mean_do_not_make_it_greater() -> None:
    """Three ranks hand in ones; one of them dies before the others come: the mean is one, not three halves."""

    class Gone(Exception):
        pass

    size = 6
    host = OneHostRounds.create(Full(), ranks=3, numel=means_numel(size))
    written: dict[int, list[float]] = {}
    means: list[ModelMeans] = []

    def hear(number: int) -> None:
        if number == 0:
            raise Gone
        if number == 1:
            means[2].keep(4)

    for number in range(3):

        def write(_: int, vector: torch.Tensor, number: int = number) -> None:
            written[number] = vector[:size].tolist()

        replica = SimpleNamespace(shares=1, read_share=lambda _, vector: vector[:size].fill_(1.0), write_share=write)
        rounds = OneHostRounds.attach(host.block, number)
        rounds.enter(number, 0)
        means.append(ModelMeans(rounds, number, 4, cast(Replica, replica), cast(Any, lambda number=number: hear(number))))
    with pytest.raises(Gone):
        means[0].keep(4)
    host.leave(0)
    means[1].keep(4)
    assert written == {1: [1.0] * size, 2: [1.0] * size}
