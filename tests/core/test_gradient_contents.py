"""Which batches a gradient contains: small histories, and the law that each batch is taken by one step, left out, or still there."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core.gradient_contents import GradientContents
from offbeat.types import LeaseId


class Held:
    """Batches of a script, and which of them it still holds."""

    def __init__(self) -> None:
        self.contents = GradientContents()
        self.alive: set[int] = set()
        self._next = 0

    def next(self, pool: int = 0, *, told: bool = True) -> LeaseId:
        """Deliver a batch; ``told``: it can be known whether the script holds the batch."""
        lease = LeaseId(self._next)
        self._next += 1
        self.alive.add(lease)
        self.contents.deliver(pool, lease, (lambda: lease in self.alive) if told else None)
        return lease


def test_a_batch_that_is_dropped_before_its_backward_pass_is_left_out() -> None:
    script = Held()
    bad = script.next()
    good = script.next()
    script.alive.discard(bad)
    script.contents.backward()
    assert script.contents.step() == (good,) and script.contents.left_out() == (bad,) and script.contents.left_out() == ()


def test_a_gradient_thrown_away_is_left_out_once_there_is_another_batch() -> None:
    script = Held()
    bad = script.next()
    script.contents.backward()
    script.contents.clear()
    assert script.contents.left_out() == (), "another pass over the same batch may follow, as in a GAN"
    good = script.next()
    script.contents.backward()
    assert script.contents.step() == (good,) and script.contents.left_out() == (bad,)


def test_a_second_pass_over_a_batch_whose_gradient_was_thrown_away_counts_it() -> None:
    script = Held()
    batch = script.next()
    script.contents.backward()
    script.contents.clear()
    script.contents.backward()
    script.contents.backward()
    assert script.contents.step() == (batch,) and script.contents.step() == ()


def test_one_pass_over_two_batches_and_over_batches_of_two_samplers() -> None:
    script = Held()
    batches = script.next(), script.next(), script.next(1)
    script.contents.backward()
    assert sorted(script.contents.step()) == list(batches)


def test_where_nobody_can_tell_a_pass_is_over_the_oldest_batch() -> None:
    """As with a prefetcher that copies its next batch to the device."""
    script = Held()
    first, second = script.next(told=False), script.next(told=False)
    script.contents.backward()
    assert script.contents.step() == (first,)
    script.contents.backward()
    assert script.contents.step() == (second,)


def test_at_an_epochs_end_the_gradient_is_kept_and_the_rest_left_out_or_given_back() -> None:
    for exhausted in (True, False):
        script = Held()
        used = script.next()
        script.contents.backward()
        rest = script.next()
        assert script.contents.leave(0, exhausted=exhausted) == (used,)
        assert script.contents.left_out() == ((rest,) if exhausted else ())
        later = script.next()
        script.contents.backward()
        assert script.contents.step() == (used, later)


@examples(400)
@given(st.lists(st.sampled_from(["next", "next unknown", "drop", "backward", "clear", "step", "written", "leave"]), max_size=40))
def test_each_batch_goes_one_way(moves: list[str]) -> None:
    script, contents, ends = Held(), GradientContents(), Counter[int]()
    script.contents = contents
    for move in moves:
        match move:
            case "next" | "next unknown":
                script.next(told=move == "next")
            case "drop":
                script.alive -= {lease for lease in script.alive if lease != script._next - 1}
            case "backward":
                contents.backward()
            case "clear":
                contents.clear()
            case "step" | "written":
                ends.update(contents.step(written=move == "written"))
            case "leave":
                kept = contents.leave(0, exhausted=True)
                assert all(contents.contains(lease) for lease in kept)
        ends.update(contents.left_out())
        assert max(ends.values(), default=0) <= 1
    ends.update(contents.step())
    contents.leave(0, exhausted=True)
    ends.update(contents.left_out())
    assert ends == Counter(range(script._next)), "taken by a step, or left out"
