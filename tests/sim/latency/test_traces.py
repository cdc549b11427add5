"""Traces: each kind of file as it is read, what is left out, what is refused and where it says the fault is, and the law of them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.events import Pushed
from offbeat.errors import ConfigurationError
from offbeat.journal.file import Journal
from offbeat.journal.records import job_record
from offbeat.sim.latency.registry import Trace, law
from offbeat.traces import read
from offbeat.types import Incarnation, WorkerId

DATA = Path(os.environ.get("OFFBEAT_DATA") or Path(__file__).parents[4] / "shared" / "data") / "traces"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"there is no {DATA}; OFFBEAT_DATA names the folder of data sets")
LONG = ",worker,gpu,time,batch_time_norm\n"


def written(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def saved(folder: Path, **arrays: Any) -> Path:
    with (folder / "trace.npz").open("wb") as file:
        np.savez(file, **arrays)
    return folder / "trace.npz"


def pushed(worker: Any, compute_s: Any) -> str:
    return json.dumps({"kind": "pushed", "t": 1.0, "worker": worker, "compute_s": compute_s}) + "\n"


JOB = '{"kind":"job","t":0.0,"format":1}\n'


# Each kind of file.


@pytest.mark.parametrize(
    "text", ["1,2\n3,4\n", "fast, slow\n1,2\n\n3, 4", "# measured on Monday\r\n1,2 # warm-up\r\n3,4\r\n", "\ufeffa,b\n1,2\n3e0,4"]
)
@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode(), mtime=0)])
def test_one_column_per_worker(tmp_path: Path, text: str, pack: Any) -> None:
    assert read(written(tmp_path, pack(text))).tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_one_measurement_per_row_keeps_whole_instants_only(tmp_path: Path) -> None:
    rows = ["0,0,25,11,30", "1,1,25,11,40", "2,0,25,1,10", "3,1,25,1,20", "4,1,25,21,99", "5,0,25,31,50", "6,1,25,31,60", "7,1,25,31,61"]
    assert read(written(tmp_path, LONG + "\n".join(rows))).tolist() == [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]


def test_a_job_among_arrays_is_the_slowest_stage_of_each_rank(tmp_path: Path) -> None:
    path = saved(tmp_path, A_compute=np.arange(12.0).reshape(2, 3, 2), A_step=np.arange(2), B_compute=np.ones((1, 2)))
    assert read(path, "A").tolist() == [[1, 3, 5], [7, 9, 11]]
    assert read(path, "B").tolist() == [[1, 1]]
    assert read(saved(tmp_path, B_compute=np.ones((1, 2)))).tolist() == [[1, 1]], "one job need not be named"


def operations(**changed: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "optype": np.array([0, 1, 2, 0, 0, 1, 0]),
        "optype_names": np.array(["backward-compute", "forward-compute", "grads-send"]),
        "dp_rank": np.array([0, 0, 0, 0, 1, 1, 0]),
        "stage": np.array([0, 0, 0, 1, 0, 1, 0]),
        "step": np.array([5, 5, 5, 5, 5, 5, 6]),
        "duration": np.array([1.0, 2.0, 100.0, 2.5, 4.0, 5.0, 6.0]),
    }
    return columns | changed


def test_operations_are_summed_and_steps_without_a_rank_left_out(tmp_path: Path) -> None:
    assert read(saved(tmp_path, **operations())).tolist() == [[3.0, 5.0]]


def test_a_journal_gives_what_pushes_took(tmp_path: Path) -> None:
    """Worker 1 never pushed, and worker 2 less often than worker 0. The cut last line is a killed job's."""
    lines = [JOB, pushed(2, 0.5), pushed(0, 0.1), '{"kind":"joined","t":1.0,"worker":1}\n', pushed(0, 0.2), pushed(2, 0.6), pushed(0, 0.3)]
    path = written(tmp_path, "".join(lines) + '{"kind":"pus', name="no-particular-name")
    assert read(path).tolist() == [[0.1, 0.5], [0.2, 0.6], [0.3, 0.5]]


def test_a_journal_as_a_job_writes_it(tmp_path: Path) -> None:
    """Worker 0 pushes local steps; worker 1's push arrives at two shards."""
    path = tmp_path / "run.jsonl"
    journal = Journal(path, now=lambda: 0.0)
    journal.write(job_record(sync="bsp", workers=2, servers=2, seed=0, started="", script=""))
    push = Pushed(worker=WorkerId(0), incarnation=Incarnation(1), version=0, samples=1, compute_s=0.5)
    journal.log(push._replace(steps=4, compute_s=3.0), 0.1)
    journal.log(push, 0.2)
    for shard in (1, 0):
        journal.log(push._replace(worker=WorkerId(1), compute_s=0.25, shard=shard), 0.3)
    journal.close()
    assert read(path).tolist() == [[0.75, 0.25], [0.5, 0.25]]


# What is refused, and where it says the fault is.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: not a trace: the file has no rows"),
        ("# nothing\n\n", "line 1: not a trace: the file has no rows"),
        ("a,b\n", "a line of names and no row"),
        ("1,2\n3\n", "line 2: 1 columns where the rows above have 2"),
        ("a,b\n1,2\n\n3,-4\n", "line 4, column 2: '-4' is not a finite number of at least 0"),
        ("1,2\n3,nan\n", "line 2, column 2: 'nan'"),
        ("1,x\n3,4\n", "line 1, column 2: 'x'"),
        ("1,\n", "line 1, column 2: ''"),
        (b"1,2\n\xff,3\n", "line 2: not a trace: neither text, nor a journal, nor an npz file"),
        (gzip.compress(b"1,2\n\xff,3\n", mtime=0), "line 2: not a trace"),
        (gzip.compress(b"1,2\n" * 999, mtime=0)[:-9], "the gzip file is damaged or cut"),
        (gzip.compress(JOB.encode(), mtime=0), "the journal has no pushes"),
        (LONG, "of 0 instants none has a row for each of the 0 workers"),
        (LONG + "0,0,25,1,10\n1,1,25,2,10\n", "of 2 instants none has a row for each of the 2 workers"),
        (LONG + "0,0,25,1\n", "line 2: 4 columns where line 1 names 5"),
        (LONG + "0,0,25,1,?\n", r"line 2, column 5: '\?'"),
        ('{"some": "JSON"}\n', "line 1: not a journal"),
        (JOB, "the journal has no pushes"),
        (JOB + pushed(0, "nan"), "line 2: pushed by worker 0 with compute_s 'nan'"),
        (JOB + pushed(None, 0.1), "line 2: pushed by worker None"),
        (JOB + pushed(0, -0.1), "line 2: pushed by worker 0 with compute_s -0.1"),
        (b"PK\x03\x04 but no more", "not an npz file of plain arrays, or a damaged one"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        read(written(tmp_path, content))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "job", "message"),
    [
        ({"x": np.ones(3)}, "", "it has the arrays x; expected JOB_compute"),
        ({"A_compute": np.ones((1, 2)), "B_compute": np.ones((1, 2))}, "", "the file has the jobs A, B; choose one"),
        ({"A_compute": np.ones((1, 2))}, "C", "job='C'.*the file has the jobs A; choose one"),
        ({"A_compute": np.ones(3)}, "", r"array A_compute: float64 of shape \(3,\); expected numbers, steps x ranks"),
        ({"A_compute": np.array([["x", "y"]])}, "", "array A_compute: <U1 of shape"),
        ({"A_compute": np.array([[1.0, 2.0], [3.0, np.inf]])}, "", "array A_compute, step 1, rank 1: inf is not"),
        ({"A_compute": np.array([[object()]])}, "", "not an npz file of plain arrays"),
        (operations(duration=np.ones(3)), "", "must hold numbers and be of equal length"),
        (operations(step=np.array(list("abcdefg"))), "", "must hold numbers and be of equal length"),
        (operations(duration=np.array([1.0, 2.0, 100.0, np.nan, 4.0, 5.0, 6.0])), "", "array duration, row 3: nan is not"),
        (operations(optype_names=np.array(["a", "b", "c"])), "", "array optype: no operation is one of forward-compute"),
        (operations(step=np.arange(7)), "", "array duration: no step has times of every rank"),
    ],
)
def test_arrays_that_are_no_trace(tmp_path: Path, arrays: dict[str, Any], job: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(saved(tmp_path, **arrays), job)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the trace .*none\.csv: No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(ConfigurationError, match="cannot read the trace"):
        read(tmp_path)
    with pytest.raises(ConfigurationError, match="only npz files have several jobs; leave job out"):
        read(written(tmp_path, "1,2\n"), "A")


# The law.


def test_the_law_goes_through_the_rows_and_begins_again(tmp_path: Path) -> None:
    path = written(tmp_path, "1,2,3\n4,5,6\n")
    sampler = law(f"trace(path={str(path)!r}, scale=0.5)").start(seed=9, workers=2)
    assert [sampler.draw(1, clock, 0.0) for clock in range(5)] == [1.0, 2.5, 1.0, 2.5, 1.0]
    moved = law(f"trace(path={str(path)!r}, offset=3)").start(seed=9, workers=2)
    assert [moved.draw(0, clock, 0.0) for clock in range(3)] == [4.0, 1.0, 4.0]


def test_a_trace_with_too_few_workers_is_refused(tmp_path: Path) -> None:
    one = Trace(path=str(written(tmp_path, "1,2,3\n4,5,6\n")))
    one.check(3)
    for refused in (one.check, lambda n: one.start(0, n)):
        with pytest.raises(ConfigurationError, match=r"the trace has 3 workers \(2 steps\), fewer than the 4 of the job"):
            refused(4)


# The real ones. The medians of slowest over mean are those of the data's own description.


@needs_data
@pytest.mark.parametrize(("job", "steps", "ratio"), [(1, 300, 1.09), (2, 238, 1.12), (3, 248, 1.10), (4, 2182, 1.86)])
def test_the_traces_of_alibaba(job: int, steps: int, ratio: float) -> None:
    times = read(DATA / "alibaba-pai-minibatch" / f"job_{job}_norm.csv.gz")
    assert times.shape == (steps, 10)
    assert np.median(times.max(axis=1) / times.mean(axis=1)) == pytest.approx(ratio, abs=0.005)


@needs_data
@pytest.mark.parametrize(("job", "shape", "ratio"), [("AR", (44, 4), 1.72), ("SE", (43, 32), 1.24), ("ST", (32, 2), 1.00)])
def test_the_traces_of_bytedance(job: str, shape: tuple[int, int], ratio: float) -> None:
    folder = DATA / "bytedance-seed-stragglers"
    times = read(folder / "step-compute.npz", job)
    assert times.shape == shape
    assert np.median(times.max(axis=1) / times.mean(axis=1)) == pytest.approx(ratio, abs=0.005)
    assert read(folder / f"trace-{job}.npz") == pytest.approx(times, rel=1e-5)


@needs_data
def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="line 1, column 1: '' is not a finite number"):
        read(DATA / "alibaba-pai-minibatch" / "coefficient_variation.csv.gz")
