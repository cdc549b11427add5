"""Hosts of a test are separate machines to what runs on them, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.hosts import Host, Network, until

SINK = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
while block := connection.recv(1 << 16):
    print(len(block), flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    for line in sys.stdin:
        connection.sendall(bytes(int(line)))
"""
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


@pytest.fixture
def two(hosts_possible: None) -> Iterator[list[Host]]:
    with Network(2) as hosts:
        yield hosts


def python(host: Host, code: str, *arguments: str) -> subprocess.Popen[str]:
    return host.popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def test_a_host_has_its_own_name_address_and_process_numbers(two: list[Host]) -> None:
    for host in two:
        assert host.run("hostname").strip() == host.name
        assert host.run("getent", "hosts", host.name).split() == [host.address, host.name]
        assert f"{host.address}/24" in host.run("ip", "-brief", "address")
        assert os.getcwd() == host.run("pwd").strip()
    process = two[0].popen(["sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE)
    assert line(process) == "here"
    inside = next(inside for inside, outside in two[0].pids().items() if outside == process.pid)
    assert process.pid not in two[1].pids().values()
    two[0].kill(inside)
    assert process.wait() == -signal.SIGKILL


def test_a_partition_shows_nothing_but_silence_and_heals(two: list[Host]) -> None:
    a, b = two
    with python(a, SINK) as sink:
        assert line(sink) == "listening"
        with python(b, SOURCE, a.address) as source:
            write(source, "10\n")
            assert line(sink) == "10"
            b.link_down()
            write(source, "20\n")
            sent = b.run("sh", "-c", "cat /proc/net/tcp | wc -l")
            assert sent.strip() == "2", "the connection stays, as far as its end knows"
            assert sink.poll() is None and source.poll() is None
            b.link_up()
            assert line(sink) == "20", "the kernel sends again what got lost"
            a.kill_everything()
            b.kill_everything()


def test_a_rate_limits_both_directions(two: list[Host]) -> None:
    a, b = two
    size = 4_000_000
    with python(a, RECEIVER) as on_a, python(b, RECEIVER) as on_b:
        assert line(on_a) == line(on_b) == "listening"
        b.limit("40mbit")
        there = float(b.run(sys.executable, "-c", SECONDS, a.address, str(size)))
        back = float(a.run(sys.executable, "-c", SECONDS, b.address, str(size)))
        b.limit("10gbit")
        fast = float(b.run(sys.executable, "-c", SECONDS, a.address, str(size)))
        for host in two:
            host.kill_everything()
    # 4 MB at 40 Mbit/s take 0.8 s, less what the bucket lets through at once. A busy machine is slower, never faster.
    assert min(there, back) > 0.6 and fast < min(there, back), (there, back, fast)


def test_a_dead_hosts_processes_are_all_gone_and_its_peers_are_told(two: list[Host]) -> None:
    a, b = two
    with python(a, SINK) as sink:
        assert line(sink) == "listening"
        with python(b, SOURCE, a.address) as source, b.popen(["sh", "-c", "setsid sleep 600 & exec sleep 600"]) as shell:
            write(source, "10\n")
            assert line(sink) == "10"
            until("sleep on its own", lambda: len(b.pids()) == 4)
            doomed = list(b.pids().values())
            b.kill_everything()
            assert source.wait() == shell.wait() == -signal.SIGKILL
            assert not any(Path(f"/proc/{pid}").exists() for pid in doomed)
            assert sink.wait() == 0, "the end of the connection"
    assert b.run("hostname").strip() == b.name, "the host can be used again"


def test_a_host_without_power_is_silent(two: list[Host]) -> None:
    a, b = two
    with python(a, SINK) as sink:
        assert line(sink) == "listening"
        with python(b, SOURCE, a.address) as source:
            write(source, "10\n")
            assert line(sink) == "10"
            b.power_off()
            assert source.wait() == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            sink.wait(0.5)
        b.power_on()
        assert "state UP" in b.run("ip", "link", "show", "eth0")
        a.kill_everything()


def test_orphans_leave_no_zombie(two: list[Host]) -> None:
    host = two[0]
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
