"""What cannot work ends soon, with status 1 or 2, nothing left behind, and a last line that says why."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.job import DEADLINE_S, MISTAKEN, SCRIPTS, TRAIN, Start
from tests.tiers import marked

TWICE = "the script raised the same exception on workers [01] and [01], which no restart mends: "
SENTENCES = {
    "frozen": TWICE + r"Linear has no trainable parameter in the optimizer: .*",
    "foreign": TWICE + r".*not.*model.*\(tests/faults/scripts/mistaken\.py:\d+\)",
    "models": r"worker [01] has another model than the workers before it: 1\.weight has shape .*",
    "optimizers": r"worker [01] has another optimizer than the workers before it: (Adam, not SGD|SGD, not Adam); .*",
    "rules": r"backup\(b=4\) with 2 workers leaves no gradient to wait for: b must be at most 1",
    "samples": TWICE + r"the data set has 1 samples for 2 workers: .*",
    "infinite": r"worker [01] stopped the job: the gradient of weight is not finite",
}


ELSEWHERE = ("frozen", "rules", "samples", "infinite")
"""Tests of one process have these sentences (tests/live, tests/test_cli.py), and the others show how a job ends with one."""


@pytest.mark.parametrize("mistake", marked(list(SENTENCES), night=ELSEWHERE))
def test_mistakes_of_scripts(start: Start, mistake: str) -> None:
    ended = start("--workers", "2", MISTAKEN, mistake).ended()
    assert ended.status == 1
    assert re.fullmatch(f"offbeat: {SENTENCES[mistake]}", ended.last_line), ended.err
    assert ended.err.count("Traceback") <= 2, ended.err


def test_memory_that_is_refused(start_new: Start) -> None:
    ended = start_new("--workers", "2", MISTAKEN, "large", file_size_max=1 << 20).ended()
    assert ended.status == 1
    assert re.search(r"cannot have 16,0\d\d,\d{3} bytes of memory for '.*'", ended.last_line), ended.err


def test_scripts_that_do_not_take_part(start_new: Start, tmp_path: Path) -> None:
    broken, other, half = tmp_path / "broken.py", tmp_path / "other.py", tmp_path / "half.py"
    broken.write_text("raise RuntimeError('no data here')\n")
    ended = start_new("--workers", "2", str(broken)).ended()
    assert ended.status == 1
    assert ended.last_line == "offbeat: no worker finished: workers 0, 1 failed: RuntimeError: no data here"
    assert ended.err.count("RuntimeError: no data here") == 3, "two tracebacks, and the last line"

    other.write_text("print('hello')\n")
    ended = start_new("--workers", "2", str(other)).ended()
    assert ended.status == 1
    assert ended.last_line.startswith(f"offbeat: {other} ended without making an offbeat.DistributedOptimizer")

    # One that fails, and one that ends, before anybody has joined: the third does not wait for them.
    lines = ["import os, runpy, sys", "worker = os.environ['OFFBEAT_WORKER']", "if worker == '1': sys.exit(3)", "if worker == '0':"]
    half.write_text("\n".join(lines) + f"\n    runpy.run_path({TRAIN!r}, run_name='__main__')\n")
    ended = start_new("--workers", "3", str(half)).ended()
    assert ended.status == 1, ended.err
    assert [r["worker"] for r in ended.records if r["kind"] == "joined"] == [0]
    assert ended.tally().problems() == []
    assert ended.records[-1]["reason"] == "worker 1 exited with status 3; every other worker's script has ended"


def test_an_exception_of_a_script_with_three_optimizers_is_told_once(start: Start, tmp_path: Path) -> None:
    """Its traceback is printed, and no optimizer's coordinator takes the end of the process for the end of the script."""
    script = tmp_path / "three.py"
    script.write_text(
        "import offbeat, torch\n"
        "models = [torch.nn.Linear(2, 1) for _ in range(3)]\n"
        "optimizers = [offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) for model in models]\n"
        "for model, optimizer in zip(models, optimizers):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step(samples=1)\n"
        "raise RuntimeError('no data here')\n"
    )
    ended = start("--workers", "1", str(script)).ended()
    assert ended.status == 1
    assert ended.last_line.startswith("offbeat: the script raised the same exception twice on worker 0")
    assert ended.err.count("\n[worker 0] RuntimeError: no data here\n") == 1, "one traceback, of the first process"
    assert ended.err.count("as on worker 0 before: see the traceback there") == 1, "in place of that of the second"
    assert len([r for r in ended.records if r["kind"] == "exception"]) == 2, "one of each process"
    assert not [r for r in ended.records if r["kind"] in ("left", "state_changed") and r.get("state") == "finished"]
    lost = [r for r in ended.records if r["kind"] == "lost"]
    assert {r.get("optimizer", 0) for r in lost} == {0, 1, 2} and all("failed: RuntimeError" in r["reason"] for r in lost)


def test_strangers_and_nonsense_gradients_do_no_harm(start_new: Start, enough: Path, tmp_path: Path) -> None:
    own = ("--until", str(enough), "--worker", "1", "--nan-at", "3", "--tell", str(tmp_path / "token"))
    job = start_new("--workers", "2", "--slow", "any=0.01", TRAIN, *own)  # the environment of a fork is that of the process before it
    refused = job.record("settle", worker=1, fate="rejected")
    assert refused["reason"] == "gradient not finite in weight"
    environment = {**job.workers()[1].environ(), "OFFBEAT_TOKEN": (tmp_path / "token").read_text()}
    changes = {
        "the token shown is not this job's": {"OFFBEAT_TOKEN": "0" * 32},
        "worker 7 is not one of this job's 2 workers": {"OFFBEAT_WORKER": "7"},
    }
    command = [sys.executable, TRAIN, "--epochs", "1"]
    strangers = {
        why: subprocess.Popen(command, env={**environment, **change}, stderr=subprocess.PIPE, text=True) for why, change in changes.items()
    }
    for why, stranger in strangers.items():
        _, said = stranger.communicate(timeout=DEADLINE_S)
        assert stranger.returncode != 0
        assert why in said.splitlines()[-1], said
    job.record("fold", after=job.records()[-1]["t"])
    ended = job.end(enough)
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    assert {r["worker"] for r in ended.records if r["kind"] == "joined"} == {0, 1}
    first = ended.reports()[0]
    assert (first["folded"], first["rejected"]) == (60, 4)
    assert [e["why"] for e in first["exceptions"]] == ["rejected: gradient not finite in weight"]


def test_a_port_in_use(start_new: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = start_new("--workers", "2", "--port", str(port), TRAIN).ended()
    assert ended.status == 2
    assert ended.last_line.startswith(f"offbeat: port {port} of 127.0.0.1 is taken by another process")
    assert "Traceback" not in ended.err


def test_a_journal_that_is_something_else(start_new: Start, tmp_path: Path) -> None:
    diary = tmp_path / "journal.jsonl"
    diary.write_text("Dear diary\n")
    ended = start_new("--workers", "2", TRAIN).ended()
    assert ended.status == 2
    assert ended.last_line.startswith(f"offbeat: {diary}, line 1: not a journal: 'Dear diary'")
    assert diary.read_text() == "Dear diary\n"


def test_a_full_dev_shm_does_not_matter(start_new: Start) -> None:
    """Shared memory of a job has no file: /dev/shm is made tiny, and full, for this job alone."""
    private = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    fill = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && ! echo x > /dev/shm/more"
    if subprocess.run([*private, f"{fill} 2>/dev/null"], capture_output=True).returncode != 0:
        pytest.skip("this system does not let us mount a /dev/shm of our own")
    ended = start_new("--workers", "2", TRAIN, before=(*private, f'{fill} 2>/dev/null; exec "$@"', "sh")).ended()
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []


@pytest.mark.whole_torch
def test_a_process_group_of_the_scripts_own_works_beside_the_job(start: Start) -> None:
    ended = start("--workers", "2", str(SCRIPTS / "group.py")).ended()
    assert ended.status == 0, ended.err
    assert ended.tally().summary()["metrics"]["seen"] == sum(range(32))
