"""Leaders die at any point, and their standbys go on: journal and parameters are those of a job without deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from tests.sim.comparison import (
    DEALT,
    FREE,
    LAWS,
    ONE_OR_TWO,
    RETURN,
    VANISHES,
    comparable,
    compare,
    deaths,
    in_order,
    ran,
    scripted,
    scripts,
    seen,
)
from tests.sim.replicated import POINTS, ReplicatedServers
from tests.sim.stepped import Timings
from tests.sim.test_dying_servers import OTHERS
from tests.tiers import examples, marked

from offbeat.errors import JobError
from offbeat.policies import RULES
from offbeat.runtime.parameter_server.fold_ahead import FoldAhead
from offbeat.runtime.parameter_server.shard import LiveShard
from offbeat.runtime.recovery.replica import Coming
from offbeat.types import WireFormat

PSP: Final = [*RULES["psp"].about.examples]
DECOUPLED: Final = "decoupled(steps=2, quorum=1)"
"""Which fragment's version a worker takes depends on what comes first within one instant, where there are two servers."""
SOME: Final = [*PSP, "bsp", "asp", "dbw", "ensemble(steps=2)", *OTHERS]
BY_SHARD: Final = [*PSP, "diloco(steps=2)", DECOUPLED]
ENCODED: Final = ["bsp", "asp", "rennala(batch=2)", "diloco(steps=2)"]


CASES: Final = [
    *((2, sync, "float32") for sync in SOME),
    *((servers, sync, wire) for sync in ENCODED for servers, wire in ((2, "bf16"), (1, "int8"))),
    (1, DECOUPLED, "int8"),
]
MORE: Final = [
    *((1, sync, "float32") for sync in SOME),
    *((servers, sync, wire) for sync in ("dbw", *OTHERS[:4]) for servers in (1, 2) for wire in ("bf16", "int8")),
    *((servers, sync, wire) for sync in ENCODED for servers, wire in ((1, "bf16"), (2, "int8"))),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("servers", "sync", "wire"), marked([*CASES, *MORE], night=MORE))
def test_journal_and_parameters_are_those_of_a_job_in_which_no_leader_has_died(
    servers: int, sync: str, wire: WireFormat, tmp_path: Path
) -> None:
    """In all formats bit for bit: a worker's parameters follow from what it was sent before, as well.

    A worker's loss is told by the supervisor, and before by the worker's connection, unless the leader dies in that moment.
    """
    script = replace(scripted(sync, LAWS[0], RETURN, FREE, servers=servers), wire=wire)
    deaths = [(kind, 5 * number + 1) for number in range(6) for kind in ("flush", "send")]
    (undisturbed, calm), (job, live) = (ran(ReplicatedServers(script, tmp_path / "journal.jsonl", dies)) for dies in ([], deaths))
    assert job.died.total() > 4
    assert seen(job) == seen(undisturbed)
    logs = [[record for record in log[1:] if record["kind"] != "lost" or record["incarnation"] is None] for log in (live, calm)]
    compare(*map(in_order, logs))


@pytest.mark.few(2)
@pytest.mark.parametrize(("sync", "servers"), [("bsp", 1), ("bsp", 2), ("asp", 1), ("backup(b=1)", 1)])
def test_a_standby_folds_as_the_sum_comes_and_forgets_it_if_the_leader_dies_meanwhile(sync: str, servers: int, tmp_path: Path) -> None:
    script = scripted(sync, LAWS[0], "", FREE, servers=servers)
    undisturbed, calm = ran(ReplicatedServers(script, tmp_path / "journal.jsonl", []))
    folds: list[bool] = []
    begun: list[Coming] = []
    is_of, begin = FoldAhead.is_of, LiveShard._begin_ahead

    def noted_is_of(ahead: FoldAhead, *about: Any) -> bool:
        folds.append(is_of(ahead, *about))
        return folds[-1]

    def noted_begin(shard: LiveShard, coming: Coming) -> FoldAhead:
        begun.append(coming)
        return begin(shard, coming)

    with patch.object(FoldAhead, "is_of", noted_is_of), patch.object(LiveShard, "_begin_ahead", noted_begin):
        job, live = ran(ReplicatedServers(script, tmp_path / "journal.jsonl", [("send_ahead", 3 + number % 2) for number in range(8)]))
    assert job.died["send_ahead"] > 2
    assert folds and all(folds), "what was made ahead is what the record told to make"
    assert len(begun) > len(folds), "not all of it was told"
    assert any(0 < coming.come < len(coming.total) for coming in begun)
    assert seen(job) == seen(undisturbed)
    compare(*(list(comparable(log[1:])) for log in (live, calm)))


@pytest.mark.parametrize("point", [15, 16])
def test_the_leader_of_a_server_that_others_do_not_know_yet_dies(point: int, tmp_path: Path) -> None:
    """Its link to server 0 has ended, and its standby's has the same name."""
    job, _ = ran(ReplicatedServers(scripted("bsp", LAWS[0], "", FREE, servers=2), tmp_path / "journal.jsonl", [("flush", point)]))
    assert job.died


@examples(80, quick=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # to shrink an example takes longer than a test may
@given(
    script=scripts([*SOME, *BY_SHARD[-2:]], servers=ONE_OR_TWO),
    wire=st.sampled_from(("float32", "bf16", "int8")),
    deaths=deaths(POINTS, 60, 20),
)
def test_whenever_leaders_die_the_books_are_right(
    tmp_path_factory: pytest.TempPathFactory, script: Timings, wire: WireFormat, deaths: list[tuple[str, int]]
) -> None:
    if script.sync in (*ENCODED, DECOUPLED):
        script = replace(script, wire=wire)
    # Server 0 decides what is folded. So the job ends if a worker dies in the moment of the death of another server's leader, and if each
    # server decides by itself, also in that of server 0's.
    try:
        ran(ReplicatedServers(script, tmp_path_factory.mktemp("replicas") / "journal.jsonl", deaths))
    except JobError as error:
        decided = script.sync not in BY_SHARD and "the standby of server 0" in str(error)
        said = "has died with the leader, or does not answer" in str(error)
        if script.cluster.servers == 1 or decided or not script.cluster.faults or not said:
            raise


def test_a_job_goes_on_if_a_worker_vanishes_in_the_moment_of_a_leaders_death(tmp_path: Path) -> None:
    """The standby lacks the gradient of this worker, and does nothing else for as long as the worker may come back."""
    deaths = [("send", 25), ("flush", 6), ("_send", 8), ("_send", 9), ("flush", 44)]
    script = scripted("bsp", "constant(seconds=1)", VANISHES, DEALT, seed=924379519)
    job, _ = ran(ReplicatedServers(script, tmp_path / "journal.jsonl", deaths))
    assert job.died.total() > 2


@pytest.mark.parametrize(("sync", "point"), [("bsp", 104), ("bsp", 109), ("dbw", 109)])
def test_it_goes_on_too_if_another_server_has_a_part_of_the_gradient(sync: str, point: int, tmp_path: Path) -> None:
    """The leader of server 0 dies, and what the others say of their parts comes after that."""
    script = scripted(sync, "uniform(low=0.5, high=1.5)", VANISHES, DEALT, seed=231, servers=2)
    job, live = ran(ReplicatedServers(script, tmp_path / "journal.jsonl", [("send", point)]))
    assert job.died and job.leaders[0].server._term == 2
    reason = "its gradient was lost with the server's former leader"
    assert next((r["worker"], r["reason"]) for r in live if r["kind"] == "lost") == (1, reason)
