"""``offbeat simulate``: what it prints and writes, and mistakes told in one sentence, with status 2, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app, main
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

RUNNER = CliRunner()
RANDOM = "shifted_exponential(shift=0.3, scale=0.7)"


def said(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_one_rule_shows_its_workers(tmp_path: Path) -> None:
    journal, summary = tmp_path / "run.jsonl", tmp_path / "run.json"
    output = said(
        "--sync", "ssp(staleness=2)", "--workers", "3", "--compute", RANDOM, "--versions", "60", "--seed", "4",
        "--faults", "slow worker=1 at=0 for=1000 factor=5", "--journal", str(journal), "--summary", str(summary),
    )  # fmt: skip
    assert "version 60 is reached" in output and "Worker 1 is slow" in output
    figures = json.loads(summary.read_text())
    assert (figures["version"], figures["started"], figures["seed"], figures["ok"]) == (60, "simulated", 4, True)
    assert figures["simulated_s"] == pytest.approx(figures["elapsed_s"], abs=1e-6) and figures["versions_per_s"] > 0
    tally = Tally.of(read(journal))
    assert tally.problems() == [] and tally.summary()["fates"] == figures["fates"]
    report = RUNNER.invoke(app, ["report", str(journal)], catch_exceptions=False)
    assert report.exit_code == 0 and "ssp(staleness=2)" in report.output


def test_several_rules_stand_side_by_side(tmp_path: Path) -> None:
    summary = tmp_path / "all.json"
    rules = ["bsp", "asp", "psp(c=6)"]
    output = said(*(word for name in rules for word in ("--sync", name)), "--workers", "8", "--time", "40", "--summary", str(summary))
    assert all(name in output for name in rules) and all(word in output for word in ("versions/s", "samples/s", "staleness", "dropped"))
    figures = json.loads(summary.read_text())
    assert [one["sync"].split("(")[0] for one in figures] == ["bsp", "asp", "psp"]


def test_several_seeds_have_a_range(tmp_path: Path) -> None:
    summary = tmp_path / "all.json"
    words = ("--sync", "bsp", "--sync", "asp", "--compute", RANDOM, "--versions", "50", "--seed", "3", "--seeds", "2")
    output = said(*words, "--summary", str(summary))
    figures = json.loads(summary.read_text())
    assert [(one["sync"], one["seed"]) for one in figures] == [("bsp", 3), ("bsp", 4), ("asp", 3), ("asp", 4)]
    rates = sorted(one["versions_per_s"] for one in figures[:2])
    assert f"{rates[0]:.3g} to {rates[1]:.3g} over 2 seeds" in output and "asp, seed 4: " in output


def test_a_thousand_workers_are_no_table_of_a_thousand_rows() -> None:
    assert len(said("--workers", "1000", "--versions", "3").splitlines()) < 12


def test_it_is_the_same_as_in_python(tmp_path: Path) -> None:
    file = tmp_path / "cli.jsonl"
    said(
        "--sync", "elastic(R=3)", "--workers", "5", "--servers", "2", "--compute", RANDOM, "--delay", "uniform(low=0, high=0.2)",
        "--push-delay", "constant(seconds=0.1)", "--update-s", "0.01", "--per-sample", "constant(seconds=0.01)", "--samples", "100",
        "--batch", "5", "--epochs", "2", "--faults", "kill worker=1 at=2", "--seed", "9", "--journal", str(file),
    )  # fmt: skip
    over = Cluster(
        workers=5,
        servers=2,
        compute=RANDOM,
        delay="uniform(low=0, high=0.2)",
        push_delay="constant(seconds=0.1)",
        update_s=0.01,
        per_sample="constant(seconds=0.01)",
        faults="kill worker=1 at=2",
        seed=9,
    )
    simulate("elastic(R=3)", over, Work(samples=100, batch=5, epochs=2), journal=tmp_path / "python.jsonl")
    assert file.read_bytes() == (tmp_path / "python.jsonl").read_bytes()


def test_norms_by_a_law() -> None:
    assert "version 20 is reached" in said("--gradient", "noise(variance=4, decay=0.99)", "--versions", "20")


MISTAKES: list[tuple[list[str], str]] = [
    (["--sync", "sssp(staleness=3)"], "--sync: there is no synchronization rule 'sssp' (did you mean 'ssp'?); the known ones are "),
    (["--sync", "ssp(staleness="], "--sync: 'ssp(staleness=': cannot read it at character"),
    (["--sync", "backup(b=4)"], "backup(b=4) with 4 workers leaves no gradient to wait for: b must be at most 3"),
    (["--sync", "bsp", "--sync", "bsp"], "--sync bsp is given twice"),
    (
        ["--compute", "unifrm(low=1, high=2)"],
        "--compute: there is no latency model 'unifrm' (did you mean 'uniform'?); the known ones are ",
    ),
    (["--delay", "constant(second=1)"], "--delay: 'constant(second=1)': constant has no setting 'second' (did you mean 'seconds'?)"),
    (["--push-delay", "constant(seconds=-1)"], "--push-delay: constant(seconds=-1): seconds must be a finite number of at least 0"),
    (["--faults", "kill worker=1 at=5; kil worker=2 at=6"], "--faults: faults, line 1, character 21: there is no fault 'kil'"),
    (["--faults", "kill worker=7 at=5"], "there is no worker 7; the job's workers are numbered 0 to 3"),
    (["--gradient", "nois(variance=1)"], "--gradient: there is no gradient model 'nois' (did you mean 'noise'?)"),
    (["--workers", "0"], "--workers 0: must be at least 1"),
    (["--servers", "0"], "--servers 0: must be at least 1"),
    (["--batch", "0"], "--batch 0: a batch has at least 1 sample, not 0"),
    (["--batch", "auto"], "--batch auto: sizes change with the samples that the job deals out; give --samples too"),
    (["--batch", "9=8"], "--batch 9=8: there is no worker 9"),
    (["--versions", "0"], "versions must be a whole number, at least 1"),
    (["--time", "0"], "a finite number of seconds greater than 0"),
    (["--epochs", "3"], "an epoch needs the size of the data set; give samples too"),
    (["--samples", "3"], "3 samples for 4 workers: each needs at least one"),
    (["--update-s", "-1"], "a finite number of seconds of at least 0"),
    (["--timeout", "0"], "a finite number of seconds of at least 0.1"),
    (["--journal", "no_such_folder/j.jsonl"], "--journal no_such_folder/j.jsonl: there is no folder"),
    (["--summary", "."], "--summary .: this is a folder; name a file in it"),
    (["--journal", "one", "--summary", "one"], "--journal and --summary are the same file, one"),
    (["--journal", "j", "--sync", "bsp", "--sync", "asp"], "--journal j: a journal holds one run, but 2 rules are given"),
    (["--journal", "j", "--seeds", "2"], "--journal j: a journal holds one run, but --seeds asks for 2; leave it out"),
    (["--seeds", "0"], "--seeds 0: must be at least 1"),
    (["--jobs", "0"], "--jobs 0: must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["offbeat", "simulate", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.startswith("offbeat: ") and message in captured.err and captured.err.count("\n") == 1
    assert not captured.out and not list(tmp_path.iterdir())


def test_a_trace_with_too_few_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "times.csv"
    trace.write_text("a,b\n1.0,2.0\n1.5,2.5\n")
    monkeypatch.setattr("sys.argv", ["offbeat", "simulate", "--compute", f"trace(path='{trace}')", "--workers", "3"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and "the trace has 2 workers (2 steps), fewer than the 3 of the job" in capsys.readouterr().err


def test_a_run_that_comes_to_nothing_has_status_1() -> None:
    result = RUNNER.invoke(app, ["simulate", "--workers", "1", "--faults", "kill worker=0 at=2.5"], catch_exceptions=False)
    assert result.exit_code == 1 and "no worker is left" in result.output
