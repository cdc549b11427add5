"""Law 2 for ranks that mix parameters: one script of timings gives the same steps, fates, samples and models, live and simulated.

Live, a rank looks by itself for whom to wait and what to mix, in memory that all share; the coordinator hears of its steps alone. So two
things are compared: what both coordinators say, record by record, but for what only the simulated one knows (``mix``, ``share``, ``pair``,
``adopt``, ``written_off``, and ``release``, which live is said before a rank has mixed); and when each rank goes on with which model, where
the simulated models follow from what the simulator says of parameters (``followed_gossip.py``). The rest:

- Under dpsgd a live gradient is heard of when its rank makes its step, a simulated one when it is ready. One whose rank dies in between,
  or which waits at the end, is dropped there and not heard of here; live its samples go to others, simulated they are dropped with it.
  A gradient is a sign of life too: a rank that falls silent may be declared dead at another time, from which on the two are not compared.
- A rank makes its steps itself: frozen while it waits under dpsgd, it makes none, and the simulated ledger makes it in its place. From
  there on the two are not compared, nor once a waiting rank has found out from memory that it was declared dead. When a rank goes on
  that is frozen is not compared.
- Where samples are dealt out and a rank dies while others wait, the coordinator deals its samples to others before it hears of their
  steps; from there on the two are not compared.
- A rank that is idle for no time at all mixes nothing in meanwhile; the simulated one mixes what is on its way to it. Under push-sum
  models are compared up to the first such pause, with ``overlap`` up to the first pause of any length.
- Whom a rank copies that comes to a running job: live the quickest, simulated the first. The simulated models take the live copy.
- What has gone with a rank (``written_off``) has its time from different sources, and is compared in tests/runtime/gossip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from tests.sim.comparison import DEALT, EFFECTS, EVENTS, FAULTS, FREE, LAWS, RETURN, VANISHES, comparable, compare, only, scripted, scripts
from tests.sim.followed_gossip import FollowedGossip
from tests.sim.stepped import Timings
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.test_same_script_ranks import EXAMPLES, TWO_DIE, is_silence
from tests.tiers import examples

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.policies import rule
from offbeat.sim.faults import Freeze
from offbeat.sim.run import simulate
from offbeat.types import Seconds, WorkerId

GOSSIP: Final = [spelling for spelling in EXAMPLES if rule(spelling).family == "gossip"] + [
    "sgp(overlap=1)",
    "sgp(graph=ring, out_degree=2)",
]
UNHEARD: Final = ("mix", "share", "pair", "adopt", "written_off", "release")
NEVER_MADE: Final = ("its replica is gone with it", "the job has ended")


def heard(records: Iterable[Record]) -> list[Record]:
    """Return what both coordinators know, in the same words."""
    said = []
    for record in records:
        if record["kind"] in UNHEARD or is_silence(record) or (record["kind"] == "settle" and record["reason"] in NEVER_MADE):
            continue
        if record["kind"] in ("fold", "settle"):
            record = {**record, "reason": record["reason"].partition(", with the parameters of")[0]}
        said.append(record)
    return said


def comparable_until(job: SteppedRanks, live: list[Record]) -> Seconds:
    """When the two begin to differ; see the head of this file."""
    if job.script.work.samples is None:
        return job.alone_from
    deaths: list[Seconds] = [record["t"] for record in live if record.get("state") == "dead"]
    return min([job.alone_from, *(t for t in deaths if job.waited_at(t))])


def compare_models(job: SteppedRanks, simulated: list[Record], followed: FollowedGossip, until: Seconds) -> None:
    """Whether each rank goes on at the same times, with the same model."""
    ice = [(fault.worker, fault.at_s) for fault in job.script.cluster.script.faults if isinstance(fault, Freeze)]

    def counts(worker: WorkerId, t: Seconds) -> bool:
        return t < until and all(worker != frozen or t < since for frozen, since in ice)

    releases = iter([record for record in simulated if record["kind"] == "release"])
    theirs: dict[WorkerId, list[tuple[Seconds, list[float]]]] = {}
    for worker, incarnation, parameters in followed.went_on:
        # A process that is gone without the coordinator's knowledge is released, and does not go on.
        t = next(record["t"] for record in releases if (record["worker"], record["incarnation"]) == (worker, incarnation))
        if counts(worker, t):
            theirs.setdefault(worker, []).append((t, parameters))
    ours: dict[WorkerId, list[tuple[Seconds, list[float]]]] = {}
    for one in job.went_on:
        if counts(one.worker, one.t):
            ours.setdefault(one.worker, []).append((one.t, one.parameters))
    assert ours.keys() == theirs.keys()
    for worker, models in ours.items():
        assert [t for t, _ in models] == [t for t, _ in theirs[worker]], f"rank {worker} goes on at other times"
        for (t, live), (_, model) in zip(models, theirs[worker], strict=True):
            assert live == pytest.approx(model, rel=1e-4, abs=1e-5), f"rank {worker} goes on with another model at {t}"


def both(script: Timings, where: Path) -> tuple[SteppedRanks, list[Record]]:
    """Run it on both sides and compare; the live run and its journal."""
    policy = rule(script.sync)
    assert isinstance(policy, GossipRule)
    job = SteppedRanks(script, where / "live.jsonl")
    live = job.run()
    followed, journal = FollowedGossip(job, live), where / "simulated.jsonl"
    result = simulate(script.sync, script.cluster, script.work, content=followed, journal=journal)
    assert "for ever" not in result.reason
    simulated, until = list(read(journal)), comparable_until(job, live)
    if policy.exchange == "average":
        until = min([until, *silences(live), *silences(simulated)])
    ours, theirs = ([r for r in heard(comparable(log)) if r["t"] < until] for log in (live, simulated))
    for wanted in (EFFECTS,) if policy.exchange == "average" else (EFFECTS, EFFECTS | EVENTS):
        compare(only(ours, wanted), only(theirs, wanted))
    if until == inf:
        assert ours[-1]["t"] == theirs[-1]["t"], "they end at different times"
    if policy.exchange == "push":
        until = min([until, *pauses(live, of_no_length=policy.delay_steps == 0)])
    compare_models(job, simulated, followed, until)
    return job, live


def silences(records: Sequence[Record]) -> list[Seconds]:
    """When ranks were declared dead because nothing was heard of them."""
    return [record["t"] for record in records if record.get("state") == "dead" and record["reason"].startswith("not heard of")]


def pauses(live: Sequence[Record], *, of_no_length: bool) -> list[Seconds]:
    """When ranks became idle; with ``of_no_length``, only those that the end of the epoch woke at the same time."""
    idle = {(record["t"], record["worker"]) for record in live if record["kind"] == "paused"}
    if of_no_length:
        idle &= {(record["t"], worker) for record in live if record["kind"] == "epoch_ended" for worker in record["workers"]}
    return [t for t, _ in idle]


@pytest.mark.few(5)
@pytest.mark.parametrize("faults", ["", RETURN])
@pytest.mark.parametrize("sync", GOSSIP)
def test_the_simulator_says_what_the_ranks_say(sync: str, faults: str, tmp_path: Path) -> None:
    for work in (FREE, DEALT):
        job, live = both(scripted(sync, LAWS[0], faults, work), tmp_path)
        assert len(job.went_on) > 10
        assert any(record.get("state") == "dead" for record in live) == bool(faults)


# Not a rank that vanishes: two neighbours may go on without it at one instant, live and simulated in another order (dpsgd, seed 2).
@examples(50)
@given(script=scripts(GOSSIP, (*(fault for fault in FAULTS if fault != VANISHES), TWO_DIE)))
def test_also_with_all_faults(tmp_path_factory: pytest.TempPathFactory, script: Timings) -> None:
    both(script, tmp_path_factory.mktemp("both"))
