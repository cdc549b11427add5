"""However long a job is: its coordinator, tally and table of causes hold no more after many versions, epochs and deaths than after some.

What is bounded by a number has that number made small here, so that the bound is reached.
"""

from __future__ import annotations

import pytest
from tests.journal.long_job import held
from tests.journal.records import push, release, settle, state
from tests.support.retained_objects import grown, sizes

from offbeat.core import leases
from offbeat.core.leases import Leases
from offbeat.journal import causes, costs, epoch_reports, summary
from offbeat.journal.audit import Audit
from offbeat.journal.file import Journal
from offbeat.journal.summary import Tally
from offbeat.policies import RULES
from offbeat.session import REPORTS_KEPT, LocalSession
from offbeat.types import Fate, WorkerId

FIRST = sorted({kind.about.examples[0] for kind in RULES.values()})
SLACK = 40
"""Elements: what is under way at one moment differs from that at another."""


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, bound in (
        (causes, "FOLDS_KEPT", 20),
        (causes, "BLOCKS_KEPT", 20),
        (epoch_reports, "EPOCHS_KEPT", 4),
        (epoch_reports, "ENTRIES_KEPT", 8),
        (summary, "FAULTS_LISTED", 4),
        (costs, "BUCKETS", 4),
        (costs, "DEATHS_KEPT", 2),
    ):
        monkeypatch.setattr(module, name, bound)


@pytest.mark.few(4)
@pytest.mark.parametrize("sync", FIRST)
def test_nothing_grows_with_versions(sync: str) -> None:
    assert grown(held(sync, 60), held(sync, 300), SLACK) == {}


@pytest.mark.few(4)
@pytest.mark.parametrize("sync", FIRST)
def test_nothing_grows_with_epochs_and_deaths(sync: str) -> None:
    def after(deaths: int) -> str:
        turns = [(number % 3, 3 * number) for number in range(deaths)]
        return "; ".join(f"kill worker={worker} at={at + 2}; restart worker={worker} at={at + 3.1}" for worker, at in turns)

    some, many = (held(sync, 10**6, samples=60, faults=after(deaths), time_s=3.0 * deaths + 5.0) for deaths in (24, 80))
    assert grown(some, many, SLACK) == {}


def test_an_epoch_lists_a_bounded_number_of_exceptions_and_counts_the_rest() -> None:
    pool = Leases()
    size = leases.EXCEPTIONS_LISTED + 500
    pool.open(0, 0, size)
    for _ in range(size):
        lease = pool.take(WorkerId(0), 0, 1)
        assert lease is not None
        pool.submit((lease.id,))
        pool.settle((lease.id,), Fate.DROPPED, "too old")
    assert sizes(pool)["Leases._pools[].exceptions"] == leases.EXCEPTIONS_LISTED
    report = pool.end(0)
    listed = sum(found["stop"] - found["start"] for found in report["exceptions"])
    assert (report["indices"], report["dropped"], listed, report["unlisted"]) == (size, size, leases.EXCEPTIONS_LISTED, 500)


def test_a_summary_has_the_newest_epochs_and_the_sums_of_the_others() -> None:
    counts = {"indices": 9, "folded": 5, "dropped": 2, "rejected": 0, "skipped": 1, "unused": 1, "returned": 3, "kept": 1, "brought": 1}
    tally = Tally()
    for epoch in range(1000):
        report = {**counts, "exceptions": [{"start": 0, "stop": 3, "why": "x"}]}
        tally.add({"kind": "epoch_ended", "t": float(epoch), "pool": 0, "epoch": epoch, "workers": [0], "report": report})
    found = tally.summary()
    assert [epoch["epoch"] for epoch in found["epochs"]] == [996, 997, 998, 999]
    assert found["earlier_epochs"] == {"epochs": 996, **{name: 996 * count for name, count in counts.items()}}
    brief = tally.summary(brief=True)
    assert [epoch["epoch"] for epoch in brief["epochs"]] == [999]
    assert brief["earlier_epochs"] == {"epochs": 999, **{name: 999 * count for name, count in counts.items()}}


def test_the_audit_forgets_the_books_of_earlier_incarnations_but_not_an_open_push() -> None:
    audit = Audit()
    for incarnation in range(1, 200):
        t, its = incarnation + 0.5, {"incarnation": incarnation}
        audit.add(state(incarnation, 0, "alive", incarnation))
        for record in (release(t, 0, **its), push(t, 0, **its), settle(t, 0, 1, "dropped", **its))[: 2 if incarnation == 3 else 3]:
            audit.add(record)
    assert 0 < sizes(audit)["Audit._open._senders[]"] < 8
    audit.add({"kind": "end", "t": 300.0, "ok": True, "reason": "done"})
    assert audit.problems() == ["worker 0, incarnation 3: its push at 3.5 s has no fate"]


def test_a_journal_holds_no_record_that_it_has_written(tmp_path: object) -> None:
    journal = Journal(f"{tmp_path}/run.jsonl.zst", now=lambda: 0.0)
    journal.write({"kind": "job", "t": 0.0, "format": 1, "workers": 1, "sync": "asp"})
    for number in range(20_000):
        journal.write({"kind": "joined", "t": 0.0, "worker": number})
    assert sizes(journal)["Journal._lines"] < 3000
    journal.close()


def test_a_worker_keeps_the_reports_of_the_newest_epochs() -> None:
    session = LocalSession.__new__(LocalSession)
    session.reports, session.reported = [], 0
    for epoch in range(REPORTS_KEPT + 20):
        session.note_report({"epoch": epoch})
    assert (len(session.reports), session.reported) == (REPORTS_KEPT, REPORTS_KEPT + 20)
    assert [report["epoch"] for report in session.reports_since(REPORTS_KEPT + 17)] == [1017, 1018, 1019]
    assert session.reports_since(session.reported) == [] and len(session.reports_since(0)) == REPORTS_KEPT
