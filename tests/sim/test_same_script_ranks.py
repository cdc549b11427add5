"""Law 2 without servers: one script of timings, through the simulator and through live ranks, gives the same log of effects.

This is for rules that sum gradients; those that mix parameters are in ``test_same_script_gossip.py``.

Live, ranks decide among themselves in memory that they share, and the coordinator follows the log of it; in the simulator the ledger
decides. The ranks here are driven one step at a time (``stepped_ranks.py``), with the real memory, log, and coordinator. Rounds across
hosts are not here: `core.allreduce.sequencer` orders them, and tests/runtime/allreduce/multi_host plays it.

What differs nevertheless:

- The ledger that follows hears of an event, and then that a round is closed with it. It says of a late arrival that its gradient is
  carried before it knows that the round closes with it; and it grants the samples of a dead rank to others before it folds the round
  that the death has closed. Of a round that no arrival has closed it does not know why. `at_once` puts both logs into the simulator's
  order.
- That a rank is silent is an event live, which has its turn in the log. The simulated coordinator says it when it is woken.
- A rank that is declared dead while it waits for others finds that out from memory, as soon as it looks. A simulated worker is told, and
  may compute in vain before. From then on the two are not compared.
- A living rank gives its parameters to one that joins between two of its steps; here it does so at once, as in the simulator.
- ``delay`` and ``update_s`` are times of servers; ranks have none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from tests.sim.comparison import (
    DEALT,
    EFFECTS,
    EVENTS,
    FAULTS,
    FREE,
    LAWS,
    RETURN,
    Replayed,
    comparable,
    compare,
    only,
    parameters_follow,
    scripted,
    scripts,
)
from tests.sim.followed import follow
from tests.sim.stepped import Timings
from tests.sim.stepped_ranks import SteppedRanks
from tests.tiers import examples

from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.policies import RULES, rule
from offbeat.sim.run import simulate
from offbeat.types import Version

EXAMPLES: Final = [spelling for kind in RULES.values() for spelling in kind.about.examples]
ROUNDS: Final = [spelling for spelling in EXAMPLES if rule(spelling).family == "allreduce"] + ["majority(staleness=2)", "all_of(m=2)"]
TWO_DIE: Final = "kill worker=0 at=2.2; kill worker=2 at=2.2; restart worker=2 at=5; restart worker=0 at=6"
SLOW: Final = "slow worker=0 at=2 for=4 factor=3; freeze worker=1 at=4.1 for=1"
BY_NOBODY: Final = re.compile(r"closed (as rank \d+ has (paused|caught up)|without rank \d+, which has left):")
BACK: Final = "samples have come back"


def at_once(records: Iterable[Record]) -> list[Record]:
    """Return a log in the simulator's order and words; see the head of this file."""
    left = deque(in_one_way(record) for record in records if not is_silence(record))
    said: list[Record] = []
    while left:
        record = left.popleft()
        if record["kind"] != "fold":
            said.append(record)
            continue
        early = said_too_early(said, record)
        said.append(record)
        while left and left[0].get("reason") == record["reason"]:
            said.append(left.popleft())
        said += early
    return said


def is_silence(record: Record) -> bool:
    return record["kind"] == "lost" and bool(record["reason"].startswith("not heard of for"))


def in_one_way(record: Record) -> Record:
    reason = record.get("reason")
    return record if reason is None else {**record, "reason": BY_NOBODY.sub("closed by the ranks that are left:", reason)}


def said_too_early(said: list[Record], fold: Record) -> list[Record]:
    """Take back what was said before a fold of the same instant; returns what is to be said after it."""
    early: list[Record] = []
    while said and said[-1]["t"] == fold["t"]:
        last = said[-1]
        if last["kind"] == "grant" and last["refreshed"]:
            early.insert(0, said.pop())
        elif last["kind"] == "release" and last["reason"] == BACK:
            early.insert(0, {**said.pop(), "version": fold["version"]})
        elif last["kind"] == "release" and carried_into(last, fold):
            said.pop()
        else:
            break
    return early


def carried_into(release: Record, fold: Record) -> bool:
    """Whether this is the word to the late rank that closes the round of this fold."""
    number: Version = fold["version"] - 1
    closed_by = fold["reason"].startswith(f"round {number}, closed by rank {release['worker']}:")
    return closed_by and bool(release["reason"] == f"late: its gradient is carried into round {number}")


def both(script: Timings, where: Path) -> tuple[SteppedRanks, list[Record]]:
    """Run it on both sides and compare; the live run and its journal."""
    job = SteppedRanks(script, where / "live.jsonl")
    live = job.run()
    journal = where / "simulated.jsonl"
    result = simulate(script.sync, script.cluster, script.work, content=Replayed(script, live), journal=journal)
    assert "for ever" not in result.reason
    ours, theirs = ([r for r in at_once(comparable(log)) if r["t"] < job.alone_from] for log in (live, list(read(journal))))
    for wanted in (EFFECTS, EFFECTS | EVENTS):
        compare(only(ours, wanted), only(theirs, wanted))
    assert ours[-1]["t"] == theirs[-1]["t"], "they end at different times"
    if parameters_follow(rule(script.sync)):
        follow(job, live)
    return job, live


@pytest.mark.few(6)
@pytest.mark.parametrize("faults", ["", RETURN])
@pytest.mark.parametrize("sync", ROUNDS)
def test_the_simulator_says_what_the_ranks_say(sync: str, faults: str, tmp_path: Path) -> None:
    for work in (FREE, DEALT):
        job, live = both(scripted(sync, LAWS[0], faults, work), tmp_path)
        assert len(job.seen) > 2
        assert any(record.get("state") == "dead" for record in live) == bool(faults)


@examples(50)
@given(script=scripts(ROUNDS, (*FAULTS, TWO_DIE, SLOW)))
def test_also_when_much_happens_at_one_instant(tmp_path_factory: pytest.TempPathFactory, script: Timings) -> None:
    both(script, tmp_path_factory.mktemp("both"))
