"""The leader of server 0 dies at any point, in a job across hosts without servers: its standby orders the rounds as the leader would."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from tests.sim.comparison import FAULTS, FREE, LAWS, compare, deaths, in_one_order, ran, scripted, scripts
from tests.sim.dying_sequencer import ReplicatedSequencer
from tests.sim.replicated import POINTS
from tests.sim.stepped import Timings
from tests.sim.test_dying_sequencer import SOME, SUMS
from tests.sim.test_same_script_ranks import TWO_DIE
from tests.tiers import examples

OFTEN: Final = [(kind, 5 * number + 1) for number in range(6) for kind in ("flush", "send")]


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", SOME)
def test_the_journal_is_that_of_a_job_in_which_no_leader_has_died(sync: str, tmp_path: Path) -> None:
    """No rank dies, and none is dealt work: the standby hears what several ranks say at one instant in another order than the leader."""
    script = scripted(sync, LAWS[0], "", FREE)
    (_, calm), (job, live) = (ran(ReplicatedSequencer(script, tmp_path / "journal.jsonl", dies)) for dies in ([], OFTEN))
    compare(*(in_one_order(log[1:]) for log in (live, calm)))
    assert job.died.total() > 4 and len(job.seen) > 2


@examples(80, quick=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    script=scripts(SUMS, (*FAULTS, TWO_DIE)),
    deaths=deaths(POINTS, 60, 20),
    ring_first=st.booleans(),
)
def test_whenever_leaders_die_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, deaths: list[tuple[str, int]], ring_first: bool
) -> None:
    """Where much happens at one instant, it matters who is heard first: so journals are not compared."""
    ran(ReplicatedSequencer(script, tmp_path_factory.mktemp("replicas") / "journal.jsonl", deaths, ring_first=ring_first))
