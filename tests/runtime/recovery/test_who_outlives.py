"""Which jobs' coordinator outlives its process where workers may be on other machines."""

from __future__ import annotations

import pytest
from tests.support.hand_driven_coordinator import Line, Mailbox, Worker

from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.live_job import LiveJob
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.transport.link import Link


@pytest.mark.parametrize(
    ("elsewhere", "sync", "why"), [(True, "asp", "not kept for a new server"), (False, "asp", None), (True, "solo", None)]
)
def test_where_gradients_may_come_over_a_network_servers_do_not(elsewhere: bool, sync: str, why: str | None) -> None:
    supervisor = Line("supervisor")
    keeper = Keeper(supervisor, {})
    keeper.elsewhere = elsewhere
    coordinators = LiveJob(JobSettings(workers=2), {}, Line("supervisor"), Mailbox(), "", lambda: 0.0, keeper)
    worker = Worker(coordinators, 0, sync=sync)
    worker.line = Link("3f", "worker 0")  # type: ignore[assignment]
    worker.greet(0.0)
    assert (keeper.given_up is None) == (why is None)
    told = [header["reason"] for header in supervisor.got("mortal")]
    assert [why in reason for reason in told] == [True] * (why is not None)
    kept = [header["name"] for header in supervisor.got("keep")]
    assert any(name.startswith("state") for name in kept) == (sync == "asp" and why is None), kept
