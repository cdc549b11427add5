"""Read files of measured times into an array of seconds (steps x workers). A file's contents, not its name, decide its format.

- CSV, gzipped or not, one column per worker and one row per step, with or without a line of names; ``#`` begins a comment.
- CSV with the columns ``worker``, ``time`` and ``batch_time_norm``, one measurement per row: the mini-batch times of Alibaba PAI.
- npz with arrays ``JOB_compute`` (steps x data-parallel ranks x pipeline stages), or with one array per column of a trace of operations:
  the straggler traces of ByteDance Seed. A worker is a data-parallel rank, its time that of its slowest stage.
- A journal of offbeat, compressed or not: the compute times in each worker's pushes.

No value is interpolated: a step at which a worker was not measured is left out. `sim.latency.traces` makes a law of the array, and
``offbeat run --slow trace=FILE`` replays it.
"""

from __future__ import annotations

import csv
import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.core.phases import COMPUTING, NOT_SEPARATED, Phase
from offbeat.errors import ConfigurationError
from offbeat.journal import file
from offbeat.journal.compression import beginning

Times: TypeAlias = NDArray[np.float64]
"""Seconds, steps x workers."""
Shares: TypeAlias = Sequence[tuple[str, float]]
"""The phases of one step, each with its share of the step's time."""
Row: TypeAlias = tuple[int, list[str]]
"""The number of a line, from 1, and its cells."""

GZIP: Final = b"\x1f\x8b"
ZIP: Final = b"PK\x03\x04"
LONG: Final = ("worker", "time", "batch_time_norm")
OPERATIONS: Final = ("optype", "optype_names", "dp_rank", "stage", "step", "duration")
COMPUTED: Final = frozenset({Phase.DATA.label, *(phase.label for phase in COMPUTING)})
COMPUTE: Final = ("forward-compute", "backward-compute")


class Measured(NamedTuple):
    """What a trace says."""

    times: Times
    shares: Sequence[Sequence[Shares]] = ()
    """By column and row, from a journal whose workers have measured their phases; empty: the trace has no phases."""


def read(path: Path | str, job: str = "") -> Times:
    """Return the times of a file, see `measured`."""
    return measured(path, job).times


def measured(path: Path | str, job: str = "") -> Measured:
    """Read the times of a file.

    Args:
        path: a CSV file, an npz file or a journal.
        job: the name of the job in an npz file that has several.

    Returns:
        The file's times (some traces are normalised), all finite and at least 0.

    Raises:
        ConfigurationError: the file cannot be read; the message names the line or array and what was expected.
    """
    try:
        first = beginning(Path(path))
        content = b"" if first.startswith(b"{") else Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read the trace {path}: {error.strerror}") from error
    if not content and first:
        if job:
            raise _no_job(path, job)
        return _read_journal(Path(path))
    return Measured(_read_table(Path(path), content, job))


def _read_table(path: Path, content: bytes, job: str) -> Times:
    if content.startswith(ZIP):
        return _read_npz(path, job)
    if job:
        raise _no_job(path, job)
    rows = list(_rows(path, content))
    if not rows:
        raise ConfigurationError(f"{path}, line 1: not a trace: the file has no rows; write one column per worker, seconds in each row")
    if set(LONG) <= {cell.strip() for cell in rows[0][1]}:
        return _read_long(path, rows)
    return _read_columns(path, rows)


def _no_job(path: Path | str, job: str) -> ConfigurationError:
    return ConfigurationError(f"trace(path={str(path)!r}, job={job!r}): only npz files have several jobs; leave job out")


def _rows(path: Path, content: bytes) -> Iterator[Row]:
    try:
        raw = gzip.decompress(content) if content.startswith(GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path}: the gzip file is damaged or cut ({error}); fetch it again") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = raw[: error.start].count(b"\n") + 1
        raise ConfigurationError(f"{path}, line {at}: not a trace: neither text, nor a journal, nor an npz file") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if bare := line.partition("#")[0].strip():
            yield number, next(csv.reader([bare]))


def _read_columns(path: Path | str, rows: list[Row]) -> Times:
    """Read a table with one column per worker."""
    if not any(_is_number(cell) for cell in rows[0][1]):
        rows = rows[1:]  # names
    if not rows:
        raise ConfigurationError(f"{path}: not a trace: there is a line of names and no row of seconds below it")
    width = len(rows[0][1])
    for number, cells in rows:
        if len(cells) != width:
            raise ConfigurationError(f"{path}, line {number}: {len(cells)} columns where the rows above have {width}, one per worker")
    return np.array([[_seconds(path, number, j + 1, cell) for j, cell in enumerate(cells)] for number, cells in rows], dtype=np.float64)


def _read_long(path: Path | str, rows: list[Row]) -> Times:
    """Read a table with one measurement per row. Times at which a worker is missing are left out; of two measurements the first counts."""
    names = [cell.strip() for cell in rows[0][1]]
    worker_at, time_at, seconds_at = (names.index(name) for name in LONG)
    instants: dict[float, dict[float, float]] = {}
    for number, cells in rows[1:]:
        if len(cells) != len(names):
            raise ConfigurationError(f"{path}, line {number}: {len(cells)} columns where line {rows[0][0]} names {len(names)}")
        instant = instants.setdefault(_seconds(path, number, time_at + 1, cells[time_at]), {})
        worker = _seconds(path, number, worker_at + 1, cells[worker_at])
        instant.setdefault(worker, _seconds(path, number, seconds_at + 1, cells[seconds_at]))
    workers = sorted({worker for instant in instants.values() for worker in instant})
    whole = [instants[time] for time in sorted(instants) if len(instants[time]) == len(workers)]
    if not whole:
        raise ConfigurationError(f"{path}: not a trace: of {len(instants)} instants none has a row for each of the {len(workers)} workers")
    return np.array([[instant[worker] for worker in workers] for instant in whole], dtype=np.float64)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _seconds(path: Path | str, line: int, column: int, cell: str) -> float:
    value = float(cell) if _is_number(cell) else math.nan
    if not 0.0 <= value < math.inf:
        raise ConfigurationError(f"{path}, line {line}, column {column}: {cell.strip()!r} is not a finite number of at least 0")
    return value


def _read_npz(path: Path, job: str) -> Times:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: array for name in file.files if isinstance(array := file[name], np.ndarray)}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigurationError(f"{path}: not an npz file of plain arrays, or a damaged one ({error})") from error
    if set(OPERATIONS) <= set(arrays):
        return _checked(path, "duration", _of_operations(path, arrays))
    jobs = {name.removesuffix("_compute"): name for name in arrays if name.endswith("_compute")}
    if not jobs:
        raise ConfigurationError(
            f"{path}: not a trace: it has the arrays {', '.join(sorted(arrays)) or '(none)'}; expected JOB_compute "
            f"(steps x ranks x stages), or the columns {', '.join(OPERATIONS)}"
        )
    if job not in jobs and (job or len(jobs) > 1):
        raise ConfigurationError(f"trace(path={str(path)!r}, job={job!r}): the file has the jobs {', '.join(sorted(jobs))}; choose one")
    name = jobs[job or next(iter(jobs))]
    times = arrays[name]
    if times.ndim not in (2, 3) or times.size == 0 or times.dtype.kind not in "fiu":
        raise ConfigurationError(
            f"{path}, array {name}: {times.dtype} of shape {times.shape}; expected numbers, steps x ranks or steps x ranks x stages"
        )
    return _checked(path, name, times.max(axis=2) if times.ndim == 3 else times)


def _of_operations(path: Path, arrays: dict[str, NDArray[np.generic]]) -> Times:
    """Return the forward plus backward compute time of each rank's slowest stage. Steps at which a rank is missing are left out."""
    columns = {name: arrays[name] for name in OPERATIONS if name != "optype_names"}
    if len({array.shape for array in columns.values()}) != 1 or any(a.ndim != 1 or a.dtype.kind not in "fiu" for a in columns.values()):
        kinds = ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in columns.items())
        raise ConfigurationError(f"{path}: the columns {kinds} must hold numbers and be of equal length")
    chosen = np.isin(columns["optype"], [i for i, name in enumerate(arrays["optype_names"].tolist()) if name in COMPUTE])
    if not chosen.any():
        raise ConfigurationError(f"{path}, array optype: no operation is one of {', '.join(COMPUTE)}")
    durations = columns["duration"].astype(np.float64)
    if len(bad := np.flatnonzero(chosen & ~(np.isfinite(durations) & (durations >= 0.0)))):
        raise ConfigurationError(f"{path}, array duration, row {bad[0]}: {durations[bad[0]]} is not a finite number of at least 0")
    indexed = [np.unique(columns[name][chosen], return_inverse=True) for name in ("step", "dp_rank", "stage")]
    sums = np.zeros([len(values) for values, _ in indexed])
    np.add.at(sums, tuple(index for _, index in indexed), durations[chosen])
    slowest: Times = sums.max(axis=2)
    return slowest[(slowest > 0.0).all(axis=1)]


def _checked(path: Path, name: str, times: NDArray[np.generic]) -> Times:
    seconds = times.astype(np.float64)
    bad = np.argwhere(~(np.isfinite(seconds) & (seconds >= 0.0)))
    if len(bad):
        step, worker = (int(i) for i in bad[0])
        raise ConfigurationError(
            f"{path}, array {name}, step {step}, rank {worker}: {seconds[step, worker]} is not a finite number of at least 0"
        )
    if not len(seconds):
        raise ConfigurationError(f"{path}, array {name}: no step has times of every rank")
    return seconds


def _read_journal(path: Path) -> Measured:
    """Return a column for each worker that pushed, by number. The times of a worker that pushed less often than others are repeated.

    A push of several local steps gives their mean time; of a push to several shards the first shard's record counts.
    """
    columns: dict[int, list[float]] = {}
    shares: dict[int, list[Shares]] = {}
    for number, entry in enumerate(file.read(path), start=1):
        if entry["kind"] != "pushed" or (entry.get("shard") and not entry.get("alone")) or entry.get("optimizer"):
            continue
        worker, seconds, steps = entry.get("worker"), entry.get("compute_s"), entry.get("steps", 1)
        if not isinstance(worker, int) or not isinstance(seconds, int | float) or not 0.0 <= seconds < math.inf:
            raise ConfigurationError(
                f"{path}, line {number}: pushed by worker {worker!r} with compute_s {seconds!r}, not a number of at least 0"
            )
        columns.setdefault(worker, []).append(float(seconds) / max(1, steps if isinstance(steps, int) else 1))
        shares.setdefault(worker, []).append(_shares(entry.get("phases") or {}))
    if not columns:
        raise ConfigurationError(f"{path}: the journal has no pushes, so no worker's times are known; use one of a longer run")
    longest = max(map(len, columns.values()))
    times = np.array([np.resize(columns[worker], longest) for worker in sorted(columns)], dtype=np.float64).T
    known = any(of_step is not NOT_SEPARATED for of_worker in shares.values() for of_step in of_worker)
    return Measured(times, tuple(shares[worker] for worker in sorted(shares)) if known else ())


def _shares(phases: Mapping[str, Any]) -> Shares:
    """Return the share of each phase in what a worker has computed; what it has waited for or exchanged is simulated anew."""
    computed = {name: float(value) for name, value in phases.items() if name in COMPUTED and isinstance(value, int | float) and value > 0}
    total = sum(computed.values())
    return tuple((name, value / total) for name, value in computed.items()) if 0.0 < total < math.inf else NOT_SEPARATED
