"""Manage the processes of a job's workers: start them, restart those that have died, and kill those that hang."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.core.backoff import Backoff
from offbeat.core.fleet import TOGETHER_S
from offbeat.errors import BY_SIGNAL
from offbeat.launch.engine import Child, Engine
from offbeat.launch.environment import worker_settings
from offbeat.launch.hangs import STACKS_S, LivedClock, ProcessStanding
from offbeat.launch.lack import lack_of
from offbeat.launch.outcome import End
from offbeat.launch.output import Output
from offbeat.launch.restarts import FailureReport, WorkerProcess, script_failed, why_not_restarted, with_remedy
from offbeat.launch.server_fleet import ServerFleet
from offbeat.runtime.job.settings import JobSettings
from offbeat.types import Seconds, WorkerId, WorkerState, worker_ids

END_SEEN_S: Seconds = 0.3
"""Seconds within which the end of a process is noticed after the end of its connection."""
EXIT_S, EXIT_GRACES = 2.0, 10
"""Least seconds that a process has to end after its goodbye, and the same as a multiple of ``--grace``: exit handlers may upload files."""


class Workers:
    """Manage the processes of all workers.

    Args:
        settings: the job.
        engine: starts the processes, and reports the machines that have come.
        servers: the job's servers.
        token: authenticates the processes of the job to each other.
        max_restarts: how often each worker may be restarted. A return after the loss of its machine does not count.
        return_s: seconds to wait for a machine once no process is left.
        grace_s: seconds that scripts have to end after Ctrl-C or SIGTERM; processes have ten times as long after their goodbye.
        clock: stands still while this process does.
        output: prints the processes' output.
        note: shows the user a line on an event.
    """

    def __init__(
        self,
        settings: JobSettings,
        engine: Engine,
        servers: ServerFleet,
        *,
        token: str,
        max_restarts: int,
        return_s: Seconds,
        grace_s: Seconds,
        clock: LivedClock,
        output: Output,
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._engine, self._servers, self._token = settings, engine, servers, token
        self._max_restarts, self._return_s = max_restarts, return_s
        self._exit_s = max(EXIT_S, EXIT_GRACES * grace_s)
        self._clock, self._output, self._note = clock, output, note
        self.snapshot: dict[str, Any] | None = None
        """The coordinator's last status; None: it has sent none."""
        self._states: dict[WorkerId, WorkerProcess] = {}
        self._backoffs: defaultdict[WorkerId, Backoff] = defaultdict(Backoff)
        """Pauses of workers that could not be started, or whose processes have failed before they could join."""
        self._later: dict[WorkerId, str] = {}
        """By worker that is to be restarted later: text on the end of its newest process."""
        self.bug: str | None = None
        """The bug of the script for which the job ends; None: no bug is known."""
        self._none_since: Seconds | None = None
        """The time since which no process of a worker runs; None: one does."""

    def start(self) -> None:
        """Start the workers whose machines are there, for the first time."""
        self._engine.arrived()
        for worker in worker_ids(self._settings.workers):
            child = self._spawn(worker)
            self._states[worker] = WorkerProcess(child, standing=ProcessStanding(self._clock.now()), moves=self._servers.fleet.moves)
            if child is None:
                self._servers.tell("lost", worker=worker, reason=self._engine.awaits)
            else:
                self._servers.record("worker", worker, "started", child.where)

    def _spawn(self, worker: WorkerId) -> Child | None:
        """Start a process of a worker; None: its machine is not there."""
        standbys = self._servers.standbys_at()
        settings = worker_settings(
            self._settings,
            worker=worker,
            token=self._token,
            servers=tuple(self._servers.addresses()),
            servers_return=self._servers.fleet.servers_return,
            standbys=None if standbys is None else tuple(standbys),
        )
        child = self._engine.start_worker(settings)
        if child is not None:
            self._output.attach("worker", worker, child)
        return child

    def children(self) -> list[Child]:
        """Return the newest process of each worker whose machine is there."""
        return [state.child for state in self._states.values() if state.child is not None]

    def print_stacks(self, worker: WorkerId) -> str | None:
        """Make a worker's process print its stacks, for `Output.stacks` and not for the user. Returns the reason if it cannot."""
        state = self._states.get(worker)
        if state is None or state.child is None or state.child.ended() is not None:
            return f"worker {worker} has no process"
        why_not = state.child.print_stacks()
        if why_not is None:
            self._output.divert_stacks(worker)
        return why_not

    # Reports of server 0.

    def on_standing(self, header: Mapping[str, Any]) -> None:
        """Update a process's standing, and kill the process if it has come back too late."""
        state = self._states.get(header["worker"])
        if state is not None and state.child is not None and state.child.pid == header["pid"]:
            state.standing.heard(header, self._clock.now())
            state.over = state.over or header.get("over", False)
            if header["standing"] == "hello":
                state.late = self._others_finished(header["worker"])
            self._note_death(header["worker"], state, header)
            if header["standing"] == "too late":
                state.too_late = True
                state.child.strike()

    def _note_death(self, worker: WorkerId, state: WorkerProcess, header: Mapping[str, Any]) -> None:
        """Note a worker's death, or show its return. A death is shown with the end of its process, or after `END_SEEN_S` without one."""
        now = self._clock.now()
        if header["standing"] == WorkerState.DEAD.value and state.died_at is None:
            state.died_at, state.told = now, False
        elif header["standing"] == WorkerState.ALIVE.value and state.died_at is not None:
            if state.told:
                self._note(f"worker {worker} is back after {now - state.died_at:.1f} s")
            state.died_at, state.told = None, False

    def _tell_deaths(self) -> None:
        """Show the deaths of workers whose processes are still running."""
        for worker, state in self._states.items():
            if state.died_at is not None and not state.told and self._clock.now() - state.died_at >= END_SEEN_S:
                state.told = True
                self._note(f"worker {worker} died ({state.standing.dead_because})")

    def on_failing(self, header: Mapping[str, Any]) -> None:
        """Keep a process's report on why its script fails."""
        if (state := self._states.get(header["worker"])) is not None:
            state.failure = FailureReport(header["reason"], header["pushed"], header["place"], header["final"], header["before"])
            state.over = state.over or header["over"]

    def on_kill(self, worker: WorkerId) -> None:
        """Kill a worker's process, as ``--kill`` orders."""
        state = self._states.get(worker)
        if state is not None and state.child is not None:
            state.ordered = True
            state.child.signal(signal.SIGKILL)

    @property
    def any_joined(self) -> bool:
        """True if a worker has ever joined: by the reports of hellos, or by the coordinator's status, which outlives restarts."""
        if any(state.standing.said_hello for state in self._states.values()):
            return True
        return self.snapshot is not None and any(row["incarnations"] for row in self.snapshot["per_worker"])

    # Ends and restarts.

    def take_in(self) -> None:
        """Start the workers whose machines have come, for the first time or again."""
        for worker in self._engine.arrived():
            state = self._states[worker]
            if state.status == 0 or (state.child is not None and state.status is None):
                continue
            child = self._spawn(worker)
            if child is not None:
                what = "started" if state.away is None else "restarted"
                state.begin(child, self._clock.now(), self._servers.fleet.moves)
                self._servers.record("worker", worker, what, f"its machine has come, {child.where}")

    def check(self, listen: Callable[[], bool]) -> None:
        """Find processes that have ended, and restart their workers where that may help.

        Args:
            listen: handles messages that have arrived from servers; returns False if the job fails.
        """
        for worker, state, status in self._ended():
            if not listen():  # a process's failure report has to be read before its end is handled
                return
            assert state.child is not None
            if status == 0 and state.standing.early:
                status = BY_SIGNAL + signal.SIGTERM  # a script that ends itself upon an order to leave has not finished its work
            if state.child.lost is not None and status != 0:
                self._lose(worker, state, state.child.lost)
                continue
            self._learn_reason(worker, state, status)
            in_vain = state.restarts and not state.has_pushed(worker, self.snapshot) and self._others_finished(worker)
            if script_failed(status) and in_vain:
                state.too_late = True  # no sample was left to it, and what its script does after its loop has nothing to work with
            how = state.describe(status)
            self._servers.record("worker", worker, "exited", how)
            if status == 0 or state.too_late or state.over or state.standing.was_done(status):
                state.status = 0
                self._engine.left(worker, finished=True)
                self._servers.tell("ended", worker=worker, pid=state.child.pid)
                if status != 0 or state.too_late or state.over:
                    self._note(f"worker {worker} {how}")
                continue
            self._servers.tell("lost", worker=worker, reason=f"its process {how}", dead=True, pid=state.child.pid)
            if script_failed(status) and state.failure is not None and (bug := state.failure.bug(worker)) is not None:
                state.status, self.bug = status, bug
                self._output.drain()
                return
            self._restart(worker, state, status, state.tell(how, status, self._clock.now()), pushed=state.has_pushed(worker, self.snapshot))
        self._tell_deaths()
        for worker, how in list(self._later.items()):
            child = self._states[worker].child
            if child is not None and child.lost is not None:
                del self._later[worker]
                self._lose(worker, self._states[worker], child.lost)
            elif self._backoffs[worker].due(self._clock.now()) or self._others_finished(worker):
                del self._later[worker]
                self._start_again(worker, self._states[worker], how)

    def _learn_reason(self, worker: WorkerId, state: WorkerProcess, status: int) -> None:
        """Take the reason of a failure from the process's output, if the process could not report it."""
        self._output.drain()
        if status > 0 and state.failure is None and (reason := self._output.reason("worker", worker, status)) is not None:
            pushed = state.has_pushed(worker, self.snapshot)
            state.failure = FailureReport(with_remedy(reason) if self._settings.torchrun_env and not pushed else reason, pushed)

    def _others_finished(self, worker: WorkerId) -> bool:
        """Return True if all other workers have ended, at least one with status 0: the job waits for this worker alone."""
        others = [state.status for other, state in self._states.items() if other != worker]
        return None not in others and 0 in others

    def _in_vain(self, worker: WorkerId) -> bool:
        """Return True if another attempt to start this worker is useless."""
        idle = all(state.status is not None or other in self._later for other, state in self._states.items() if other != worker)
        return self._others_finished(worker) or (idle and self._backoffs[worker].hopeless(self._clock.now()))

    def _ended(self) -> Iterator[tuple[WorkerId, WorkerProcess, int]]:
        """Yield the workers whose newest process has ended and has not been handled: worker, state and exit status."""
        for worker, state in self._states.items():
            if state.child is None or state.status is not None or worker in self._later:
                continue
            if (status := state.child.ended()) is not None:
                yield worker, state, status

    def _restart(self, worker: WorkerId, state: WorkerProcess, status: int, how: str, *, pushed: bool) -> None:
        final = state.failure is not None and state.failure.final
        # Its server has died before it was greeted, or it was told where former processes listen: the next attempt knows better.
        elsewhere = self._servers.fleet.moves > state.moves and not (pushed and state.standing.said_hello)
        moved = script_failed(status) and not final and elsewhere
        why_not = (
            None
            if moved
            else why_not_restarted(status, pushed=pushed, restarts=state.restarts, max_restarts=self._max_restarts, final=final)
        )
        self._output.drain()  # so that the process's own output comes before the line on its end
        if why_not is not None:
            self._give_up(worker, state, status, f"{how}: not restarted, {why_not}")
        elif moved or status < 0 or state.standing.said_hello:
            self._backoffs.pop(worker, None)
            self._start_again(worker, state, how, counts=not moved)
        else:
            pause_s = self._backoffs[worker].failed(self._clock.now())
            self._later[worker] = how
            self._note(f"worker {worker} {how}: restarted in {pause_s:g} s, since it has failed before it could join")

    def _start_again(self, worker: WorkerId, state: WorkerProcess, how: str, *, counts: bool = True) -> None:
        """Restart a worker, or try again later if this machine lacks descriptors or memory for a process."""
        try:
            child = self._spawn(worker)
        except OSError as error:
            if (lack := lack_of(error)) is None:
                raise
            if self._in_vain(worker):
                ended = None if state.child is None else state.child.ended()
                self._give_up(worker, state, -signal.SIGKILL if ended is None else ended, f"{how}: not restarted, {lack}")
                return
            if not self._backoffs[worker].failing:
                self._note(f"worker {worker} {how}: it cannot be restarted yet, and is tried again: {lack}")
            self._backoffs[worker].failed(self._clock.now())
            self._later[worker] = how
            return
        if child is not None:
            state.restarts += counts
            state.begin(child, self._clock.now(), self._servers.fleet.moves)
            count = f"{state.restarts} of {self._max_restarts}" if counts else "a server had gone on in another process since its start"
            self._servers.record("worker", worker, "restarted", f"{count}, {child.where}")
            self._note(f"worker {worker} {how}: restarted ({count})")
        else:
            self._lose(worker, state, "its machine is gone")

    def _give_up(self, worker: WorkerId, state: WorkerProcess, status: int, why: str) -> None:
        """Handle the end for good of a worker that has not finished: another may take its seat."""
        state.status = status
        self._note(f"worker {worker} {why}")
        self._engine.left(worker, finished=False)

    def _lose(self, worker: WorkerId, state: WorkerProcess, reason: str) -> None:
        """Handle the loss of a worker's machine. The worker may return with the machine, which does not count as a restart."""
        pid = 0 if state.child is None else state.child.pid
        state.child, state.away, state.told = None, reason, True
        state.died_at = self._clock.now() if state.died_at is None else state.died_at
        self._servers.tell("lost", worker=worker, reason=reason, pid=pid)
        self._servers.record("worker", worker, "lost", reason)
        self._note(f"worker {worker} is lost: {reason}; {self._engine.returns}")
        self._engine.left(worker, finished=False)

    def check_hangs(self, *, loading: bool) -> None:
        """Detect processes that hang, and kill them once they have had time to print their stacks.

        Args:
            loading: True while server 0 imports, and cannot report hellos.
        """
        now = self._clock.now()
        for worker, state in self._states.items():
            if loading:
                state.standing.started = now
            if state.child is None or state.status is not None or state.child.ended() is not None:
                continue
            if state.standing.kill_reason is None and not self._hangs(worker, state.child, state.standing, now):
                continue
            if now >= state.standing.kill_at:
                state.child.strike()

    def _hangs(self, worker: WorkerId, child: Child, standing: ProcessStanding, now: Seconds) -> bool:
        """Return True if a process hangs, after ordering it to print its stacks before it is killed."""
        settings = self._settings
        standing.kill_reason = standing.hung(now, settings.timeout_s, settings.progress_timeout_s, self._exit_s)
        if standing.kill_reason is None:
            return False
        self._servers.record("worker", worker, "hung", standing.kill_reason)
        why_silent = child.print_stacks()
        said = "its stacks follow on its stderr" if why_silent is None else f"no stacks: {why_silent}"
        self._note(f"worker {worker} {standing.kill_reason}: it is killed; {said}")
        standing.kill_at = now + (STACKS_S if why_silent is None else 0.0)
        return True

    def dismiss(self) -> None:
        """Order workers to leave that a signal asked to end at least `TOGETHER_S` ago, since it was not meant for the whole job."""
        now = self._clock.now()
        for state in self._states.values():
            standing = state.standing
            if state.child is not None and standing.told_at is not None and not standing.ordered and now - standing.told_at >= TOGETHER_S:
                standing.ordered = True
                state.child.signal(signal.SIGTERM)

    # The end of the job.

    def all_done(self) -> bool:
        """Return True if no process runs or is awaited any more."""
        states = self._states.values()
        if any(state.child is not None and state.status is None for state in states):
            self._none_since = None
            return False
        if all(state.status is not None for state in states) or any(state.status == 0 for state in states):
            return True
        now = self._clock.now()
        if self._none_since is None:
            self._none_since = now
            self._note(f"no worker is left: waiting {self._return_s:g} s for a machine (--start-timeout)")
        return now - self._none_since >= self._return_s

    def none_runs(self) -> bool:
        """Return True if no process runs."""
        return all(state.child is None or state.status is not None for state in self._states.values())

    def all_have_ended(self) -> bool:
        """Return True if every process has ended, handled or not."""
        return all(child.ended() is not None for child in self.children())

    def ask_to_leave(self, *, gently: bool) -> None:
        """Send SIGTERM to all; with ``gently`` SIGINT to those that have said hello, whose scripts may catch KeyboardInterrupt and save.

        Before its hello a process has nothing to save, and a traceback of its imports would only confuse the user.
        """
        for state in self._states.values():
            if state.child is not None:
                state.child.signal(signal.SIGINT if gently and state.standing.said_hello else signal.SIGTERM)

    def note_ends(self) -> None:
        """Handle ends of processes without restarts, and report them to the coordinator: others may wait for a worker that never joined."""
        self._later.clear()
        for worker, state, status in self._ended():
            state.status = status
            self._learn_reason(worker, state, status)
            self._servers.record("worker", worker, "exited", state.describe(status))
            self._servers.tell("lost", worker=worker, reason=f"its process {state.describe(status)}", dead=True)

    def ends(self) -> dict[WorkerId, End]:
        """Return how each worker has ended for good, as far as it has."""
        ends = {w: End(state.status, state.describe(state.status)) for w, state in self._states.items() if state.status is not None}
        return ends | {w: End(-signal.SIGKILL, f"was lost: {state.away}") for w, state in self._states.items() if state.away is not None}
