"""``offbeat doctor`` as a user types it: text, JSON, exit statuses, and what cannot be had."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.job import QUICK

from offbeat.cli import main
from offbeat.launch.environment import free_port

OFFBEAT = [sys.executable, "-m", "offbeat", "doctor", "--seconds", "0.1"]


def doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_TOKEN")}
    return subprocess.run(
        [*OFFBEAT, *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, **QUICK, **variables},
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("a secret of a test")
    return str(file)


def port_of(serving: subprocess.Popen[str]) -> str:
    """Return the port at which a process serves, once it says so."""
    assert serving.stderr is not None
    for line in serving.stderr:
        if found := re.search(r"serving at \S+:(\d+) ", line):
            return found[1]
    raise AssertionError(f"it has ended with status {serving.wait()}")


def test_text_and_status() -> None:
    done = doctor()
    assert done.returncode == (1 if " problem " in done.stdout.replace("no problem", "") else 0), done
    assert done.stdout.isascii() and re.search(r"^  good     Python ", done.stdout, re.MULTILINE)
    assert re.search(r"^(no|\d+) problems?, \d+ notes?, \d+ good$", done.stdout.splitlines()[-1])
    assert done.stderr == ""


def test_machines_measure_each_other_and_report_as_json(token: str) -> None:
    with subprocess.Popen(
        [*OFFBEAT, "--serve", "--listen", "127.0.0.1", "--port", str(free_port()), "--token-file", token],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUICK},
    ) as serving:
        try:
            port = port_of(serving)
            absent = f"127.0.0.1:{free_port()}"
            done = doctor("--connect", f"localhost:{port}", "--connect", absent, "--token-file", token, "--json")
            told = json.loads(done.stdout)
            assert done.returncode == 1 and not told["ok"], "a machine that is not there is a problem"
            found = {one["name"]: one for one in told["findings"] if one["block"] == "Between machines"}
            (way,) = [one for name, one in found.items() if name.endswith(f" to localhost:{port}")]
            assert way["figures"]["there_bytes_per_s"] > 0 and f"clock of localhost:{port}" in found
            assert {"name", "state", "seen", "remedy", "figures", "block"} == set(way)
        finally:
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 130


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--serve",), "need the secret of the job"),
        (("--connect", "node1"), "need the secret of the job"),
        (("--connect", "node1:x"), "--connect 'node1:x': write HOST or HOST:PORT"),
        (("--port", "0"), "--port 0: must be from 1"),
        (("--servers", "-1"), "--servers -1: must be from 1"),
        (("--seconds", "nan"), "--seconds nan: must be from 0.1"),
        (("--tls-ca", "none.pem"), "--tls-ca without --tls-cert"),
        (("--token-file", "/no/such/file"), "cannot read it"),
    ],
)
def test_mistakes_are_one_sentence(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OFFBEAT_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["offbeat", "doctor", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and message in said.err and len(said.err.splitlines()) == 1
    assert said.out == ""
