"""The coordinator's process of a job without servers dies at any point, and the journal is that of a job without deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.comparison import DEALT, FAULTS, FREE, LAWS, RETURN, compare, deaths, in_order, ran, scripted, scripts
from tests.sim.dying_servers import POINTS, DyingCoordinator
from tests.sim.stepped import Timings
from tests.sim.test_same_script_ranks import ROUNDS, TWO_DIE
from tests.tiers import NIGHT, examples, marked

from offbeat.journal.records import Record

GOSSIP: Final = ["dpsgd", "sgp", "sgp(out_degree=2, overlap=1)", "adpsgd"]
SOME: Final = ["solo", "majority", "full", "quorum(q=2)", "solo(delivery=latest, model_sync_every=3)", *GOSSIP]


def compared(script: Timings, where: Path, calm: list[Record], deaths: list[tuple[str, int]], records: int = 20) -> DyingCoordinator:
    """Compare it with the job in which nobody dies, but for the first record, which says when it was started."""
    job, live = ran(DyingCoordinator(script, where / "journal.jsonl", deaths, records))
    compare(*(in_order(log[1:]) for log in (live, calm)))
    return job


@pytest.mark.few(4)
@pytest.mark.parametrize("sync", SOME)
def test_the_journal_is_that_of_a_job_in_which_it_has_not_died(sync: str, tmp_path: Path) -> None:
    deaths = [(kind, 3 * number + 1) for number in range(6) for kind in ("append", "send", "change", "append")]
    for work in (FREE, DEALT):
        script = scripted(sync, LAWS[0], RETURN, work)
        _, calm = ran(DyingCoordinator(script, tmp_path / "journal.jsonl", []))
        job = compared(script, tmp_path, calm, deaths, records=5)
        assert job.died.total() > 8 and all(job.died[kind] for kind in ("append", "send", "change"))


@pytest.mark.slow
@pytest.mark.parametrize("sync", marked(SOME, night=[*SOME[::2], "quorum(q=2)"]))
@pytest.mark.parametrize("kind", ["begin", "change", "note_lost"])
def test_each_change_of_the_ranks_is_made_once(sync: str, kind: str, tmp_path: Path) -> None:
    script, number = scripted(sync, LAWS[0], RETURN, DEALT), 1
    _, calm = ran(DyingCoordinator(script, tmp_path / "journal.jsonl", []))
    while compared(script, tmp_path, calm, [(kind, number)]).died:
        number += 1 if NIGHT else 3
    assert number > 8 or (kind == "note_lost" and not sync.startswith("sgp")), number


@examples(150, quick=4)
@given(
    script=scripts(sorted({*ROUNDS, *SOME}), (*FAULTS, TWO_DIE)),
    deaths=deaths(POINTS, 80, 30),
    records=st.integers(1, 40),
)
def test_whenever_it_dies_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, deaths: list[tuple[str, int]], records: int
) -> None:
    """Where much happens at one instant, it matters who is heard first: so journals are not compared."""
    ran(DyingCoordinator(script, tmp_path_factory.mktemp("dying") / "journal.jsonl", deaths, records))
