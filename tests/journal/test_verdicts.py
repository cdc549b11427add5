"""Costs are of arrivals and add up; verdicts name who, why and since when, and are silent about what is nobody's fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.journal.costs import Costs
from offbeat.journal.records import Record
from offbeat.journal.verdicts import Verdict, verdicts

Phases = Mapping[str, float]
STEP: Phases = {"data": 0.01, "forward": 0.03, "backward": 0.05, "own": 0.01}


def barrier(
    steps: Sequence[Sequence[Phases]], *, host: Sequence[Mapping[str, float]] = (), busy: float = 1.0, cores: float = 64.0
) -> list[Record]:
    """Return the records of a job under a barrier: for each fold, the phases of each worker's push."""
    workers = len(steps[0])
    t, records = 1.0, [{"kind": "job", "t": 0.0, "workers": workers}]
    records += [{"kind": "state_changed", "t": 0.5, "worker": worker, "incarnation": 1, "state": "alive"} for worker in range(workers)]
    for number, of_workers in enumerate(steps):
        records += [{"kind": "release", "t": t, "worker": worker} for worker in range(workers)]
        ends = sorted((t + sum(phases.values()), worker) for worker, phases in enumerate(of_workers))
        for at, worker in ends:
            processor = {name: seconds * busy for name, seconds in of_workers[worker].items()}
            push = {"kind": "pushed", "t": at, "worker": worker, "samples": 8, "compute_s": at - t, "phases": of_workers[worker]}
            readings = dict(host[worker]) if host else {}
            records.append({**push, "processor": processor, "host": readings if number else {**readings, "cores": cores}})
        t = ends[-1][0]
        records.append({"kind": "fold", "t": t, "version": number + 1, "parts": [{"worker": worker} for worker in range(workers)]})
    return records


def costs_of(records: Sequence[Record]) -> Costs:
    costs = Costs()
    for record in records:
        costs.add(record)
    return costs


def found(records: Sequence[Record]) -> list[Verdict]:
    return verdicts(costs_of(records))


def with_more(**more: float) -> Phases:
    return {**STEP, **{name: STEP.get(name, 0.0) + seconds for name, seconds in more.items()}}


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=2, max_size=12))
def test_the_waits_of_folds_are_divided_among_their_workers(times: list[list[float]]) -> None:
    costs = costs_of(barrier([[{"forward": seconds} for seconds in of_workers] for of_workers in times]))
    waited = sum(max(of_workers) - min(of_workers) for of_workers in times[1:])  # the first push has the script's beginning in it
    divided = sum(sum(worker.causes.values()) for worker in costs.workers.values())
    assert divided == pytest.approx(waited, abs=1e-5 * len(times))


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "own", "gc", "evaluation", "save", "push", "update"])
def test_one_slow_phase(phase: str) -> None:
    slow = with_more(**{phase: 0.1})
    (verdict,) = found(barrier([[STEP, STEP, slow, STEP]] * 30))
    assert (verdict.workers, verdict.cause, verdict.confidence) == ((2,), phase, "high")
    assert verdict.share == pytest.approx(0.5, abs=0.02)
    assert verdict.since_s is None


def test_most_workers_are_slow() -> None:
    slow = with_more(data=0.1)
    (verdict,) = found(barrier([[STEP, slow, slow, slow]] * 30))
    assert (verdict.workers, verdict.cause) == ((1, 2, 3), "data")
    assert verdict.share == pytest.approx(0.5, abs=0.02)
    assert verdict.what == "Workers 1, 2 and 3 cost this job 48 % of its time: their DataLoaders"


def test_a_worker_that_folds_leave_out_makes_nobody_else_slow() -> None:
    steps = [[with_more(forward=0.004 * ((number + worker) % 3)) for worker in range(3)] for number in range(40)]
    records = [record | ({"workers": 4} if record["kind"] == "job" else {}) for record in barrier(steps)]
    slow = [{"kind": "pushed", "t": t, "worker": 3, "samples": 8, "compute_s": 0.5, "phases": {"data": 0.5}} for t in (2.0, 2.5, 3.0)]
    assert found(sorted([*records, *slow], key=lambda record: record["t"])) == []


def test_two_workers_with_two_causes() -> None:
    said = found(barrier([[STEP, with_more(data=0.1), with_more(gc=0.06), STEP]] * 30))
    assert [(verdict.workers, verdict.cause) for verdict in said] == [((1,), "data"), ((2,), "gc")]


def test_rare_pauses_hide_in_a_mean_and_not_here() -> None:
    steps = [[STEP, with_more(gc=2.0) if number % 25 == 24 else STEP] for number in range(100)]
    (verdict,) = found(barrier(steps))
    assert (verdict.workers, verdict.cause) == ((1,), "gc")
    assert verdict.share == pytest.approx(0.44, abs=0.02)


def test_since_when() -> None:
    steps = [[STEP, STEP]] * 300 + [[STEP, with_more(backward=0.1)]] * 300
    (verdict,) = found(barrier(steps))
    assert verdict.since_s == pytest.approx(31.0, abs=4.0)


@given(st.lists(st.lists(st.floats(0.098, 0.102), min_size=4, max_size=4), min_size=40, max_size=60))
def test_small_differences_are_nobody_s_fault(times: list[list[float]]) -> None:
    assert found(barrier([[{"forward": seconds} for seconds in of_workers] for of_workers in times])) == []


def test_every_worker_waits_for_its_data() -> None:
    (verdict,) = found(barrier([[with_more(data=0.2)] * 3] * 30))
    assert (verdict.kind, verdict.workers, verdict.cause) == ("everywhere", (0, 1, 2), "data")


def test_who_queues_everywhere_waits_for_a_core() -> None:
    said = found(barrier([[STEP, STEP]] * 30, host=[{"queued_s": 0.06}] * 2, busy=0.4))
    verdict = next(one for one in said if (one.kind, one.cause) == ("everywhere", "queued"))
    assert verdict.what.startswith("Every worker waits ") and verdict.what.endswith(" of its time for a core, which other processes use")


def test_the_processes_of_a_loader_use_the_cores_for_which_all_workers_wait() -> None:
    queue = {"queued_s": 0.06}
    (verdict,) = found(barrier([[STEP, STEP]] * 30, host=[{**queue, "children_s": 0.01}, {**queue, "children_s": 0.09}], busy=0.4))
    assert (verdict.workers, verdict.cause) == ((1,), "data")
    assert verdict.what.endswith(" of its time for a core, which processes of the DataLoader of worker 1 use")
    few = found(barrier([[STEP, STEP]] * 30, host=[{**queue, "children_s": 0.01}] * 2, busy=0.4))
    assert [one.cause for one in few] == ["queued"], "a neighbour"


def test_the_job_s_own_servers_are_nobody_s_fault() -> None:
    """Two workers on two cores leave none for the servers: a quarter of the steps is queueing, as in undisturbed jobs."""
    assert found(barrier([[STEP, STEP]] * 30, host=[{"queued_s": 0.28 * sum(STEP.values())}] * 2, busy=0.4)) == []


@pytest.mark.parametrize(
    ("cores", "other_s", "queued_s", "said"),
    [(2.0, 0.0, 0.012, []), (3.0, 0.0, 0.012, ["queued"]), (2.0, 0.0, 0.05, ["queued"]), (2.0, 0.026, 0.034, ["queued"])],
)
def test_where_no_core_is_left_for_the_servers_a_little_queueing_is_not_told(
    cores: float, other_s: float, queued_s: float, said: list[str]
) -> None:
    """The worker is late by 7 to 11 %. In the last two cases it or both queue for longer than the servers make them queue."""
    slow = {phase: 1.08 * seconds for phase, seconds in STEP.items()} if other_s else with_more(forward=0.012)
    host = [{"queued_s": other_s}, {"queued_s": queued_s}]
    records = barrier([[STEP, slow]] * 30, host=host, busy=0.85 if queued_s < 0.03 else 0.5, cores=cores)
    assert [verdict.cause for verdict in found(records)] == said


def test_who_is_slowed_on_purpose_is_not_told_to_look_at_the_script() -> None:
    records = barrier([[STEP, with_more(own=0.1)]] * 30)
    on_purpose = {"kind": "fault", "t": 0.9, "what": "slow", "worker": 1, "detail": "0.1 s, each step"}
    (verdict,) = found([*records[:3], on_purpose, *records[3:]])
    assert verdict.cause == "own" and verdict.remedy == "leave out what slows it on purpose"
    (unknown,) = found(records)
    assert unknown.remedy.startswith("look at what the script does")


def test_who_works_more_queues_more_on_a_busy_host() -> None:
    slow = with_more(data=0.15, forward=0.01, backward=0.04)
    said = found(barrier([[STEP, slow]] * 30, host=[{"queued_s": 0.06}, {"queued_s": 0.18}], busy=0.4))
    assert (said[0].workers, said[0].cause) == ((1,), "data")


COMPUTES, LOADS = with_more(forward=0.06, backward=0.1), with_more(data=0.2)


@pytest.mark.parametrize(
    ("slow", "readings", "busy", "cause"),
    [
        (COMPUTES, {"queued_s": 0.15}, 0.4, "queued"),
        *((COMPUTES, {reading: 0.15}, 0.3, reading.split("_")[0]) for reading in ("memory_stalled_s", "throttled_s", "stolen_s")),
        (COMPUTES, {"gpu_throttled": 1.0, "gpu_mhz": 900.0}, 1.0, "gpu"),
        (LOADS, {"memory_stalled_s": 0.01, "major_faults": 200.0}, 0.3, "memory"),
        (LOADS, {"memory_stalled_s": 0.0, "major_faults": 200.0}, 0.3, "data"),
        (LOADS, {"memory_stalled_s": 0.01, "major_faults": 3.0}, 0.3, "data"),
    ],
)
def test_a_cause_outside_of_the_process(slow: Phases, readings: dict[str, float], busy: float, cause: str) -> None:
    (verdict,) = found(barrier([[STEP, slow]] * 30, host=[{}, readings], busy=busy))
    assert (verdict.workers, verdict.cause) == ((1,), cause)
    assert ("pages read from the disk" in verdict.evidence) == (cause == "memory")


def test_more_workers_than_cores() -> None:
    (verdict,) = found(barrier([[STEP] * 4] * 30, host=[{"queued_s": 0.03}] * 4, busy=0.6, cores=2.0))
    assert verdict.kind == "oversubscribed"
    assert verdict.what == "Oversubscribed: 4 workers share 2 cores"


@pytest.mark.parametrize(("queued_s", "cause"), [(0.0, "link"), (0.02, "link"), (0.06, "queued")])
def test_a_link_is_what_neither_phases_nor_a_queue_for_a_core_explain(queued_s: float, cause: str) -> None:
    records = barrier([[STEP, with_more(unknown=0.1)]] * 30, host=[{}, {"queued_s": queued_s}])
    for record in records:
        record.get("phases", {}) and record["phases"] != STEP and record.update(phases=STEP)
    (verdict,) = found(records)
    assert (verdict.workers, verdict.cause) == ((1,), cause)


@pytest.mark.parametrize("hosts", [(), ("here", "here"), ("here", "there")])
def test_a_slow_push_has_no_network_to_blame_on_one_host(hosts: tuple[str, ...]) -> None:
    records = barrier([[STEP, with_more(push=0.1)]] * 30)
    starts = [
        {"kind": "process", "t": 0.4, "role": "worker", "number": number, "what": "started", "detail": f"pid {number} on {host}"}
        for number, host in enumerate(hosts)
    ]
    (verdict,) = found([records[0], *starts, *records[1:]])
    assert verdict.cause == "push" and ("--wire" in verdict.remedy) == (len(set(hosts)) == 2)


def test_where_nobody_waits_a_slow_worker_does_less() -> None:
    records: list[Record] = [{"kind": "job", "t": 0.0, "workers": 2}]
    pushes = sorted(
        (1.0 + number * length, worker, length) for worker, length in ((0, 0.1), (1, 0.4)) for number in range(int(20 / length))
    )
    last = [1.0, 1.0]
    for at, worker, length in pushes:
        phases = with_more(data=length - 0.1)
        records.append({"kind": "release", "t": last[worker], "worker": worker})
        records.append({"kind": "pushed", "t": at, "worker": worker, "samples": 8, "compute_s": length, "phases": phases})
        records.append({"kind": "fold", "t": at, "version": 1, "parts": [{"worker": worker}]})
        last[worker] = at
    (verdict,) = found(records)
    assert (verdict.workers, verdict.cause) == ((1,), "data")
    assert verdict.share == pytest.approx(0.375, abs=0.02), "of two workers' time, three quarters of one's"
    assert verdict.what.startswith("Worker 1 is slow, which costs this job 37 % of what it could do")


def test_without_phases_there_is_still_a_name() -> None:
    records = barrier([[STEP, with_more(data=0.1)]] * 30)
    for record in records:
        record.pop("phases", None)
    (verdict,) = found(records)
    assert (verdict.workers, verdict.cause, verdict.confidence) == ((1,), "compute", "medium")


def test_a_death_is_told_in_full() -> None:
    records = barrier([[STEP] * 3] * 20)
    t = records[-1]["t"]
    more: list[dict[str, Any]] = [
        {"kind": "release", "t": t, "worker": 0},
        {"kind": "release", "t": t, "worker": 1},
        {"kind": "release", "t": t, "worker": 2},
        {"kind": "grant", "t": t, "worker": 2, "lease": 7, "start": 64, "stop": 96},
        {"kind": "pushed", "t": t + 0.1, "worker": 0, "samples": 8, "compute_s": 0.1, "phases": STEP},
        {"kind": "pushed", "t": t + 0.1, "worker": 1, "samples": 8, "compute_s": 0.1, "phases": STEP},
        {"kind": "state_changed", "t": t + 1.1, "worker": 2, "state": "dead", "reason": "silent"},
        {"kind": "state_changed", "t": t + 1.2, "worker": 2, "state": "recovered", "reason": "heard of again"},
        {"kind": "state_changed", "t": t + 1.3, "worker": 2, "state": "dead", "reason": "connection closed"},
        {"kind": "release", "t": t + 1.7, "worker": 2},
    ]
    (verdict,) = found([*records, *more])
    assert (verdict.kind, verdict.workers) == ("death", (2,))
    assert verdict.details == {"away_s": 0.6, "stalled_s": 1.0, "samples": 32.0}
    assert verdict.cost_s == pytest.approx(1.2)
    assert "was back after 600.0 ms" in verdict.what
    assert "32 samples that it held were dealt out again" in verdict.evidence


@pytest.mark.parametrize(
    ("what", "remedy"), [("lost", "the agent or command that ran it is gone; the same command"), ("exited", "see its last output")]
)
def test_who_is_lost_with_what_ran_it_returns_with_that(what: str, remedy: str) -> None:
    records = barrier([[STEP] * 3] * 20)
    t, detail = records[-1]["t"], "the connection to node2 has ended"
    more: list[dict[str, Any]] = [
        {"kind": "state_changed", "t": t + 0.1, "worker": 2, "state": "dead", "reason": detail},
        {"kind": "process", "t": t + 0.1, "role": "worker", "number": 2, "what": what, "detail": detail},
    ]
    (verdict,) = found([*records, *more])
    assert "did not come back" in verdict.what and verdict.remedy.startswith(remedy)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("reason", ["connection closed: end of stream", "its process killed by SIGKILL"])
def test_a_death_has_its_cause_whatever_is_heard_of_first(first: bool, reason: str) -> None:
    """The end of a killed process may be known 9 ms after that of its connection, which tells nothing."""
    records = barrier([[STEP] * 3] * 20)
    t = records[-1]["t"] + 0.1
    exited = {"kind": "process", "t": t, "role": "worker", "number": 2, "what": "exited", "detail": "killed by SIGKILL"}
    dead = {"kind": "state_changed", "t": t, "worker": 2, "state": "dead", "reason": reason}
    (verdict,) = found([*records, exited, dead] if first else [*records, dead, exited])
    assert "its process killed by SIGKILL" in verdict.evidence and "connection" not in verdict.evidence


@pytest.mark.parametrize(("ok", "folded", "told"), [(False, False, 0), (False, True, 1), (True, False, 1)])
def test_a_death_with_which_the_job_fails_costs_nothing(ok: bool, folded: bool, told: int) -> None:
    records = barrier([[STEP] * 3] * 20)
    t = records[-1]["t"]
    dead = {"kind": "state_changed", "t": t + 0.1, "worker": 2, "state": "dead", "reason": "its script failed"}
    fold = {"kind": "fold", "t": t + 0.2, "version": 21, "parts": [{"worker": 0}]}
    end = {"kind": "end", "t": t + 0.3, "ok": ok, "reason": "the script raised the same exception on workers 1 and 2"}
    assert len(found([*records, dead, *([fold] if folded else []), end])) == told


def test_a_few_folds_say_nothing() -> None:
    assert found(barrier([[STEP, with_more(data=1.0)]] * 4)) == []
