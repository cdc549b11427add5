"""The leader of server 0 dies at any point, in a job across hosts without servers: its standby orders the rounds as the leader would."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from tests.sim.comparison import FAULTS, FREE, LAWS, books_are_right, compare, deaths, scripted, scripts
from tests.sim.dying_sequencer import ReplicatedSequencer
from tests.sim.followed import follow
from tests.sim.replicated import POINTS
from tests.sim.stepped import Timings
from tests.sim.test_dying_sequencer import SOME, SUMS, in_one_order, without_undone
from tests.sim.test_same_script_ranks import TWO_DIE, parameters_follow
from tests.tiers import examples

from offbeat.journal.records import Record

OFTEN: Final = [(kind, 5 * number + 1) for number in range(6) for kind in ("flush", "send")]


def ran(
    script: Timings, where: Path, deaths: list[tuple[str, int]], *, ring_first: bool = True
) -> tuple[ReplicatedSequencer, list[Record]]:
    """Run it, and check what holds of every job."""
    job = ReplicatedSequencer(script, where / "journal.jsonl", deaths, ring_first=ring_first)
    live = job.run()
    books_are_right(live)
    if parameters_follow(script):
        follow(job, without_undone(live))
    return job, live


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", SOME)
def test_the_journal_is_that_of_a_job_in_which_no_leader_has_died(sync: str, tmp_path: Path) -> None:
    """No rank dies, and none is dealt work: the standby hears what several ranks say at one instant in another order than the leader."""
    script = scripted(sync, LAWS[0], "", FREE)
    _, calm = ran(script, tmp_path, [])
    job, live = ran(script, tmp_path, OFTEN)
    compare(*(in_one_order(log) for log in (live, calm)))
    assert job.died.total() > 4 and len(job.seen) > 2


@examples(80, quick=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    script=scripts(SUMS, (*FAULTS, TWO_DIE)),
    deaths=deaths(POINTS, 60, 20),
    ring_first=st.booleans(),
)
def test_whenever_leaders_die_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, deaths: list[tuple[str, int]], ring_first: bool
) -> None:
    """Where much happens at one instant, it matters who is heard first: so journals are not compared."""
    ran(script, tmp_path_factory.mktemp("replicas"), deaths, ring_first=ring_first)
