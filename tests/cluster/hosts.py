"""Hosts with addresses of their own on one machine: network namespaces on a common link, whose cable can be cut.

The names have the number of the test's process in them, so that test processes side by side do not meet, and so that hosts which a killed
test has left behind are found and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "ofbt"
LEFT_BEHIND = re.compile(rf"{PREFIX}(\d+)n\d+")


def why_not() -> str | None:
    """Return why there can be no hosts here; None: there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (Debian: iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"{PREFIX}{os.getpid()}n99"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{PREFIX}{os.getpid()}n99"], capture_output=True)
    return f"network namespaces cannot be made: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Host:
    """One network namespace."""

    name: str
    address: str
    cable: str

    @property
    def before(self) -> list[str]:
        """Return the words before a command that runs here."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", f"{PREFIX}{os.getpid()}n0", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", f"{PREFIX}{os.getpid()}n0", "link", "set", self.cable, "up")

    def limit(self, rate: str) -> None:
        """Let no more than ``rate`` (as tc writes it, for instance ``100mbit``) leave this host."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", *shape], check=True, capture_output=True)

    def lose(self) -> None:
        """Kill everything that runs here, as the loss of a machine does."""
        for pid in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Make so many hosts on one link; everything in them is killed at the end."""
    _remove_left_behind()
    owner = os.getpid()
    switch = f"{PREFIX}{owner}n0"
    made: list[Host] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for n in range(1, number + 1):
            host = Host(f"{PREFIX}{owner}n{n}", f"10.77.0.{n}", f"cable{n}")
            _ip("netns", "add", host.name)
            made.append(host)
            _ip("link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", host.cable, "netns", switch)
            _ip("-n", switch, "link", "set", host.cable, "master", "bridge")
            _ip("-n", switch, "link", "set", host.cable, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", link, "up")
        yield made
    finally:
        for name in [*(host.name for host in made), switch]:
            _remove(name)


def _remove_left_behind() -> None:
    for name in LEFT_BEHIND.finditer(_ip("netns", "list")):
        if not Path(f"/proc/{name[1]}").exists():
            _remove(name[0])


def _remove(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
