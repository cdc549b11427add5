"""What Prometheus scrapes: names that promtool accepts, counters that agree with the job's summary, and no scrape that costs the job."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.journal.records import state
from tests.view.test_follow import Job
from tests.view.test_follow import job as job_with

from offbeat.errors import ConfigurationError
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.launch.followers import FollowerSpec
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view import metrics
from offbeat.view.metrics import Collector, command_of

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install 'offbeat[view]'")


def simulated(
    folder: Path, sync: str = "backup(b=1)", workers: int = 4, faults: str = "kill worker=2 at=9; restart worker=2 at=30"
) -> list[Record]:
    path = folder / "run.jsonl"
    simulate(sync, Cluster(workers=workers, compute="lognormal(mean=1, sd=0.3)", faults=faults), Work(versions=60), journal=path)
    return list(read(path))


def fed(records: list[Record]) -> tuple[Collector, dict[str, Any]]:
    collector, tally = Collector(), Tally()
    for record in records:
        collector.record(record)
        tally.add(record)
    collector.status(tally.summary())
    return collector, tally.summary()


def shown(collector: Collector) -> str:
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    return str(prometheus.generate_latest(registry).decode())


def value(text: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_the_figures_are_those_of_the_summary(tmp_path: Path) -> None:
    collector, summary = fed(simulated(tmp_path))
    text = shown(collector)
    assert value(text, "offbeat_version") == summary["version"] == 60
    assert value(text, 'offbeat_samples_total{fate="folded"}') == summary["samples"]
    for worker in summary["per_worker"]:
        for fate, count in worker["fates"].items():
            assert value(text, f'offbeat_gradients_total{{fate="{fate}",worker="{worker["worker"]}"}}') == count
    assert value(text, "offbeat_step_seconds_count") == summary["pushes"]
    assert value(text, "offbeat_staleness_versions_count") == summary["fates"]["folded"]
    assert value(text, "offbeat_round_seconds_count") == 59
    deaths = sum(value(text, f'offbeat_deaths_total{{cause="{cause}"}}') for cause in {*metrics.CAUSES.values(), "other"})
    assert deaths == sum(worker["deaths"] for worker in summary["per_worker"]) == 1
    assert value(text, "offbeat_rejoin_seconds_count") == 1 and 20 < value(text, "offbeat_rejoin_seconds_sum") < 30
    assert 'rule="backup(b=1)"' in text


def test_a_closed_connection_is_explained_by_the_end_of_the_process(tmp_path: Path) -> None:
    collector = Collector()

    def dies(worker: int, t: float) -> None:
        collector.record({**state(t, worker, "dead"), "reason": "connection closed: x"})

    def deaths(cause: str) -> float:
        return value(shown(collector), f'offbeat_deaths_total{{cause="{cause}"}}')

    for worker in (0, 1, 2):
        dies(worker, 1.0)
    collector.record({"kind": "process", "t": 1.1, "role": "worker", "number": 0, "what": "exited", "detail": "killed by SIGKILL"})
    assert (deaths("killed"), deaths("connection")) == (1, 0)
    collector.record(state(2.0, 1, "alive", 2))
    assert (deaths("killed"), deaths("connection")) == (1, 1)
    collector.status({**Tally().summary(), "elapsed_s": 7.0})
    assert (deaths("killed"), deaths("connection")) == (1, 2)


@pytest.mark.parametrize("sync", ["psp(c=1)", "majority", "ensemble"])
def test_other_families(sync: str, tmp_path: Path) -> None:
    collector, summary = fed(simulated(tmp_path, sync))
    assert value(shown(collector), "offbeat_version") == summary["version"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("known", [True, False])
def test_promtool_accepts_it(known: bool, tmp_path: Path) -> None:
    collector = fed(simulated(tmp_path))[0] if known else Collector()
    done = subprocess.run(["promtool", "check", "metrics"], input=shown(collector), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_dashboard_and_the_page_use_names_that_are_served(tmp_path: Path) -> None:
    collector, summary = fed(simulated(tmp_path))
    collector.status({**summary, "loss": 0.5})
    text, root = shown(collector), Path(__file__).parents[2]
    served = {name for name in re.findall(r"^(offbeat_\w+?)(?:\{| )", text, re.MULTILINE) if not name.endswith("_created")}
    board = json.loads((root / "contrib" / "grafana.json").read_text(encoding="utf-8"))
    used = {name for panel in board["panels"] for target in panel["targets"] for name in re.findall(r"offbeat_\w+", target["expr"])}
    assert used <= served, used - served
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in served}
    page = (root / "docs" / "tools.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(offbeat_\w+)`", page, re.MULTILINE)) == families


def test_of_a_thousand_workers_32_have_labels(tmp_path: Path) -> None:
    collector, _ = fed(simulated(tmp_path, "asp", workers=300, faults=""))
    found = set(re.findall(r'worker="(\d+)"', shown(collector)))
    assert len(found) in (0, 32)


def test_what_a_script_or_a_host_is_called_breaks_no_line(tmp_path: Path) -> None:
    collector, summary = fed(simulated(tmp_path))
    collector.status({**summary, "script": 'a"b\\c\n<script>', "sync": None, "loss": "nan"})
    text = shown(collector)
    assert r'script="a\"b\\c\n<script>"' in text and value(text, "offbeat_loss") != value(text, "offbeat_loss")


@pytest.mark.parametrize("text", ["", "x", "99999", "-1", "host:", ":9090", "host:99999", "a@b:1", "host:1/x", "::1:9"])
def test_a_wrong_address_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--metrics"):
        command_of(text)


def following(folder: Path, port: str) -> AbstractContextManager[Job]:
    return job_with(folder, spec=FollowerSpec(name="--metrics", command=command_of(port), kinds=metrics.KINDS))


def test_a_job_is_scraped_and_many_readers_hang(tmp_path: Path) -> None:
    records = simulated(tmp_path)
    _, summary = fed(records)
    with following(tmp_path, "0") as job, ExitStack() as held:
        job.followers.on_status(summary, last=True)
        job.until("its address", lambda: bool(job.notes))
        address = job.notes[0].removeprefix("--metrics: ")
        assert address.startswith("http://127.0.0.1:")
        port = int(address.split(":")[2].split("/")[0])
        for number in range(50):  # readers that ask and never read, or do not even ask
            reader = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            reader.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\r\n" * (number % 2))
            time.sleep(0.01)  # the server's queue holds five: a connection that finds it full is tried again seconds later
        began = time.monotonic()
        job.followers.tick()
        assert time.monotonic() - began < 5.0

        def scraped() -> str:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return str(answer.read().decode())

        job.until("the figures", lambda: "offbeat_version 60.0" in scraped())
        job.end()
    assert list(job.missing) == []


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with following(tmp_path, str(port)) as job:
            job.until("its end", job.followers.all_over)
            job.end()
    assert list(job.missing) == [
        f"--metrics is not complete: port {port} of 127.0.0.1 is in use: choose another one, or 0 for any free port"
    ]
    assert job.missing.outcome(0, "done") == (0, "done")
