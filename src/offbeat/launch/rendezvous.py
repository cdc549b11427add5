"""Let a job's agents find its supervisor: through torchrun's store, a fixed port, or a private file on one machine.

The token does not travel with the address. Where there are several machines, the user supplies it (``OFFBEAT_TOKEN`` or a file); on one
machine it is in a file that only this user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import StoreError, TorchrunStore
from offbeat.launch.private_folder import folder_of_user, new_file, opened_folder, read_file, write_file
from offbeat.launch.tasks import Task
from offbeat.runtime.job.settings import read_addresses
from offbeat.transport.addresses import WILDCARDS, bindable, loopback
from offbeat.transport.base import Address

KEY = "offbeat/supervisor"
C10D = (
    "torchrun's c10d rendezvous restarts every machine whenever one comes or goes, which offbeat is there to avoid: type "
    "torchrun --nnodes=N --node-rank=K --master-addr=HOST --master-port=PORT, without --rdzv-backend=c10d"
)


class Meeting:
    """Find, or publish, the address of one job's supervisor.

    Args:
        task: the task that this process is.
        listen: the address that the user has given for the supervisor; "": none.
        folder: folder of the private file of a job on one machine; None: this user's folder for temporary files.
    """

    def __init__(self, task: Task, listen: str = "", folder: Path | None = None) -> None:
        self._task = task
        self._host = task.host or loopback()
        """Host of the supervisor, as this machine reaches it."""
        if task.alone:  # the supervisor listens at loopback, whatever name the engine has for this machine
            self._host = loopback() if listen in WILDCARDS else listen
        folder = folder or folder_of_user()
        self._file = folder / hashlib.sha256(f"{task.engine} {task.job}".encode()).hexdigest()[:32]
        self._address_file = self._file.with_suffix(".address")
        self._store: TorchrunStore | None = None
        self._by_file = task.alone if task.store is not None else not task.port
        """True if a file of this machine has the supervisor's address. On one machine torchrun's store could have it too, but its client
        is part of PyTorch, which an agent needs for nothing else and which takes 2 s of a core to import."""

    def hosts(self) -> bool:
        """Return True if this process has to start the supervisor: it is task 0, or it is at the endpoint and no process listens there."""
        task = self._task
        if task.rank is not None:
            return task.rank == 0
        if task.host and not bindable(task.host):
            return False
        return _free(task.host, task.port)

    def token(self, given: str | None) -> str:
        """Return the job's token: the given one, or on one machine a new one that all tasks of this user share.

        Raises:
            ConfigurationError: there are several machines, and no token was given.
        """
        if given:
            return given
        if not self._task.alone:
            raise ConfigurationError(
                "the job has several machines, and they need a common secret: type once  openssl rand -hex 16 > FILE; chmod 600 FILE  and "
                "start the command on each machine with --token-file FILE (or OFFBEAT_TOKEN_FILE=FILE)"
            )
        return _private(self._file)

    def begin(self) -> None:
        """Remove the address of an earlier job with this name whose supervisor was killed before it could remove it."""
        with contextlib.suppress(OSError), opened_folder(self._file.parent) as folder:
            os.unlink(self._address_file.name, dir_fd=folder)

    def publish(self, address: Address) -> None:
        """Publish the supervisor's address for the other tasks."""
        if self._by_file:
            write_file(self._address_file, json.dumps([address]))
        elif self._task.store is not None:
            self._opened(self._task.store).put(KEY, json.dumps([address]))

    def find(self) -> Address | None:
        """Return the supervisor's address; None: it is not known yet."""
        task = self._task
        if self._by_file:
            with contextlib.suppress(OSError), opened_folder(self._address_file.parent) as folder:
                return read_addresses(read_file(folder, self._address_file.name))[0]
            return None
        if task.store is None:
            return Address("", (self._host, task.port), "")
        try:
            text = self._opened(task.store).find(KEY)
        except StoreError:  # the store has ended, or has not begun
            return None
        if text is None:
            return None
        address = read_addresses(text)[0]
        return address._replace(tcp=(self._host, address.tcp[1]))

    def done(self) -> None:
        """Remove this job's files."""
        with contextlib.suppress(OSError, ConfigurationError), opened_folder(self._file.parent) as folder:
            for file in (self._file, self._address_file):
                with contextlib.suppress(OSError):
                    os.unlink(file.name, dir_fd=folder)

    def _opened(self, at: tuple[str, int]) -> TorchrunStore:
        if self._store is None:
            store = TorchrunStore(*at)
            # The static rendezvous writes this key before it starts a process; the c10d rendezvous gives processes an empty store.
            if store.find(f"{self._task.run}/torchelastic/role_info/0") is None:
                raise ConfigurationError(C10D)
            self._store = store
        return self._store


def _free(host: str, port: int) -> bool:
    """Return True if no process listens at this port of this machine."""
    try:
        socket.create_connection((host or loopback(), port), 2.0).close()
    except OSError:
        return True
    return False


def _private(file: Path) -> str:
    """Return the token in a file that only this user can read; the first task writes it."""
    mine = f"{file.name}.{secrets.token_hex(4)}"
    with opened_folder(file.parent) as folder:
        new_file(folder, mine, secrets.token_hex(16))
        try:
            os.link(mine, file.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:  # another task was first; the link makes its file visible only when complete
            pass
        finally:
            os.unlink(mine, dir_fd=folder)
        return read_file(folder, file.name)
