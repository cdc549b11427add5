"""Law 2: one script of timings, through the simulator and through the live servers, gives the same log of effects, for every rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.followed import follow
from tests.sim.stepped import SteppedJob, Timings
from tests.tiers import examples

from offbeat.core.effects import Effect, Fold
from offbeat.core.events import Event, Folded
from offbeat.journal.records import Record, read
from offbeat.policies import RULES, SERVER_RULES, rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.workload import Content, Handed

SETTINGS: Final = (
    "bsp",
    "asp",
    "ssp(staleness=1)",
    "ssp(staleness=3)",
    "dssp(lower=1, upper=3)",
    "backup(b=1)",
    "backup(b=1, obsolete=pull_and_wait, lr_rule=proportional)",
    "backup(b=1, obsolete=push_and_interrupt)",
    "dbw",
    "dbw(obsolete=pull_and_wait, lr_rule=proportional, smoothness=auto)",
    "dbw(obsolete=push_and_interrupt, optimism=0.0, beta=None)",
    "b_dbw",
    "b_dbw(obsolete=push_and_interrupt)",
    "psp(c=2)",
    "psp(c=2, b=0.5, tau1=0.2, tau2=0.1)",
    "psp(c=1, b=0.5, future=hold, interrupt=True)",
    "psp(c=2, b=0.5, future=drop, max_skew=1, tau_max=2.0, scaling=none)",
    "elastic(R=4)",
    "elastic(R=6, history=3, monitor=1, grace=0.5, objective=sum)",
    "elastic(R=4, mode=bulk)",
    "elastic(R=4, mode=bulk, weighting=workers, length_penalty=True)",
    "elastic(R=4, mode=local)",
    "ensemble(steps=3)",
    "ensemble(steps=4, combine=median, adapt_period=True)",
    "ensemble(steps=2, combine=samples, outer_lr=0.7, outer_momentum=0.9)",
    "ensemble(per_epoch=4, overlap=0.5)",
    "ensemble(per_epoch=3, overlap=0.25, budget=12, reallocate=affine)",
    "ensemble(per_epoch=2, overlap=0.0, budget=15, reallocate=inverse, batch_min=2, combine=trimmed_mean, trim=0.34)",
)
LAWS: Final = ("uniform(low=0.5, high=1.5)", "constant(seconds=1)", "rotating(low=0.5, high=2)")
"""The second and the third make much happen at the same instant."""
RETURN: Final = "kill worker=1 at=4.2; restart worker=1 at=8"
FAULTS: Final = (
    "",
    RETURN,
    "join worker=2 at=3; kill worker=0 at=5",
    "vanish worker=1 at=4; restart worker=1 at=9; slow worker=0 at=2 for=4 factor=3",
    "freeze worker=1 at=4.1 for=6",
)
AT_ONCE: Final = "constant(seconds=0)"
FREE: Final = Work(time_s=14.0)
DEALT: Final = Work(samples=50, batch=4, epochs=2)


def kinds(union: Any) -> frozenset[str]:
    """How a journal calls the members of a union of events or effects."""
    return frozenset(re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in get_args(union))


EFFECTS: Final = kinds(Effect)
EVENTS: Final = kinds(Event)


class Replayed(Content):
    """What a live run has measured, and the losses that its workers knew, for a simulated run of the same script."""

    empty = False

    def __init__(self, script: Timings, live: Sequence[Record]) -> None:
        self._script = script
        self._measured = {record["version"]: record for record in live if record["kind"] == "folded"}

    def fold(self, effect: Fold) -> Folded:
        record = self._measured.get(effect.version)
        if record is None:
            return super().fold(effect)
        return Folded(effect.version, tuple(record["squares"]), record["total"], record["lr"], record["difference"])

    def handed_in(self, push: Handed) -> float | None:
        losses = [self._script.loss(push.worker, step.number) for step in push.steps]
        return sum(losses) / len(losses)


def comparable(records: Sequence[Record]) -> Iterator[Record]:
    """Without what only real processes have: connections. Of one that has left, or is known to be dead, it may close afterwards or not;
    of one that is killed it is not said how its end was seen."""
    gone = set()
    for record in records:
        if record["kind"] == "state_changed" and record["state"] in ("dead", "finished"):
            gone.add((record["worker"], record["incarnation"]))
        if record["kind"] == "lost" and (record["worker"], record["incarnation"]) in gone:
            continue
        reason = record.get("reason")
        yield record if reason is None else {**record, "reason": reason.removeprefix("connection closed: ")}


def only(records: Sequence[Record], wanted: frozenset[str]) -> list[Record]:
    return [record for record in records if record["kind"] in wanted]


def compare(live: list[Record], simulated: list[Record]) -> None:
    """Equal, or the first difference and what led to it."""
    for place, (one, other) in enumerate(zip(live, simulated, strict=False)):
        if one != other:
            before = "".join(f"  {record}\n" for record in live[max(0, place - 12) : place])
            pytest.fail(f"record {place} differs; before it\n{before}live       {one}\nsimulated  {other}", pytrace=False)
    longer = live[len(simulated) :] or simulated[len(live) :]
    assert not longer, f"{'live' if len(live) > len(simulated) else 'simulated'} alone goes on with {longer[:5]}"


def both(script: Timings, where: Path) -> tuple[SteppedJob, list[Record]]:
    """Run it on both sides and compare; the live run and its journal."""
    job = SteppedJob(script, where / "live.jsonl")
    live = job.run()
    journal = where / "simulated.jsonl"
    result = simulate(script.sync, script.cluster, script.work, content=Replayed(script, live), journal=journal)
    assert "for ever" not in result.reason
    expected, simulated = list(comparable(live)), list(comparable(list(read(journal))))
    for wanted in (EFFECTS, EFFECTS | EVENTS):
        compare(only(expected, wanted), only(simulated, wanted))
    assert expected[-1]["t"] == simulated[-1]["t"], "they end at different times"
    follow(job, live)
    return job, live


def scripted(
    sync: str, law: str, faults: str, work: Work, *, delay: str = AT_ONCE, seed: int = 0, servers: int = 1, shares_memory: bool = True
) -> Timings:
    cluster = Cluster(
        workers=3,
        servers=servers,
        compute=law,
        per_sample="uniform(low=0.01, high=0.05)",
        delay=delay,
        faults=faults,
        timeout_s=2.0,
        seed=seed,
    )
    return Timings(sync, cluster, work, shares_memory=shares_memory)


def works(sync: str) -> list[Work]:
    """Whether samples are dealt out; where workers have splits of their own, they are."""
    return [DEALT] if rule(sync).split_overlap is not None else [FREE, DEALT]


def test_every_rule_is_here() -> None:
    """But for those without servers, which take their decisions elsewhere when they are live."""
    assert {type(rule(sync)).called() for sync in SETTINGS} == {word for word, kind in RULES.items() if kind in SERVER_RULES}


@pytest.mark.parametrize("faults", ["", RETURN])
@pytest.mark.parametrize("sync", SETTINGS)
def test_the_simulator_says_what_the_servers_say(sync: str, faults: str, tmp_path: Path) -> None:
    for work in works(sync):
        job, live = both(scripted(sync, LAWS[0], faults, work, servers=2), tmp_path)
        assert len(job.seen) > 2
        assert any(record.get("state") == "dead" for record in live) == bool(faults)


@pytest.mark.parametrize("sync", SETTINGS)
def test_also_while_parameters_are_on_their_way(sync: str, tmp_path: Path) -> None:
    both(scripted(sync, LAWS[0], RETURN, works(sync)[-1], delay="uniform(low=0, high=0.5)", servers=2), tmp_path)


@examples(50)
@given(
    sync=st.sampled_from(SETTINGS),
    law=st.sampled_from(LAWS),
    faults=st.sampled_from(FAULTS),
    dealt=st.booleans(),
    seed=st.integers(0, 1 << 30),
    servers=st.sampled_from((1, 2)),
    shares_memory=st.booleans(),
)
def test_also_when_much_happens_at_one_instant(
    tmp_path_factory: pytest.TempPathFactory,
    sync: str,
    law: str,
    faults: str,
    dealt: bool,
    seed: int,
    servers: int,
    shares_memory: bool,
) -> None:
    if rule(sync).scope == "shard" and "freeze" in faults:
        faults = ""  # that a block is read is a sign of life, before the next heartbeat, and the simulator does not know
    work = works(sync)[-1 if dealt else 0]
    both(scripted(sync, law, faults, work, seed=seed, servers=servers, shares_memory=shares_memory), tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_what_one_has_pushed_before_it_died_counts_while_its_next_process_waits_for_the_next_epoch(
    shares_memory: bool, tmp_path: Path
) -> None:
    """It is in the memory of the process that died, and not in that of the one that came."""
    faults = "slow worker=2 at=0.1 for=10 factor=3; kill worker=0 at=2.5; restart worker=0 at=3"
    script = scripted("ensemble(steps=2)", LAWS[1], faults, DEALT, shares_memory=shares_memory)
    _, live = both(script, tmp_path)
    first = next(record for record in live if record["kind"] == "fold")
    joined = next(record["t"] for record in live if record["kind"] == "joined" and record["t"] > 0)
    assert joined < first["t"] and (0, 1) in {(part["worker"], part["incarnation"]) for part in first["parts"]}
