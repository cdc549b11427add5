"""The process of the coordinator and the sequencer of a job across hosts dies at any point, and the journal is that of a calm job."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sim.comparison import DEALT, FAULTS, FREE, LAWS, RETURN, compare, deaths, in_one_order, ran, scripted, scripts
from tests.sim.dying_sequencer import DyingSequencer
from tests.sim.stepped import Timings
from tests.sim.test_same_script_ranks import ROUNDS, TWO_DIE
from tests.tiers import examples

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies import rule_of

SOME: Final = ["solo", "majority", "full", "quorum(q=2)", "first_of(m=2)"]
SUMS: Final = [sync for sync in dict.fromkeys([*ROUNDS, *SOME]) if rule_of(RoundRule, sync).model_sync_every is None]  # type: ignore[type-abstract]
"""These ranks sum gradients only."""
POINTS: Final = ("append", "begin", "send")


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", SOME)
def test_the_journal_is_that_of_a_job_in_which_it_has_not_died(sync: str, tmp_path: Path) -> None:
    deaths = [(kind, 3 * number + 1) for number in range(8) for kind in ("append", "send", "append")]
    for work in (FREE, DEALT):
        script = scripted(sync, LAWS[0], RETURN, work)
        (_, calm), (job, live) = (ran(DyingSequencer(script, tmp_path / "journal.jsonl", dies, 5)) for dies in ([], deaths))
        compare(*(in_one_order(log[1:]) for log in (live, calm)))
        assert job.died.total() > 8 and all(job.died[kind] for kind in ("append", "send"))
        assert job.process_of(0).server.service.state.job is not None and len(job.seen) > 2


BACK: Final = scripted(
    "majority(staleness=2)", LAWS[0], "vanish worker=1 at=4; restart worker=1 at=9; slow worker=0 at=2 for=4 factor=3", DEALT, seed=671
)
"""A rank is handed a result while another has the connection of its earlier process still."""


@examples(150, quick=4)
@example(script=BACK, deaths=[("append", 3), ("append", 73), ("begin", 7)], records=18, ring_first=False)
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
    ran(DyingSequencer(script, tmp_path_factory.mktemp("dying") / "journal.jsonl", deaths, records, ring_first=ring_first))
