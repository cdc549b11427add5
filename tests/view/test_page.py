"""The page of a journal: what it says, that it asks nothing of the network, that nothing in a journal can run, and how large it gets."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.view.page_records import unpacked
from typer.testing import CliRunner

from offbeat.advise.advice import Question
from offbeat.cli import app
from offbeat.commands.advise import SHORT
from offbeat.journal.file import Records, read
from offbeat.journal.summary import Tally
from offbeat.journal.turns import Turn
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view.columns import GROWS, SIGNED, Packed
from offbeat.view.content import Source
from offbeat.view.of_journal import Reading
from offbeat.view.page import NBYTES, render
from offbeat.view.shares import KINDS, Shares
from offbeat.view.steps import Steps

SLOW = "per_worker(law='shifted_exponential(shift=0.03, scale=0.01)', factors=(1, 1, 4, 1))"
CHROMIUM = shutil.which("chromium")
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&</title>"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.jsonl"
    faults = "kill worker=1 at=2; restart worker=1 at=3"
    simulate("bsp", Cluster(workers=4, compute=SLOW, faults=faults), Work(versions=60, samples=1000, batch=8), journal=path)
    return path


def page_of(path: Path) -> str:
    records, reading = Records(path, tolerant=True), Reading(path.name)
    records.feed(reading.add)
    reading.end()
    return render(reading.view, Source(path.name, records.nbytes, "0" * 64, records.cut))


def made(path: Path, *options: str, status: int = 0) -> tuple[str, str]:
    """Run the command; return the page and what the command said."""
    out = path.parent / "out.html"
    done = CliRunner().invoke(app, ["report", str(path), "--html", str(out), *options], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return out.read_text(encoding="utf-8"), done.output


def data_of(page: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the page's scripts read."""
    found = re.search(r'<script type="application/json" id="message">(.*?)</script>', page, re.DOTALL)
    packed = re.search(r'id="data">([^<]*)</script>', page)
    assert found is not None and packed is not None
    head = json.loads(found[1])
    return head, unpacked({**head["packed"], "text": packed[1]})


def test_columns_come_back_as_they_were() -> None:
    packed = Packed(until=1.0)
    packed.add("grows", np.array([3, 5, 900_000]), GROWS)
    packed.add("both", np.array([-4, 0, 7]), SIGNED)
    packed.add("none", np.array([], dtype=np.int64))
    packed.add("zeros", np.zeros(3))
    packed.add("jumps", np.array([5, 2, 9]), GROWS | SIGNED)
    packed.times("times", np.array([0.5, np.nan]))
    packed.floats("loss", np.array([0.5, np.nan, -2.0]))
    columns = unpacked(packed.plain())
    assert columns["grows"].tolist() == [3, 5, 900_000] and columns["both"].tolist() == [-4, 0, 7]
    assert columns["none"].tolist() == [] and columns["zeros"].tolist() == [0, 0, 0] and columns["times"].tolist() == [500_000, 0]
    assert columns["jumps"].tolist() == [5, 2, 9] and columns["loss"][0] == 0.5 and np.isnan(columns["loss"][1])


def test_the_page_says_who_costs_what_and_holds_every_push(journal: Path) -> None:
    page, said = made(journal)
    assert said.strip().endswith("out.html")
    summary = Tally.of(read(journal)).summary()
    assert f"<h1>{summary['verdicts'][0]['what']}" in page and "Worker 1 died at 2.0 s" in page
    assert hashlib.sha256(journal.read_bytes()).hexdigest() in page
    assert "waiting for worker 2" in page and "waits for worker 2" in page
    head, columns = data_of(page)
    assert len(columns["number"]) == summary["pushes"] and head["workers"] == 4 and head["slow"] == [2]
    pushed = [record for record in read(journal) if record["kind"] == "pushed"]
    assert np.abs(columns["arrived"] * head["packed"]["tick"] - [record["t"] for record in pushed]).max() <= head["packed"]["tick"]
    assert columns["version"].tolist() == [record["version"] for record in pushed]
    folded = columns["fate"] == head["fates"].index("folded")
    assert int(folded.sum()) == summary["fates"]["folded"]
    assert all(sum(epoch[name] for name in ("folded", "dropped", "unused")) == epoch["indices"] for epoch in summary["epochs"])
    assert "Every index has one fate" in page


def test_the_page_asks_nothing_of_the_network_and_runs_one_script_alone(journal: Path) -> None:
    page = page_of(journal)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|\ssrc=|<link|@import|url\(|\son\w+=", markup)
    said, *code = re.sub(r"/\*.*?\*/", "", script[0], flags=re.DOTALL), *re.findall(r"\bfetch\([^)]*", script[0])
    assert not re.search(r"https?://|XMLHttp|WebSocket|innerHTML|eval\(", said)
    assert all(re.match(r"fetch\([`\"](?:levels|advice)", one) for one in code), "and the policy forbids even these"
    assert "Copyright (c) 2022 Leon Sorokin" in script[0], "the licence of uPlot comes with it"


def test_names_from_scripts_and_hosts_are_text(journal: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[0]["script"] = EVIL
    process = {"kind": "process", "t": 0.0, "role": "worker", "number": 2, "what": "started", "detail": f"pid 1 on {EVIL}"}
    metrics = [{"kind": "metrics", "t": t, "worker": 0, "version": 1, "values": {EVIL: t, "x": "nan"}} for t in (1.0, 1.5)]
    reason = {"kind": "exception", "t": 1.6, "worker": 0, "reason": EVIL, "place": EVIL}
    at = next(place for place, line in enumerate(lines) if line["t"] > 1.6)
    path = tmp_path / f"{EVIL.replace('/', '')}.jsonl"
    path.write_text("\n".join(map(json.dumps, [lines[0], process, *lines[1:at], *metrics, reason, *lines[at:]])) + "\n")
    page = page_of(path)
    assert len(re.findall(r"<script\b", page)) == 3 and "<img" not in page and page.count("</title>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    head, _ = data_of(page)
    assert "metric 0" in head["curves"] and EVIL in head["hosts"][2]


def test_what_is_cut_growing_or_contradictory_is_said_and_the_rest_is_shown(journal: Path, tmp_path: Path) -> None:
    data, path = journal.read_bytes(), tmp_path / "part.jsonl"
    path.write_bytes(data[: len(data) // 2])
    page, said = made(path)
    assert "is cut off" in page and "has no end" in page and "is cut off" in said
    assert hashlib.sha256(path.read_bytes()).hexdigest() in page
    whole = data[: len(data) // 2].rpartition(b"\n")[0] + b"\n"
    path.write_bytes(whole + b"garbage\n" + data[-200:].partition(b"\n")[2])
    page, said = made(path)
    assert "is no record with a kind and a time" in page and "warning" in said
    path.write_bytes(whole + b'{"kind":"pushed","t":9.0}\n' + b'{"kind":"release","t":9.5,"worker":{}}\n')
    page, said = made(path)
    assert "not what offbeat writes in a record of kind &#39;pushed&#39; (KeyError" in page
    path.write_bytes(data.splitlines(keepends=True)[0])
    assert "No worker has pushed anything" in made(path)[0]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_in_a_record_the_page_is_made(journal: Path, tmp_path: Path, seed: int) -> None:
    """A hostile journal: fields of other types, negative and huge numbers, no worker of that number, time that runs backwards."""
    drawn, lines = random.Random(seed), [json.loads(line) for line in journal.read_text().splitlines()]
    for _ in range(4):
        record = drawn.choice(lines[len(lines) // 2 :])
        record[drawn.choice(list(record))] = drawn.choice([None, "x", -1, 1e308, [], {}, EVIL, True, 10**12])
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    page, said = made(path)
    assert "<h1>" in page and "Traceback" not in said and len(re.findall(r"<script\b", page)) == 3
    data_of(page)
    for option in ([], ["--why", "wait"]):
        assert CliRunner().invoke(app, ["report", str(path), *option], catch_exceptions=False).exit_code == 0


def test_no_journal_at_all(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run.jsonl"), "--html", str(tmp_path / "run.html")])
    assert done.exit_code != 0 and "No such file" in str(done.exception) and not (tmp_path / "run.html").exists()


def test_one_journal_of_several_cannot_be_read(journal: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(journal), str(tmp_path / "missing.jsonl")])
    assert done.exit_code == 2 and "bsp: version 60" in done.output and "missing.jsonl" in done.output


def test_replay_simulates_as_much_as_the_page_of_a_job(journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three seeds of ``offbeat advise`` it took five times as long."""
    asked: list[Question] = []

    def rows(path: Path, question: Question = SHORT) -> list[dict[str, Any]]:
        asked.append(question)
        return [{"name": "", "measured": True, "best": False, "notes": ["No advice."]}]

    monkeypatch.setattr("offbeat.commands.report.rows_of", rows)
    done = CliRunner().invoke(app, ["report", str(journal), "--html", str(tmp_path / "run.html"), "--replay"])
    assert done.exit_code == 0 and "No advice." in (tmp_path / "run.html").read_text() and asked == [SHORT]


def test_what_cannot_be_asked_for(journal: Path) -> None:
    for words, message in (
        (["--html", str(journal)], "this is the journal itself"),
        ([str(journal), "--html", "x.html"], "a page is of one job, but 2 journals are given"),
        (["--replay"], "give --html FILE"),
    ):
        done = CliRunner().invoke(app, ["report", str(journal), *words])
        assert done.exit_code != 0 and message in str(done.exception)


def test_of_a_long_job_excerpts_are_kept_and_all_is_in_the_shares(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = data_of(page_of(journal))
    monkeypatch.setattr("offbeat.view.steps.PUSHES_KEPT", 60)
    head, columns = data_of(page_of(journal))
    assert 0 < len(columns["number"]) <= 60 < head["pushes"] == whole["pushes"] and head["stride"] > 1
    kept = np.floor(columns["arrived"] * head["packed"]["tick"] / head["window"] + 1e-6) % head["stride"]
    assert (kept == 0).mean() > 0.95, "the page draws the excerpts where they are"


@pytest.mark.slow
def test_memory_and_size_are_bounded_whatever_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.view.steps.PUSHES_KEPT", 4_000)
    steps, drawn = Steps(), np.random.default_rng(0)
    turn = Turn(doing="computing", incarnation=1)
    names = ("data", "forward", "backward", "own", "gc", "push")
    for number in range(30_000):
        t = 1.0 + number * 0.05
        phases = dict(zip(names, drawn.uniform(0.0, 0.01, 6).round(6).tolist(), strict=True))
        record = {"kind": "pushed", "t": t, "worker": number % 8, "incarnation": 1, "version": number, "samples": 8, "phases": phases}
        turn.clock = number + 1
        steps.push(turn, record, t - 0.07)
        steps.settle({"worker": number % 8, "incarnation": 1, "clock": number + 1, "fate": "folded", "version": number + 1, "t": t}, 0)
    steps.end()
    assert len(steps) <= 4_000 and steps.count == 30_000 and not steps._pending
    assert steps.shares.totals().sum() == pytest.approx(30_000 * 0.07, rel=1e-3)
    assert steps.shares.longest.shape[1] <= 2048


def test_shares_divide_time_among_their_parts_however_long_the_job_is() -> None:
    shares = Shares()
    for start in (0.0, 5.0, 1e4, 1e6):
        shares.stretch(1, "dead", start, start + 2.0)
    shares.stretch(0, "waiting", 0.0, 1e6)
    totals = shares.totals()
    assert totals[1, KINDS.index("dead")] == pytest.approx(8.0, rel=1e-4)
    assert totals[0, KINDS.index("wait")] == pytest.approx(1e6, rel=1e-4)
    shares.stretch(10**9, "dead", 0.0, 1.0)
    with pytest.raises(ValueError, match="worker 1000000000 of a journal"):
        shares.totals()


@pytest.mark.slow
def test_of_a_thousand_workers_a_few_have_a_row(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    factors = tuple(2.5 if worker == 417 else 1.0 for worker in range(1000))
    law = f"per_worker(law='shifted_exponential(shift=0.3, scale=0.02)', factors={factors})"
    simulate("bsp", Cluster(workers=1000, compute=law), Work(versions=6), journal=path)
    page = page_of(path)
    assert "<h1>Worker 417 costs this job" in page and '"heat"' in page and len(page) < NBYTES / 5
    assert page.count("<dt") < 40 and page.count("<tr") < 60
    assert "more: a step" in page and re.search(r"worker 417 \d\d\d\.\d ms \(2\.\dx\)", page)
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 0 and len(done.output.splitlines()) < 24
    assert re.search(r"^and 99\d more: pushes 6, compute ", done.output, re.MULTILINE)


def test_other_rules_stand_below_the_measured_one(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.advise.advice.considered", lambda *_: ("backup(b=1)", "asp", "majority"))
    page, _ = made(journal, "--replay")
    assert re.search(r"<code>bsp</code>, measured.*?1\.00x.*?<code>backup\(b=1\)</code>.*?class=\"gain\">\d\.\d\dx", page, re.DOTALL)
    assert "ratios are between simulations" in page and "Or take another rule" in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_draws_the_page_and_tells_the_story_of_a_push(journal: Path, tmp_path: Path) -> None:
    made(journal)
    address = f"{(journal.parent / 'out.html').as_uri()}#push=2@30"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}"]
    done = subprocess.run([str(CHROMIUM), *options, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r'data-ready="\d+"', done.stdout)
    story = re.search(r'<div id="story".*?</div><ol>.*?</div>', done.stdout, re.DOTALL)
    assert story is not None and "Push of worker 2, clock 30: folded" in story[0] and "folded into version 30" in story[0]
    assert "CONSOLE" not in done.stderr
