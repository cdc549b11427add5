"""Make the corpus anew: ``python -m tests.fuzz.corpus_maker``. Small jobs run within this process, and what they send is recorded.

Kept are at most three frames of each kind and conversation, with different fields. Kinds that these jobs do not send, such as those of
agents, come from the examples of ``tests/malformed.py``. The bytes differ from one recording to the next: numbers of processes, addresses.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import msgpack  # type: ignore[import-untyped]
import torch
from tests import malformed
from tests.fuzz.frames import CORPUS, encoded
from tests.live.harness import APART, HALVES, Job, Worker

from offbeat.errors import ProtocolError
from offbeat.launch import agent_messages
from offbeat.runtime.allreduce.multi_host.messages import FIRST, kinds_of
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.recovery.replica_messages import FROM_LEADER, FROM_STANDBY
from offbeat.transport.link import AWAIT, HEARD, RESUME
from offbeat.transport.schema import Kinds
from offbeat.transport.stream import StreamConnection

EACH_MAX = 3
PAYLOAD_NBYTES_MAX = 2000
TABLES: dict[str, tuple[Sequence[Kinds], Sequence[Mapping[str, Any]]]] = {
    "from-worker": (
        (messages.FROM_WORKER, messages.FAILING, messages.ROUNDS),
        (malformed.FROM_WORKER, malformed.FAILING, malformed.ROUNDS),
    ),
    "to-shard": ((messages.TO_SHARD,), (malformed.TO_SHARD,)),
    "from-shard": ((messages.CALL, messages.FROM_SHARD), (malformed.CALL, malformed.FROM_SHARD)),
    "from-server-0": ((messages.FROM_SERVER_0,), (malformed.FROM_SERVER_0, malformed.ORDERS)),
    "from-supervisor": ((messages.FROM_SUPERVISOR,), (malformed.FROM_SUPERVISOR,)),
    "from-leader": ((FROM_LEADER,), (malformed.FROM_LEADER,)),
    "from-standby": (
        (FROM_STANDBY, AWAIT, RESUME, HEARD),
        (malformed.FROM_STANDBY, malformed.AWAIT, malformed.RESUME, malformed.HEARD),
    ),
    "to-supervisor": ((messages.TO_SUPERVISOR,), (malformed.TO_SUPERVISOR,)),
    "to-worker": ((messages.TO_WORKER,), (malformed.TO_WORKER,)),
    "from-agent": ((agent_messages.FROM_AGENT,), (malformed.FROM_AGENT,)),
    "to-agent": ((agent_messages.TO_AGENT,), (malformed.TO_AGENT,)),
    "first-of-rank": ((FIRST,), (malformed.FIRST,)),
    "between-ranks": ((kinds_of(3, 4).requests, kinds_of(3, 4).between), (malformed.TO_SEAT, malformed.BETWEEN_RANKS)),
    "from-sequencer": ((kinds_of(3, 4).orders,), (malformed.FROM_SEAT,)),
}
"""By conversation: the kinds, and the examples."""
WITHIN_WORKER: list[Any] = [
    ["step", {"samples": 4, "nonfinite": [1]}],
    ["take", {}],
    ["DistributedOptimizer", {"pieces": [["weight", 0, [3, 4], "float32", 0], ["bias", -1, [4], "float32", 0]]}],
    {"error": "ValueError: no such file"},
    {
        "grant": [0, 1, 0, 16, [[0, 100]], None],
        "moved": False,
        "loads": True,
        "version": 3,
        "batch": None,
        "overlap": None,
        "resumes": True,
        "reports": [{"epoch": 0, "indices": 100}],
        "held": [[0, 1]],
    },
]
CARRIED: list[tuple[dict[str, Any], int]] = [
    ({"_ahead": ["push", 0, 128]}, 128),
    ({"_ahead": ["push", 0, 64]}, 64),
    ({"_ahead": ["initial", 0, 20]}, 20),
    ({"_ahead": ["pull", 0, 64]}, 64),
    ({"kind": "push", "_region": ["push", 128]}, 128),
    ({"kind": "initial", "_region": ["initial", malformed.LAYOUT["nbytes"]]}, malformed.LAYOUT["nbytes"]),
    ({"kind": "ready"}, 0),
    ({"_got": 4}, 0),
    ({"_bye": True}, 0),
    ({"_refused": "no more"}, 0),
]
_SETTINGS = JobSettings(workers=3, replicas=1).to_wire()
RECORDS: list[bytes] = [
    encoded({"kind": "record", "at": at, "done": done}, msgpack.packb(record))
    for at, done, record in (
        (1, [1, 0], ["begin", 0.0, "2026-01-01T00:00:00+00:00", _SETTINGS, "[]"]),
        (1, [0, 0], ["open", "3f", "127.0.0.1, port 80", False, False]),
        (1, [0, 0], ["tick", 0.5, []]),
        (1, [0, 0], ["closed", 0.5, "3f", "end of stream"]),
        (1, [0, 0], ["message", 0.5, "supervisor", 1, 0, {"kind": "lost", "worker": 1, "reason": "gone"}, b""]),
    )
] + [
    encoded({"kind": "bytes", "start": 0, "nbytes": 64}, bytes(64)),
    encoded({"kind": "bytes", "start": 0, "nbytes": 128, "fold": {"hyper": None, "scale": 1.0, "released": [0, 1]}}, bytes(64)),
]
"""Of a leader to its standby."""
HANDSHAKE: list[dict[str, Any]] = [
    {"_nonce": b"n" * 32},
    {"_nonce": b"n" * 32, "_proof": b"p" * 32, "_stream": [b"s" * 16, False, 0, "of-this-machine-71", ""]},
    {"_nonce": b"n" * 32, "_proof": b"p" * 32, "_stream": [b"s" * 16, True, 4096, "", ""]},
    {"_proof": b"p" * 32, "_stream": [b"", False, 4096, "of-this-machine-70", "offbeat-3f"]},
    {"_clear": True},
    {"_refused": "too many handshakes at the same time: connect again"},
]

Sent = list[tuple[dict[str, Any], bytes]]


@contextlib.contextmanager
def recording() -> Iterator[Sent]:
    """Note every message that is sent meanwhile."""
    sent: Sent = []
    before = StreamConnection.send

    def send(self: StreamConnection, header: Mapping[str, Any], **content: Any) -> None:
        payload = b"".join(bytes(part) for part in content.get("payload", ()))
        sent.append((msgpack.unpackb(msgpack.packb(header)), payload))
        before(self, header, **content)

    with mock.patch.object(StreamConnection, "send", send):
        yield sent


def trained(sync: str) -> Callable[[Worker], None]:
    """The script of a worker: an epoch of a small model."""

    def script(worker: Worker) -> None:
        torch.manual_seed(worker.number)
        model = torch.nn.Linear(4, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model, sync)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step(samples=2)
        optimizer.pull()

    return script


def recorded() -> Sent:
    """What small jobs under different rules send."""
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("bsp", {"servers": 2}),
        ("asp", {"hosts": APART, "servers": 2}),
        ("psp(c=1)", {"hosts": HALVES, "servers": 2}),
        ("solo", {"hosts": APART}),
        ("full", {"hosts": HALVES}),
        ("solo", {}),
        ("dpsgd", {}),
        ("ensemble(steps=2)", {}),
        ("dbw", {"hosts": APART}),
    ]
    with recording() as sent:
        for sync, options in jobs:
            with Job(3, **options) as job:
                job.run(trained(sync))
    return sent


def chosen(sent: Sent, kinds: Sequence[Kinds], examples: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The frames of one conversation: of each kind a few, with different fields."""
    key = kinds[0].key
    found: Sent = [({key: kind.split()[0], **fields}, b"") for table in examples for kind, fields in table.items()]
    found += [(header, payload) for header, payload in sent if key in header and len(payload) <= PAYLOAD_NBYTES_MAX]
    count: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    frames = []
    for header, payload in found:
        kind, most = str(header[key]), EACH_MAX * (4 if header[key] == "orders" else 1)
        shape = (kind, *sorted(header), *sorted(str(order.get("do")) for order in header.get("orders", ())))
        if count[kind] >= most or shape in seen or not any(_fits(table, header, payload) for table in kinds):
            continue
        seen.add(shape)
        count[kind] += 1
        frames.append(encoded(header, payload))
    missing = {kind for table in kinds for kind in table.kinds} - count.keys() - {"noted", "records", "records_taken"}
    assert not missing, f"no frame of {missing}"
    return frames


def _fits(table: Kinds, header: dict[str, Any], payload: bytes) -> bool:
    try:
        table.check(header, "", len(payload))
    except ProtocolError:
        return False
    return True


def main() -> None:
    """Write the corpus."""
    sent = recorded()
    for name, (kinds, examples) in TABLES.items():
        frames = chosen(sent, kinds, examples) + (RECORDS if name == "from-leader" else [])
        (CORPUS / f"{name}.frames").write_bytes(b"".join(frames))
        print(f"{name}: {len(frames)} frames, {sum(map(len, frames))} bytes")
    others = {
        "within-worker": [encoded({}, msgpack.packb(message)) for message in WITHIN_WORKER],
        "carried": [encoded(header, bytes(nbytes)) for header, nbytes in CARRIED],
        "handshake": [encoded(header) for header in HANDSHAKE],
    }
    for name, frames in others.items():
        (CORPUS / f"{name}.frames").write_bytes(b"".join(frames))


if __name__ == "__main__":
    main()
