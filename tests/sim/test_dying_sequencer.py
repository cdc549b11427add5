"""The process of the coordinator and the sequencer of a job across hosts dies at any point, and the journal is that of a calm job."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.comparison import DEALT, FAULTS, FREE, LAWS, RETURN, books_are_right, comparable, compare, deaths, scripted, scripts
from tests.sim.dying_sequencer import DyingSequencer
from tests.sim.followed import follow
from tests.sim.stepped import Timings
from tests.sim.test_same_script_ranks import ROUNDS, TWO_DIE, parameters_follow
from tests.tiers import examples

from offbeat.core.allreduce.policy import RoundRule
from offbeat.journal.records import Record
from offbeat.policies import rule_of

SOME: Final = ["solo", "majority", "full", "quorum(q=2)", "first_of(m=2)"]
SUMS: Final = [sync for sync in dict.fromkeys([*ROUNDS, *SOME]) if rule_of(RoundRule, sync).model_sync_every is None]  # type: ignore[type-abstract]
"""These ranks sum gradients only."""
POINTS: Final = ("append", "begin", "send")


def ran(
    script: Timings, where: Path, deaths: list[tuple[str, int]], records: int = 20, *, ring_first: bool = True
) -> tuple[DyingSequencer, list[Record]]:
    """Run it, and check what holds of every job."""
    job = DyingSequencer(script, where / "journal.jsonl", deaths, records, ring_first=ring_first)
    live = job.run()
    books_are_right(live)
    if parameters_follow(script):
        follow(job, without_undone(live))
    return job, live


def without_undone(log: list[Record]) -> list[Record]:
    """Return a journal whose folds have no gradients that have gone with their hosts, as the journal says later."""
    gone = {(r["version"], r["worker"], r["incarnation"], r["clock"]) for r in log if r["kind"] == "undone"}
    return [
        {**r, "parts": [p for p in r["parts"] if (r["version"], p["worker"], p["incarnation"], p["clock"]) not in gone]}
        if r["kind"] == "fold"
        else r
        for r in log
    ]


def in_one_order(log: list[Record]) -> list[Record]:
    """Return what is to be compared. Of two that say something at one instant, either may be heard first: also of the supervisor and the
    connection of a rank, which both tell of the rank's end."""
    records = (record for record in comparable(log[1:]) if record["kind"] != "lost")
    return sorted(records, key=lambda record: (record["t"], str(record)))


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", SOME)
def test_the_journal_is_that_of_a_job_in_which_it_has_not_died(sync: str, tmp_path: Path) -> None:
    deaths = [(kind, 3 * number + 1) for number in range(8) for kind in ("append", "send", "append")]
    for work in (FREE, DEALT):
        script = scripted(sync, LAWS[0], RETURN, work)
        _, calm = ran(script, tmp_path, [])
        job, live = ran(script, tmp_path, deaths, records=5)
        compare(*(in_one_order(log) for log in (live, calm)))
        assert job.died.total() > 8 and all(job.died[kind] for kind in ("append", "send"))
        assert job.process_of(0).server.service.state.job is not None and len(job.seen) > 2


@examples(150, quick=8)
@given(
    script=scripts(SUMS, (*FAULTS, TWO_DIE)),
    deaths=deaths(POINTS, 80, 30),
    records=st.integers(1, 40),
    ring_first=st.booleans(),
)
def test_whenever_it_dies_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, deaths: list[tuple[str, int]], records: int, ring_first: bool
) -> None:
    """Where much happens at one instant, it matters who is heard first: so journals are not compared."""
    ran(script, tmp_path_factory.mktemp("dying"), deaths, records, ring_first=ring_first)
