"""Hosts of a test are separate machines to what runs on them, and nothing of them is left.

That a cable can be pulled, and a host lost, the tests of jobs on hosts show: no worker would be lost there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import Host, Network, until

SECONDS = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - began)
"""
RECEIVER = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.close()
"""


def python(host: Host, code: str, *arguments: str) -> subprocess.Popen[str]:
    return host.popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_host_has_its_own_name_address_and_process_numbers(two_hosts: list[Host]) -> None:
    for host in two_hosts:
        assert host.run("hostname").strip() == host.name
        assert host.run("getent", "hosts", host.name).split() == [host.address, host.name]
        assert f"{host.address}/24" in host.run("ip", "-brief", "address")
        assert os.getcwd() == host.run("pwd").strip()
    process = two_hosts[0].popen(["sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE)
    assert line(process) == "here"
    inside = next(inside for inside, outside in two_hosts[0].pids().items() if outside == process.pid)
    assert process.pid not in two_hosts[1].pids().values()
    two_hosts[0].kill(inside)
    assert process.wait() == -signal.SIGKILL


def test_a_rate_limits_both_directions(two_hosts: list[Host]) -> None:
    a, b = two_hosts
    size = 4_000_000
    with python(a, RECEIVER) as on_a, python(b, RECEIVER) as on_b:
        assert line(on_a) == line(on_b) == "listening"
        b.limit("40mbit")
        there = float(b.run(sys.executable, "-c", SECONDS, a.address, str(size)))
        back = float(a.run(sys.executable, "-c", SECONDS, b.address, str(size)))
        b.limit("10gbit")
        fast = min(float(b.run(sys.executable, "-c", SECONDS, a.address, str(size))) for _ in range(3))
        for host in two_hosts:
            host.kill_everything()
    # 4 MB at 40 Mbit/s take 0.8 s, less what the bucket lets through at once. A busy machine is slower, never faster.
    assert min(there, back) > 0.6 and fast < min(there, back), (there, back, fast)


def test_orphans_leave_no_zombie(two_hosts: list[Host]) -> None:
    host = two_hosts[0]
    host.run("sh", "-c", "sh -c 'sleep 0.1 &'")
    until("no other process", lambda: len(host.pids()) == 1)
    assert "Z" not in host.run("ps", "-A", "-o", "stat=").split()


def test_nothing_is_left_after_the_end_nor_after_sigkill_of_the_test(hosts_possible: None, tmp_path: Path) -> None:
    def links() -> str:
        return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout

    before = links()
    with Network(2) as (a, _):
        process = a.popen(["sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE)
        assert line(process) == "here" and links() == before, "the machine's own network is not touched"
    assert process.wait() == -signal.SIGKILL
    code = """
import sys, time
from tests.cluster.hosts import Network
network = Network(2)
a, b = network.hosts
process = a.popen(["sh", "-c", "setsid sleep 600 & exec sleep 600"])
while len(a.pids()) < 3:
    pass
print(*a.pids().values(), *b.pids().values(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as test:
        pids = [int(word) for word in line(test).split()]
        assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        test.kill()
    until("the end of all processes", lambda: not any(_running(pid) for pid in pids))
    assert links() == before


def _running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
