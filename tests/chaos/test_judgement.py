"""The verdict: what a run has come to, and which promise was broken."""

from __future__ import annotations

from typing import Any

import pytest
from tests.journal.records import JOB, fold, push, release, settle, state

from offbeat.chaos.history import History
from offbeat.chaos.judgement import DOCUMENTED, FINISHED, HANG, LOST, Ended, Verdict, judge
from offbeat.chaos.schedule import Fault


def records(*, sync: str = "bsp", ok: bool = True, end: bool = True, gap_s: float = 1.0, workers: int = 1) -> list[dict[str, Any]]:
    """The journal of a worker that pushes ten times, with a gap after the fifth."""
    found = [{**JOB, "sync": sync, "workers": workers}, state(0.5, 0, "alive")]
    t = 1.0
    for clock in range(1, 11):
        found += [release(t, 0, clock - 1, clock - 1), push(t + 0.5, 0, clock - 1)]
        found += [fold(t + 0.5, clock, (0, clock, 1.0, 0)), settle(t + 0.5, 0, clock, version=clock)]
        t += gap_s if clock == 5 else 1.0
    report = {"indices": 80, "folded": 80, "dropped": 0, "rejected": 0, "unused": 0}
    found.append({"kind": "epoch_ended", "t": t, "pool": 0, "epoch": 0, "workers": [0], "report": report})
    return [*found, {"kind": "end", "t": t, "ok": ok, "reason": "every worker's script has ended"}] if end else found


def seen(
    journal: list[dict[str, Any]],
    *faults: Fault,
    timeout_s: float = 10.0,
    baseline: list[dict[str, Any]] | None = None,
    **more: Any,
) -> Verdict:
    """The verdict on a run with this journal and these faults."""
    before = None if baseline is None else History.of(baseline)
    return judge(Ended(History.of(journal), list(faults), **more), timeout_s=timeout_s, max_restarts=3, baseline=before)


def hit(kind: str, target: str = "worker", at: float = 6.0, worker: int | None = 0, **more: Any) -> Fault:
    known = {"injected_at_s": at, "journal_s": at, "victim": f"{target} 0", "worker": worker if target == "worker" else None}
    return Fault(0, at, kind, target, 0.0, 1.0, 0.5, **{**known, "done": True, "proved": True, **more})


def failed(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if check.held is False]


def test_a_good_run() -> None:
    verdict = seen(records(gap_s=3.0), hit("kill"), baseline=records(), timeout_s=2.0)
    assert verdict.ok and verdict.outcome == FINISHED
    assert verdict.goodput == pytest.approx(9.5 / 11.5) and verdict.present == pytest.approx(1.0)
    assert {check.name for check in verdict.checks if check.held is None} == {"replicas equal"}
    assert (verdict.figures["indices"], verdict.figures["unused"], verdict.figures["pauses_s"]) == (80, 0, [2.5])


def test_replicas_are_compared_unless_they_differ_under_the_rule() -> None:
    def held(sync: str) -> list[bool | None]:
        job, *rest = records()
        logs = [
            {"kind": "metrics", "t": 5.0, "worker": worker, "version": 4, "values": {"replica": float(worker), "replica_version": 4.0}}
            for worker in (0, 1)
        ]
        return [check.held for check in seen([{**job, "sync": sync}, *logs, *rest]).checks if check.name == "replicas equal"]

    assert (held("bsp"), held("sgp")) == ([False], [None])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"left": ["process 17"]}, "nothing left"),
        ({"hang": "no record in the journal for 120 s"}, "end"),
        ({"status": 1, "said": "something else"}, "end"),
        ({"faults": [hit("kill", proved=False, note="not seen within 10.0 s")]}, "each fault happened"),
    ],
)
def test_what_a_journal_cannot_say(changes: dict[str, Any], name: str) -> None:
    assert failed(seen(records(), *changes.pop("faults", ()), **changes)) == [name]


def test_a_push_without_a_fate_a_lost_index_and_a_lost_version() -> None:
    journal = records()
    assert failed(seen([one for one in journal if not (one["kind"] == "settle" and one["clock"] == 3)])) == ["the books"]
    journal[-2] = {**journal[-2], "report": {**journal[-2]["report"], "indices": 81}}
    assert failed(seen(journal)) == ["the books"]
    skipped = [{**one, "version": 7} if one["kind"] == "fold" and one["version"] == 6 else one for one in records()]
    assert failed(seen(skipped)) == ["the books"]


def test_the_dead_are_waited_for_no_longer_than_the_timeout() -> None:
    assert failed(seen(records(gap_s=9.0), hit("kill"), timeout_s=8.0)) == []
    assert failed(seen(records(gap_s=9.0), hit("kill"), timeout_s=2.0)) == ["no wait for the dead"]
    assert failed(seen(records(gap_s=9.0), hit("kill"), timeout_s=2.0, baseline=records(gap_s=9.0))) == [], "so do the undisturbed"


ENDS: list[tuple[dict[str, Any], list[Fault], str]] = [
    ({"status": 143, "timed": True}, [hit("kill")], FINISHED),
    ({"status": 143}, [hit("kill")], LOST),
    ({"status": -9}, [hit("kill", "supervisor")], DOCUMENTED),
    ({"status": -9}, [hit("kill")], LOST),
    ({"status": 1, "said": "server 0 killed by SIGKILL, and what it held is gone"}, [hit("kill", "server")], DOCUMENTED),
    ({"status": 1, "said": "server 0 killed by SIGKILL, and what it held is gone"}, [hit("kill")], LOST),
    ({"status": 1, "said": "it stumbled"}, [hit("kill", "server")], LOST),
    ({"status": 1, "said": "no worker finished: worker 0 killed by SIGKILL"}, [hit("kill")] * 4, DOCUMENTED),
    ({"status": 1, "said": "no worker finished: worker 0 killed by SIGKILL"}, [hit("kill")] * 3, LOST),
    ({"status": 1, "said": "no worker finished: worker 0 exited with status 143"}, [hit("term")], DOCUMENTED),
    ({"status": 1, "said": "done; but the journal is not complete: no space"}, [hit("disk", "journal")], DOCUMENTED),
    ({"status": 0, "hang": "no record"}, [], HANG),
]


@pytest.mark.parametrize(
    ("sync", "reason", "outcome"),
    [
        ("solo", "--max-restarts 3 is used up", DOCUMENTED),
        ("solo", "the ranks decide among themselves", LOST),
        ("dpsgd", "the state of this server cannot be kept", LOST),
        ("psp(c=1)", "the state of this server cannot be kept", LOST),
        ("bsp", "worker 1 does not share memory with the servers", DOCUMENTED),
        ("bsp", "workers may be on other machines, and gradients that come over a network are not kept for a new server", DOCUMENTED),
        ("bsp", "no other process could have it, see --replicas", DOCUMENTED),
        ("full", "no agent is left on this machine that could start it again", DOCUMENTED),
    ],
)
def test_the_death_of_a_server_is_documented_where_no_other_process_can_go_on(sync: str, reason: str, outcome: str) -> None:
    said = f"server 0 killed by SIGKILL, and what it held is gone with it ({reason}); offbeat run --resume x goes on"
    assert seen(records(sync=sync, ok=False), hit("kill", "server"), status=1, said=said).outcome == outcome


@pytest.mark.parametrize(("more", "injected", "outcome"), ENDS)
def test_how_a_job_ends(more: dict[str, Any], injected: list[Fault], outcome: str) -> None:
    verdict = seen(records(ok=False), *injected, **more)
    assert verdict.outcome == outcome
    assert next(check.held for check in verdict.checks if check.name == "end") is (outcome in (FINISHED, DOCUMENTED))


def test_with_standbys_a_server_may_end_the_job_only_if_both_were_hit_and_nobody_waits_for_it() -> None:
    standby = {"kind": "process", "t": 0.1, "role": "standby", "number": 0, "what": "started", "detail": "pid 7"}

    def replicated(*faults: Fault, gap_s: float = 1.0, **more: Any) -> Verdict:
        job, *rest = records(gap_s=gap_s, end=not more, ok=not more)
        return seen([job, standby, *rest], *faults, timeout_s=2.0, **more)

    ended: dict[str, Any] = {"status": 1, "said": "server 0 killed by SIGKILL, and what it held is gone with it"}
    assert replicated(hit("kill", "server"), **ended).outcome == LOST
    assert replicated(hit("kill", "standby"), hit("kill", "server"), **ended).outcome == DOCUMENTED
    for target in ("server", "standby"):
        assert failed(replicated(hit("kill", target), gap_s=3.0)) == []
        assert failed(replicated(hit("kill", target), gap_s=9.0)) == ["no wait for the dead"]


def test_ranks_that_are_all_away_at_once_lose_the_model_as_documented() -> None:
    journal = records(sync="majority", ok=False)
    gone = {"kind": "state_changed", "t": journal[-1]["t"], "worker": 0, "incarnation": 1, "state": "dead", "reason": ""}
    lost = [*journal[:-1], gone, journal[-1]]
    said: dict[str, Any] = {"status": 1, "said": "every rank is dead"}
    assert seen(lost, hit("kill"), **said).outcome == DOCUMENTED
    with_servers = [{**one, "sync": "bsp"} if one["kind"] == "job" else one for one in lost]
    assert seen(with_servers, hit("kill"), **said).outcome == LOST


def test_a_status_of_0_without_an_end_is_no_good_end() -> None:
    assert seen(records(end=False)).outcome == LOST
