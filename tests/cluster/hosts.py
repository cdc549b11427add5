"""Hosts of a test: each has a network, a name, processes and mounts of its own (Linux namespaces), and one switch joins them.

A host behaves as a machine does for what runs on it: its own addresses, loopback, abstract sockets, process numbers, hostname, /proc,
/etc/hosts and /dev/shm. The rest of the file system is common to all hosts, as on a cluster with a network file system. The test process
itself stands outside. Hosts can be cut off, slowed down, and killed with all their processes.

Nothing has a name that the machine knows: namespaces live as long as their processes and the file descriptors of the test process. A host's
first process reads from a pipe whose other end the test process has, so that the kernel removes everything also after SIGKILL of the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 120.0
"""For anything that takes a second on an idle machine."""
NET, NET_6 = "10.77.0.", "fd77::"
"""All test processes may use the same addresses: no two of them share a network."""
TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST = "256kb"
"""Of a limited link: four of the largest packets that the kernel hands to a device."""
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Return why this machine cannot make hosts; None if it can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this container may not make namespaces: {tried.stderr.strip()}" if tried.returncode else None


def until(what: str, ready: Callable[[], object], limit_s: float = DEADLINE_S) -> None:
    """Wait until it is so; fails with ``what`` after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)  # the machine has few cores, and those waited for need them


class _Namespaces:
    """Namespaces that stay while this object is open.

    Args:
        holder: a process in them.
        kinds: as in ``/proc/PID/ns``.
    """

    def __init__(self, holder: int, *kinds: str) -> None:
        self._fds = {kind: os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}

    def enter(self, *kinds: str) -> list[str]:
        """Return the words that run a command in some of them."""
        option = {"net": "--net", "uts": "--uts", "mnt": "--mount"}
        return ["nsenter", *(f"{option[kind]}=/proc/{os.getpid()}/fd/{self._fds[kind]}" for kind in kinds)]

    def inode(self, kind: str) -> int:
        """Return the number of one of them, as processes in it have it in ``/proc/PID/ns``."""
        return os.fstat(self._fds[kind]).st_ino

    @contextlib.contextmanager
    def children_inside(self) -> Iterator[None]:
        """Give the processes that this thread starts in the block numbers of the process namespace.

        The thread itself stays outside, and so a `subprocess.Popen` of the block is an ordinary child, with its number outside.
        """
        own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(self._fds["pid"])
            try:
                yield
            finally:
                _setns(own)
        finally:
            os.close(own)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _setns(fd: int) -> None:
    if _libc.setns(fd, 0) != 0:  # os.setns comes with Python 3.12
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


class _Holder:
    """A process that makes namespaces and stays until its pipe is closed.

    Args:
        words: run the command below in new namespaces.
        script: of sh, run first.
    """

    def __init__(self, words: Sequence[str], script: str = "") -> None:
        # Children of a process that ignores SIGCHLD leave no zombie: orphans of a host get its first process as their parent.
        commands = f"set -e; {script} echo ready; exec env --ignore-signal=CHLD cat >/dev/null"
        self._process = subprocess.Popen(
            [*words, "sh", "-c", commands], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        assert line == b"ready\n", f"{shlex.join(words)}: {self._process.stderr.read().decode().strip()}"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0]) if children else self._process.pid
        """Of the process itself, not of ``unshare --fork``, which waits for it."""

    def kill(self, others: Sequence[subprocess.Popen[str]] = ()) -> None:
        """Kill it. When this returns, a process namespace whose first process it is has no processes any more.

        Args:
            others: the processes of the namespace that the test has started; the first one does not end before somebody waits for each.
        """
        os.kill(self.pid, signal.SIGKILL)
        for other in others:
            other.wait()
        self._process.communicate()


class Host:
    """One host. Made by `Network`.

    Args:
        network: the one that it belongs to.
        number: from 0.
        name: its hostname.
    """

    def __init__(self, network: Network, number: int, name: str) -> None:
        self._network, self.number, self.name = network, number, name
        self.address = network.address_of(number)
        self._port = f"host{number}"
        """The switch's end of this host's cable."""
        maker = _Holder(["unshare", "--net", "--uts"], f"ip link set lo up; hostname {shlex.quote(name)};")
        self._lasting = _Namespaces(maker.pid, "net", "uts")
        network.switch("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(maker.pid))
        maker.kill()
        network.switch("ip", "link", "set", self._port, "master", "switch", "up")
        if network.ipv6:
            self._configure("ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
        length = ("/64", "nodad") if network.ipv6 else ("/24",)
        self._configure("ip", "addr", "add", f"{self.address}{length[0]}", "dev", "eth0", *length[1:])
        self._configure("ip", "link", "set", "eth0", "up")
        self._first: _Holder | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._space: _Namespaces
        self._on()

    def _configure(self, *words: str) -> None:
        """Run a command in this host's network, also when no process can run on it."""
        _checked([*self._lasting.enter("net", "uts"), *words])

    def _on(self) -> None:
        """Start the first process; the others need it."""
        names = "".join(f"{line}\\n" for line in self._network.names_file)
        # The file is on a disk of its own in memory, which the mount keeps: SIGKILL of the test leaves no file behind.
        own_names = f"mount -t tmpfs tmpfs /mnt; printf '{names}' > /mnt/hosts; mount --bind /mnt/hosts /etc/hosts; umount -l /mnt;"
        mounts = f"{own_names} mount -t tmpfs tmpfs /dev/shm;"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = _Holder([*self._lasting.enter("net", "uts"), *unshare], mounts)
        self._space = _Namespaces(self._first.pid, "pid", "mnt")

    @property
    def is_on(self) -> bool:
        """Whether processes can run on it."""
        return self._first is not None

    # Processes.

    def popen(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a process on this host. Its ``pid`` is the one outside; on the host it has another.

        Args:
            argv: the command.
            env: variables added to those of the test.
            options: of `subprocess.Popen`.
        """
        assert self.is_on, f"{self.name} is off"
        folder = options.pop("cwd", None) or os.getcwd()
        words = [*self._lasting.enter("net", "uts"), *self._space.enter("mnt")[1:], f"--wdns={folder}", "--", *argv]
        with self._space.children_inside():
            process = subprocess.Popen(words, env={**os.environ, **(env or {})}, text=True, **options)
        self._started = [*(other for other in self._started if other.poll() is None), process]
        return process

    def words(self, *argv: str) -> list[str]:
        """Return the words that run a command in this host's network and with its name, while this process lives."""
        return [*self._lasting.enter("net", "uts"), *argv]

    def run(self, *argv: str, timeout: float = DEADLINE_S, **options: Any) -> str:
        """Run a command on this host to its end. Returns what it prints; fails if its status is not 0."""
        with self.popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
            try:
                out, error = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, f"{shlex.join(argv)} on {self.name}: status {process.returncode}: {error.strip()}"
        return out

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that has this number on this host."""
        self.run("sh", "-c", f"kill -{int(number)} {pid}")

    def pids(self) -> dict[int, int]:
        """Return the processes of this host, zombies left out: the number outside of each number on the host."""
        found: dict[int, int] = {}
        for folder in Path("/proc").iterdir() if self.is_on else ():
            with contextlib.suppress(OSError, ValueError):  # no process, or no longer
                outside = int(folder.name)
                status = (folder / "status").read_text()
                if (folder / "ns/pid").stat().st_ino == self._space.inode("pid") and "\nState:\tZ" not in status:
                    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                    found[int(line.split()[-1])] = outside
        return found

    def kill_everything(self) -> None:
        """Kill all processes of this host at once, and start it again, empty; the kernel tells their peers (FIN, RST)."""
        self._off()
        self._on()

    def _off(self) -> None:
        if self._first is not None:
            self._space.close()
            self._first.kill(self._started)  # the kernel kills all others with the first
            self._first = None
            self._started.clear()

    # The cable.

    def power_off(self) -> None:
        """Lose this host: nobody hears anything of it any more, and its processes are dead."""
        self.link_down()
        self._off()

    def power_on(self) -> None:
        """Start this host again, empty, after `power_off`."""
        self._on()
        self.link_up()

    def link_down(self) -> None:
        """Pull the cable: what is sent gets lost in silence, and connections stay."""
        self._network.switch("ip", "link", "set", self._port, "down")

    def link_up(self) -> None:
        """Put the cable in again."""
        self._network.switch("ip", "link", "set", self._port, "up")

    def limit(self, rate: str) -> None:
        """Limit what this host sends and what it receives, each to ``rate``, for instance "100mbit"."""
        words = ("root", "tbf", "rate", rate, "burst", BURST, "latency", "50ms")
        self._configure("tc", "qdisc", "replace", "dev", "eth0", *words)
        self._network.switch("tc", "qdisc", "replace", "dev", self._port, *words)

    def close(self) -> None:
        self._off()
        self._lasting.close()


class Network:
    """Hosts that one switch joins: ``with Network(2) as (a, b): ...``.

    Args:
        count: of hosts; host ``n`` has the address ``10.77.0.{n + 1}``.
        names: their hostnames; None: node0, node1 and so on.
        ipv6: True: they have no IPv4 address, not even at loopback, and host ``n`` is ``fd77::{n + 1}``.
    """

    def __init__(self, count: int, names: Sequence[str] | None = None, *, ipv6: bool = False) -> None:
        self.ipv6 = ipv6
        names = names or [f"node{number}" for number in range(count)]
        assert len(names) == count <= 250, f"{count} hosts, and the names {names}"
        self.hosts: list[Host] = []
        localhost = "::1" if ipv6 else "127.0.0.1"
        self.names_file = [f"{localhost} localhost", *(f"{self.address_of(number)} {name}" for number, name in enumerate(names))]
        """The lines of /etc/hosts on each host."""
        self._switch: _Namespaces | None = None
        try:
            holder = _Holder(["unshare", "--net"], "ip link add switch type bridge; ip link set switch up;")
            self._switch = _Namespaces(holder.pid, "net")
            holder.kill()
            for number, name in enumerate(names):
                self.hosts.append(Host(self, number, name))
        except BaseException:
            self.close()
            raise

    def address_of(self, number: int) -> str:
        """Return the address of a host."""
        return f"{NET_6 if self.ipv6 else NET}{number + 1}"

    def switch(self, *words: str) -> None:
        """Run a command where the switch and its ends of the cables are."""
        assert self._switch is not None
        _checked([*self._switch.enter("net"), *words])

    def close(self) -> None:
        """Kill all processes of the hosts, and remove these."""
        for host in self.hosts:
            host.close()
        self.hosts.clear()
        if self._switch is not None:
            self._switch.close()
            self._switch = None

    def __enter__(self) -> list[Host]:
        return self.hosts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _checked(words: Sequence[str]) -> None:
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(words)}: {result.stderr.strip()}"
