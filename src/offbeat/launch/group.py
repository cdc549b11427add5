"""Run one worker as several processes, the ranks of a ``torch.distributed`` group in which the script's own DDP or FSDP2 works.

The engine that starts the worker sees one process, this one, which starts the ranks and waits for them. Rank 0 is the group's leader, which
takes part in the job; `runtime.group` connects the ranks. If one rank dies, this process kills the others and ends itself in the same way:
so the death of a rank is the death of its worker, and the engine restarts the worker.

    python -m offbeat.launch.group 2 train.py --epochs 3
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from offbeat.launch.environment import THREADS, Place, free_port, share_of_cores, torchrun_variables
from offbeat.launch.forkserver import begin_anew, run_program
from offbeat.launch.process_exit import end_as
from offbeat.launch.processes import describe, die_with_parent
from offbeat.launch.program import Program
from offbeat.runtime.job.notices import INTERRUPT, LEAVE, NOTICES, heeded, ordered, sit_out
from offbeat.runtime.job.settings import TOKEN, take_token
from offbeat.runtime.worker import stacks
from offbeat.session import LEADERLESS, PROCESS
from offbeat.transport.addresses import loopback
from offbeat.types import WorkerId

MODULE = "offbeat.launch.group"
RANK = "rank"
"""In place of a size in the command: this process is a rank."""
FORWARDED = {number: number for number in (*NOTICES, signal.SIGINT)} | {LEAVE: signal.SIGTERM, INTERRUPT: signal.SIGINT}
"""Signals sent on to the group's leader, with the signal that each means; an order is sent on as an order."""


def grouped(program: Program, size: int) -> Program:
    """Return the program with which an engine starts a worker of ``size`` processes."""
    if size == 1:
        return program
    return Program(MODULE, (str(size), *program.command), module=True, home=program.folder)


def rank_environment(rank: int, size: int, port: int, links: Sequence[int], worker: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank that differ from those of its worker.

    ``LOCAL_RANK`` counts the ranks of all workers of the machine, so that each rank can choose a GPU by it.

    >>> env = rank_environment(1, 2, 4711, [5], {"LOCAL_RANK": "3"})
    >>> env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]
    ('1', '2', '7')
    """
    first, workers = int(worker.get("LOCAL_RANK", "0")) * size, int(worker.get("LOCAL_WORLD_SIZE", "1"))
    threads = worker.get(THREADS)
    return {
        **({THREADS: str(share_of_cores(workers * size))} if threads == str(share_of_cores(workers)) else {}),
        PROCESS: json.dumps([rank, size, list(links)]),
        **torchrun_variables(WorkerId(rank), size, Place(0, first + rank, size, loopback(), port)),
    }


class Ranks:
    """Start and watch the processes of one worker.

    Args:
        program: the user's program.
        size: number of processes.
    """

    def __init__(self, program: Program, size: int) -> None:
        self._program, self._size = program, size
        self._pids: dict[int, int] = {}
        """Rank by process number."""

    def start(self) -> bool:
        """Start all ranks. Returns True in a rank that is a fork of this process, and has to run the program."""
        token = {TOKEN: take_token()}
        pairs = [socket.socketpair() for _ in range(self._size - 1)]
        ends = [[pair[0] for pair in pairs], *([pair[1]] for pair in pairs)]
        port = free_port()
        for rank, mine in enumerate(ends):
            environment = rank_environment(rank, self._size, port, [end.fileno() for end in mine], os.environ)
            if rank == 0:
                environment |= token
            if "torch" in sys.modules:  # this process is a fork with imports done, which its own forks need not repeat
                pid = self._fork(environment)
                if pid == 0:
                    for end in (end for other in ends if other is not mine for end in other):
                        end.close()
                    for end in mine:
                        end.detach()
                    return True
            else:
                keep = [end.fileno() for end in mine]
                command = [sys.executable, "-m", MODULE, RANK, *self._program.command]
                pid = subprocess.Popen(command, env={**os.environ, **environment}, pass_fds=keep, preexec_fn=die_with_parent()).pid  # noqa: PLW1509 - this process has one thread
            self._pids[pid] = rank
        for pair in pairs:
            for end in pair:
                end.close()
        return False

    def _fork(self, environment: Mapping[str, str]) -> int:
        prepare = die_with_parent()
        pid = os.fork()
        if pid == 0:
            prepare()
            begin_anew(environment)
        return pid

    def watch(self) -> int:
        """Wait for all ranks; kill the others at the first failure. Returns the worker's status, negative for a signal."""
        for number in heeded(FORWARDED):
            signal.signal(number, lambda number, _: self._pass_on(number))
        faulthandler.unregister(stacks.NUMBER)
        signal.signal(stacks.NUMBER, lambda number, _: self._send(number))
        leaderless = False
        while self._pids:
            pid, waited = os.wait()
            rank, status = self._pids.pop(pid, None), os.waitstatus_to_exitcode(waited)
            if rank is None:
                continue  # a child that something else in this process has started, such as a ``.pth`` file
            if status == LEADERLESS and 0 in self._pids.values():
                leaderless = True  # the leader is about to end too, with a status that tells more
            elif status != 0 or (leaderless and not self._pids):
                self._end_others(rank, status)
                return status or 1
        return 0

    def _end_others(self, rank: int, status: int) -> None:
        how = describe(status) if status else "ended before the others"
        others = "; the others are ended" if self._pids else ""
        print(f"offbeat: process {rank} of the {self._size} of this worker {how}{others}", file=sys.stderr, flush=True)
        self._send(signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _pass_on(self, number: int) -> None:
        """Send the group's leader a signal that asks the worker to end."""
        means = FORWARDED[number]
        for pid in [pid for pid, rank in self._pids.items() if rank == 0]:
            os.kill(pid, number if means == number else ordered(pid, means))

    def _send(self, number: int) -> None:
        for pid in list(self._pids):
            os.kill(pid, number)


def main(arguments: Sequence[str]) -> None:
    """Act as the worker's process, or run the program as a rank."""
    # A rank ends without clearing its modules, as forks do: a thread of gloo that drops a tensor meanwhile would abort the process (seen in
    # one of ten runs of short FSDP2 scripts, after their last collective).
    program = Program.of(arguments[1:])
    ranks = Ranks(program, int(arguments[0])) if arguments[0] != RANK else None
    if ranks is None or ranks.start():
        if not sys.flags.safe_path:
            sys.path[0] = program.folder
        if json.loads(os.environ[PROCESS])[0] != 0:  # only the leader reacts to signals
            sit_out()
        run_program(program.command)
    status = ranks.watch()
    if status < 0:
        end_as(status)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
