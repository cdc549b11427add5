"""A process that another engine has started takes part, ends, and returns as another process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract import test_engine
from tests.contract.test_engine import WORKER, Bench

from offbeat.types import FIRST_WORKER

GUEST = """
import os, sys, time
from offbeat.launch.guest import Guest
from offbeat.runtime.job.settings import read_addresses, take_token
script, address = sys.argv[1:]
guest = Guest(0, take_token(), read_addresses(address)[0], advertise="", start_s=30.0)
assert os.environ["OFFBEAT_WORKER"] == "0" and take_token()
while not os.path.exists(script + ".end"):
    time.sleep(0.02)
guest.finish()
guest._thread.join()
sys.exit(7)
"""


def test_a_guest_is_started_lost_replaced_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_engine, "AGENT", GUEST)
    bench = Bench("agent", tmp_path)
    assert bench.engine.arrived() == [] and bench.agent is not None
    child = bench.engine.start_worker(WORKER)
    assert child is not None
    bench.wait("its number", lambda: child.pid)
    assert child.pid == bench.agent.pid, "it is its own child"
    child.strike()
    bench.wait("its loss", lambda: child.ended() is not None)
    assert child.lost is not None and bench.agent.wait(30) == -9

    bench.start_agent()
    bench.wait("its return", lambda: bench.engine.arrived() == [FIRST_WORKER])
    again = bench.engine.start_worker(WORKER)
    assert again is not None
    bench.wait("its number", lambda: again.pid)
    bench.script.with_name(bench.script.name + ".end").touch()
    assert bench.ended(again) == 0 and again.lost is None
    bench.close()
