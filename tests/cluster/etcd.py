"""A real etcd of one member, for tests; where it is not installed they skip."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from offbeat.launch.environment import free_port
from offbeat.launch.leadership import EtcdStore, StoreError

DEADLINE_S = 120.0


def why_not() -> str | None:
    """Return why there can be no etcd here; None: there can."""
    return None if shutil.which("etcd") else "etcd is not installed (Debian: apt-get install etcd-server)"


@contextlib.contextmanager
def an_etcd(folder: Path, port: int | None = None) -> Iterator[int]:
    """Run an etcd, with the data that an earlier one has left in the folder. Yields its port."""
    port = port or free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    words = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    with open(folder / "etcd.log", "wb") as log:
        process = subprocess.Popen(["etcd", *words, "--listen-peer-urls", peer], stdout=log, stderr=log)
    try:
        store = EtcdStore([("127.0.0.1", port)])
        deadline = time.monotonic() + DEADLINE_S
        while not _answers(store):
            assert process.poll() is None and time.monotonic() < deadline, f"etcd does not answer: see {log.name}"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(store: EtcdStore) -> bool:
    try:
        store.find("is it there?")
    except StoreError:
        return False
    return True
