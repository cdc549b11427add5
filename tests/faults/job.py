"""A real job under a test's hands: started as a user would, watched through its journal and /proc, and searched for remains at its end.

Processes are found as ``offbeat chaos`` finds them, by a mark in their environment, so that nothing can be left behind unseen, whoever its
parent is then. Waiting is for an event, with a deadline; between two looks the test waits for the job's end, which no event will follow.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil

from offbeat.chaos import procfs
from offbeat.errors import ConfigurationError
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
MISTAKEN = str(SCRIPTS / "mistaken.py")
FAULTY = str(SCRIPTS / "faulty.py")
QUICK = {"PYTHONPATH": str(SCRIPTS / "quick")}
"""The environment of a job whose processes import what they need of PyTorch, and write their journal soon, see ``scripts/quick``."""
WHOLE_TORCH = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""The environment of a job whose processes import all of PyTorch."""
WIDER: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]] = {
    "optimizers": ((), ("--models", "2"), {}),
    "groups": (("--procs-per-worker", "2"), ("--ddp",), WHOLE_TORCH),
}
"""Several optimizers, or several processes a worker: options of the job, arguments of ``resumed.py``, and the environment."""
FAKE_GPU = {"OFFBEAT_FAKE_GPU": str(SCRIPTS.parents[2])}
"""The environment of a job whose processes have the GPU of ``tests/support/fake_cuda.py``."""
PLANE = os.environ.get("OFFBEAT_TEST_PLANE")
"""The value of ``--plane`` for all jobs, see ``tests/device.py``; None: its default."""
FAKED: Mapping[str, str] = FAKE_GPU if PLANE and "OFFBEAT_TEST_DEVICE" not in os.environ else {}
DEADLINE_S = 120.0
"""For anything that takes a few seconds on an idle machine."""
LOOK_S = 0.05
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError)


def orders_to_die(folder: Path) -> dict[str, str]:
    """The variables with which servers look in this folder, which is made, for orders to die (``scripts/deaths``)."""
    folder.mkdir(exist_ok=True)
    return {"OFFBEAT_DEATHS": str(folder), "PYTHONPATH": f"{SCRIPTS / 'deaths'}{os.pathsep}{SCRIPTS / 'quick'}"}


class Ended(NamedTuple):
    """What is known of a job that is over."""

    status: int
    out: str
    err: str
    records: list[Record]

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""

    def tally(self) -> Tally:
        return Tally.of(self.records)

    def reports(self) -> list[Record]:
        """Those of the epochs."""
        return [record["report"] for record in self.records if record["kind"] == "epoch_ended"]

    def accounted(self, indices: int = 64) -> None:
        """It has ended well, every push has one fate, and every index of every epoch was used once, whoever has died over some."""
        assert self.status == 0, self.err
        assert self.tally().problems() == []
        reports = self.reports()
        assert reports and all(report["folded"] == report["indices"] == indices for report in reports), reports


RUN = (sys.executable, "-m", "offbeat.cli", "run")
AGENT = (sys.executable, "-m", "offbeat.agent")


class Job:
    """One run of ``offbeat run``, or of another command that runs a job.

    Args:
        folder: for its journal and its output.
        arguments: of ``offbeat run``, the script and its own arguments last.
        environment: more variables.
        file_size_max: RLIMIT_FSIZE in bytes, which shared memory obeys as well; None: no limit.
        before: words before the command, for instance of ``unshare``.
        command: takes these arguments, and --journal.
        popen: starts the command; it takes what `subprocess.Popen` takes.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        file_size_max: int | None = None,
        before: Sequence[str] = (),
        command: Sequence[str] = RUN,
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self.journal = folder / "journal.jsonl"
        self._out, self._err = folder / "out", folder / "err"
        self.mark = secrets.token_hex(8)
        self._records: list[Record] = []
        self._read_at: tuple[int, int, int] | None = None

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
            if file_size_max is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_max, file_size_max))

        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = popen(
                [*before, *command, "--journal", str(self.journal), *(("--plane", PLANE) if PLANE else ()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    **QUICK,
                    **FAKED,
                    **(environment or {}),
                    procfs.MARK: self.mark,
                    "COLUMNS": "200",
                },
                start_new_session=True,
                preexec_fn=prepare,
            )

    # Looking.

    def records(self) -> list[Record]:
        """The journal so far; none while there is no whole line.

        Tests look twenty times a second, and a job writes once: what has not changed is not read again, which took half a core.
        """
        with contextlib.suppress(ConfigurationError, FileNotFoundError):
            status = self.journal.stat()
            if self._read_at != (seen := (status.st_ino, status.st_size, status.st_mtime_ns)):
                self._records, self._read_at = list(read(self.journal)), seen
            return list(self._records)
        return []

    def processes(self) -> Iterator[psutil.Process]:
        """Every living process of the job, the supervisor too."""
        for process in self._found():
            with contextlib.suppress(*GONE):
                yield psutil.Process(process.pid)

    def _found(self) -> list[procfs.Process]:
        return list(procfs.marked(self.mark))

    def printed(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    def workers(self) -> dict[int, psutil.Process]:
        return self._those("worker")

    def servers(self) -> dict[int, psutil.Process]:
        return self._those("server")

    def _those(self, role: str) -> dict[int, psutil.Process]:
        """By their number."""
        found: dict[int, psutil.Process] = {}
        for pid, (its, number) in procfs.roles(self._found()).items():
            with contextlib.suppress(*GONE):
                if its == role and number is not None:
                    found[number] = psutil.Process(pid)
        return found

    # Waiting.

    def wait(self, what: str, ready: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """The first truth that ``ready`` tells; fails with ``what`` when the job ends or the deadline comes before it."""
        deadline = time.monotonic() + deadline_s
        while not (found := ready()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_S)
                found = ready()
                assert found, f"the job ended before {what}: {self._story()}"
                break
            assert time.monotonic() < deadline, f"no {what} within {deadline_s} s: {self._story()}"
        return found

    def record(self, kind: str, *, after: float = -1.0, **fields: Any) -> Record:
        """The first journal record of this kind later than ``after`` seconds whose fields have these values."""

        def look() -> Record | None:
            found = (r for r in self.records() if r["kind"] == kind and r["t"] > after)
            return next((r for r in found if all(r[name] == value for name, value in fields.items())), None)

        record: Record = self.wait(f"{kind} {fields}", look)
        return record

    def contribution(self, worker: int, incarnation: int) -> Record:
        """The first push of this incarnation that was folded."""
        return self.record("settle", worker=worker, incarnation=incarnation, fate="folded")

    def began(self, workers: int) -> None:
        """Wait until each of so many workers has contributed."""
        for worker in range(workers):
            self.contribution(worker, 1)

    def folds(self) -> int:
        return sum(record["kind"] == "fold" for record in self.records())

    def goes_on(self, versions: int = 3) -> None:
        """Wait for more versions than so many."""
        made = self.folds()
        self.wait("more versions", lambda: self.folds() > made + versions)

    def ended(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Wait for its end, and see that nothing is left of it: processes, shared memory, sockets."""
        try:
            status = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end within {deadline_s} s: {self._story()}") from None
        self._nothing_left()
        return Ended(status, self._out.read_text(), self._err.read_text(), self.records())

    def end(self, enough: Path) -> Ended:
        """Make the file with which the scripts come to their end, and do as `ended`."""
        enough.touch()
        return self.ended()

    def _nothing_left(self) -> None:
        deadline = time.monotonic() + 10.0
        while remains := procfs.remains(self.mark):
            assert time.monotonic() < deadline, f"the job has left behind: {remains}"
            # Processes of a supervisor killed by SIGKILL die with it, but a moment later.
            psutil.wait_procs(list(self.processes()), timeout=LOOK_S)

    # Ending by force.

    def clean_up(self) -> None:
        """Whatever the test has come to: the supervisor and everything marked dies."""
        if self.process.poll() is None:
            self.process.kill()
        for process in self.processes():
            with contextlib.suppress(*GONE):
                process.kill()
        self.process.wait()

    def _story(self) -> str:
        return f"{self._out.read_text()[-2000:]}\n{self._err.read_text()[-2000:]}\n{self.records()[-5:]}"


Start: TypeAlias = Callable[..., Job]
"""Starts a job, as the fixtures of `tests.faults.conftest` do."""


class Faulty:
    """A job whose workers have mishaps.

    Args:
        start: starts a job.
        folder: for what the job is told.
    """

    def __init__(self, start: Callable[..., Job], folder: Path) -> None:
        self._start, self._folder = start, folder
        self.enough = folder / "enough"
        """For `Job.end`."""

    def start(self, *options: str, more: tuple[str, ...] = (), **how: Any) -> Job:
        """``options`` of ``offbeat run``, ``more`` of the script, ``how`` of `Job`."""
        own = ("--until", str(self.enough), "--orders", str(self._folder), *more)
        return self._start(*options, "--slow", "any=0.01", FAULTY, *own, **how)

    def order(self, worker: int | str, mishap: str) -> None:
        """Let a worker have a mishap before its next step."""
        hidden = self._folder / f".{worker}"
        hidden.write_text(mishap)
        hidden.rename(self._folder / str(worker))


def name_of(process: psutil.Process) -> str:
    """Return a process's name, which says of a fork what it is; "" if the process is gone."""
    with contextlib.suppress(*GONE):
        return str(process.name())
    return ""


def signalled(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal and see that it has arrived: the process is gone, stopped, or goes on."""
    reached: dict[signal.Signals, Callable[[str], bool]] = {
        signal.SIGKILL: lambda status: status == psutil.STATUS_ZOMBIE,
        signal.SIGSTOP: lambda status: status == psutil.STATUS_STOPPED,
        signal.SIGCONT: lambda status: status != psutil.STATUS_STOPPED,
    }
    process.send_signal(number)
    deadline = time.monotonic() + 10.0
    with contextlib.suppress(psutil.NoSuchProcess):
        while not reached[number](process.status()):
            assert time.monotonic() < deadline, f"{number.name} has not reached process {process.pid}: {process.status()}"
            os.sched_yield()
