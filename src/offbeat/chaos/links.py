"""Take down the network of hosts that are namespaces of this machine, and bring it back as it was. Needs root, ``ip`` and ``nsenter``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

TOOLS = ("ip", "nsenter")
FLAGS = ("linkdown", "dead")
"""What ``ip route show`` says of a route's state, which ``ip route replace`` does not take."""


def why_not() -> str | None:
    """Return why links cannot be cut on this machine; None: they can."""
    if os.geteuid() != 0:
        return "only root may take a link down"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)" if missing else None


def namespace(pid: int | str) -> int | None:
    """Return the number of a process's network namespace; None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


class Links:
    """The links of one host.

    Args:
        pid: a process on it. The namespace is kept open, so that it may be gone when the links come back.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._cut: list[str] = []
        self._routes: list[str] = []

    def devices(self) -> list[str]:
        """Return the devices that are up, without loopback."""
        found: list[dict[str, Any]] = json.loads(self._ip("-json", "link", "show", "up") or "[]")
        return [one["ifname"] for one in found if "LOOPBACK" not in one.get("flags", ("LOOPBACK",))]  # one that is down is an empty object

    def down(self) -> bool:
        """Take every device down. Returns False if there is none, or it cannot be done."""
        try:
            self._cut = self.devices()
            # The kernel brings back the routes to the host's own networks, but not those that were added by hand.
            self._routes = [line for line in self._ip("route", "show").splitlines() if "proto kernel" not in line]
            for device in self._cut:
                self._ip("link", "set", device, "down")
        except subprocess.CalledProcessError:
            self.up()
            return False
        return bool(self._cut)

    def up(self) -> None:
        """Bring back what `down` has taken, and the routes over it."""
        for words in [["link", "set", device, "up"] for device in self._cut] + [
            ["route", "replace", *(word for word in line.split() if word not in FLAGS)] for line in self._routes
        ]:
            self._ip(*words, check=False)
        self._cut, self._routes = [], []

    def are_down(self) -> bool:
        """Return True if no device is up."""
        return not self.devices()

    def close(self) -> None:
        os.close(self._fd)

    def _ip(self, *words: str, check: bool = True) -> str:
        command: Sequence[str] = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._fd}", "ip", *words]
        return subprocess.run(command, capture_output=True, text=True, check=check).stdout
