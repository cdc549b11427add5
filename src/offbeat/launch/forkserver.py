"""Fork workers and servers from a process that has already imported what they all need.

Loading PyTorch takes seconds of a core for each process, at the start of a job and whenever a dead process is restarted. The forkserver's
process imports modules once and then waits for requests. Each fork runs its program as ``python script.py`` would. `Forkserver` is the
launcher's side; `main` runs in the forkserver's process.

Servers are forks of the process that is started first. Workers are forks of a branch of it, a forkserver which also imports what the script
does (``preload.py`` chooses): these imports are tried (``import_trial.py``), and those that cannot be shared are left to the workers.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from offbeat.launch import process_exit, program
from offbeat.launch.environment import THREADS
from offbeat.launch.import_trial import import_all, quiet_fork
from offbeat.launch.processes import LocalChild, die_with_parent, start
from offbeat.launch.program import Program
from offbeat.runtime.job.notices import heed_again, sit_out
from offbeat.runtime.job.settings import ROLE, TOKEN, take_token
from offbeat.runtime.worker import stacks
from offbeat.types import Seconds

MESSAGE_BYTES = 1 << 16
FOUND = "--"
"""Separates required modules from optional ones in the forkserver's command."""
REFUSED = -1
"""Sent in place of a fork's process number if the fork failed, for example because there are too many processes."""
ANSWER_S: Seconds = 5.0
"""Seconds that a forkserver has to answer a request. A fork takes milliseconds; a stopped forkserver (SIGSTOP) never answers, and the
process that waits is the supervisor or an agent."""
OPTIMIZERS = "torch._dynamo"
"""The module that every PyTorch optimizer imports when it is made, which takes as long as importing torch."""
MODULE = "offbeat.launch.forkserver"
BRANCH = "ob-forkserver"
"""The name of a branch's process. By this name `offbeat chaos` knows it."""


class Forkserver:
    """Start the forkserver's process, and request forks from it.

    Args:
        program: the program of the forks; modules are searched in its folder first.
        modules: modules to import once.
        environment: all variables; forks have these and more.
        found: modules to import once unless that does harm, as in `ScriptImports.modules`.
        base: the forkserver of which this one is a branch: a fork that has the base's imports, and dies with it. None: a new process.

    Raises:
        OSError: this machine lacks descriptors, memory or processes for it, or the base has ended.
    """

    def __init__(
        self,
        program: Program,
        modules: Sequence[str],
        environment: Mapping[str, str],
        found: Sequence[str] = (),
        base: Forkserver | None = None,
    ) -> None:
        self._environment = environment
        self._ready = False
        self._statuses: dict[int, int] = {}
        self.over = False
        """True once the forkserver's process has ended."""
        self.hung = False
        """True if the forkserver was killed because it did not answer."""
        self.failure: str | None = None
        """The reason for which a required module could not be imported; None: no import has failed."""
        self.left_out: dict[str, str] = {}
        """Modules of the script that each worker imports for itself, with the reason."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (program.folder, *modules, FOUND, *found)
        with theirs:
            if base is None:
                command = [sys.executable, "-m", MODULE, *arguments, str(theirs.fileno())]
                self.child = start(command, environment, capture=True, keep=[theirs.fileno()])
            else:
                pid = base.request(environment, Program(MODULE, arguments, module=True), keep=[theirs.fileno()])
                if pid is None:
                    raise OSError(errno.EAGAIN, "the forkserver has ended, or could not fork")
                self.child = LocalChild(Fork(base, pid))

    def settled(self) -> bool:
        """Return True if all modules are imported, or the process has ended."""
        self._receive(0.0)
        return self._ready or self.over

    def fork(self, environment: Mapping[str, str], program: Program) -> LocalChild | None:
        """Return a new process that runs a program; None: the forkserver has ended, or the fork has failed.

        Args:
            environment: all variables of the fork.
            program: the user's program.
        """
        with contextlib.ExitStack() as ends:
            outputs: list[IO[bytes]] = []
            theirs: list[int] = []
            for _ in range(2):
                reading, writing = os.pipe()
                ends.callback(os.close, writing)
                theirs.append(writing)
                outputs.append(open(reading, "rb", buffering=0))  # noqa: SIM115 - the child's, until its end
            pid = self.request(environment, program, outputs=theirs)
        if pid is not None:
            return LocalChild(Fork(self, pid, *outputs))
        for output in outputs:
            output.close()
        return None

    def request(
        self, environment: Mapping[str, str], program: Program, *, outputs: Sequence[int] = (), keep: Sequence[int] = ()
    ) -> int | None:
        """Request a fork, and return its process number; None: the forkserver has ended, or the fork has failed.

        A forkserver that does not answer within `ANSWER_S` is killed, and its forks with it: a fork that came later would be one too many.

        Args:
            environment: all variables of the fork.
            program: its program.
            outputs: descriptors of its stdout and stderr; none: it has the forkserver's.
            keep: descriptors that the fork inherits; their numbers there are the last arguments of the program.
        """
        more = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        request = {"environment": more, "command": program.command, "outputs": len(outputs), "descriptors": len(outputs) + len(keep)}
        with contextlib.suppress(OSError):
            socket.send_fds(self._channel, [json.dumps(request).encode()], [*outputs, *keep])
        deadline = time.monotonic() + ANSWER_S
        while not self.over:
            left_s = deadline - time.monotonic()
            pid = self._receive(max(0.0, left_s))
            if pid is not None:
                return None if pid == REFUSED else pid
            if left_s <= 0.0:
                self.child.kill()
                self.over = self.hung = True
        return None

    def status(self, pid: int, timeout_s: Seconds) -> int | None:
        """Return a fork's exit status, negative for a signal; None: it has not arrived within ``timeout_s`` seconds."""
        if pid not in self._statuses:
            self._receive(timeout_s)
        return self._statuses.get(pid, -signal.SIGKILL if self.over else None)  # the kernel kills the forks of a dead forkserver

    def release(self, pid: int) -> None:
        """Let the system reuse the process number of an ended fork, to which no signal will be sent any more."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({"release": pid}).encode())

    def _receive(self, timeout_s: Seconds) -> int | None:
        """Read messages that have arrived, up to one with the process number of a new fork, which is returned."""
        while not self.over and select.select([self._channel], [], [], timeout_s)[0]:
            message = {}
            with contextlib.suppress(ConnectionResetError, ValueError, RecursionError):  # data that is no JSON counts as the end too
                message = json.loads(self._channel.recv(MESSAGE_BYTES) or "{}")
            match message:
                case {"forked": int(pid)}:
                    return pid
                case {"ended": int(pid), "status": int(status)}:
                    self._statuses[pid] = status
                case {"ready": _, "left_out": dict(reasons)}:
                    self._ready, self.left_out = True, reasons
                case {"failed": str(reason)}:
                    self.failure = reason
                case _:
                    self.over = True
            timeout_s = 0.0
        return None


class Fork:
    """Provide, for a fork, the parts of `subprocess.Popen` that `LocalChild` needs."""

    def __init__(self, forkserver: Forkserver, pid: int, stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None) -> None:
        self._forkserver = forkserver
        self._status: int | None = None
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: Seconds) -> int:
        deadline = time.monotonic() + timeout
        while (status := self._look(max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def _look(self, timeout_s: Seconds) -> int | None:
        if self._status is None and (status := self._forkserver.status(self.pid, timeout_s)) is not None:
            self._status = status
            self._forkserver.release(self.pid)
        return self._status


# In the forkserver's process.


def main(arguments: Sequence[str]) -> None:
    """Import, then fork on each request; in a fork, run the program as if the fork were a new process."""
    sit_out()  # the forks would die with this process
    gc.disable()  # collections during the imports find little, and take a fifth of the time
    folder, *rest, descriptor = arguments
    channel = socket.socket(fileno=int(descriptor))
    modules, found = rest[: rest.index(FOUND)], rest[rest.index(FOUND) + 1 :]
    if not sys.flags.safe_path:
        sys.path[0] = folder
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            channel.send(json.dumps({"failed": f"--preload {name}: {type(error).__name__}: {error}"[: MESSAGE_BYTES // 8]}).encode())
            sys.exit(1)
    left_out = dict(import_all(found, channel.fileno()))
    gc.freeze()  # the modules' objects stay: a collection in a fork would touch, and so copy, their pages
    gc.enable()
    channel.send(json.dumps({"ready": True, "left_out": left_out}).encode())
    command = _serve(channel)
    if command is not None:
        channel.close()
        run_program(command)


def _serve(channel: socket.socket) -> list[str] | None:
    """Fork, and report the ends of forks, until the supervisor is gone: then return None. In a fork, return the command to run."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    ended = os.waitid(os.P_PID, key.data, os.WEXITED | os.WNOWAIT)  # keeps the process number taken until it is released
                    assert ended is not None
                    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    channel.send(json.dumps({"ended": key.data, "status": status}).encode())
                    continue
                text, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
                match json.loads(text or "{}"):
                    case {"command": command, "environment": environment, "outputs": outputs, "descriptors": sent}:
                        watch, pid = REFUSED, REFUSED
                        if len(descriptors) == sent:  # the kernel passes fewer if this process may not open so many files
                            watch, pid = _fork(environment, descriptors[:outputs])
                        for descriptor in descriptors if pid != 0 else descriptors[:outputs]:
                            os.close(descriptor)
                        if pid == 0:
                            for other in selector.get_map().values():
                                if other.data is not None:
                                    os.close(other.fd)
                            return [*command, *map(str, descriptors[outputs:])]
                        if pid != REFUSED:
                            selector.register(watch, selectors.EVENT_READ, pid)
                        channel.send(json.dumps({"forked": pid}).encode())
                    case {"release": pid}:
                        os.waitpid(pid, 0)
                    case _:
                        return None


def _fork(environment: Mapping[str, str], descriptors: Sequence[int]) -> tuple[int, int]:
    """Fork. Returns a descriptor that becomes readable at the fork's end, and its process number: 0 in the fork, `REFUSED` after a failure.

    The fork has its own session and environment, its own output if there are descriptors for it, and dies with this process. A lack of
    descriptors or processes must not end this process: its earlier forks would die with it.
    """
    prepare = die_with_parent()
    try:
        waiting, prepared = os.pipe()
    except OSError:
        return REFUSED, REFUSED
    try:
        pid = quiet_fork()
    except OSError:
        pid = REFUSED
    if pid == 0:
        heed_again()
        _take_name(environment)  # before it has a session: `offbeat chaos` knows the leader of a session by its name
        os.setsid()
        prepare()
        for number, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, number)
        begin_anew(environment)
    os.close(prepared)
    if pid != 0:
        os.read(waiting, 1)  # returns at the end of the pipe: by then the fork has its session, and signals reach it
    os.close(waiting)
    return (REFUSED, pid) if pid in (0, REFUSED) else _watched(pid)


def _watched(pid: int) -> tuple[int, int]:
    """Return a descriptor that becomes readable at a fork's end, and its process number. Kills a fork that cannot be watched."""
    try:
        return os.pidfd_open(pid), pid
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return REFUSED, REFUSED


def begin_anew(environment: Mapping[str, str]) -> None:
    """Give a fork the variables and random seeds of a new process. A fork calls this first."""
    os.environ.update(environment)
    if TOKEN in os.environ:
        take_token()
    if THREADS in environment and "torch" in sys.modules:  # torch reads the variable when it is loaded
        sys.modules["torch"].set_num_threads(int(environment[THREADS]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does this itself
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # or unseeded workers would all draw the same noise, masks and batches


def _take_name(environment: Mapping[str, str]) -> None:
    """Name this process by role and number for ``ps`` and ``top``, where all forks show the forkserver's command and variables."""
    name = BRANCH
    if (number := environment.get("OFFBEAT_WORKER")) is not None:
        name = f"ob-worker-{number}"
    elif (number := environment.get("OFFBEAT_SERVER")) is not None:
        name = f"ob-{'standby' if environment.get(ROLE) == 'standby' else 'server'}-{number}"
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def run_program(command: Sequence[str]) -> NoReturn:
    """Run this command's program, and end the process as Python would. ``sys.path[0]`` must be the program's folder."""
    stacks.register()
    sys.excepthook = _show
    process_exit.run_and_exit(Program.of(command).run)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an exception as Python does, without this package's frames, which have run the program."""
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(program.__file__):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(sys.argv[1:])
