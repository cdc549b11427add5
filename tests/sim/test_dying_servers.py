"""Servers' processes die at any point, and the journal and the parameters are those of a job without deaths."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.comparison import FREE, LAWS, ONE_OR_TWO, RETURN, compare, deaths, in_order, ran, scripted, scripts, seen
from tests.sim.dying_servers import OF_SERVERS, DyingServers
from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.tiers import examples, marked

from offbeat.core.fleet import State
from offbeat.errors import JobError, ProtocolError
from offbeat.policies import RULES
from offbeat.runtime.recovery.keeper import APART_NBYTES
from offbeat.tensors.shard import Shard

PSP: Final = [*RULES["psp"].about.examples, "psp(c=3, scaling=none)"]
OTHERS: Final = ["ssp(staleness=1)", "backup(b=1)", "elastic(R=4)", "elastic(R=4, mode=bulk)", "elastic(R=4, mode=local)"]
SOME: Final = [*PSP, "bsp", "asp", "dbw", "rennala(batch=2)", "ensemble(steps=2)", *OTHERS]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("sync", "servers"), marked([(sync, servers) for sync in SOME for servers in (1, 2)], night=[(sync, 1) for sync in (*PSP[1:], *OTHERS)])
)
def test_the_journal_is_that_of_a_job_in_which_none_has_died(sync: str, servers: int, tmp_path: Path) -> None:
    """Parameters bit by bit, and all records but the first, which says when it was started."""
    deaths = [(kind, 3 * number + 1) for number in range(6) for kind in ("append", "send", "once", "append")]
    script, journal = scripted(sync, LAWS[0], RETURN, FREE, servers=servers), tmp_path / "journal.jsonl"
    (undisturbed, calm), (job, live) = (ran(DyingServers(script, journal, dies, 5)) for dies in ([], deaths))
    assert seen(job) == seen(undisturbed)
    compare(*(in_order(log[1:]) for log in (live, calm)))
    assert job.died.total() > 8 and all(job.died_at[number] for number in range(servers))


@pytest.mark.parametrize("apart", [APART_NBYTES, 3])
@pytest.mark.parametrize("sync", ["psp(c=1)", "psp(c=1, b=0.5)"])
def test_a_block_that_is_sent_again_is_as_it_was_although_its_shard_has_gone_on(sync: str, apart: int, tmp_path: Path) -> None:
    """The dead process had sent it, and it was on its way while others had it, and pushed what came of it."""
    deaths = [("append", number) for number in range(1, 24)]
    script = scripted(sync, LAWS[0], "", FREE, delay="uniform(low=0, high=2)", servers=2)
    job, _ = ran(DyingServers(script, tmp_path / "journal.jsonl", deaths, 100, apart))
    assert job.died.total() == len(deaths)
    for kept in job.fleet.kept.values():
        blocks = [name for name in kept if name.startswith("block ")]
        assert 0 < len(blocks) < 6 if apart == 3 else not blocks, "those that nobody needs any more are let go"
        assert not blocks or int(blocks[-1].split()[-1]) > len(blocks)


@examples(120, quick=4)
@given(
    script=scripts(SOME, servers=ONE_OR_TWO),
    deaths=deaths(OF_SERVERS, 60, 30),
    records=st.integers(1, 40),
    apart=st.sampled_from((APART_NBYTES, 3)),
)
def test_whenever_they_die_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, deaths: list[tuple[str, int]], records: int, apart: int
) -> None:
    """Where much happens at one instant, it matters who is heard first: so journals are not compared."""
    ran(DyingServers(script, tmp_path_factory.mktemp("dying") / "journal.jsonl", deaths, records, apart))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("sync", "changes"), [("bsp", "begin_fold"), ("psp(c=1)", "begin_fold"), ("rennala(batch=2)", "gather")])
def test_a_change_of_a_shard_that_fails_ends_the_job(
    sync: str, changes: str, servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on from what it has decided. The worker that had pushed last was refused for it, and the others waited for ever."""
    plain, calls = getattr(Shard, changes), itertools.count()

    def fails(shard: Shard, *arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("no memory")
        return plain(shard, *arguments, **named)

    monkeypatch.setattr(Shard, changes, fails)
    job = DyingServers(scripted(sync, LAWS[0], "", FREE, servers=servers), tmp_path / "journal.jsonl", [])
    with pytest.raises(JobError, match=r"server \d could not do what the job has decided: RuntimeError: no memory"):
        job.run()


def test_who_was_not_started_by_the_supervisor_does_not_take_the_place(tmp_path: Path) -> None:
    job = DyingServers(scripted("bsp", LAWS[0], "", FREE), tmp_path / "journal.jsonl", [])
    job._open()
    job.dies(job.process_of(0))
    stranger = SteppedHub(job.network, lambda: None)
    stranger.name = "process 99 of this host"
    line = stranger.connect(job._at)
    line.send({"kind": "listening", "number": 0, "address": stranger.listen(), "role": "leader"})
    with pytest.raises(ProtocolError, match="process 99 of this host sent 'listening' but is no server of this job"):
        job.settle()
    job.settle()
    fleet = job.fleet.fleet
    assert fleet.processes[fleet.servers[0].leader].state is State.LEADING, "the process that was started goes on"
