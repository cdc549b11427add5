"""Rules of shard scope through the `Coordinator`: by hand, fold by fold against BSP, and in thousands of random schedules."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from experiments.psp_table1.listing import Listing
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn import shard_rules
from tests.core.hand import Hand, names, only
from tests.core.shard_world import ShardWorld, drawn
from tests.tiers import ALL, examples

from offbeat.core.effects import Effect, EpochEnded, Fold, Publish, Release, Settle
from offbeat.core.events import Abandoned, Folded, Initialised, Joined, Left, Lost, PullWanted, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.policies import BSP, PSP
from offbeat.types import Fate, WorkerState


class Shards(Hand):
    """A job of some workers and two shards, begun, carried by hand; a push arrives at one shard at a time."""

    def __init__(self, policy: PSP, workers: int, shards: int = 2) -> None:
        super().__init__(policy, workers, begun=False)
        self.job = Coordinator(policy, workers, shards=shards)
        self._shards = shards
        for worker in range(workers):
            self(Joined(worker))
        self(Initialised(0))

    def at(
        self,
        shard: int,
        worker: int,
        t: int = 0,
        held: tuple[int, ...] = (),
        incarnation: int = 1,
        leases: tuple[int, ...] = (),
        bad: str | None = None,
    ) -> list[Effect]:
        return self(Pushed(worker, incarnation, t, 8, 1.0, leases, bad, shard=shard, held=held or (t,) * self._shards))


# By hand.


def test_everybody_is_released_at_the_start_and_nobody_waits_after_a_push() -> None:
    job = Shards(PSP(c=2), 2)
    assert names(job.said)[-2:] == ["Release 0", "Release 1"]
    assert job.at(0, 0) == [], "one of two gradients, and no admission to wait for"


def test_each_shard_folds_by_itself_and_publishes() -> None:
    job = Shards(PSP(c=2), 2)
    job.at(1, 0)
    effects = job.at(1, 1)
    assert names(effects) == ["Fold", "Settle 0", "Settle 1", "Publish"]
    fold, publish = only(Fold, effects), only(Publish, effects)
    assert (fold.shard, fold.version, fold.scale) == (1, 1, 2.0) and [part.worker for part in fold.parts] == [0, 1]
    assert (publish.shard, publish.version, publish.workers) == (1, 1, ((0, 1), (1, 1)))
    assert {effect.shard for effect in effects if isinstance(effect, Settle)} == {1}
    assert job.job.version == 0, "the job is where its last shard is"


def test_the_staleness_is_that_of_the_shards_own_block() -> None:
    job = Shards(PSP(c=1), 1)
    for t in range(3):
        job.at(0, 0, t)
    fold = only(Fold, job.at(0, 0, t=3, held=(1, 0)))
    assert fold.parts[0].staleness == 2 and fold.version == 4
    assert only(Fold, job.at(1, 0, t=3, held=(1, 0))).parts[0].staleness == 0


def test_samples_share_one_fate_when_every_shard_has_spoken() -> None:
    """Dropped at one shard, folded at the other: its samples are used."""
    job = Shards(PSP(c=1), 2)
    job.want(0, size=4)
    job.want(1, size=4)
    job.at(0, 1, leases=(1,))
    assert only(Settle, job.at(0, 0, leases=(0,))).fate is Fate.DROPPED
    assert only(Settle, job.at(1, 0, leases=(0,))).fate is Fate.FOLDED
    job.finish(0, size=4)
    effects = job.finish(1, size=4)
    assert not [effect for effect in effects if isinstance(effect, EpochEnded)], "worker 1's gradient has not arrived everywhere"
    assert only(Settle, effects := job.at(1, 1, leases=(1,))).fate is Fate.DROPPED
    assert only(EpochEnded, effects).report["folded"] == 4


def test_a_death_in_the_middle_of_a_push_leaves_what_has_arrived() -> None:
    job = Shards(PSP(c=2), 3)
    job.want(0)
    job.at(0, 0, leases=(0,))
    assert not [effect for effect in job(Lost(0, "gone")) if isinstance(effect, Settle)]
    late = only(Settle, job.at(1, 0, leases=(0,)))
    assert (late.fate, late.shard) == (Fate.REJECTED, 1) and "was declared dead" in late.reason
    assert job.job.membership[0].state is WorkerState.DEAD, "what another server reports is no sign of life"
    effects = job.at(0, 1)
    assert {part.worker for part in only(Fold, effects).parts} == {0, 1}
    assert job.job.ledger.unsettled == {1}


def test_a_push_of_a_finished_worker_that_arrives_late_says_so() -> None:
    job = Shards(PSP(c=2), 2)
    job.at(0, 0)
    job(Left(0, 1))
    assert only(Settle, job.at(1, 0)).reason == "sent by incarnation 1, which has left"


def test_who_returns_gets_the_whole_model_and_its_old_gradient_is_dropped() -> None:
    job = Shards(PSP(c=3), 3)
    job.want(0, size=2)
    job.at(0, 0, leases=(0,))
    effects = job(Joined(0))
    assert [effect.reason for effect in effects if isinstance(effect, Settle)] == [
        "its worker has come back before the fold and contributes anew"
    ]
    release = only(Release, effects)
    assert (release.worker, release.incarnation, release.version) == (0, 2, 0)
    grant = job.want(0, incarnation=2, size=2)
    assert names(grant) == ["Grant 0"], "and its samples have come back"


def test_what_one_shard_has_folded_is_not_worked_on_again() -> None:
    job = Shards(PSP(c=1), 2)
    job.want(0, size=2)
    job.at(0, 0, leases=(0,))
    job(Lost(0, "gone"))
    job(Joined(0))
    effects = job.want(0, incarnation=2, size=2)
    assert names(effects)[0] == "Paused 0"


def test_a_rejected_gradient_brings_the_whole_model_since_no_fold_will() -> None:
    job = Shards(PSP(c=1), 1)
    effects = job.at(1, 0, bad="bias")
    assert names(effects) == ["Settle 0", "Release 0"] and only(Settle, effects).fate is Fate.REJECTED
    assert names(job.at(0, 0, bad="bias")) == ["Settle 0"], "once"


def test_samples_that_are_not_its_own_reject_a_gradient_at_every_shard() -> None:
    job = Shards(PSP(c=1), 2)
    job.want(1)
    for shard in (0, 1):
        settle = [effect for effect in job.at(shard, 0, leases=(0,)) if isinstance(effect, Settle)]
        assert [(s.fate, s.reason) for s in settle] == [(Fate.REJECTED, "its samples have gone to another worker")]


def test_the_rest_of_a_push_does_not_wake_a_worker_that_has_paused_since() -> None:
    job = Shards(PSP(c=2), 2)
    job.want(0, size=4)
    job.want(1, size=4)
    job.at(0, 0, leases=(0,))
    assert "Paused 0" in names(job.want(0, size=4))
    job.at(1, 0, leases=(0,))
    effects = job.at(0, 1, leases=(1,))
    assert only(Publish, effects).workers == ((1, 1),), "worker 0 still waits for the end of the epoch"


def test_a_paused_worker_that_pushes_after_all_is_sent_what_it_has_missed() -> None:
    job = Shards(PSP(c=1), 2)
    job.want(1, size=2)
    job.want(0, size=2)
    job.at(0, 1, leases=(0,))
    effects = job.at(1, 0, held=(0, 0))
    assert [(e.shard, e.workers) for e in effects if isinstance(e, Publish)] == [(0, ((0, 1),)), (1, ((1, 1), (0, 1)))]


def test_a_worker_that_gives_up_goes_on_by_itself_and_its_samples_go_back() -> None:
    job = Shards(PSP(c=1, interrupt=True), 2)
    job.want(0, size=2)
    assert job(Abandoned(0, 1, 0, 1.0, (0,))) == []
    assert names(job.want(1, size=2)) == ["Grant 1"]


def test_a_pull_brings_the_whole_model_and_measurements_are_not_asked_for() -> None:
    job = Shards(PSP(c=2), 2)
    assert names(job(PullWanted(0, 1))) == ["Release 0"]
    assert job(Folded(1, (), 0.0, 0.1)) == []


def test_a_shard_wakes_up_when_its_timeout_ends() -> None:
    job = Shards(PSP(c=1, tau1=5.0), 2)
    job.at(1, 0)
    assert job.job.wake_at() == job.now + 5.0
    assert job.job.wake(job.now + 4.0) == []
    assert only(Fold, job.job.wake(job.now + 5.0)).shard == 1 and job.job.wake_at() is None


def test_the_end_of_the_job_drops_what_waits() -> None:
    job = Shards(PSP(c=2), 2)
    job.at(0, 0)
    effects = job.job.close(job.now, "the job is over")
    assert [(e.shard, e.fate) for e in effects if isinstance(e, Settle)] == [(0, Fate.DROPPED)] and not job.job.ledger.unsettled


# The deadlock of the listing (SPEC 5.5, 2).


@pytest.mark.parametrize("kind", [Listing, PSP])
def test_the_listing_waits_for_ever_where_the_rule_goes_on(kind: type[PSP]) -> None:
    """Worker 1 is ahead and dies; worker 0 has used up shard 1's block while it waited for shard 0's, which was late."""
    policy = kind(c=1)
    job, blocks = Shards(policy, 2), policy.blocks(2)
    for shard in (0, 1):
        blocks.received(shard, 0, job.now)
    blocks.released()
    job.at(0, 1, t=0)
    job.at(1, 1, t=0)
    blocks.received(1, 1, job.now)
    job.at(1, 1, t=1)
    job(Lost(1, "gone"))
    blocks.received(1, 2, job.now)
    assert blocks.ready(job.now) and blocks.advance() == 0, "its first iteration, begun with the release"
    assert not blocks.ready(job.now)
    blocks.received(0, 1, job.now)
    assert blocks.ready(job.now) and blocks.advance() == 1 and blocks.used == (1, 2)
    effects = job.at(0, 0, t=1, held=blocks.used) + job.at(1, 0, t=1, held=blocks.used)
    assert [(e.shard, e.version) for e in effects if isinstance(e, Publish)] == [(0, 2)], "shard 1 has gone on without this gradient"
    blocks.received(0, 2, job.now)
    assert blocks.ready(1e9) == (kind is PSP)
    assert job.job.wake_at() is None, "shard 1 waits for worker 0, and nothing is under way any more"


# BSP.


def test_with_every_worker_and_every_block_it_is_bsp_fold_by_fold() -> None:
    """Whoever pushes, dies or returns in whatever order: each shard's folds are BSP's."""
    for seed in range(200 if ALL else 40):
        _beside_bsp(random.Random(seed))


def _beside_bsp(chance: random.Random) -> None:
    workers, shards = chance.randint(1, 4), chance.randint(1, 3)
    policy = PSP(c=workers, b=1.0, scaling="none")
    bsp, psp = Hand(BSP(), workers), Shards(policy, workers, shards)
    blocks = {worker: policy.blocks(shards) for worker in range(workers)}
    incarnations = dict.fromkeys(range(workers), 1)
    folds: list[list[tuple[object, ...]]] = [[] for _ in range(shards)]
    expected = []

    def carry_out(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Fold):
                assert effect.shard is not None
                folds[effect.shard].append((effect.version, effect.parts, effect.scale))
            elif isinstance(effect, Publish):
                for worker, _ in effect.workers:
                    blocks[worker].received(effect.shard, effect.version, psp.now)
            elif isinstance(effect, Release):
                for shard in range(shards):
                    blocks[effect.worker].received(shard, len(folds[shard]), psp.now)
                blocks[effect.worker].released()

    carry_out(psp.said)
    for _ in range(60):
        waiting = [w for w in incarnations if blocks[w].ready(psp.now)]
        assert sorted(waiting) == sorted(set(incarnations) - set(bsp.job.ledger.waiting)), "the same workers may go on"
        what = chance.random()
        if what < 0.05 and len(incarnations) > 1:
            worker = chance.choice(list(incarnations))
            del incarnations[worker]
            expected += [e for e in bsp(Lost(worker, "gone")) if isinstance(e, Fold)]
            carry_out(psp(Lost(worker, "gone")))
        elif what < 0.1 and len(incarnations) < workers:
            worker = next(w for w in range(workers) if w not in incarnations)
            expected += [e for e in bsp(Joined(worker)) if isinstance(e, Fold)]
            blocks[worker] = policy.blocks(shards)
            carry_out(psp(Joined(worker)))
            incarnations[worker] = psp.job.membership[worker].incarnation
        elif waiting:
            worker = chance.choice(waiting)
            t, used = blocks[worker].advance(), blocks[worker].used
            assert set(used) == {bsp.job.version}
            expected += [e for e in bsp.push(worker, bsp.job.version, incarnations[worker]) if isinstance(e, Fold)]
            for shard in chance.sample(range(shards), shards):
                carry_out(psp.at(shard, worker, t, used, incarnations[worker]))
    assert folds == [[(e.version, e.parts, e.scale) for e in expected]] * shards and expected


# Random schedules.


@pytest.mark.parametrize("name", shard_rules)
def test_no_schedule_of_delays_deaths_and_epochs_leads_into_a_deadlock(name: str) -> None:
    """Each also keeps every promise of the auditor."""

    @examples(3000, quick=60)
    @given(st.integers(0, 2**62))
    def check(seed: int) -> None:
        ShardWorld(drawn(seed, name)).run()

    check()


OFTEN = ("Abandoned", "PullWanted", "Lost", "Left", "NoneType", "stale block", "ahead of a shard")
ONCE = (
    *(f"dropped: {why}" for why in ("of an earlier", "its worker has sent a newer", "its worker has come back")),
    *(f"rejected: {why}" for why in ("gradient", "sent by incarnation 1, which was", "sent by incarnation 1, which has")),
    "release: samples have come",
)


def missing(seen: Counter[str]) -> list[str]:
    """What has not happened, or not more than 20 times."""
    return [what for what in OFTEN if seen[what] <= 20] + [words for words in ONCE if not any(key.startswith(words) for key in seen)]


def test_the_schedules_have_everything_in_them() -> None:
    """They are worth something only if what is to be tested happens, in the first thousand of them."""
    seen: Counter[str] = Counter()
    for seed in range(1000):
        if not missing(seen):
            break
        world = ShardWorld(drawn(seed)).run()
        for _, event, effects in world.log:
            seen[type(event).__name__] += 1
            seen.update(f"{e.fate}: {e.reason}" for e in effects if isinstance(e, Settle))
            seen.update(f"release: {e.reason}" for e in effects if isinstance(e, Release))
        seen["stale block"] += any(part.staleness for fold in world.audit.folds for part in fold.parts)
        seen["ahead of a shard"] += any(sent.t > min(sent.held) for sent in world.audit._sent.values())
    assert missing(seen) == []


def test_the_world_notices_a_deadlock() -> None:
    """The same schedules with the listing as printed: some of them never end."""
    stuck, seeds = 0, iter(range(400))
    while stuck <= 20:
        plan = drawn(next(seeds))
        assert isinstance(plan.policy, PSP)
        world = ShardWorld(dataclasses.replace(plan, policy=Listing(c=plan.policy.c, b=plan.policy.b)))
        world.play()
        stuck += bool(world.unfinished())
