"""What the fuzzer has found, one test each: the message, and the sentence that answers it now."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests import malformed
from tests.fuzz.frames import encoded
from tests.fuzz.launchers import ToAgent, ToSupervisor
from tests.fuzz.receiver import Outcome, Receiver, Tracebacks
from tests.fuzz.servers import FromServer0, FromShard, FromSupervisor, FromWorker, FromWorkerToShard, ServerReceiver
from tests.fuzz.sockets import Carried

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.parameter_server.commands import Measurements
from offbeat.runtime.parameter_server.shard import passed_on
from offbeat.runtime.worker_requests import METRICS_MAX
from offbeat.tensors.shard import SquaredNorms
from offbeat.transport.base import Message
from offbeat.transport.schema import REASON_MAX, readable

Made = Callable[..., Any]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a receiver whose job has this rule, in the first of its states that has joined."""
    made: list[Receiver] = []

    def make(kind: type[Receiver], sync: str = "asp") -> Receiver:
        draw = random.Random(0)
        monkeypatch.setattr(draw, "random", lambda: 0.0)
        receiver = kind(draw)
        if isinstance(receiver, ServerReceiver):
            monkeypatch.setattr(kind, "rules", (sync,))
        receiver.begin()
        made.append(receiver)
        return receiver

    yield make
    for receiver in made:
        receiver.end()


def handed(receiver: Any, header: dict[str, Any], payload: bytes = b"") -> None:
    """Let a server have a message. No error of its own may be logged."""
    with Tracebacks() as tracebacks:
        try:
            receiver.server._arrived(receiver.line, Message(header, memoryview(payload), ()))
        finally:
            tracebacks.check()


@pytest.mark.parametrize(
    "order",
    [
        {"do": "state", "worker": 1},
        {"do": "initialise", "worker": 1},
        {"do": "fold", "version": 1, "parts": [[1, 1.0]], "sums": [], "hyper": malformed.HYPER, "scale": 1.0},
    ],
    ids=lambda order: order["do"],
)
def test_orders_about_a_worker_that_is_not_known(order: dict[str, Any], begun: Made) -> None:
    """They were a KeyError, which the last guard logged with its traceback."""
    receiver = begun(FromServer0)
    with pytest.raises(JobError, match="server 1 could not do what the job has decided: KeyError: 1"):
        handed(receiver, {"kind": "orders", "orders": [order]})


def test_initial_parameters_of_a_process_that_is_dead_by_now(begun: Made) -> None:
    """They were a KeyError, too."""
    receiver = begun(FromWorkerToShard, "bsp")
    receiver.tell(receiver.of_server_0, {"kind": "orders", "orders": [{"do": "forget", "worker": 2}]})
    handed(receiver, {"kind": "initial", "worker": 2, "number": 1, "provided": False})
    assert not receiver.line.closed


@pytest.mark.parametrize("lr", [1e300, 70_000.0, (1 << 64) - 1, -(1 << 63), float("nan")])
def test_settings_with_which_torch_makes_no_step(lr: float, begun: Made) -> None:
    """The error came in the middle of a fold, and cost the worker whose message had completed it the connection."""
    hyper = [{**malformed.HYPER[0], "lr": lr}]
    fold = {"do": "fold", "version": 1, "parts": [[2, 1.0]], "sums": [], "hyper": hyper, "scale": 1.0}
    with pytest.raises(JobError, match="lr of parameter group 0 must be finite, and from -65504 to 65504"):
        handed(begun(FromServer0), {"kind": "orders", "orders": [fold]})
    receiver = begun(FromWorker)
    handed(receiver, {"kind": "push", **malformed.FROM_WORKER["push"], "push": {**malformed.PUSH, "incarnation": 1}, "hyper": hyper})
    assert receiver.line.closed


def test_fields_of_the_transport_are_not_passed_on() -> None:
    assert passed_on({"do": "release", "worker": 2, "_x": 1, "version": 3}) == {"version": 3}


@pytest.mark.parametrize(
    ("order", "seen"),
    [
        ({"do": "delete", "worker": 1}, r"orders\.0\.do = a str of length 6 \(expected one of enter, "),
        ({"do": "gather", "worker": 1}, r"orders\.0\.weight = nothing"),
        ({"do": "fold", "version": 1, "parts": [[1, 8, 1.0]], "sums": [], "hyper": None, "scale": 1.0}, r"orders\.0\.parts\.0 = a list of"),
    ],
    ids=["do", "weight", "parts"],
)
def test_orders_that_do_not_fit(order: dict[str, Any], seen: str, begun: Made) -> None:
    with pytest.raises(JobError, match=seen):
        handed(begun(FromServer0), {"kind": "orders", "orders": [order]})


def test_a_push_with_a_description_costs_only_the_worker_that_sends_it_to_another_server(begun: Made) -> None:
    """Server 1 passed it on under a rule of job scope, an AssertionError at server 0 ended the connection to server 1, and so the job."""
    push = {"kind": "push", **malformed.TO_SHARD["push"]}
    receiver = begun(FromWorkerToShard)
    handed(receiver, push)
    assert receiver.line.closed
    receiver.hub.inbox.clear()
    coordinator = begun(FromShard)
    header = {**malformed.FROM_SHARD["arrived"], "kind": "arrived", "push": {**malformed.PUSH, "incarnation": 1}}
    handed(coordinator, header)  # also if server 1 passes it on
    assert not coordinator.line.closed
    coordinator.server.tick()


@pytest.mark.parametrize("sync", ["asp", "psp(c=1)"])
def test_a_push_without_a_description(sync: str, begun: Made) -> None:
    receiver = begun(FromWorkerToShard, sync)
    handed(receiver, {"kind": "push", "worker": 2, "number": 8}, bytes(malformed.LAYOUT["nbytes"]))
    assert receiver.line.closed == (sync != "asp")


def test_measurements_that_nobody_awaits_are_refused_and_not_kept(begun: Made) -> None:
    measurements = Measurements(2)
    with pytest.raises(ProtocolError, match="a measurement of version 7 came"):
        measurements.note(7, SquaredNorms((1.0,), 1.0, None))
    measurements.ordered(7, 0.1)
    measurements.note(7, SquaredNorms((1.0,), 1.0, None))
    with pytest.raises(ProtocolError, match=r"version 7 has 2 parts .expected 1"):
        measurements.note(7, SquaredNorms((1.0, 1.0), 1.0, None))
    with pytest.raises(JobError, match="a measurement of version 1 came"):
        handed(begun(FromShard), {"kind": "measured", **malformed.FROM_SHARD["measured"]})


def test_a_server_that_speaks_before_any_worker_has_joined(begun: Made) -> None:
    receiver = begun(FromShard)
    line = receiver.server
    line.service.state.job.first.driver.plane = None
    with pytest.raises(JobError, match="server 1 sent 'arrived' before a worker has joined"):
        handed(receiver, {"kind": "arrived", **malformed.FROM_SHARD["arrived"]})


def test_fields_of_a_newer_supervisor_are_ignored(begun: Made) -> None:
    """Each was an argument of a function, and a TypeError ended the server."""
    receiver = begun(FromSupervisor)
    fields = {**malformed.FROM_SUPERVISOR["process"]["fields"], "newer": 1}
    handed(receiver, {"kind": "process", "fields": fields})
    with pytest.raises(JobError, match="the supervisor sent 'job' a second time"):
        handed(receiver, {"kind": "job", **malformed.FROM_SUPERVISOR["job"]})


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "status", "snapshot": {"version": 1}},
        {"kind": "status", "snapshot": {**malformed.SUMMARY, "per_worker": [{"worker": 0}]}},
        {"kind": "status", "snapshot": {**malformed.SUMMARY, "loss": "much"}},
        {"kind": "standing", "worker": 1, "pid": 77, "standing": "dead"},
        {"kind": "standing", "worker": 1, "pid": 77, "standing": "stuck"},
    ],
    ids=["status", "worker", "loss", "dead", "stuck"],
)
def test_the_supervisor_outlives_a_report_without_what_it_computes_with(header: dict[str, Any], begun: Made) -> None:
    """Each was a KeyError that ended the supervisor."""
    receiver = begun(ToSupervisor)
    assert receiver.receive(Message(header, memoryview(b""), ())) is Outcome.REFUSED
    reason, mistake = receiver.supervisor._failure
    assert reason.startswith("server 0 broke the protocol: ") and "(expected " in reason and not mistake


@pytest.mark.parametrize(
    "variables", [["A"], ["LD_PRELOAD", "x.so"], ["PYTHONPATH", "/"], ["OFFBEAT_=", "1"], ["OFFBEAT_WORKER", "0\0"]], ids=str
)
def test_an_agent_takes_only_variables_of_the_job(variables: list[str], begun: Made) -> None:
    """Others decide which code a process runs; one without a value, or with a zero byte, ended the agent."""
    receiver = begun(ToAgent)
    with pytest.raises(ProtocolError, match=r"the supervisor sent 'start' with variables"):
        receiver.receive(Message({"kind": "start", **malformed.TO_AGENT["start"], "variables": variables}, memoryview(b""), ()))
    assert receiver.agent._waiting == {}


def test_what_a_stranger_writes_moves_no_cursor_and_is_short(begun: Made) -> None:
    """A reason is logged, also of a peer that has not shown the token."""
    assert readable("\0\n\x1b[2J" + "x" * 5000) == "???[2J" + "x" * (REASON_MAX - 6)
    carried = begun(Carried)
    for reason, seen in {"\x1b[2J": "refused: ?[2J", "": "gives no reason", 7: "gives no reason"}.items():
        carried.peer.send(encoded({"_refused": reason}))
        _, closed = carried.connection.receive()
        assert closed is not None and seen in closed.reason
        carried.end()
        carried.begin()


@pytest.mark.parametrize("region", [["push", "x" * 70_000], ["x" * 70_000, 3]])
def test_a_refused_region_is_not_repeated(region: list[Any], begun: Made) -> None:
    carried = begun(Carried)
    data = encoded({"kind": "push", "_region": region})
    reason = None
    while reason is None:
        data = data[carried.peer.send(data) :]
        _, closed = carried.connection.receive()
        reason = None if closed is None else closed.reason
    assert "a str of length 70000" in reason and len(reason) < 300


def test_a_worker_says_once_what_it_has_loaded(begun: Made) -> None:
    """A later process of the same worker could end a job that had long begun: its checksum was compared with that of the first."""
    receiver = begun(FromWorker)
    push = {"kind": "push", **malformed.FROM_WORKER["push"], "push": {**malformed.PUSH, "incarnation": 1}, "loaded": 0}
    handed(receiver, push)
    assert not receiver.line.closed
    handed(receiver, {**push, "number": 9, "loaded": 7})
    assert receiver.line.closed


def test_names_of_metrics_do_not_pile_up(begun: Made) -> None:
    receiver = begun(FromWorker)
    for first in range(0, METRICS_MAX, 1000):
        handed(receiver, {"kind": "metrics", "values": {f"metric {number}": 1.0 for number in range(first, first + 1000)}})
    handed(receiver, {"kind": "metrics", "values": {"metric 7": 2.0}})
    assert not receiver.line.closed
    for _ in range(2):
        handed(receiver, {"kind": "metrics", "values": {"one more": 1.0, "metric 8": 3.0}})
    assert not receiver.line.closed
    summary = receiver.server.service.state.job.tally.summary()
    assert len(summary["metrics"]) == METRICS_MAX and summary["metrics"]["metric 8"] == 3.0
    assert [warning["about"] for warning in summary["warnings"]] == ["names_of_metrics"]
