"""A worker's blocks: when it may go on, and as which iteration."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core.block_cache import Blocks


def begun(blocks: Blocks) -> Blocks:
    """With version 0 of every block, and iteration 0 begun."""
    for shard in range(len(blocks.held)):
        blocks.received(shard, 0, now=0.0)
    assert blocks.ready(now=0.0) and blocks.advance() == 0
    return blocks


def give(blocks: Blocks, now: float, **versions: int) -> None:
    """Blocks a, b, c ... at these versions."""
    for name, version in versions.items():
        blocks.received(ord(name) - ord("a"), version, now)


@pytest.mark.parametrize(("shards", "fraction", "needed"), [(32, 0.9, 29), (32, 0.75, 24), (100, 0.29, 29), (4, 0.01, 1), (3, 1.0, 3)])
def test_the_fraction_is_rounded_up(shards: int, fraction: float, needed: int) -> None:
    assert begun(Blocks(shards, fraction=fraction)).needed == needed


def test_it_waits_for_the_others_until_the_timeout_or_the_last() -> None:
    blocks = begun(Blocks(3, fraction=0.6, timeout_s=4.0))
    give(blocks, 1.0, a=1)
    assert blocks.wake_at() is None
    give(blocks, 2.0, b=1)
    assert not blocks.ready(now=2.0) and blocks.wake_at() == 6.0
    assert not blocks.ready(now=5.9) and blocks.ready(now=6.0)
    give(blocks, 3.0, c=1)
    assert blocks.ready(now=3.0) and blocks.wake_at() is None


def test_the_timeout_runs_while_it_computes() -> None:
    blocks = begun(Blocks(3, fraction=0.6, timeout_s=4.0))
    give(blocks, 1.0, a=2, b=2)
    assert blocks.ready(now=5.0) and blocks.advance() == 2
    give(blocks, 6.0, a=3, b=3)
    assert blocks.wake_at() == 10.0


def test_a_release_lets_it_go_on_from_what_there_is() -> None:
    blocks = begun(Blocks(2))
    blocks.released()
    assert blocks.ready(now=1.0) and blocks.advance() == 0, "nobody has made a new version, and it computes once more from this one"
    give(blocks, 2.0, a=5, b=6)
    blocks.released()
    assert blocks.ready(now=2.0) and blocks.advance() == 5
    with pytest.raises(AssertionError, match="released without all blocks"):
        Blocks(2).released()


@pytest.mark.parametrize("interrupt", [False, True])
def test_an_iteration_is_overtaken_once_the_next_could_begin(interrupt: bool) -> None:
    blocks = begun(Blocks(3, fraction=0.6, interrupt=interrupt))
    give(blocks, 1.0, a=1)
    assert not blocks.overtaken
    give(blocks, 1.0, b=1)
    assert blocks.overtaken is interrupt


def test_beginning_too_early_is_our_mistake() -> None:
    blocks = begun(Blocks(2))
    with pytest.raises(AssertionError, match="not ready"):
        blocks.advance()


@examples(300)
@given(st.data())
def test_whatever_comes_it_is_ready_when_enough_is_held(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 6))
    fraction = data.draw(st.floats(0.01, 1.0))
    skew = data.draw(st.one_of(st.none(), st.integers(0, 3)))
    blocks, held, t = begun(Blocks(shards, fraction=fraction, max_skew=skew)), [0] * shards, 0
    need = ceil(fraction * shards - 1e-9)
    for shard, version in data.draw(st.lists(st.tuples(st.integers(0, shards - 1), st.integers(0, 9)), max_size=30)):
        blocks.received(shard, version, now=1.0)
        held[shard] = max(held[shard], version)
        largest = sorted(held, reverse=True)[need - 1]
        ready = largest > t and (skew is None or min(held) + skew > t)
        assert blocks.ready(now=1.0) == ready
        if ready and data.draw(st.booleans()):
            before, t = t, blocks.advance()
            assert before < t <= largest and blocks.used == tuple(held)
            assert t == largest or t == min(held) + (skew or 0)
