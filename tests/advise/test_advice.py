"""Advice for simulated runs: which rule is advised, what is said of its costs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.advise.advice import Advice, Question, advice, shared_host
from offbeat.advise.choices import considered
from offbeat.advise.table import page_rows
from offbeat.advise.words import assumptions, conclusion, of_links, of_sizes, warnings
from offbeat.cli import app
from offbeat.commands.advise import counts, rows_of
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES, rule
from offbeat.sim.cluster import Cluster, Work, quantity
from offbeat.sim.recording import recorded
from offbeat.sim.run import simulate

SLOW = "per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=(1, 1, 4, 1))"
FAST = Question(seeds=1, pushes=160)


def journal(folder: Path, law: str, sync: str = "bsp", versions: int = 100, **settings: object) -> Path:
    path = folder / "run.jsonl"
    machines = Cluster(workers=4, compute=law, **settings)  # type: ignore[arg-type]
    simulate(sync, machines, Work(versions=versions, batch=16), journal=path)
    return path


@pytest.fixture
def few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rules only one of each kind is simulated: for what is said of a run whatever the rules. Of all: `slow`."""
    monkeypatch.setattr("offbeat.advise.advice.considered", lambda *_: ("backup(b=1)", "asp", "ensemble(steps=10)", "majority"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    """Advice for a run with a slow worker."""
    path = journal(tmp_path_factory.mktemp("slow"), SLOW)
    return advice(path, Question(workers=(3, 5), servers=(2,), seeds=1, pushes=200))


def test_a_slow_worker_is_repaired_first_and_a_rule_comes_second(slow: Advice) -> None:
    said = conclusion(slow)
    assert said[0].startswith("Repair first. Worker 2 costs this job")
    assert slow.repaired is not None and slow.repaired.ratio > 3.0 and "Were worker 2 like the others" in said[1]
    assert any(text.startswith("Rule second: take backup(b=1)") and "throws away nearly all of worker 2's samples" in text for text in said)
    assert "48 samples in place of 64" in " ".join(said)


def test_stale_rules_say_what_they_cost(slow: Advice) -> None:
    by_name = {row.name: row for row in slow.rows}
    assert by_name["asp"].kind == "stale" and by_name["backup(b=1)"].kind == "biased"
    assert by_name["elastic(mode=local)"].kind == "own models, biased" and by_name["ensemble(steps=10)"].kind == "own models"
    assert by_name["ssp(staleness=3)"].ratio == pytest.approx(1.0, abs=0.1), "it runs at the slow worker's pace"
    assert by_name["asp"].found.least < 0.5 and by_name["asp"].found.least_worker == 2
    assert slow.off == pytest.approx(1.0, abs=0.02) and slow.own.ratio == 1.0
    assert len(slow.rows) == len(considered(4, 1, "bsp"))


def test_other_numbers_of_workers_and_servers(slow: Advice) -> None:
    sizes = {row.name: row.ratio for row in slow.sizes}
    assert sizes["bsp, 3 workers"] > 2.5, "without the slowest"
    assert sizes["bsp, 5 workers"] == pytest.approx(1.25, rel=0.05)
    assert sizes["bsp, 2 servers"] == pytest.approx(1.0, abs=0.02), "folds take no time here"
    said = " ".join(of_sizes(slow, (3, 5), (2,)))
    assert "without the slowest: worker 2" in said and "to be like worker" in said and "how long messages take stays" in said
    assert shared_host(slow.recording) is None, "of a simulation it can be asked"


def test_pages_show_the_measured_row_and_three_more(slow: Advice) -> None:
    rows = page_rows(slow)
    assert [row["measured"] for row in rows] == [True, False, False, False]
    assert rows[1]["best"] and rows[1]["name"] == slow.advised[0].name
    assert any(text.startswith("Repair first") for text in rows[0]["notes"])


def test_where_nothing_gains_the_advice_is_to_stay(tmp_path: Path) -> None:
    found = advice(journal(tmp_path, "constant(seconds=1)"), FAST)
    assert not found.advised and conclusion(found) == [
        text for text in conclusion(found) if text.startswith("Stay with bsp: no rule gains 10 %")
    ]
    assert warnings(found) == [] and page_rows(found)[1]["best"] is False


@pytest.mark.slow
@pytest.mark.usefixtures("few_rules")
def test_in_parallel_the_figures_are_the_same(tmp_path: Path) -> None:
    path = journal(tmp_path, SLOW)
    alone, together = (advice(path, FAST._replace(jobs=jobs)) for jobs in (1, 2))
    assert [(row.name, row.ratio) for row in alone.rows] == [(row.name, row.ratio) for row in together.rows]


@pytest.mark.usefixtures("few_rules")
def test_the_time_to_a_loss_is_a_range_where_versions_have_fewer_samples(tmp_path: Path) -> None:
    path = journal(tmp_path, SLOW)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == "pushed":
            record["loss"] = 10.0 - record["t"] / 100.0
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = advice(path, FAST._replace(target_loss=8.0))
    by_name = {row.name: row for row in found.rows}
    assert found.reached is not None and found.reached.seconds == pytest.approx(200.0, abs=20.0)
    least, most = by_name["backup(b=1)"].seconds or (0.0, 0.0)
    assert least < most == pytest.approx(least * 4 / 3, rel=0.05), "three gradients of four in a version"
    assert by_name["asp"].seconds is None and by_name["ensemble(steps=10)"].seconds is None
    assert advice(path, FAST._replace(target_loss=0.1)).reached is None


@pytest.mark.usefixtures("few_rules")
def test_deaths_other_machines_and_optimizers_are_said(tmp_path: Path) -> None:
    path = journal(tmp_path, "constant(seconds=1)", faults="kill worker=1 at=30; restart worker=1 at=50")
    lines = path.read_text().splitlines()
    job = json.loads(lines[0]) | {"started": "2026-01-01T09:00:00+00:00", "machine": {"host": "far", "cores": 2}}
    more = [{"kind": "optimizer", "t": 0.0, "optimizer": 1, "sync": "asp"}]
    path.write_text("".join(f"{line}\n" for line in (json.dumps(job), *map(json.dumps, more), *lines[1:])))
    found = advice(path, FAST)
    said = " ".join(assumptions(found, here="near"))
    assert "1 death and the returns" in said and "Measured on far (2 cores)" in said and "2 optimizers" in said
    assert "4 workers shared 2 cores of far" in " ".join(warnings(found))
    assert "far" in (shared_host(found.recording) or "")
    assert advice(path, FAST._replace(servers=(2,))).sizes == () and "not simulated: servers and workers" in " ".join(
        of_sizes(found, (), (2,))
    )


@pytest.mark.usefixtures("few_rules")
def test_another_link_is_simulated(tmp_path: Path) -> None:
    """A run whose messages took 1 s for 4 x 1 MB each way: the same link gives its own rate, others what their bits and servers give."""
    path = journal(tmp_path, "constant(seconds=1)", link="32mbit", model_size="1MB")
    found = advice(path, FAST._replace(links=(32e6, 64e6), model_size=1e6, servers=(4,)))
    ratios = {row.name: row.ratio for row in found.sizes if row.what == "link"}
    turns = {"32mbit": 3.0, "64mbit": 2.0, "32mbit, 4 servers": 1.5, "64mbit, 4 servers": 1.25}
    assert {f"bsp, {name}" for name in turns} <= set(ratios)
    for name, turn_s in turns.items():
        assert ratios[f"bsp, {name}"] == pytest.approx(3.0 / turn_s, rel=0.03), name
    (said,) = of_links(found, (32e6,), 1e6)
    assert "of 1 MB share links, each worker and each server on its own" in said


def test_hosts_of_the_run_are_those_of_its_links(tmp_path: Path) -> None:
    path = journal(tmp_path, "constant(seconds=1)")
    head, *lines = path.read_text().splitlines()
    at = [("server", 0, "a"), ("worker", 0, "a"), ("worker", 1, "a"), ("worker", 2, "b"), ("worker", 3, "b")]
    for machines, hosts in ((at, 2), (at[1:], 2), ([("server", 0, "c"), *at[1:]], None), ([], None)):
        more = [
            {"kind": "process", "t": 0.0, "role": role, "number": number, "what": "started", "detail": f"on {host}"}
            for role, number, host in machines
        ]
        path.write_text("".join(f"{line}\n" for line in (head, *map(json.dumps, more), *lines)))
        recording = recorded(path)
        assert (recording.hosts_of(4), recording.apart) == (hosts, bool(machines) and machines[0][2] == "c")
        cluster = recording.cluster(recording.cast(6), link=1e9, model_size=1e6)
        assert cluster.hosts == (3 if hosts else None)


def test_a_rule_whose_messages_share_no_link_has_no_row(tmp_path: Path) -> None:
    found = advice(journal(tmp_path, "constant(seconds=1)", "psp(c=3)"), FAST._replace(links=(1e9,), model_size=1e6))
    assert not any(row.what == "link" and row.name.startswith("psp") for row in found.sizes)
    assert "Links are not simulated for psp(c=3): psp(c=3" in " ".join(of_links(found, (1e9,), 1e6))


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_the_rules_that_are_compared_can_run(workers: int) -> None:
    for servers in (1, 4):
        names = considered(workers, servers, "bsp")
        for spec in names:
            rule(spec).check(workers)
        assert len(set(names)) == len(names) and ("psp" in {name.partition("(")[0] for name in names}) == (servers > 1)
    every = {name.partition("(")[0] for name in considered(8, 4, "no such rule")}
    assert every == set(RULES) - {"auto", "dbw", "full"}
    assert considered(4, 1, "bsp", ("bsp", "backup(b=2)", "ssp(staleness=3)"))[:2] == ("backup(b=2)", "ssp(staleness=3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8..2", "8..2 runs backwards; write 2..8"),
        ("-4", "0 is not between 1 and 1,000"),
        ("many", "cannot read 'many'"),
        ("1..99999", "1001 is not between"),
        ("4,,5", "cannot read ''"),
    ],
)
def test_numbers_that_cannot_be_asked_for(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--workers") as caught:
        counts("--workers", text, 4)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["fast", "0gbit", "-1gbit", "10", "10gbyte", "1e9bit"])
def test_links_that_cannot_be_asked_for(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--link"):
        quantity("--link", text, "bit", "10gbit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sync", "backup(b=9)"], "--sync: backup(b=9) with 4 workers"),
        (["--sync", "baup"], "--sync: there is no synchronization rule 'baup'"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--pushes", "3"], "--pushes 3: must be at least 100"),
        (["--model-size", "4MB"], "give --link 10gbit too"),
        (["--link", "1gbit"], "--link 1gbit: the journal does not say how large a push is; give --model-size 400MB too"),
    ],
)
def test_mistakes_are_found_before_anything_is_simulated(tmp_path: Path, words: list[str], message: str) -> None:
    path = journal(tmp_path, "constant(seconds=1)", versions=3)
    done = CliRunner().invoke(app, ["advise", str(path), *words])
    assert done.exit_code != 0 and message in str(done.exception)


@pytest.mark.usefixtures("few_rules")
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path, out = journal(tmp_path, SLOW), tmp_path / "advice.json"
    done = CliRunner().invoke(
        app, ["advise", str(path), "--jobs", "1", "--seeds", "1", "--pushes", "200", "--workers", "+1", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[1].startswith("bsp, measured") and "bsp, worker 2 repaired" in done.output and "bsp, 5 workers" in done.output
    written = json.loads(out.read_text())
    assert written["advised"][0] == "backup(b=1)" and written["measured"]["samples_per_s"] > 0.0
    assert {"name", "ratio", "ratio_least", "staleness", "dropped", "least"} <= set(written["rules"][0]) and written["said"]


def test_a_journal_without_an_answer_says_why(tmp_path: Path) -> None:
    short = journal(tmp_path, "constant(seconds=1)", versions=3)
    (row,) = rows_of(short)
    assert "too short to advise from" in row["notes"][0] and row["name"] == ""
    done = CliRunner().invoke(app, ["advise", str(short)])
    assert done.exit_code != 0 and "about 21 versions" in str(done.exception)
    broken = tmp_path / "unknown.jsonl"
    broken.write_text(journal(tmp_path, "constant(seconds=1)").read_text().replace('"sync":"bsp"', '"sync":"quantum(q=3)"', 1))
    with pytest.raises(ConfigurationError, match=r"the rule that ran cannot be simulated: .*quantum"):
        advice(broken, FAST)


@pytest.mark.parametrize(("versions", "more"), [(30, "the run has no more"), (100, "--pushes 320 simulates more")])
def test_a_rule_that_makes_no_two_versions_says_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: int, more: str
) -> None:
    """It was the rule's own number of pushes, ``--pushes 8``, where the whole run was simulated."""
    monkeypatch.setattr("offbeat.advise.advice.considered", lambda *_: ("ensemble(steps=40)",))
    ((name, why),) = advice(journal(tmp_path, "constant(seconds=1)", versions=versions), FAST).failed
    assert name == "ensemble(steps=40)" and why.endswith(more)


@pytest.mark.usefixtures("few_rules")
def test_of_a_long_run_parts_are_simulated_with_the_deaths_that_are_in_them(tmp_path: Path) -> None:
    path = journal(tmp_path, "constant(seconds=1)", versions=400, faults="kill worker=1 at=30; restart worker=1 at=200")
    found = advice(path, Question(seeds=3, pushes=400))
    assert found.part < found.recording.seconds / 3 and "s of them at a time" in assumptions(found)[0]
    asp = next(row for row in found.rows if row.name == "asp")
    assert asp.ratio == pytest.approx(1.0, abs=0.02) and asp.most - asp.least < 0.05


@pytest.mark.usefixtures("few_rules")
def test_a_journal_that_is_cut_or_grows_is_said_to(tmp_path: Path) -> None:
    path = journal(tmp_path, "constant(seconds=1)")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert any("has no end" in text for text in assumptions(advice(path, FAST)))
    path.write_text("".join(lines[:-1]) + '{"kind":"pu')
    assert any("cut" in text or "incomplete" in text for text in assumptions(advice(path, FAST)))
