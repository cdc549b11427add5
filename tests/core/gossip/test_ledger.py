"""The books of gossip: each gradient has one fate, in its own rank's replica; what the effects say of parameters adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn import gossip_rules, settings
from tests.core.mixing import Replicas
from tests.tiers import examples

from offbeat.core.effects import Adopt, Effect, Fold, Mix, Pair, Release, Settle, Share, WrittenOff
from offbeat.core.events import Initialised, Joined, Lost, Pushed
from offbeat.core.gossip.ledger import GossipLedger
from offbeat.core.gossip.push_sum import Gossip, GossipRule
from offbeat.core.job.coordinator import Coordinator
from offbeat.policies import ADPSGD, DPSGD, SGP
from offbeat.types import Fate


def push(worker: int, incarnation: int, version: int) -> Pushed:
    return Pushed(worker, incarnation, version, samples=8, compute_s=1.0)


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def begin(rule: GossipRule, count: int) -> GossipLedger:
    ledger = GossipLedger(rule)
    for rank in range(count):
        assert kinds(ledger.enter(rank, 1, 0.0))[0] == "Adopt"
    return ledger


def test_a_ring_of_three_in_lockstep() -> None:
    ledger = begin(DPSGD(), 3)
    assert kinds(ledger.push(push(0, 1, 0), 1.0)) == ["Mix", "Fold", "Settle", "Share", "Release"], "what it needs was there before"
    assert kinds(ledger.push(push(0, 1, 1), 1.1)) == [], "its neighbours have not made their first step"
    assert kinds(ledger.push(push(1, 1, 0), 1.2))[-1] == "Release" and list(ledger.waiting) == [0]
    effects = ledger.push(push(2, 1, 0), 1.3)
    assert kinds(effects) == ["Mix", "Fold", "Settle", "Share", "Release"] * 2
    assert [effect.worker for effect in effects if isinstance(effect, Release)] == [2, 0]
    mix = effects[5]
    assert isinstance(mix, Mix) and mix.own == pytest.approx(1 / 3) and {(s.worker, s.clock) for s in mix.sources} == {(1, 1), (2, 1)}
    fold = effects[6]
    assert isinstance(fold, Fold) and (fold.version, fold.parts[0].staleness) == (4, 2)


def test_push_sum_waits_for_its_sender_and_overlap_does_not() -> None:
    ledger = begin(SGP(), 4)
    assert kinds(ledger.push(push(0, 1, 0), 1.0)) == ["Fold", "Settle", "Share"]
    effects = ledger.push(push(3, 1, 0), 1.1)
    assert kinds(effects) == ["Fold", "Settle", "Share", "Mix", "Release"]
    mix = effects[3]
    assert isinstance(mix, Mix) and (mix.worker, mix.own, mix.mass, mix.sources[0][:2]) == (0, 0.5, 1.0, (3, 1))
    overlapping = begin(SGP(overlap=1), 4)
    assert kinds(overlapping.push(push(0, 1, 0), 1.0)) == ["Fold", "Settle", "Share", "Mix", "Release"]
    assert kinds(overlapping.push(push(0, 1, 1), 1.1)) == ["Fold", "Settle", "Share"], "what its sender sent at step 1 is not there"


def test_pairs_never_wait() -> None:
    ledger = begin(ADPSGD(), 4)
    assert kinds(ledger.push(push(0, 1, 0), 1.0)) == ["Fold", "Settle", "Release"], "an even place does not choose"
    effects = ledger.push(push(1, 1, 0), 1.1)
    assert kinds(effects) == ["Pair", "Fold", "Settle", "Release"]
    assert isinstance(effects[0], Pair) and effects[0].partner in (0, 2)


def test_the_dead_are_waited_for_no_more_and_their_mass_is_written_off() -> None:
    ledger = begin(SGP(), 4)
    ledger.push(push(0, 1, 0), 1.0)
    ledger.push(push(2, 1, 0), 1.1)  # to 3
    effects = ledger.leave(3, 2.0)
    (lost,) = (effect for effect in effects if isinstance(effect, WrittenOff))
    assert (lost.worker, lost.mass, [source.worker for source in lost.sources]) == (3, 1.5, [2])
    assert [effect.worker for effect in effects if isinstance(effect, Release)] == [0], "among three, 2 sends to 0, and has sent already"
    ledger.push(push(1, 1, 0), 2.1)
    (adopt, release) = ledger.enter(3, 2, 3.0)
    assert isinstance(adopt, Adopt) and (adopt.source, adopt.clock) == (0, 1) and isinstance(release, Release)


def test_a_pending_gradient_dies_with_its_rank() -> None:
    ledger = begin(DPSGD(), 3)
    ledger.push(push(0, 1, 0), 1.0)
    ledger.push(push(0, 1, 1), 1.1)
    assert list(ledger.unsettled) == [0]
    (settle,) = ledger.leave(0, 1.2)
    assert isinstance(settle, Settle) and settle.fate is Fate.DROPPED


def test_a_refused_gradient_is_a_step_without_one() -> None:
    for rule, expected in (
        (DPSGD(), ["Settle", "Mix", "Share", "Release"]),
        (SGP(), ["Settle", "Share", "Mix", "Release"]),
        (ADPSGD(), ["Settle", "Pair", "Release"]),
    ):
        ledger = begin(rule, 2)
        ledger.push(push(0, 1, 0), 1.0)
        effects = ledger.push(push(1, 1, 0), 1.0, refusal="not finite")
        mine = [e for e in effects if e.worker == 1]  # type: ignore[union-attr]
        assert kinds(mine) == expected and not any(isinstance(e, Fold) for e in effects)
        assert isinstance(effects[0], Settle) and effects[0].fate is Fate.REJECTED


def test_behind_the_coordinator() -> None:
    job = Coordinator(SGP(), workers=2)
    effects = [*job.on(Joined(0), 0.0), *job.on(Joined(1), 0.0), *job.on(Initialised(0), 0.1)]
    assert [effect.worker for effect in effects if isinstance(effect, Release)] == [0, 1]
    assert isinstance(job.on(push(0, 1, 0), 1.0)[-1], Share)
    assert kinds(job.on(Lost(1, "killed"), 2.0)) == ["StateChanged", "WrittenOff", "Mix", "Release"]
    assert kinds(job.on(push(0, 1, 1), 3.0)) == ["Fold", "Settle", "Release"], "alone it exchanges with nobody"


def restored(gossip: Gossip, rule: GossipRule) -> Gossip:
    """Return the machine that goes on with the state of this one, as processes that share it do."""
    other = Gossip(rule, seed=3)
    other.restore(gossip.words())
    assert other.words() == gossip.words()
    return other


@pytest.mark.parametrize("name", gossip_rules)
@examples(100)
@given(data=st.data())
def test_whatever_happens_the_books_add_up(name: str, data: st.DataObject) -> None:
    ranks = range(data.draw(st.integers(1, 6)))
    rule = data.draw(settings(name, len(ranks)))
    assert isinstance(rule, GossipRule)
    ledger, replicas = GossipLedger(rule, seed=3), Replicas(rule.exchange)
    incarnations = dict.fromkeys(ranks, 1)
    versions: dict[int, int] = {}
    pushed: list[tuple[int, int, int]] = []
    asleep: set[int] = set()

    def do(effects: list[Effect]) -> None:
        replicas.follow(effects, initial=5.0)
        versions.update({e.worker: e.version for e in effects if isinstance(e, Release)})

    for rank in ranks:
        do(ledger.enter(rank, 1, 0.0, more=rank != ranks[-1]))
    for what in data.draw(
        st.lists(st.sampled_from(["push"] * 14 + ["leave", "enter", "pause", "resume", "refresh"]), min_size=20, max_size=150)
    ):
        there = set(ledger.gossip.present)
        going = sorted(there - set(ledger.waiting) - asleep)
        if what == "push" and going:
            rank = data.draw(st.sampled_from(going))
            pushed.append((rank, incarnations[rank], ledger.clock(rank) + 1))
            do(ledger.push(push(rank, incarnations[rank], versions[rank]), 1.0))
        elif what == "leave" and there:
            rank = data.draw(st.sampled_from(sorted(there)))
            replicas.gone(rank)
            asleep.discard(rank)
            do(ledger.leave(rank, 1.0))
        elif what == "enter" and set(ranks) - there:
            rank = data.draw(st.sampled_from(sorted(set(ranks) - there)))
            incarnations[rank] += 1
            do(ledger.enter(rank, incarnations[rank], 1.0))
        elif what == "pause" and going:
            asleep.add(rank := data.draw(st.sampled_from(going)))
            do(ledger.pause(rank, 1.0))
        elif what == "resume" and asleep:
            asleep.remove(rank := data.draw(st.sampled_from(sorted(asleep))))
            do(ledger.resume(rank, 1.0))
        elif what == "refresh" and going:
            do(ledger.refresh(data.draw(st.sampled_from(going)), 1.0, "asked for"))
        assert not ledger.active or set(ledger.active) - set(ledger.waiting), "somebody can go on"
        for rank in ledger.waiting:
            assert set(ledger.gossip.behind(rank)) <= set(ledger.active) - {rank}
        if rule.exchange == "push":
            assert replicas.total() + replicas.lost == pytest.approx(replicas.entered + replicas.added)
        if rule.exchange == "pair":
            assert not ledger.waiting
        ledger.gossip = restored(ledger.gossip, rule)
        if present := ledger.gossip.present:
            masses = [ledger.gossip.mass(rank) for rank in present]
            assert min(masses) > 0.0
            assert sum(masses) + ledger.gossip.in_flight() + ledger.gossip.lost == pytest.approx(ledger.gossip.entered)
    do(ledger.close(9.0, "the job has ended"))
    assert sorted(fate[:3] for fate in replicas.fates) == sorted(pushed), "every gradient has one fate"
    folded = sum(fate[3] is Fate.FOLDED for fate in replicas.fates)
    assert folded == ledger.version == round(replicas.added)
    dropped = [fate for fate in replicas.fates if fate[3] is Fate.DROPPED]
    assert rule.exchange == "average" or not dropped
