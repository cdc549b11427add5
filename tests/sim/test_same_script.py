"""Law 2: one script of timings, through the simulator and through the live servers, gives the same log of effects, for every rule with
servers. Those without are in ``test_same_script_ranks.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.sim.comparison import (
    DEALT,
    EFFECTS,
    EVENTS,
    FREE,
    LAWS,
    ONE_OR_TWO,
    RETURN,
    Replayed,
    comparable,
    compare,
    only,
    scripted,
    scripts,
)
from tests.sim.followed import follow
from tests.sim.stepped import SteppedJob, Timings
from tests.tiers import examples, marked

from offbeat.core.policy import ServerRule
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.policies import RULES, rule, rule_of
from offbeat.sim.cluster import Work
from offbeat.sim.faults import Freeze, Vanish
from offbeat.sim.run import simulate

SETTINGS: Final = [spelling for kind in RULES.values() for spelling in kind.about.examples if rule(spelling).family == "server"]


def both(script: Timings, where: Path) -> tuple[SteppedJob, list[Record]]:
    """Run it on both sides and compare; the live run and its journal."""
    job = SteppedJob(script, where / "live.jsonl")
    live = job.run()
    journal = where / "simulated.jsonl"
    result = simulate(script.sync, script.cluster, script.work, content=Replayed(script, live), journal=journal)
    assert "for ever" not in result.reason
    # A simulated worker carries its causes; what a live one acts on is found by the coordinator, for blocks only as far as pushes tell.
    causes = rule_of(ServerRule, script.sync).scope == "job"
    expected, simulated = (list(comparable(records, causes=causes)) for records in (live, list(read(journal))))
    for wanted in (EFFECTS, EFFECTS | EVENTS):
        compare(only(expected, wanted), only(simulated, wanted))
    assert expected[-1]["t"] == simulated[-1]["t"], "they end at different times"
    follow(job, live)
    return job, live


def works(sync: str) -> list[Work]:
    """Whether samples are dealt out; where workers have splits of their own, they are."""
    return [DEALT] if rule(sync).split_overlap is not None else [FREE, DEALT]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("sync", "faults"),
    marked([(sync, faults) for sync in SETTINGS for faults in ("", RETURN)], night=[(sync, "") for sync in SETTINGS if "(" in sync]),
)
def test_the_simulator_says_what_the_servers_say(sync: str, faults: str, tmp_path: Path) -> None:
    for work in works(sync):
        job, live = both(scripted(sync, LAWS[0], faults, work, servers=2), tmp_path)
        assert len(job.seen) > 2
        assert any(record.get("state") == "dead" for record in live) == bool(faults)


@pytest.mark.few(4)
@pytest.mark.parametrize("sync", SETTINGS)
def test_also_while_parameters_are_on_their_way(sync: str, tmp_path: Path) -> None:
    both(scripted(sync, LAWS[0], RETURN, works(sync)[-1], delay="uniform(low=0, high=0.5)", servers=2), tmp_path)


@examples(50)
@given(script=scripts(SETTINGS, servers=ONE_OR_TWO, shares_memory=st.booleans()))
def test_also_when_much_happens_at_one_instant(tmp_path_factory: pytest.TempPathFactory, script: Timings) -> None:
    # That a block is read is a sign of life, before the next heartbeat, and the simulator does not know.
    silent = any(isinstance(one, Freeze | Vanish) for one in script.cluster.script.faults)
    assume(rule_of(ServerRule, script.sync).scope == "job" or not silent)
    assume(script.work in works(script.sync))
    both(script, tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_what_one_has_pushed_before_it_died_counts_while_its_next_process_waits_for_the_next_epoch(
    shares_memory: bool, tmp_path: Path
) -> None:
    """It is in the memory of the process that died, and not in that of the one that came."""
    faults = "slow worker=2 at=0.1 for=10 factor=3; kill worker=0 at=2.5; restart worker=0 at=3"
    script = scripted("ensemble(steps=2)", LAWS[1], faults, DEALT, shares_memory=shares_memory)
    _, live = both(script, tmp_path)
    first = next(record for record in live if record["kind"] == "fold")
    joined = next(record["t"] for record in live if record["kind"] == "joined" and record["t"] > 0)
    assert joined < first["t"] and (0, 1) in {(part["worker"], part["incarnation"]) for part in first["parts"]}
