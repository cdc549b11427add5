"""The source of a joiner's replica dies after it has admitted the joiner and before it has sent the replica; another source gives its own.

The two sources may be at different versions. The joiner must begin at the version of the replica that it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.comparison import DEALT, FREE, LAWS, deaths, ran, scripted, scripts
from tests.sim.dying_servers import POINTS, DyingCoordinator
from tests.sim.stepped import Timings
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.test_dying_coordinator import GOSSIP
from tests.tiers import NIGHT, examples

RETURNS: Final = "kill worker=1 at=4.2; restart worker=1 at=8"
SILENT: Final = "vanish worker=1 at=4.2; restart worker=1 at=8"
"""As `RETURNS`, in a job that watches for silent processes: the end of a source may be noticed some rounds later."""
OTHERS: Final = "join worker=2 at=3; vanish worker=2 at=7.1; restart worker=2 at=8.5"
ROUNDS: Final = ["full", "solo", "majority", "quorum(q=2)", "solo(staleness=2)", "full(delivery=latest, model_sync_every=3)"]


def ran_with(job: SteppedRanks, ends: Iterable[str | None]) -> SteppedRanks:
    """Run a job in which sources end so, one after the other."""
    job.source_ends.extend(ends)
    return ran(job)[0]


def joined(job: SteppedRanks) -> bool:
    """Whether a joiner whose first source has died takes part in the end."""
    return any(went.worker == job.ended[0].joiner and went.incarnation > 1 for went in job.went_on)


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["seen", "silent"])
@pytest.mark.parametrize("sync", [*ROUNDS, *GOSSIP])
def test_the_joiner_begins_at_the_version_of_the_replica_that_it_gets(sync: str, how: str, tmp_path: Path) -> None:
    both = [
        ran_with(SteppedRanks(scripted(sync, law, SILENT, work, seed=seed), tmp_path / "journal.jsonl"), [how])
        for law in LAWS[:2]
        for work in (FREE, DEALT)
        for seed in range(2 if NIGHT else 1)
    ]
    assert all(job.ended for job in both) and any(joined(job) for job in both)


@examples(120, quick=4)
@given(
    script=scripts([*ROUNDS, *GOSSIP], (RETURNS, SILENT, OTHERS)),
    ends=st.lists(st.sampled_from((None, "seen", "silent")), max_size=3),
    deaths=deaths(POINTS, 80, 12, least=0),
)
def test_also_if_the_coordinator_dies_too(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, ends: list[str | None], deaths: list[tuple[str, int]]
) -> None:
    job = DyingCoordinator(script, tmp_path_factory.mktemp("sources") / "journal.jsonl", deaths)
    ran_with(job, (how if how != "silent" or script.cluster.silence_s else "seen" for how in ends))
