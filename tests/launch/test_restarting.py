"""When a worker is restarted: at once, after a pause, or once this machine has what a process needs."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest

from offbeat.core.backoff import FIRST_S, GIVE_UP_S, LONGEST_S
from offbeat.launch.engine import Child, Engine
from offbeat.launch.missing import Missing
from offbeat.launch.output import Output
from offbeat.launch.workers import Workers
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.types import Seconds, WorkerId


class Process(Child):
    """A process that ends when the test says so, and prints nothing."""

    def __init__(self) -> None:
        self.status: int | None = None

    pid = 7
    drained = True

    def pipes(self) -> list[int]:
        return []

    def read(self) -> list[tuple[bool, bytes]]:
        return []

    def ended(self) -> int | None:
        return self.status

    def signal(self, number: int) -> None: ...

    def print_stacks(self) -> str | None: ...

    def strike(self) -> None: ...

    def kill(self) -> None: ...


class Machines(Engine):
    """An engine that notes who has left, says who has come, and starts processes as the test says."""

    def __init__(self, start: Callable[[WorkerId], Child]) -> None:
        super().__init__()
        self._start = start
        self.came: list[WorkerId] = []
        self.gone: list[tuple[WorkerId, bool]] = []

    def arrived(self) -> list[WorkerId]:
        came, self.came = self.came, []
        return came

    def start_worker(self, settings: WorkerSettings) -> Child:
        return self._start(settings.worker)

    def left(self, worker: WorkerId, *, finished: bool) -> None:
        self.gone.append((worker, finished))


Machines.__abstractmethods__ = frozenset()


class Job:
    """The workers of a job, with a clock and a machine that the test has in its hands.

    Args:
        workers: how many.
        max_restarts: of each.
    """

    def __init__(self, workers: int = 2, max_restarts: int = 20) -> None:
        self.time: Seconds = 0.0
        self.lack: int | None = None
        self.processes: dict[WorkerId, list[Process]] = {}
        self.notes: list[str] = []
        pushed = {"per_worker": [{"worker": worker, "pushes": 1} for worker in range(workers)]}
        self.machines = Machines(self.spawn)  # type: ignore[abstract]
        self.servers = Mock(**{"standbys_at.return_value": None, "addresses.return_value": []})
        self.servers.fleet = Mock(servers_return=False, moves=0)
        self.workers = Workers(
            JobSettings(workers=workers),
            self.machines,
            self.servers,
            token="token",
            max_restarts=max_restarts,
            return_s=0.0,
            grace_s=1.0,
            clock=cast(Any, self),
            output=Output(Mock(), None, Missing()),
            note=self.notes.append,
        )
        self.workers.snapshot = pushed
        self.workers.start()

    def now(self) -> Seconds:
        return self.time

    def spawn(self, worker: WorkerId) -> Child:
        if self.lack is not None:
            raise OSError(self.lack, "lack")
        self.processes.setdefault(worker, []).append(Process())
        return self.processes[worker][-1]

    def started(self, worker: int) -> int:
        return len(self.processes[WorkerId(worker)])

    def ends(self, worker: int, status: int, *, joined: bool) -> None:
        if joined:
            self.workers.on_standing({"worker": worker, "pid": 7, "standing": "alive"})
        self.processes[WorkerId(worker)][-1].status = status
        self.look()

    def look(self) -> None:
        self.workers.check(lambda: True)

    def after(self, seconds: Seconds) -> None:
        self.time += seconds
        self.look()


@pytest.mark.parametrize(("status", "joined"), [(-9, True), (-9, False), (1, True)])
def test_at_once(status: int, joined: bool) -> None:
    job = Job()
    job.ends(1, status, joined=joined)
    assert job.started(1) == 2


def test_a_process_that_fails_before_it_could_join_is_restarted_after_growing_pauses() -> None:
    job = Job(max_restarts=8)
    pauses = []
    for number in range(8):
        job.ends(1, 1, joined=False)
        began = job.time
        while job.started(1) == number + 1:
            job.after(0.5)
        pauses.append(job.time - began)
    assert pauses == [min(LONGEST_S, FIRST_S * 2**number) for number in range(8)]
    job.ends(1, 1, joined=True)
    assert job.notes[-1].endswith("not restarted, --max-restarts 8 is used up")


def test_a_failure_before_the_first_step_does_not_count_if_a_server_has_gone_on_in_another_process_meanwhile() -> None:
    job = Job(max_restarts=0)
    for _ in range(3):
        job.servers.fleet.moves += 1
        job.ends(1, 1, joined=False)
        assert job.notes[-1].endswith("restarted (a server had gone on in another process since its start)")
    job.ends(1, 1, joined=False)
    assert job.started(1) == 4 and job.notes[-1].endswith("not restarted, --max-restarts is 0")
    job.servers.fleet.moves += 1
    job.ends(0, 1, joined=True)
    assert job.started(0) == 1 and job.notes[-1].endswith("not restarted, --max-restarts is 0"), "it had made a step"


@pytest.mark.parametrize(("number", "knob"), [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "memory")])
def test_a_lack_of_descriptors_or_memory_is_waited_for(number: int, knob: str) -> None:
    job = Job(max_restarts=1)
    job.lack = number
    job.ends(1, -9, joined=True)
    for _ in range(200):
        job.after(1.0)
    assert job.started(1) == 1 and len(job.notes) == 1 and knob in job.notes[0] and not job.workers.all_done()
    job.lack = None
    job.after(LONGEST_S)
    assert job.started(1) == 2 and job.notes[-1].endswith("restarted (1 of 1)")


def test_a_death_is_told_once_with_its_cause_and_so_is_the_return() -> None:
    job = Job(max_restarts=3)
    dead = {"worker": 1, "pid": 7, "standing": "dead", "reason": "connection closed: end of stream"}
    alive = {"worker": 1, "pid": 7, "standing": "alive"}
    job.workers.on_standing(alive)
    job.workers.on_kill(WorkerId(1))
    job.workers.on_standing(dead)  # server 0 knows first, and the supervisor knows why
    job.look()
    job.ends(1, -9, joined=False)
    job.workers.on_standing(alive)
    assert job.notes == [
        "worker 1 died (killed by SIGKILL, as ordered by --kill): restarted (1 of 3)",
        "worker 1 is back after 0.0 s",
    ]
    job.notes.clear()
    job.workers.on_standing({**dead, "reason": "not heard of for 10.0 s"})
    job.after(1.0)
    job.after(1.0)
    job.workers.on_standing(alive)
    assert job.notes == ["worker 1 died (not heard of for 10.0 s)", "worker 1 is back after 2.0 s"]
    job.notes.clear()
    job.workers.on_standing(dead)
    job.workers.on_standing(alive)
    assert job.notes == [], "it has missed nothing"


def test_it_is_not_waited_for_without_an_end() -> None:
    """Once the others have finished, or if no worker runs at all."""
    job = Job()
    job.lack = errno.EMFILE
    job.ends(1, -9, joined=True)
    job.ends(0, 0, joined=True)
    job.look()
    assert job.workers.all_done() and "not restarted, this process may have" in job.notes[-1]
    job = Job(workers=1)
    job.lack = errno.EMFILE
    job.ends(0, -9, joined=True)
    for _ in range(int(GIVE_UP_S + LONGEST_S)):
        job.after(1.0)
    assert job.workers.all_done() and "not restarted" in job.notes[-1]


def test_the_end_of_the_job_does_not_wait_for_it() -> None:
    job = Job()
    job.lack = errno.EMFILE
    job.ends(1, -9, joined=True)
    job.processes[WorkerId(0)][-1].status = -15
    job.workers.note_ends()
    assert job.workers.none_runs()


def test_another_error_is_none_of_these() -> None:
    job = Job()
    job.lack = errno.ENOEXEC
    with pytest.raises(OSError, match="lack"):
        job.ends(1, -9, joined=True)


def failure(worker: int, reason: str, **more: Any) -> dict[str, Any]:
    return {"worker": worker, "reason": reason, "type": "", "place": None, "final": False, "over": False, "before": None, **more}


@pytest.mark.parametrize(("others", "pushed", "finished"), [((0, 0), False, True), ((0, None), False, False), ((0, 0), True, False)])
def test_a_script_that_fails_when_nothing_was_left_to_do_is_no_failure_of_the_job(
    others: tuple[int | None, ...], pushed: bool, finished: bool
) -> None:
    """It came back after the others had finished: without its restart the job would have succeeded, too."""
    job = Job(3)
    job.ends(2, -9, joined=True)
    for worker, status in enumerate(others):
        if status is not None:
            job.ends(worker, status, joined=True)
    assert not job.workers.all_done(), "what comes after its loop, such as a save by rank 0, nobody else has done"
    job.workers.on_failing(failure(2, "ValueError: no mean", pushed=pushed))
    job.ends(2, 1, joined=True)
    assert ((2, True) in job.machines.gone) == finished
    if finished:
        assert job.notes[-1].endswith("its script begins; its script failed after its training loop: ValueError: no mean")


def test_so_it_is_where_the_job_has_ended_before_its_script() -> None:
    """Its last pass had no batch, or ended early: the others' scripts had ended, of which server 0 knows before the supervisor."""
    job = Job()
    job.ends(1, -9, joined=True)
    job.workers.on_failing(failure(1, "StopIteration", pushed=True, over=True))
    job.ends(1, 1, joined=True)
    assert (1, True) in job.machines.gone and job.started(1) == 2
    assert job.notes[-1].endswith("the scripts of the others had ended; its script failed after its training loop: StopIteration")


@pytest.mark.parametrize("late", [True, False])
def test_so_it_is_where_it_has_left_the_job_before_and_sends_no_report(late: bool) -> None:
    job = Job()
    job.ends(1, -9, joined=True)
    if late:
        job.ends(0, 0, joined=True)
    job.workers.on_standing({"worker": 1, "pid": 7, "standing": "hello"})
    if not late:
        job.ends(0, 0, joined=True)
    job.ends(1, 1, joined=True)
    assert ((1, True) in job.machines.gone) == late
    assert not late or job.notes[-1].endswith("the others had finished the training with which its script begins")


def test_another_worker_takes_the_seat_of_one_that_has_ended_for_good_and_none_that_of_one_that_has_finished() -> None:
    job = Job(3, max_restarts=1)
    job.ends(1, -9, joined=True)
    job.ends(1, -9, joined=True)
    job.ends(2, 0, joined=True)
    assert job.started(1) == 2 and job.machines.gone == [(1, False), (2, True)]
    job.machines.came = [WorkerId(0), WorkerId(1), WorkerId(2)]
    job.workers.take_in()
    assert [job.started(worker) for worker in range(3)] == [1, 3, 1], "worker 0 runs, worker 2 has finished"
    job.ends(1, -9, joined=True)
    assert job.started(1) == 4, "it is another worker, with restarts of its own"


def test_a_worker_that_leaves_while_its_restart_is_delayed_is_lost_at_once() -> None:
    job = Job()
    job.ends(1, 1, joined=False)
    assert "restarted in" in job.notes[-1]
    job.processes[WorkerId(1)][-1].lost = "its joiner has ended"
    job.look()
    assert job.machines.gone == [(1, False)] and "worker 1 is lost: its joiner has ended" in job.notes[-1]
    job.after(60.0)
    assert job.started(1) == 1
