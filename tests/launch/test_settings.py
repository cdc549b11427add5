"""Settings arrive as they were sent, through messages and through environment variables."""

from __future__ import annotations

import os
import subprocess
import sys

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import (
    CheckpointOrder,
    InjectedKill,
    InjectedSlowdown,
    JobSettings,
    Late,
    ReplayedTrace,
    WorkerSettings,
)
from offbeat.transport.base import Address
from offbeat.types import WIRE_FORMATS, WorkerId

SECONDS = st.floats(0.0, 1e6)
VERSIONS = st.integers(0, 1 << 40)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
TRACE = st.builds(ReplayedTrace, path=TEXT, job=TEXT, column=st.integers(0, 99), scale=SECONDS)
SLOW = st.builds(
    InjectedSlowdown, worker=st.integers(-1, 99), seconds=SECONDS, start=VERSIONS, stop=st.none() | VERSIONS, trace=st.none() | TRACE
)
KILL = st.builds(InjectedKill, worker=st.integers(0, 99), version=VERSIONS)
LATE = st.builds(Late, server=st.integers(-1, 99), seconds=SECONDS, share=st.floats(0.0, 1.0))
CHECKPOINT = st.builds(
    CheckpointOrder, folder=TEXT, every_s=st.none() | SECONDS, every_versions=st.none() | st.integers(1, 99), keep=st.integers(1, 9)
)
WIRE = st.sampled_from([None, *WIRE_FORMATS])
JOBS = st.builds(
    JobSettings,
    workers=st.integers(1, 999),
    servers=st.integers(1, 99),
    sync=st.none() | TEXT,
    wire=WIRE,
    seed=st.integers(-5, 1 << 40),
    timeout_s=SECONDS,
    script=TEXT,
    journal=st.none() | TEXT,
    slow=st.lists(SLOW, max_size=3).map(tuple),
    kill=st.lists(KILL, max_size=3).map(tuple),
    late=st.lists(LATE, max_size=3).map(tuple),
    checkpoint=st.none() | CHECKPOINT,
    resume=st.none() | TEXT,
)
ADDRESSES = st.builds(Address, TEXT, st.tuples(TEXT, st.integers(0, 65535)), TEXT)
WORKERS = st.builds(
    WorkerSettings,
    worker=st.integers(0, 999),
    workers=st.integers(1, 999),
    token=TEXT,
    servers=st.lists(ADDRESSES, min_size=1, max_size=3).map(tuple),
    seed=st.integers(-5, 1 << 40),
    timeout_s=SECONDS,
    slow=st.lists(SLOW, max_size=3).map(tuple),
    wire=WIRE,
)


@given(JOBS)
def test_a_job_survives_the_wire(settings: JobSettings) -> None:
    assert JobSettings.from_wire(msgpack.unpackb(msgpack.packb(settings.to_wire()))) == settings


@given(WORKERS)
def test_a_worker_finds_its_settings_in_the_environment(settings: WorkerSettings) -> None:
    assert WorkerSettings.from_environment(settings.to_environment()) == settings


def test_no_launcher() -> None:
    assert WorkerSettings.from_environment({"OFFBEAT_WORKER": "3", "OFFBEAT_HOST": "here"}) is None


def test_half_an_environment() -> None:
    whole = WorkerSettings(worker=WorkerId(0), workers=1, token="t", servers=(Address("h", ("127.0.0.1", 1), ""),)).to_environment()
    for name in ("OFFBEAT_WORKER", "OFFBEAT_WORKERS", "OFFBEAT_TOKEN"):
        rest = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(ConfigurationError, match=f"OFFBEAT_SERVERS is set but {name} is not: start the script with 'offbeat run'"):
            WorkerSettings.from_environment(rest)
    for change in (
        {"OFFBEAT_WORKER": "first"},
        {"OFFBEAT_SERVERS": "here:80"},
        {"OFFBEAT_SERVERS": "[1]"},
        {"OFFBEAT_SLOW": '[{"speed": 1}]'},
    ):
        with pytest.raises(ConfigurationError, match="an OFFBEAT_ variable cannot be read"):
            WorkerSettings.from_environment({**whole, **change})


def test_the_token_stays_out_of_sight() -> None:
    assert "secret" not in repr(WorkerSettings(worker=WorkerId(0), workers=1, token="secret", servers=()))


SEEN = """
import offbeat, os, subprocess, sys
from offbeat.runtime.job.settings import WorkerSettings
print("OFFBEAT_TOKEN" in os.environ, [WorkerSettings.from_environment().token for _ in range(2)])
show = "import os; print('OFFBEAT_TOKEN' in os.environ, 'OFFBEAT_SERVERS' in os.environ)"
print(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout)
refused = "from offbeat.runtime.job.settings import WorkerSettings as W; W.from_environment()"
print(subprocess.run([sys.executable, "-c", refused], capture_output=True, text=True).stderr)
"""


def test_a_worker_keeps_the_token_from_what_its_script_starts_and_logs() -> None:
    settings = WorkerSettings(worker=WorkerId(0), workers=1, token="secret", servers=(Address("h", ("127.0.0.1", 1), ""),))
    command = [sys.executable, "-c", SEEN]
    ran = subprocess.run(command, env={**os.environ, **settings.to_environment()}, capture_output=True, text=True, timeout=60)
    mine, others, refused = ran.stdout.split("\n", 2)
    assert mine == "False ['secret', 'secret']", ran.stderr
    assert others == "False True"
    assert "OFFBEAT_TOKEN is not, as in a process that a worker has started" in refused
