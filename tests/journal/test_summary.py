"""What the tally counts."""

from __future__ import annotations

import json
import math

from tests.journal.records import (
    END,
    JOB,
    abandoned,
    epoch_ended,
    fold,
    interrupt,
    metrics,
    paused,
    plan,
    push,
    release,
    round_of_two,
    settle,
    state,
    two_shards,
)

from offbeat.journal.summary import Tally


def test_one_round_by_hand() -> None:
    tally = Tally.of(round_of_two())
    summary = tally.summary()
    assert tally.problems() == []
    assert (summary["sync"], summary["workers"], summary["version"], summary["ok"], summary["reason"]) == ("bsp", 2, 1, True, "done")
    assert (summary["wall_s"], summary["samples"], summary["samples_per_s"], summary["loss"]) == (1.0, 16, 16.0, 1.5)
    assert summary["fates"] == {"folded": 2, "carried": 0, "dropped": 0, "rejected": 0}
    first, second = summary["per_worker"]
    assert (first["compute_s"], first["wait_s"], first["clock"], first["pushes"]) == (0.5, 0.75, 1, 1)
    assert (second["compute_s"], second["wait_s"], second["samples"]) == (1.0, 0.5, 8)


def test_a_resumed_job_in_which_nothing_is_left_to_do_has_the_version_of_its_checkpoint() -> None:
    assert Tally.of([JOB, state(0.0, 0, "alive"), release(0.1, 0, version=32, clock=32)]).summary()["version"] == 32


def test_what_was_folded_and_went_with_its_host_is_taken_back() -> None:
    *records, end = round_of_two()
    undone = {"kind": "undone", "t": end["t"], "worker": 1, "incarnation": 1, "clock": 1, "version": 1, "samples": 8, "reason": "gone"}
    tally = Tally.of([*records, undone, end])
    assert tally.problems() == []
    assert tally.summary()["fates"] == {"folded": 1, "carried": 0, "dropped": 1, "rejected": 0}
    assert [row["samples"] for row in tally.summary()["per_worker"]] == [8, 0]


def test_a_kind_of_warning_that_two_optimizers_give_is_told_once() -> None:
    warning = {"kind": "warning", "t": 1.0, "about": "equal_gradients", "workers": [0, 1], "step": 1, "detail": "they are equal"}
    tally = Tally.of([JOB, warning, {**warning, "optimizer": 1}, {**warning, "about": "samples_unknown", "optimizer": 1}])
    assert [warned["about"] for warned in tally.summary()["warnings"]] == ["equal_gradients", "samples_unknown"]


def test_metrics_come_from_the_newest_version_and_its_lowest_worker() -> None:
    tally = Tally.of([JOB])
    for worker, version, value in ((1, 5, 0.1), (0, 5, 0.2), (1, 5, 0.3), (0, 4, 0.4)):
        tally.add(metrics(worker, version, value))
    assert tally.summary()["metrics"] == {"accuracy": 0.2}
    tally.add(metrics(1, 6, 0.5))
    assert tally.summary()["metrics"] == {"accuracy": 0.5}
    tally.add(metrics(1, 7, math.nan))
    assert tally.summary()["metrics"] == {"accuracy": "nan"}


def test_what_a_later_optimizer_has_logged_takes_the_place_of_the_first_one_s() -> None:
    tally = Tally.of([JOB, release(1.0, 0), push(2.0, 0, loss=3.0), metrics(0, 9, 0.1)])
    job = {**JOB, "optimizer": 1}
    for record in (job, release(3.0, 0, optimizer=1), push(4.0, 0, optimizer=1)):
        tally.add(record)
    assert (tally.summary()["loss"], tally.summary()["metrics"]) == (3.0, {"accuracy": 0.1}), "it has logged nothing"
    for record in (push(5.0, 0, loss=2.0, optimizer=1), {**metrics(0, 2, 0.2), "optimizer": 1}):
        tally.add(record)
    assert (tally.summary()["loss"], tally.summary()["metrics"]) == (2.0, {"accuracy": 0.2})


def test_a_loss_that_is_not_a_number_stays_one_that_json_can_carry() -> None:
    tally = Tally.of([JOB, release(1.0, 0), push(2.0, 0, loss="nan")])
    assert tally.summary()["loss"] == "nan"
    json.dumps(tally.summary(), allow_nan=False)


def test_waiting_for_the_end_of_an_epoch_is_idleness_and_a_death_ends_a_wait() -> None:
    dead, ended = state(4.0, 1, "dead"), epoch_ended(4.0, 0, 0)
    tally = Tally.of([*round_of_two()[:-1], paused(2.5, 0), push(3.0, 1, 1), dead, ended, release(4.0, 0, 1, 1), release(6.0, 1, 1, 1, 2)])
    first, second = tally.summary()["per_worker"]
    assert (first["idle_s"], second["wait_s"], second["deaths"], second["incarnations"]) == (1.5, 1.5, 1, 2)
    assert tally.summary()["epochs"] == [{"pool": 0, "epoch": 0, "t": 4.0, "indices": 16, "folded": 16}]


def test_an_abandoned_computation_is_counted_apart_and_the_wait_after_it_is_one() -> None:
    tally = Tally.of([*round_of_two()[:-1], interrupt(2.75, 1), abandoned(3.0, 1, 1, compute_s=0.5), release(3.25, 1, 1, 1), END])
    summary = tally.summary()
    second = summary["per_worker"][1]
    assert (second["abandoned"], second["abandoned_s"], second["interrupts"], second["pushes"], second["clock"]) == (1, 0.5, 1, 1, 1)
    assert (second["compute_s"], second["wait_s"]) == (1.0, 0.75)
    assert (summary["abandoned"], summary["interrupts"]) == (1, 1)


def test_local_steps_count_and_batches_are_told_by_epoch() -> None:
    records = [
        JOB,
        *(release(1.0, worker, plan=plan(steps=4, batch=batch)) for worker, batch in ((0, 48), (1, 16))),
        push(2.0, 0, steps=4, compute_s=1.0) | {"samples": 192},
        push(2.0, 1, steps=3, compute_s=1.0) | {"samples": 48},
        fold(2.0, 1, (0, 1, 0.5, 0), (1, 1, 0.5, 0)),
        settle(2.0, 0, 1, samples=192),
        settle(2.0, 1, 1, samples=48),
        epoch_ended(2.0, 0, 0, 1),
        *(release(2.0, worker, 1, 1, plan=plan(steps=4, batch=32)) for worker in (0, 1)),
        state(3.0, 1, "dead"),
        epoch_ended(4.0, 1, 0),
        END,
    ]
    records[1:1] = [state(0.5, 0, "alive"), state(0.5, 1, "alive")]
    tally = Tally.of(records)
    summary = tally.summary()
    assert tally.problems() == []
    assert (summary["steps"], summary["pushes"], summary["blocks"]) == (7, 2, 2)
    assert [worker["samples_per_step"] for worker in summary["per_worker"]] == [48.0, 16.0]
    assert [epoch["batches"] for epoch in summary["epochs"]] == [{"0": 48, "1": 16}, {"0": 32}]
    assert summary["per_worker"][0]["batch"] == 32


def test_in_shard_scope_an_iteration_counts_once_and_fates_count_blocks() -> None:
    summary = Tally.of(two_shards()).summary()
    assert (summary["pushes"], summary["blocks"], summary["samples"]) == (3, 6, 24)
    assert summary["fates"] == {"folded": 4, "carried": 0, "dropped": 2, "rejected": 0}
    assert [(shard["version"], shard["staleness_max"]) for shard in summary["shards"]] == [(2, 0), (1, 0)]
    assert (summary["version"], summary["wall_s"], summary["samples_per_s"]) == (1, 5.0, 4.8)
    assert (summary["scale"], summary["parts"]["mean"]) == ({"least": 2.0, "most": 4.0, "mean": 8 / 3}, 4 / 3)
    first, second = summary["per_worker"]
    assert (first["pushes"], first["clock"], first["compute_s"]) == (2, 2, 2.5)
    assert first["wait_s"] == 1.5, "between its pushes at 2.0 and 5.0 s it has computed for 1.5 s"
    assert (second["pushes"], second["wait_s"], second["samples"]) == (1, 0.0, 8)


def test_in_shard_scope_waiting_ends_with_a_pause_too_and_parameters_asked_for_do_not_end_it() -> None:
    records = two_shards()[:-1]
    tally = Tally.of([*records, release(6.0, 0, 1, 2), push(8.0, 0, 2, compute_s=1.0, shard=0, held=[2, 1])])
    assert tally.summary()["per_worker"][0]["wait_s"] == 3.5
    tally = Tally.of([*records, paused(6.0, 0), release(7.0, 0, 1, 2), push(8.0, 0, 2, compute_s=1.0, shard=0, held=[2, 1])])
    assert (tally.summary()["per_worker"][0]["wait_s"], tally.summary()["per_worker"][0]["idle_s"]) == (2.5, 1.0)
    tally = Tally.of([*records, abandoned(6.5, 0, 2, compute_s=0.5), push(8.0, 0, 3, compute_s=1.0, shard=0, held=[3, 1])])
    assert (tally.summary()["per_worker"][0]["wait_s"], tally.summary()["per_worker"][0]["abandoned_s"]) == (3.0, 0.5)


def test_faults_are_kept_and_unknown_kinds_are_passed_over() -> None:
    tally = Tally.of([JOB, {"kind": "fault", "t": 1.0, "worker": 1, "what": "slow", "detail": "3x"}, {"kind": "from_the_future", "t": 2.0}])
    assert tally.summary()["faults"] == [{"t": 1.0, "worker": 1, "what": "slow", "detail": "3x"}]
    assert tally.summary()["elapsed_s"] == 2.0


def test_a_worker_that_vanishes_neither_computes_nor_waits_until_the_job_notices() -> None:
    vanished = {"kind": "fault", "t": 2.5, "worker": 0, "what": "vanish", "detail": ""}
    first, _ = Tally.of([*round_of_two()[:-1], vanished, state(8.0, 0, "dead"), END]).summary()["per_worker"]
    assert (first["busy_s"], first["wait_s"], first["doing"], first["deaths"]) == (0.75, 0.75, "absent", 1)


def test_what_stands_still_with_the_coordinator_neither_waits_nor_is_idle() -> None:
    """Worker 0 waits from 1.5 s on, everything is stopped from 2 to 10 s, and worker 1's push releases it at 10.25 s."""
    tally, stopped = Tally(), {"kind": "stood_still", "t": 10.0, "seconds": 8.0}
    for record in (JOB, release(0.5, 0), release(0.5, 1), push(1.5, 0), stopped, release(10.25, 0)):
        tally.add(record)
    assert tally.summary()["per_worker"][0]["wait_s"] == 0.75
