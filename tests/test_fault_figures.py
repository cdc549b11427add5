"""The plans of `benchmarks.faults` have the shares that were asked for, and its figures are those of the two journals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fault_figures import gaps, infinite, lost_indices, table, window
from benchmarks.fault_plan import DEATHS, ENDING, RULES_OF_TURN, SHARES, following, grouped


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_faults_have_the_shares_even_if_some_could_not_be_done(seed: int) -> None:
    done: Counter[str] = Counter()
    before: list[tuple[str, int]] = []
    while done.total() < 1000:
        job = following(seed, before, done, rules=RULES_OF_TURN, faults=26, cuts=True)
        assert job == following(seed, before, done, rules=RULES_OF_TURN, faults=26, cuts=True)
        assert sum(job.plan.get(fault, 0) for fault in ENDING) <= 1 and job.plan.get("term:worker", 0) <= 1
        assert sum(job.plan.values()) == (26 if job.hosts == 1 else 16)
        before.append((job.sync, job.hosts))
        done += Counter({fault: max(0, number - (number > 4)) for fault, number in job.plan.items()})
    groups = grouped(done)
    for group, share in SHARES.items():
        assert groups[group] / groups.total() == pytest.approx(share, abs=0.02), group
    assert {sync for sync, on in before if on == 1} == set(RULES_OF_TURN)


def test_deaths_alone_may_be_asked_for() -> None:
    job = following(1, [], {}, rules=["diloco(steps=5)"], faults=20, cuts=False, wanted=DEATHS)
    assert job.plan == {"kill:worker": 14, "kill:server": 6}


def journal(folder: Path, *, samples: int) -> Path:
    """Two workers that push once a second, the second one from second 2 on; worker 1 is dead from second 5 to 7."""
    found: list[dict[str, Any]] = [{"kind": "job", "t": 0.0, "format": 1, "sync": "asp", "workers": 2, "servers": 1, "seed": 0}]
    for worker in (0, 1):
        found.append({"kind": "state_changed", "t": 0.0, "worker": worker, "incarnation": 1, "state": "alive", "reason": ""})
    for version in range(1, 11):
        for worker in (0, 1) if version > 1 else (0,):
            who = {"t": float(version), "worker": worker, "incarnation": 1}
            found.append({"kind": "pushed", **who, "version": version - 1, "samples": samples, "compute_s": 0.5})
            part = {"worker": worker, "incarnation": 1, "clock": version, "weight": 1.0, "staleness": 0}
            settle = {"kind": "settle", **who, "clock": version, "fate": "folded", "reason": "", "version": version, "samples": samples}
            found += [{"kind": "fold", "t": float(version), "version": 2 * version + worker, "parts": [part], "reason": ""}, settle]
        for second, state in ((5, "dead"), (7, "alive")):
            if version == second:
                found.append({"kind": "state_changed", "t": 0.5 + second, "worker": 1, "incarnation": 1, "state": state, "reason": ""})
    back = {"kind": "process", "t": 5.0, "role": "server", "number": 0, "what": "restarted", "detail": ""}
    found.insert(next(place for place, record in enumerate(found) if record["t"] > 5.0), back)
    report = {"indices": 90, "folded": 80, "dropped": 0, "rejected": 0, "unused": 7}
    found.append({"kind": "epoch_ended", "t": 11.0, "pool": 0, "epoch": 0, "workers": [0], "report": report})
    path = folder / "journal.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return path


def test_both_jobs_are_measured_from_the_first_push_of_the_last_worker(tmp_path: Path) -> None:
    path = journal(tmp_path, samples=8)
    plain = window(path, 4.0)
    assert (plain.seconds, plain.samples, plain.rate) == (4.0, 64, 16.0)
    assert plain.present == pytest.approx(1 - 0.5 / 8.0)
    stop: dict[str, Any] = {"number": 0, "at_s": 0.9, "kind": "stop", "target": "server", "pick": 0.5, "seconds": 2.0, "duty": 0.9}
    stop |= {"victim": "server 0", "injected_at_s": 0.9, "journal_s": 3.0, "until_s": 2.9, "done": True}
    slow = {**stop, "kind": "slow", "target": "worker", "victim": "worker 0", "worker": 0, "duty": 0.5}
    assert window(path, 4.0, [stop]).present == pytest.approx(1 - 4.5 / 8.0)
    assert window(path, 4.0, [slow]).present == pytest.approx(1 - 1.5 / 8.0)
    kill = {**stop, "kind": "kill", "until_s": None, "journal_s": 4.5}
    assert window(path, 4.0, [kill]).present == pytest.approx(1 - 1.5 / 8.0), "until its next process goes on, both workers can do nothing"
    assert window(path, 99.0, ends=True).seconds == 8.0
    assert lost_indices(path) == 3
    assert infinite(path) == 0
    diverged = {"kind": "settle", "t": 11.0, "worker": 0, "fate": "rejected", "reason": "gradient not finite in 0.weight"}
    with path.open("a") as file:
        file.write(json.dumps(diverged) + "\n")
    assert infinite(path) == 1
    kills = [{**stop, "kind": "kill", "journal_s": at} for at in (2.25, 2.5, 5.5)]
    assert gaps(path, kills) == {"kill:server": [0.75, 1.0, 1.0]}


def test_the_table_compares_all_jobs_of_a_rule_together() -> None:
    job: dict[str, Any] = {"sync": "bsp", "hosts": 1, "done": {"kill:worker": 9, "kill:supervisor": 1}, "outcome": "ended as documented"}
    job |= {"indices": 1000, "lost": 0, "broken": [], "rate": 100.0, "seconds": 10.0, "samples": 810, "present": 0.9}
    other = {**job, "outcome": "hang", "broken": ["end"], "lost": 2, "samples": 630}
    shown = table([job, other])
    cells = [list(column.cells) for column in shown.columns]
    assert [column[0] for column in cells] == ["bsp", "2", "20", "18", "10.0", "72", "80", "2,000", "2", "1", "1"]
    assert next(column[1] for column in cells) == "all"
