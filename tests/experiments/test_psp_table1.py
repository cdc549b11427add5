"""PSP-SGD's Algorithm 1 as printed: where it differs from the library's rule, and the paper's table, shortened."""

from __future__ import annotations

import pytest
from experiments.psp_table1 import TABLE_1
from experiments.psp_table1.cluster import Cluster, Setting
from experiments.psp_table1.listing import Listing, ListingBlocks
from tests.core.test_block_cache import begun, give
from tests.policies.test_psp import folds, gradient, shard

from offbeat.core.block_cache import Blocks


def test_a_worker_may_count_twice() -> None:
    decision = Listing(c=2).fold(shard(gradient(0, t=6, arrived=2.0), earlier=(gradient(0, arrived=1.0),)))
    assert folds(decision) == [(0, 5), (0, 6)]


def test_the_first_iteration_needs_every_block() -> None:
    blocks = Listing(c=1, b=0.3).blocks(3)
    give(blocks, 1.0, a=0, b=0)
    assert not blocks.ready(now=9.0) and blocks.wake_at() is None
    give(blocks, 2.0, c=0)
    assert blocks.ready(now=2.0)


def test_a_block_counts_only_in_the_iteration_in_which_it_is_taken() -> None:
    """SPEC 5.5 (2), three messages: the fast shard's next block is used up while the worker waits for the slow shard."""
    listing, mended = begun(ListingBlocks(2)), begun(Blocks(2))
    for blocks in (listing, mended):
        give(blocks, 1.0, b=1)
        give(blocks, 2.0, b=2)
        assert not blocks.ready(now=2.0)
        give(blocks, 3.0, a=1)
        assert blocks.ready(now=3.0) and blocks.advance() == 1 and blocks.used == (1, 2)
        give(blocks, 4.0, a=2)
    assert mended.ready(now=4.0)
    assert not listing.ready(now=1e9) and listing.wake_at() is None, "it waits for a block that it has got"


def test_iterations_are_replayed() -> None:
    blocks = begun(ListingBlocks(2, fraction=0.5))
    for version in (1, 2, 3):
        give(blocks, 1.0, a=version, b=version)
    order = []
    while blocks.ready(now=2.0):
        order.append((blocks.advance(), blocks.used))
    assert order == [(1, (1, 0)), (2, (2, 0)), (3, (3, 0))], "the first block taken is enough; the second is then too old"


def test_the_timeout_begins_when_it_waits() -> None:
    blocks = begun(ListingBlocks(2, fraction=0.5, timeout_s=4.0))
    give(blocks, 1.0, a=1)
    assert not blocks.ready(now=5.0) and blocks.wake_at() == 9.0
    assert not blocks.ready(now=8.0) and blocks.ready(now=9.0)
    give(blocks, 8.5, b=1)
    assert blocks.ready(now=8.5)


def test_a_release_begins_with_the_oldest_block() -> None:
    blocks = ListingBlocks(2)
    give(blocks, 1.0, a=5, b=6)
    blocks.released()
    assert blocks.ready(now=1.0) and blocks.advance() == 5


@pytest.mark.parametrize(("c", "b"), TABLE_1)
def test_the_listing_takes_as_long_as_in_the_paper(c: int, b: float) -> None:
    iterations = 60
    outcome = Cluster(Listing(c=c, b=b), Setting(iterations=iterations), seed=1).run()
    minutes = outcome.seconds / 60 * Setting().iterations / iterations
    print(f"c={c} b={b:.0%}: {minutes:.2f} min, in the paper {TABLE_1[c, b]}")
    assert minutes == pytest.approx(TABLE_1[c, b], rel=0.05)
