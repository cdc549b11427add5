"""The rule that changes: what it predicts, what it chooses, when it changes, and that it tells."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.promises import FreshOnly, by_samples, fresh
from tests.tiers import ALL, examples

from offbeat.core.effects import Effect, Fold, Release
from offbeat.core.events import Event, Pushed
from offbeat.core.policy import ServerRule
from offbeat.core.server.ledger import Ledger
from offbeat.journal.file import read
from offbeat.policies import ASP, SSP, Auto, Backup, Rennala
from offbeat.policies.auto import BOUNDED, FAIR, KINDS, Allow, Choice, chosen
from offbeat.policies.replayed import Outlook, first_fresh, nobody_waits, one_by_one, part_of_rate
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate


class Changing(FreshOnly):
    """Without permission for stale gradients as the rules of fresh ones; with it somebody computes at least."""

    @staticmethod
    def most_stale(rule: Any, workers: int) -> Any:
        return 0 if rule.allow in ("exact", "biased") else None

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        if self.rule.allow in ("exact", "biased"):
            fresh(effect)
        if not any(part.gathered for part in effect.parts):  # `Rennala` weighs a push without a count of samples as one sample
            by_samples(effect, pushes)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        if self.rule.allow in ("exact", "biased"):
            super().step(event, effects)
        else:
            assert not self.ledger.active or len(self.ledger.waiting) < len(self.ledger.active), "everybody waits"


PROMISES = {Auto: Changing}
REFUSED = [
    ("auto(allow=all)", r"auto\(allow='all'\): allow must be one of exact, biased, stale, any"),
    ("auto(gain=0.9)", r"auto\(gain=0.9\): gain must be a number, at least 1"),
    ("auto(patience=0)", r"auto\(patience=0\): patience must be a whole number, at least 1"),
    ("auto(window=3)", r"auto\(window=3\): window must be a whole number, at least 4"),
]

turns = st.integers(2, 5).flatmap(
    lambda n: st.lists(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=8), min_size=n, max_size=n)  # lengths differ
)


def really(policy: ServerRule, given: Sequence[Sequence[float]], pushes: int) -> tuple[list[int], int, float]:
    """Let the rule itself fold workers' turns: by worker the folded gradients, the number of versions, and the time of the last fold."""
    ledger = Ledger(policy)
    due: list[tuple[float, int, int]] = []
    made, folded, last = [0] * len(given), [0] * len(given), 0.0

    def note(effects: Sequence[Effect], now: float) -> float:
        for effect in effects:
            if isinstance(effect, Release):
                own = given[effect.worker]
                heappush(due, (now + own[made[effect.worker] % len(own)], effect.worker, effect.version))
                made[effect.worker] += 1
            elif isinstance(effect, Fold):
                for part in effect.parts:
                    folded[part.worker] += 1
        return now if any(isinstance(effect, Fold) for effect in effects) else last

    for worker in range(len(given)):
        note(ledger.enter(worker, 1, 0.0, more=worker < len(given) - 1), 0.0)
    for _ in range(pushes):
        now, worker, version = heappop(due)
        last = note(ledger.push(Pushed(worker, 1, version, 8, 1.0), now), now)
    return folded, ledger.version, last


@examples(200, quick=40)
@given(turns, st.integers(0, 2), st.integers(8, 60))
def test_what_is_predicted_of_fresh_gradients_is_what_the_rule_makes(given: list[list[float]], b: int, pushes: int) -> None:
    n = len(given)
    for policy, found in (
        (Backup(b=min(b, n - 1)), first_fresh(given, n - min(b, n - 1), pushes)),
        (Rennala(batch=n), first_fresh(given, n, pushes, ahead=True)),
    ):
        folded, versions, last = really(policy, given, pushes)
        if found is None:
            assert versions == 0
            continue
        length = part_of_rate(n - policy.b, n) if isinstance(policy, Backup) else 1.0
        assert (found.gradients, found.steps) == pytest.approx((sum(folded) / last, length * versions / last))
        assert list(found.folded) == folded


@examples(100, quick=20)
@given(turns, st.sampled_from(BOUNDED))
def test_where_nobody_waits_as_many_gradients_come_as_are_predicted_and_no_rule_that_holds_workers_gets_more(
    given: list[list[float]], rule: ServerRule
) -> None:
    n, pushes = len(given), 400
    folded, _, last = really(ASP(), given, pushes)
    free, found = nobody_waits(given), one_by_one(rule, given, pushes)
    assert free.gradients == pytest.approx(pushes / last, rel=0.1) and free.steps == pytest.approx(free.gradients / n / 2)
    assert [one / sum(free.folded) for one in free.folded] == pytest.approx([one / pushes for one in folded], abs=0.1)
    assert found is not None and sum(found.folded) == pushes and found.gradients < 1.1 * free.gradients


outlooks = st.builds(
    Outlook,
    gradients=st.floats(0.1, 10.0),
    steps=st.floats(0.1, 10.0),
    folded=st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any).map(tuple),
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Choice]:
    fresh_ones = [Choice(Backup(b=b), "exact", draw(outlooks), 4 - b) for b in (0, 1, 2)]
    kinds = [one._replace(kind="biased") if one.outlook.least < FAIR and one.batch < 4 else one for one in fresh_ones]
    rest = [Choice(Rennala(batch=4), "biased", draw(outlooks), 4), Choice(SSP(staleness=3), "stale", draw(outlooks), 1)]
    return [*kinds, *rest, Choice(ASP(), "unbounded", draw(outlooks), 1)]


@examples(300, quick=60)
@given(candidates(), st.sampled_from(list(KINDS)), st.sampled_from((1.0, 1.1, 2.0)), st.integers(0, 5))
def test_the_same_figures_never_lead_to_a_second_change(found: list[Choice], allow: Allow, gain: float, at: int) -> None:
    policy = Auto(allow=allow, gain=gain)
    first = chosen(found, policy, found[at])
    assert first is not None and first.kind in KINDS[allow]
    assert chosen(found, policy, first) == first
    if first != found[at] and found[at].kind in KINDS[allow] and found.index(first) > found.index(found[at]):
        assert first.outlook.progress >= gain * found[at].outlook.progress, "a less gentle rule gains"


SLOW = "per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=(4,1,1,1))"
CHANGING = "windows(law='lognormal(mean=1, sd=0.1, low=0.5)', worker=0, begin=100, end=300, factor=4)"


def changes(sync: str, compute: str, time_s: float = 400.0) -> list[tuple[float, str, str]]:
    """Return the changes of the rule in a simulation, from its summary."""
    result = simulate(sync, Cluster(workers=4, compute=compute), Work(time_s=time_s))
    return [(change["t"], change["rule"], change["reason"]) for change in result.summary["rule_changes"]]


def test_a_slow_worker_is_not_waited_for_where_that_is_allowed() -> None:
    assert changes("auto", SLOW) == [], "worker 0 would weigh nothing"
    ((_, became, reason),) = changes("auto(allow=biased)", SLOW)
    assert became == "backup(b=1)"
    for figure in (
        "gradients/s",
        "bsp 1",
        "3 of 4 gradients in place of 4",
        "the learning rate is that of the script",
        "worker 0 weighs 0.00 of its share, 0.00 on average",
    ):
        assert figure in reason


def test_it_goes_back_when_the_slowness_is_over() -> None:
    found = changes("auto(allow=biased)", CHANGING)
    assert [became for _, became, _ in found] == ["backup(b=1)", "bsp"]
    assert 100 < found[0][0] < 130 and 300 < found[1][0] < 320, "turns of before are left out"


def test_workers_that_are_slow_in_turn_all_keep_their_shares() -> None:
    """While one is slow it weighs nothing, and on average of the predictions as much as any other."""
    law = "lognormal(mean=1, sd=0.1, low=0.5)"
    for worker in range(4):
        law = f"windows(law={law!r}, worker={worker}, begin={60 * worker}, end={60 * worker + 60}, every=240, factor=4)"
    ((at, became, reason),) = changes("auto", law, 500.0)
    assert became == "backup(b=1)" and 60 < at < 240, "the first that is slow alone has not had its share"
    assert FAIR <= float(reason.split("of its share, ")[1].split()[0]) < 1.0


def test_nothing_changes_where_nobody_is_slow() -> None:
    for allow in ("exact", "biased"):
        assert changes(f"auto(allow={allow})", "lognormal(mean=1, sd=0.1, low=0.5)", 1000.0 if ALL else 250.0) == []


def test_single_gradients_have_an_nth_of_the_rate_and_the_change_is_a_record(tmp_path: Path) -> None:
    cluster = Cluster(workers=4, compute="per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=(1, 4, 4, 4))")
    result = simulate("auto(allow=any, gain=1.0)", cluster, Work(time_s=100), journal=tmp_path / "run.jsonl")
    records = [record for record in read(tmp_path / "run.jsonl") if record["kind"] in ("fold", "rule_changed")]
    at = next(place for place, record in enumerate(records) if record["kind"] == "rule_changed")
    changed = records[at]
    assert changed["rule"] == "asp" and "the learning rate is divided by 8" in changed["reason"]
    assert changed["version"] == records[at - 1]["version"] and changed["cause"] == records[at - 1]["cause"], "it follows a whole fold"
    assert {(len(record["parts"]), record.get("scale", 1.0)) for record in records[:at]} == {(4, 1.0)}
    assert {(len(record["parts"]), record.get("scale", 1.0)) for record in records[at + 1 :]} == {(1, 0.125)}
    assert result.summary["rule_changes"] == [{key: changed[key] for key in ("t", "version", "rule", "reason")}]


def test_bounded_staleness_serves_a_worker_that_is_always_slow_and_one_that_was() -> None:
    """Its gradients count, and when the slowness is over no lead that it has let others get keeps anybody waiting."""
    assert [became for _, became, _ in changes("auto(allow=stale)", SLOW)] == ["elastic"]
    found = changes("auto(allow=stale)", CHANGING, 600.0)
    assert [became for _, became, _ in found] == ["backup(b=1)", "elastic", "bsp"], "at first worker 0 has had its share"
    result = simulate("auto(allow=stale)", Cluster(workers=4, compute=SLOW), Work(time_s=400.0))
    folded = [worker["fates"]["folded"] for worker in result.summary["per_worker"]]
    assert sum(worker["fates"].get("dropped", 0) for worker in result.summary["per_worker"]) == 0 and sum(folded) > 2 * 400
