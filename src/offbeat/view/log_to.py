"""``--log-to``: write a job's curves to TensorBoard, Weights & Biases or MLflow, through their own clients. A follower, see `view.follow`.

Each is one class with `begin`, `write`, `flush` and `close`. The package is imported by the follower alone: without it, one sentence says
what to install, and training goes on.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import Record
from offbeat.view.curves import LABELLED, LABELLED_MAX, Curves, Point
from offbeat.view.follow import Sink, follow

KEY_MAX: Final = 250
"""Most characters of a metric's name that MLflow takes."""
CONFIG: Final = ("sync", "workers", "servers", "seed", "started", "script")
"""What a snapshot says of the job, for a run's configuration."""


class Writer:
    """Writes points to one tool. A subclass overrides all but `flush`, which does nothing."""

    def begin(self, job: Mapping[str, Any]) -> None:
        """Begin, or go on where an earlier process of this job has died; ``job``: the `CONFIG`."""

    def write(self, points: Sequence[Point]) -> None:
        """Write these points."""

    def flush(self) -> None:
        """Write what the tool's client has kept back."""

    def close(self, ok: bool) -> None:
        """End the run; ``ok``: the job has succeeded."""


class TensorBoard(Writer):
    """Writes event files: the job's curves in a folder, and each worker's in a subfolder, so that one chart shows them together.

    Args:
        folder: the log directory.
        job: unused; each process adds a file.
    """

    def __init__(self, folder: str, job: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._open = Event, Summary, EventFileWriter
        self._folder = Path(folder)
        self._files: dict[int | None, Any] = {}

    def begin(self, job: Mapping[str, Any]) -> None:
        self._of(None)

    def _of(self, worker: int | None) -> Any:
        if worker not in self._files:
            folder = self._folder if worker is None else self._folder / f"worker-{worker}"
            self._files[worker] = self._open(str(folder), filename_suffix=".offbeat")
        return self._files[worker]

    def write(self, points: Sequence[Point]) -> None:
        for (worker, version, at), group in groupby(points, key=lambda point: (point.worker, point.version, point.at)):
            summary = self._summary(value=[self._summary.Value(tag=point.name, simple_value=point.value) for point in group])
            self._of(worker).add_event(self._event(wall_time=at, step=version, summary=summary))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, ok: bool) -> None:
        for file in self._files.values():
            file.close()


class WeightsAndBiases(Writer):
    """Writes a run, whose x axis is ``version``; a worker's curves are ``NAME worker N``. ``WANDB_MODE`` and the like are the user's.

    wandb has no call to flush: if this process is killed, the last 32 KiB of rows are lost, which wandb keeps back.

    Args:
        project: of the run; "": the user's ``WANDB_PROJECT``, else offbeat.
        job: the run's id, so that a second process goes on with the run of the first.
    """

    def __init__(self, project: str, job: str) -> None:
        import wandb

        self._wandb, self._project, self._job = wandb, project, job
        self._run: Any = None

    def begin(self, job: Mapping[str, Any]) -> None:
        silent = self._wandb.Settings(silent=True, console="off")
        project = self._project or os.environ.get("WANDB_PROJECT") or "offbeat"
        try:
            self._run = self._wandb.init(project=project, id=self._job, resume="allow", config=dict(job), settings=silent)
        except self._wandb.Error as error:
            raise ConfigurationError(f"Weights & Biases: {_first_line(error)}") from error
        self._run.define_metric("*", step_metric="version")

    def write(self, points: Sequence[Point]) -> None:
        for (version, at), group in groupby(points, key=lambda point: (point.version, point.at)):
            self._run.log({"version": version, "_timestamp": at, **{_full(point): point.value for point in group}})

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class MlFlow(Writer):
    """Writes a run; a worker's curves are ``NAME worker N``. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are the user's.

    Nothing needs to be flushed: a batch that was logged is with the tracking server, or in its files.

    Args:
        uri: of the tracking server or file store; "": the user's.
        job: a tag of the run, so that a second process goes on with the run of the first.
    """

    BATCH = 1000
    """Most points of one request."""

    def __init__(self, uri: str, job: str) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._mlflow, self._metric, self._job = mlflow, Metric, job
        self._uri = uri or None
        self._client: Any = None
        self._keys: dict[str, str] = {}
        self._folders: set[str] = set()
        self._run = ""

    def begin(self, job: Mapping[str, Any]) -> None:
        try:
            client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "offbeat"
            known = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if known is None else known.experiment_id
            before = client.search_runs([experiment], f"tags.`offbeat.job` = '{self._job}'", max_results=1)
            if before:
                self._run = before[0].info.run_id
                return
            run = client.create_run(experiment, tags={"offbeat.job": self._job, "mlflow.source.name": str(job.get("script", ""))})
            self._run = run.info.run_id
            for key, value in job.items():
                client.log_param(self._run, key, value)
        except self._mlflow.exceptions.MlflowException as error:
            raise ConfigurationError(f"MLflow: {_first_line(error)}") from error

    def write(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(self._key(_full(point)), point.value, round(1000 * point.at), point.version) for point in points]
        for start in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + self.BATCH])

    def _key(self, name: str) -> str:
        """Return a metric's key. In a store of files, ``a`` cannot be a metric beside ``a/b``: the second one of them gets no folder."""
        if name not in self._keys:
            key = mlflow_key(name)
            folders = {key[:at] for at, c in enumerate(key) if c == "/"}
            if key in self._folders or folders & set(self._keys.values()):
                key = mlflow_key(name.replace("/", "_x2f_")) + "_" * (key in self._folders)
            else:
                self._folders |= folders
            self._keys[name] = key
        return self._keys[name]

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._run, status="FINISHED" if ok else "FAILED")


TARGETS: Final[dict[str, tuple[Callable[[str, str], Writer], str]]] = {
    "tensorboard": (TensorBoard, "DIR"),
    "wandb": (WeightsAndBiases, "a project"),
    "mlflow": (MlFlow, "a URI"),
}
"""What follows ``--log-to``, which is also the package's and the extra's name; the class that uses it, and its argument in words."""


def parsed(text: str) -> tuple[str, str]:
    """Return the tool and its argument.

    Raises:
        ConfigurationError: there is no such tool, or its argument is missing.

    >>> parsed("tensorboard:runs/a"), parsed("wandb"), parsed("mlflow:http://localhost:5000")
    (('tensorboard', 'runs/a'), ('wandb', ''), ('mlflow', 'http://localhost:5000'))
    """
    tool, colon, argument = text.partition(":")
    if tool not in TARGETS:
        raise ConfigurationError(f"--log-to {text}: must be tensorboard:DIR, wandb, wandb:PROJECT, mlflow or mlflow:URI")
    if (colon or tool == "tensorboard") and not argument:
        raise ConfigurationError(f"--log-to {text}: after {tool}: comes {TARGETS[tool][1]}, for instance --log-to tensorboard:runs")
    return tool, argument


def command_of(text: str) -> tuple[str, ...]:
    """Return the command of the follower for a value of ``--log-to``, with a fresh name for the job's run. Raises as `parsed` does."""
    return ("-m", "offbeat.view.log_to", *parsed(text), secrets.token_hex(8))


class LogTo(Sink):
    """The sink: makes points, and has them written. A curve lacks the points of records that are missing; the job's summary says so.

    Args:
        writer: of one tool.
        note: shows the user a sentence.
    """

    def __init__(self, writer: Writer, note: Callable[[str], None]) -> None:
        self._writer, self._note = writer, note
        self._curves = Curves()
        self._begun = False
        self._ok = False

    def record(self, record: Record) -> None:
        if record["kind"] == "job":
            self._begin(record)
        self._write(self._curves.record(record))

    def status(self, snapshot: Mapping[str, Any]) -> None:
        self._ok = bool(snapshot.get("ok"))
        self._begin(snapshot)
        self._write(self._curves.status(snapshot))

    def flush(self) -> None:
        if self._begun:
            self._writer.flush()

    def close(self) -> None:
        self._write(self._curves.rest())
        if self._begun:
            self._writer.flush()
            self._writer.close(self._ok)

    def _begin(self, job: Mapping[str, Any]) -> None:
        if self._begun or job.get("sync") is None:  # before the first worker has come, a snapshot knows nothing
            return
        self._begun = True
        self._writer.begin({key: job.get(key) for key in CONFIG})
        if (job.get("workers") or 0) > LABELLED_MAX:
            self._note(f"with more than {LABELLED_MAX} workers, the first {LABELLED} have curves of their own")

    def _write(self, points: Iterable[Point]) -> None:
        if (found := sorted(points, key=lambda point: (point.worker is None, point.worker, point.version))) and self._begun:
            self._writer.write(found)


def mlflow_key(name: str) -> str:
    """Return a name as MLflow takes it: letters, digits and ``_-. /``; another character becomes ``_x`` and its number. Long ones are cut.

    >>> mlflow_key("train/loss"), mlflow_key("<b>"), mlflow_key("../up")
    ('train/loss', '_x3c_b_x3e_', '_x2e__x2e_/up')
    """
    key = "".join(c if (c.isascii() and c.isalnum()) or c in "_-. /" else f"_x{ord(c):x}_" for c in name)
    key = "/".join(_x_dots(part) for part in key.split("/"))
    if len(key) <= KEY_MAX:
        return key
    return f"{key[: KEY_MAX - 9]}_{hashlib.sha256(name.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"


def _x_dots(part: str) -> str:
    """Return a part of a path as one that is a file's name: not empty, not a folder above."""
    return "_x_" if not part else "_x2e_" * len(part) if set(part) == {"."} else part


def _full(point: Point) -> str:
    return point.name if point.worker is None else f"{point.name} worker {point.worker}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main(tool: str, argument: str, job: str) -> int:
    """Follow a job. Returns the exit status."""

    def make(note: Callable[[str], None]) -> LogTo:
        try:
            return LogTo(TARGETS[tool][0](argument, job), note)
        except ImportError as error:
            if error.name is not None and error.name.partition(".")[0] != tool:
                raise ConfigurationError(f"{tool} cannot be imported: {error}") from error
            raise ConfigurationError(f"{tool} is not installed: pip install 'offbeat[{tool}]'") from error

    return follow(make)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
