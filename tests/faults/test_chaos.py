"""``offbeat chaos`` on real jobs: kills and stops that a job survives, and the death of a server, which ends it as documented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults.job import QUICK, RUN, SCRIPTS

REPLICAS = str(SCRIPTS / "replicas.py")
DEADLINE_S = 200.0


def chaos(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run it on a job of three workers whose replicas are compared. Returns the ended process and its result."""
    result = folder / "result.json"
    job = (*RUN, "--workers", "3", "--timeout", "2", "--max-restarts", "99", "--slow", "any=0.02", REPLICAS)
    command = [sys.executable, "-m", "offbeat.cli", "chaos", "--json", str(result), *options, "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **QUICK})
    return done, json.loads(result.read_text()) if result.exists() else {}


def test_kills_and_stops_that_a_job_survives(tmp_path: Path) -> None:
    options = ("--seed", "5", "--mtbf", "0.8", "--count", "5", "--faults", "kill,stop", "--time", "8", "--mix", "freeze=50")
    done, result = chaos(tmp_path, *options, "--no-baseline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["outcome"] == "finished" and all(check["held"] for check in result["checks"]), result["checks"]
    hit = [fault for fault in result["faults"] if fault["done"]]
    assert {fault["kind"] for fault in hit} == {"kill", "stop"} and all(fault["proved"] for fault in hit)
    assert all(fault["until_s"] is not None for fault in hit if fault["kind"] == "stop")
    assert "--seed 5 with the same options repeats the schedule." in done.stdout


def test_a_servers_death_is_survived_and_the_undisturbed_job_is_compared(tmp_path: Path) -> None:
    options = ("--seed", "8", "--mtbf", "1", "--count", "1", "--faults", "kill", "--targets", "server", "--time", "5")
    done, result = chaos(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["outcome"] == "finished" and all(check["held"] is not False for check in result["checks"]), result["checks"]
    assert result["baseline_samples_per_s"] > 0 and result["goodput"] is not None
    assert next(check for check in result["checks"] if check["name"] == "nothing left")["held"]
