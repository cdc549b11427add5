"""Compares two journals of one script of timings, a live run's and a simulated one's; and the scripts that all such tests go through."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, get_args

import pytest
from hypothesis import strategies as st
from tests.sim.followed import follow
from tests.sim.stepped import SteppedJob, Timings

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold
from offbeat.core.events import Event, Folded
from offbeat.core.policy import Policy
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.training.workload import Handed, Workload

Job = TypeVar("Job", bound=SteppedJob)

LAWS: Final = ("uniform(low=0.5, high=1.5)", "constant(seconds=1)", "rotating(low=0.5, high=2)")
"""The second and the third make much happen at the same instant."""
RETURN: Final = "kill worker=1 at=4.2; restart worker=1 at=8"
VANISHES: Final = "vanish worker=1 at=4; restart worker=1 at=9; slow worker=0 at=2 for=4 factor=3"
FAULTS: Final = (
    "",
    RETURN,
    "join worker=2 at=3; kill worker=0 at=5",
    VANISHES,
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


class Replayed(Workload):
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


def comparable(records: Sequence[Record], *, causes: bool = False) -> Iterator[Record]:
    """Leave out the records' numbers, and what only real processes have: connections, clocks of their phases.

    With ``causes``, name the cause of each record.

    The connection of a process that has left, or is known to be dead, may close afterwards or not; of a process that is killed the records
    do not say how its end was seen.
    """
    gone = set()
    numbered = {record["id"]: record for record in records if "id" in record}
    for record in records:
        if record["kind"] == "state_changed" and record["state"] in ("dead", "finished"):
            gone.add((record["worker"], record["incarnation"]))
        if record["kind"] == "lost" and (record["worker"], record["incarnation"]) in gone:
            continue
        plain = {key: value for key, value in record.items() if key not in ("id", "cause", "phases")}
        if causes and "cause" in record:
            cause = numbered[record["cause"]]
            plain["because"] = cause["kind"], cause.get("worker"), cause.get("version"), cause["t"]
        if "reason" in plain:
            plain["reason"] = plain["reason"].removeprefix("connection closed: ")
        yield plain


def in_order(records: Sequence[Record]) -> list[Record]:
    """Return what is comparable, in one order: of two that say something at the same instant, either may be heard first."""
    return sorted(comparable(records), key=lambda record: (record["t"], str(record)))


def in_one_order(records: Sequence[Record]) -> list[Record]:
    """Return the same without the ends of ranks, of which the supervisor and the rank's connection tell, either of them first."""
    return in_order([record for record in records if record["kind"] != "lost"])


def ran(job: Job) -> tuple[Job, list[Record]]:
    """Run a job and check what holds of every one: each gradient and each index has one fate, and the parameters are those that the folds
    come to. Of gradients that have gone with their hosts the journal says so after the fold."""
    live = job.run()
    assert Tally.of(live).problems() == []
    for report in (record["report"] for record in live if record["kind"] == "epoch_ended"):
        assert sum(report[name] for name in ("folded", "dropped", "rejected", "unused")) == report["indices"]
    policy = rule(job.script.sync)
    for shard in range(job.script.cluster.servers) if policy.family == "server" else ():
        versions = [record["version"] for record in live if record["kind"] == "fold" and record.get("shard", 0) == shard]
        assert versions == list(range(1, len(versions) + 1))
    if job.script.wire == "float32" and parameters_follow(policy):
        gone = {(r["version"], r["worker"], r["incarnation"], r["clock"]) for r in live if r["kind"] == "undone"}
        for fold in (record for record in live if gone and record["kind"] == "fold"):
            parts = [p for p in fold["parts"] if (fold["version"], p["worker"], p["incarnation"], p["clock"]) not in gone]
            live[live.index(fold)] = {**fold, "parts": parts}
        follow(job, live)
    return job, live


def parameters_follow(policy: Policy) -> bool:
    """Whether the live parameters are what the journal's folds come to: where replicas drift apart, or late gradients are clipped, not."""
    return policy.family == "server" or (isinstance(policy, RoundRule) and policy.delivery == "replay" and policy.carry_clip is None)


def seen(job: SteppedJob) -> dict[Any, list[Any]]:
    """The parameters with which workers have gone on, bit by bit; who has gone on first at one instant does not matter."""
    return {key: sorted(parameters.tolist() for parameters in each) for key, each in job.seen.items()}


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


def scripts(rules: Sequence[str], faults: Sequence[str] = FAULTS, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Timings]:
    """Draw scripts of these rules; ``more``: further arguments of `scripted`."""
    drawn = (st.sampled_from(each) for each in (rules, LAWS, faults, (FREE, DEALT)))
    return st.builds(scripted, *drawn, seed=st.integers(0, 1 << 30), **more)


def deaths(points: Iterable[str], latest: int, most: int, *, least: int = 1) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Draw when processes die: at the nth time, from one death to the next, that they come to a point."""
    return st.lists(st.tuples(st.sampled_from(sorted(points)), st.integers(1, latest)), min_size=least, max_size=most)


ONE_OR_TWO: Final = st.sampled_from((1, 2))
