"""``--dashboard`` in real jobs: whatever becomes of the page, its port or its readers, the job ends as without it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tests.faults.job import QUICK, TRAIN, Job, Start

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'offbeat[view]'")

ADDRESS = re.compile(r"^--dashboard[^:]*: (http://\S+/)$", re.MULTILINE)
IMPATIENT = (
    sys.executable,
    "-c",
    "from offbeat.launch import supervisor; supervisor.FOLLOWERS_END_S = 3.0; from offbeat.cli import main; main()",
    "run",
)
"""``offbeat run`` which waits at its end for the page as long, not half a minute."""
NAMED = """
import sys, pathlib, torch, offbeat
model = torch.nn.Linear(4, 1)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = torch.utils.data.TensorDataset(torch.randn(256, 4))
while not pathlib.Path(sys.argv[1]).exists():
    for (x,) in torch.utils.data.DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4)):
        optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); optimizer.step()
        offbeat.log(**{"loss": loss.item(), "<script>": 1.0, **{f"metric {n}": float(n) for n in range(9_000)}})
"""


def address(job: Job) -> str:
    found: re.Match[str] = job.wait("address of the page", lambda: ADDRESS.search(job._err.read_text()))
    return found[1]


def stream(url: str) -> socket.socket:
    """A connection that has asked for the events."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)
    connection.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


def first(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}events", timeout=30) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise EOFError


def page_of(job: Job) -> psutil.Process | None:
    return next((one for one in job.processes() if "offbeat.view.dashboard" in one.cmdline()), None)


def test_the_page_shows_a_running_job_and_its_end(start: Start, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    job = start("--workers", "2", "--slow", "any=0.01", "--quiet", "--dashboard", "0", TRAIN, "--until", str(until))
    url = address(job)
    job.record("fold", version=20)
    message = job.wait("figures on the page", lambda: (found := first(url))["pushes"] >= 40 and found["figures"] and found)
    assert message["whole"] and message["live"] and message["lanes"] == [0, 1] and "Where" in message["html"]["whole"]
    page = page_of(job)
    assert page is not None and urlsplit(url).path.strip("/") not in " ".join(page.cmdline()), "other users read command lines"
    with closing(stream(url)) as reader:
        until.touch()
        ended = job.ended()
        data = b"".join(iter(lambda: reader.recv(1 << 16), b""))
    last = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ") and line.endswith(b"}")][-1]
    assert ended.status == 0 and last["over"] and not last["live"]
    assert last["ok"] is True and "its server has ended with the job" in last["html"]["notes"]
    assert ended.tally().problems() == []


def test_names_of_scripts_and_many_metrics_reach_the_page(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "<b>.py"
    script.write_text(NAMED)
    job = start("--workers", "2", "--slow", "any=0.05", "--dashboard", "0", str(script), str(tmp_path / "enough"))
    url = address(job)
    html = job.wait("metrics", lambda: (html := first(url)["html"]).get("metrics") and html)
    assert "&lt;script&gt;" in html["metrics"] and html["metrics"].count("<li>") == 32 and re.search(r"\d{3,} more names", html["metrics"])
    assert "&lt;b&gt;.py" in html["head"]
    (tmp_path / "enough").touch()
    assert job.ended().status == 0


def test_a_port_in_use_is_one_sentence(start: Start, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        job = start("--workers", "2", "--slow", "any=0.01", "--dashboard", str(port), TRAIN, "--until", str(until))
        job.wait("the sentence", lambda: "in use" in job.printed())
        until.touch()
        ended = job.ended()
    assert ended.status == 0
    (line,) = [line for line in ended.out.splitlines() if "in use" in line]
    assert f"--dashboard {port}: port {port} of 127.0.0.1 is in use by another program" in line and "training goes on without it" in line


def test_a_killed_page_comes_back_at_its_address_and_stopped_or_unread_it_costs_nothing(start: Start, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    job = start("--workers", "2", "--slow", "any=0.01", "--dashboard", "0", TRAIN, "--until", str(until), command=IMPATIENT)
    url = address(job)
    page = page_of(job)
    assert page is not None
    page.kill()
    job.wait("the note", lambda: "is started again; training goes on" in job.printed())

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(first(url)["pushes"])
        return False

    job.wait("a page at the same address", answers)
    readers = [stream(url) for _ in range(40)]
    page = page_of(job)
    assert page is not None
    page.suspend()
    before = job.records()[-1]["t"]
    job.record("fold", after=before + 1.0)
    until.touch()
    ended = job.ended()
    for reader in readers:
        reader.close()
    assert ended.status == 0 and ended.tally().problems() == []
    assert len(ADDRESS.findall(ended.err)) == 1, "it is said once"
    # Where the machine is so slow that the page has been silent for long by then, it counts as hanging.
    assert any(f"--dashboard 0: {why}" in ended.out for why in ("it had not ended when the job had", "it hangs"))


def test_without_the_extra_training_goes_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')")
    until = tmp_path / "enough"
    environment = {"PYTHONPATH": f"{tmp_path}:{QUICK['PYTHONPATH']}"}
    job = start("--workers", "1", "--dashboard", TRAIN, "--until", str(until), environment=environment)
    said = "--dashboard: uvicorn is not installed: pip install 'offbeat[view]'; training goes on without it"
    job.wait("the sentence", lambda: said in job.printed())
    until.touch()
    assert job.ended().status == 0
