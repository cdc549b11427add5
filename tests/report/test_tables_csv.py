"""The CSV tables of a journal: a row for each push with its fate, and sums that agree with the summary, whatever the rule."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.journal.records import END, Record, push, release, round_of_two, settle
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.journal.file import Records
from offbeat.report.tables_csv import COLUMNS, write
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

FAULTS = "kill worker=2 at=9; restart worker=2 at=30"
RULES = ("bsp", "asp", "backup(b=1)", "psp(c=1)", "majority", "elastic(R=8)", "ensemble(steps=4)", "sgp")


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def simulated(folder: Path, sync: str) -> tuple[Path, Mapping[str, Any]]:
    path = folder / "run.jsonl"
    cluster = Cluster(workers=4, servers=2 if sync.startswith("psp") else 1, compute="lognormal(mean=1, sd=0.3)", faults=FAULTS)
    return path, simulate(
        sync, cluster, Work(versions=400 if sync == "asp" or sync.startswith("elastic") else 60, batch=5), journal=path
    ).summary


@pytest.mark.parametrize("sync", RULES)
def test_the_sums_are_those_of_the_summary(sync: str, tmp_path: Path) -> None:
    path, summary = simulated(tmp_path, sync)
    assert {f"{name}.csv" for name in COLUMNS} == set(write(Records(path), tmp_path / "csv"))
    pushes, folds = (rows(tmp_path / "csv", name) for name in ("pushes", "folds"))
    assert len(pushes) == summary["blocks"]
    fates = Counter(row["fate"] for row in pushes)
    assert {fate: fates[fate] for fate in summary["fates"]} == summary["fates"]
    assert sum(int(row["contributions"]) for row in folds) == summary["fates"]["folded"]
    if not summary["shards"]:
        folded = sum(int(row["samples"]) for row in pushes if row["fate"] == "folded")
        assert folded == summary["samples"]
        assert sum(int(row["samples"]) for row in folds) == folded
    staleness = [int(row["staleness"]) for row in pushes if row["fate"] == "folded"]
    assert max(staleness, default=0) == summary["staleness_max"]
    assert [int(row["pushes"]) for row in rows(tmp_path / "csv", "workers")] == [worker["pushes"] for worker in summary["per_worker"]]
    (death,) = rows(tmp_path / "csv", "deaths")
    assert (death["worker"], float(death["t"]), float(death["back_t"] or 0)) == ("2", 9.0, 0.0 if sync == "sgp" else 30.0)


def test_a_push_without_a_fate_is_there(tmp_path: Path) -> None:
    records = [record for record in round_of_two() if record["kind"] not in ("settle", "fold", "end")]
    write(records, tmp_path)
    assert [(row["worker"], row["fate"], row["settled_t"]) for row in rows(tmp_path, "pushes")] == [("0", "", ""), ("1", "", "")]


def test_a_push_of_an_earlier_process_has_clock_0_and_takes_none_from_the_next(tmp_path: Path) -> None:
    late = [push(2.6, 0, 1, incarnation=0), settle(2.6, 0, 0, "rejected", incarnation=0), push(3.0, 0, 1), settle(3.0, 0, 2, "dropped")]
    write([*round_of_two()[:-1], *late, END], tmp_path)
    assert [(row["fate"], row["clock"]) for row in rows(tmp_path, "pushes")][2:] == [("rejected", "0"), ("dropped", "2")]


def test_names_and_texts_keep_to_their_columns(tmp_path: Path) -> None:
    values = {'a,"b"\nc': 1.0, "<script>": "nan"}
    metrics: Record = {"kind": "metrics", "t": 2.5, "worker": 0, "version": 1, "values": values}
    write([*round_of_two()[:-1], release(2.4, 0, 1, 1), metrics, END], tmp_path)
    assert [(row["name"], row["value"]) for row in rows(tmp_path, "metrics")] == [('a,"b"\nc', "1.0"), ("<script>", "nan")]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--csv"):
        write(round_of_two(), tmp_path / "file")


def test_the_command(tmp_path: Path) -> None:
    path, _ = simulated(tmp_path, "asp")
    done = CliRunner().invoke(app, ["report", str(path), "--csv", str(tmp_path / "csv")])
    assert done.exit_code == 0 and "pushes.csv" in done.output
    done = CliRunner().invoke(app, ["report", str(path), str(path), "--csv", str(tmp_path / "csv")])
    assert isinstance(done.exception, ConfigurationError)


def test_the_page_names_every_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    for name, columns in COLUMNS.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}.csv`")]
        assert [column for column in columns if f"`{column}`" not in line] == []
