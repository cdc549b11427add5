"""Every kind of message is checked where it enters: its fields, and whether it can be sent now. What is refused has changed nothing."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
from tests import malformed
from tests.support.hand_driven_coordinator import Worker, coordinator

from offbeat import runtime
from offbeat.errors import JobError, ProtocolError
from offbeat.launch import agent_messages
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.live_job import LiveJob
from offbeat.runtime.recovery.replica_messages import FROM_LEADER, FROM_STANDBY
from offbeat.tensors.optimizers import check_changed, hyperparameters, spec_of
from offbeat.transport.base import Message
from offbeat.transport.link import AWAIT, HEARD, LEADING, RESUME, STANDBY
from offbeat.transport.schema import Kinds
from offbeat.transport.shm import MemoryBlock

TABLES: dict[str, tuple[Kinds, dict[str, dict[str, Any]]]] = {
    "from worker": (messages.FROM_WORKER, malformed.FROM_WORKER),
    "failing": (messages.FAILING, malformed.FAILING),
    "rounds": (messages.ROUNDS, malformed.ROUNDS),
    "to shard": (messages.TO_SHARD, malformed.TO_SHARD),
    "call": (messages.CALL, malformed.CALL),
    "from shard": (messages.FROM_SHARD, malformed.FROM_SHARD),
    "from server 0": (messages.FROM_SERVER_0, malformed.FROM_SERVER_0),
    "from supervisor": (messages.FROM_SUPERVISOR, malformed.FROM_SUPERVISOR),
    "to supervisor": (messages.TO_SUPERVISOR, malformed.TO_SUPERVISOR),
    "to worker": (messages.TO_WORKER, malformed.TO_WORKER),
    "link": (RESUME, malformed.RESUME),
    "await": (AWAIT, malformed.AWAIT),
    "leading": (LEADING, malformed.LEADING),
    "standby": (STANDBY, malformed.STANDBY),
    "heard": (HEARD, malformed.HEARD),
    "from standby": (FROM_STANDBY, malformed.FROM_STANDBY),
    "from leader": (FROM_LEADER, malformed.FROM_LEADER),
    "from agent": (agent_messages.FROM_AGENT, malformed.FROM_AGENT),
    "to agent": (agent_messages.TO_AGENT, malformed.TO_AGENT),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_kind_lets_its_example_pass_and_names_what_does_not_fit(table: str) -> None:
    kinds, examples = TABLES[table]
    assert examples.keys() | {"noted"} >= kinds.kinds.keys()
    for kind, fields in examples.items():
        assert kinds.check({"kind": kind, **fields, "of a newer peer": 1}, "worker 2") == kind
        for field, value in fields.items():
            if field in ("layout", "optimizer", "hyper", "pieces", "snapshot", "summary", "report", "replica", "settings", "part"):
                continue  # somebody else checks these, or any plain data will do
            wrong: Any = {"a": nothing} if (nothing := object()) and not isinstance(value, dict) else 7
            with pytest.raises(ProtocolError, match=rf"worker 2 sent '{kind}' with {field}.* = .* \(expected "):
                kinds.check({"kind": kind, **fields, field: wrong}, "worker 2")
    strange: list[Any] = [None, 3, "x", "x" * 1000, [], b"push"]
    for unknown in strange:
        with pytest.raises(ProtocolError, match=r"^worker 2 sent a message of unknown kind .{1,30} \(expected one of "):
            kinds.check({"kind": unknown}, "worker 2")


@pytest.mark.parametrize("table", [table for table in TABLES if "agent" not in table])
def test_the_table_of_the_package_names_every_kind(table: str) -> None:
    assert runtime.__doc__ is not None
    assert {kind for kind in TABLES[table][0].kinds if not re.search(rf"\b{kind}\b", runtime.__doc__)} == set()


def test_errors_show_numbers_and_types_and_never_what_a_peer_has_written() -> None:
    for value, seen in {"secret " * 9: "a str of length 63", b"secret": "a bytes of length 6", 1 << 63: str(1 << 63), -1.5: "-1.5"}.items():
        with pytest.raises(ProtocolError) as caught:
            messages.FROM_WORKER.check({"kind": "heard", "incarnation": value}, "worker 1")
        assert str(caught.value) == f"worker 1 sent 'heard' with incarnation = {seen} (expected an integer from 0 to 2**62)"
    for value in (float("nan"), float("inf"), -0.1, "1", True):
        with pytest.raises(ProtocolError, match=r"'push' with push\.compute_s = "):
            messages.FROM_WORKER.check(
                {"kind": "push", **malformed.FROM_WORKER["push"], "push": {**malformed.PUSH, "compute_s": value}}, ""
            )
    with pytest.raises(ProtocolError, match="expected none"):
        messages.FROM_WORKER.check({"kind": "heard", "incarnation": 1, "stuck_s": 0.0}, "worker 1", payload_nbytes=5)
    with pytest.raises(ProtocolError, match=r"5 blocks of memory \(expected at most 4\)"):
        messages.FROM_WORKER.check({"kind": "hello", **malformed.HELLO}, "worker 1", blocks=5)


class Intruder(Worker):
    """A worker of a job under way that says what it likes."""

    def __init__(self, sync: str = "asp") -> None:
        host = coordinator(JobSettings(workers=2))
        self.honest = Worker(host, 0, sync=sync)
        super().__init__(host, 1, sync=sync)
        for worker in (self.honest, self):
            worker.join(0.0)
        self.honest.provide(0.1)
        self.honest.push(0.2)

    def train(self) -> None:
        """The other goes on."""
        before = len(self.honest.line.got("parameters"))
        self.honest.push(0.4)
        assert len(self.honest.line.got("parameters")) == before + 1

    def end(self) -> None:
        self.host.close(True, "enough", 1.0)
        self.host.release_memory()


def _refused(intruder: Intruder, kind: str, match: str, **fields: Any) -> None:
    with pytest.raises(ProtocolError, match=match):
        intruder.say(kind, 0.3, **fields)
    intruder.train()


def test_what_fits_and_cannot_be_now_is_refused() -> None:
    intruder = Intruder()
    push = {**malformed.PUSH, "incarnation": 1}

    def refused(kind: str, match: str, **fields: Any) -> None:
        _refused(intruder, kind, match, **fields)

    refused("heard", r"worker 1 sent 'heard' with incarnation = 2 \(expected at most 1\)", incarnation=2, stuck_s=0.0)
    refused("push", r"'push' with incarnation = 9", number=1, steps=1, push={**push, "incarnation": 9})
    refused("push", r"push\.version = 1000 \(expected at most \d", number=1, steps=1, push={**push, "version": 1000})
    refused("push", r"lease named twice", number=1, steps=1, push={**push, "leases": [3, 3]})
    settings: list[Any] = [7, [], [7], [{}], [{**malformed.HYPER[0], "lr": float("nan")}], [{**malformed.HYPER[0], "momentum": "much"}]]
    for hyper in settings:
        refused("push", "settings", number=1, steps=1, push=push, hyper=hyper)
    refused("samples", r"incarnation = 3", want={**malformed.WANT, "incarnation": 3})
    refused("hello", "a second time", **malformed.HELLO)
    refused("initial", "number", number=-1, provided=False)
    refused("buffers", "layout of buffers", layout=[["float32", [-1, -3]]], changed=[0])
    refused("buffers", r"changed its buffer 1 \(expected a number below 1\)", layout=[["float32", [3]]], changed=[1])
    refused("state", r"with do = a str of length 6 \(expected one of get, offer\)", do="delete")
    refused("donation", "for jobs without servers", **malformed.FROM_WORKER["donation"])
    refused("measured", "unknown kind 'measured'", **malformed.FROM_SHARD["measured"])
    intruder.end()


def test_samples_are_not_dealt_to_who_waits_for_its_push() -> None:
    """The pause that belongs to an epoch's end would else take a worker off the list of those whose push has no fate yet."""
    host = coordinator(JobSettings(workers=2))
    first, second = Worker(host, 0, sync="bsp"), Worker(host, 1, sync="bsp")
    for worker in (first, second):
        worker.join(0.0)
    early = {**malformed.WANT, "incarnation": 1}
    with pytest.raises(ProtocolError, match="before the job let it go on"):
        first.say("samples", 0.1, want=early)
    first.provide(0.1)
    first.push(0.2)
    with pytest.raises(ProtocolError, match="'epoch' before the job let it go on"):
        first.say("epoch", 0.3, want=early)
    second.push(0.4)
    assert host.first.driver.coordinator is not None
    assert host.first.driver.coordinator.version == 1
    host.close(True, "enough", 1.0)


@pytest.mark.parametrize("sync", ["asp", "bsp", "solo"])
def test_a_hello_that_does_not_fit_changes_nothing(sync: str) -> None:
    host = coordinator(JobSettings(workers=2))
    first, second = Worker(host, 0, sync=sync), Worker(host, 1, sync=sync)
    first.greet(0.0)
    small = MemoryBlock.allocate(8, "small")
    for change, match in {
        "worker": r"worker 5 is not one of this job's 2 workers",
        "layout": "layout",
        "optimizer": "SGD",
        "memory": r"blocks of memory of \[8, 8\] bytes \(expected \[\d+, \d+\]\)",
        "nothing": r"blocks of memory of \[\] bytes",
    }.items():
        if sync == "solo" and change in ("memory", "nothing"):
            continue
        with pytest.raises(ProtocolError, match=match):
            _greet_with(host, second, change, small)
    second.greet(0.1)
    assert first.line.got("welcome") and second.line.got("welcome")
    assert not first.line.got("refused")
    host.close(True, "enough", 0.2)
    host.release_memory()


def _greet_with(host: LiveJob, worker: Worker, change: str, small: MemoryBlock) -> None:
    said: list[Message] = []
    worker.host = type("Ear", (), {"on_message": lambda self, line, message, now: said.append(message)})()
    worker.greet(0.0)
    worker.host = host
    header, memory = copy.deepcopy(said[0].header), said[0].memory
    if change == "worker":
        header["worker"] = 5
    elif change in ("layout", "optimizer"):
        header[change] = {"tensors": 3, "name": "SGD"}
    elif change == "memory":
        memory = (small, small)
    elif change == "nothing":
        memory = ()
    host.on_message(worker.line, Message(header, memoryview(b""), memory), 0.05)


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp(staleness=2)", "psp(c=1)", "solo", "dpsgd", "ensemble(steps=2)"])
def test_thousands_of_mutations_raise_nothing_but_what_costs_the_connection(sync: str) -> None:
    draw = random.Random(f"{sync} 1")
    host = coordinator(JobSettings(workers=3))
    honest = [Worker(host, number, sync=sync) for number in range(2)]
    for worker in honest:
        worker.greet(0.0)
    host.on_lost(2, "never came", 0.0)
    refused = 0
    for turn in range(600):
        worker = Worker(host, 2, sync=sync) if turn % 20 == 0 else worker
        if turn % 20 == 0:
            worker.greet(0.1)
            worker.say("ready", 0.1)
        kind = draw.choice([kind for kind in malformed.FROM_WORKER if kind != "hello"])
        header = malformed.mutated({"kind": kind, **malformed.FROM_WORKER[kind]}, draw, times=draw.choice([1, 1, 2, 4]))
        if header.get("kind") == "abort" and isinstance(header.get("reason"), str):
            continue
        try:
            host.on_message(worker.line, Message(header, memoryview(bytes(draw.choice([0, 0, 12, 20]))), ()), 0.2)
        except ProtocolError:
            refused += 1
        except JobError as error:
            assert "nobody is left to copy" in str(error)  # noqa: PT017 - no rank has begun, and one came back
            break
    assert refused > 100 or sync in ("solo", "dpsgd")


def test_settings_that_a_scheduler_changes_pass_and_others_do_not() -> None:
    import torch

    optimizer = torch.optim.AdamW([torch.zeros(2)], lr=0.1)
    spec = spec_of(optimizer)
    optimizer.param_groups[0].update(lr=1, betas=(0.8, 0.9))
    check_changed(spec, hyperparameters(optimizer))
    good = hyperparameters(optimizer)[0]
    for key, value in {"lr": float("inf"), "betas": [0.9], "weight_decay": "x", "eps": None, "amsgrad": 3.5}.items():
        with pytest.raises(ProtocolError):
            check_changed(spec, [{**good, key: value}] if key != "amsgrad" else [{**good, "foreign": value}])
    others: list[Any] = [None, [], [good, good], [[]], {"0": good}]
    for groups in others:
        with pytest.raises(ProtocolError, match="settings of parameter group"):
            check_changed(spec, groups)
