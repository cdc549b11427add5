"""Valid examples of every message of a job, and mutations of them: what a peer with the right token may send and must not."""

from __future__ import annotations

import random
from typing import Any

import torch

from offbeat.journal.summary import Tally
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of

_model = torch.nn.Linear(4, 1)
_optimizer = torch.optim.SGD(_model.parameters(), lr=0.01)
LAYOUT, OPTIMIZER = Layout.of(_model, _optimizer).to_wire(), spec_of(_optimizer).to_wire()
HYPER = hyperparameters(_optimizer)

PUSH = {
    "incarnation": 0,
    "version": 0,
    "samples": 2,
    "compute_s": 0.1,
    "leases": [],
    "nonfinite": None,
    "loss": 0.5,
    "steps": 1,
    "held": [],
}
WANT = {"incarnation": 0, "pool": 0, "epoch": 0, "size": 100, "batch": 4}
HELLO = {"worker": 2, "pid": 1, "sync": "asp", "local_only": None, "layout": LAYOUT, "optimizer": OPTIMIZER}
REPLICA = {"map": [["parameters", {"tensor": ["uint8", [4], 0]}]]}
FROM_WORKER: dict[str, dict[str, Any]] = {
    "hello": HELLO,
    "ready": {},
    "heard": {"incarnation": 0, "stuck_s": 0.0},
    "stands": {"incarnation": 0, "still": True},
    "skipped": {"incarnation": 0, "leases": []},
    "initial": {"number": 7, "provided": True, "replica": REPLICA, "from": 0},
    "push": {"number": 8, "steps": 3, "push": PUSH, "hyper": HYPER, "first": [[1, 77, True]]},
    "got": {},
    "abandoned": {"work": {"incarnation": 0, "version": 0, "compute_s": 0.1, "leases": []}},
    "buffers": {"layout": [["float32", [3]], ["int64", []]], "changed": [0, 1]},
    "metrics": {"values": {"accuracy": 0.5}},
    "met": {},
    "place": {"incarnation": 0, "pull": False},
    "part": {"version": 3, "nth": 0, "part": [["torch", 1]]},
    "parts": {"version": 3, "nth": 0, "last": False},
    "checkpoint_part": {"version": 3, "final": True, "part": {"map": [["buffers", {"list": []}]]}},
    "outside": {"incarnation": 0, "reason": "left out"},
    "voided": {"number": 3},
    "leaving": {},
    "donation": {"to": 1, "number": 3, "failed": None, "replica": REPLICA, "from": 0},
    "pull": {"incarnation": 0},
    "samples": {"want": WANT},
    "epoch": {"want": {name: value for name, value in WANT.items() if name != "batch"}},
    "barrier": {"incarnation": 0, "number": 0},
    "left": {"incarnation": 0, "noticed": False},
    "abort": {"reason": "enough"},
    "state": {"do": "offer", "pieces": [[0, "momentum_buffer", 0, 4, None, "float32"]]},
}
ROUNDS = {"rounds": {"worker": 2, "index": 0}}
"""The first message of a rank's connection to the sequencer."""
FAILING = {
    "failing": {
        "worker": 2,
        "reason": "ValueError",
        "pushed": True,
        "type": "ValueError",
        "place": "train.py:12",
        "final": False,
        "over": False,
    }
}
TO_SHARD: dict[str, dict[str, Any]] = {
    "attach": {"worker": 2, "in_place": False},
    "push": {"worker": 2, "number": 8, "steps": 3, "push": PUSH, "hyper": HYPER},
    "got": {},
    "initial": {"worker": 2, "number": 7, "provided": True},
    "state": FROM_WORKER["state"],
}
CALL = {"shard": {"number": 1}}
FROM_SHARD: dict[str, dict[str, Any]] = {
    "arrived": {"worker": 2, "number": 8, "shard": 1, "steps": 3, "push": PUSH, "hyper": HYPER},
    "initialised": {"worker": 2, "number": 7, "shard": 1},
    "measured": {"version": 1, "norms": [[1.0], 1.0, None], "shard": 1},
    "saved": {"version": 1, "failed": None, "cut_off": False, "shard": 1},
}
FROM_SERVER_0: dict[str, dict[str, Any]] = {
    "setup": {"layout": LAYOUT, "optimizer": OPTIMIZER, "sync": "asp", "servers": 2},
    "orders": {"orders": [{"do": "release", "worker": 0}]},
}
ORDERS: dict[str, dict[str, Any]] = {
    f"orders {order['do']}": {"orders": [order]}
    for order in (
        {"do": "enter", "worker": 2},
        {"do": "initialise", "worker": 2},
        {"do": "state", "worker": 2},
        {"do": "forget", "worker": 2},
        {"do": "gather", "worker": 2, "weight": 1.0},
        {"do": "save", "version": 1, "name": ".partial-00000001-0123abcd"},
        {"do": "fold", "version": 1, "parts": [[2, 0.5]], "sums": [], "hyper": HYPER, "scale": 1.0},
        {"do": "discard", "worker": 2, "number": 8},
        {"do": "publish", "workers": [2], "chief": 0},
        {
            "do": "release",
            "worker": 2,
            "serial": 1,
            "version": 1,
            "incarnation": 1,
            "chief": 0,
            "begins": True,
            "exact": False,
            "anew": False,
            "plan": [None, None, None],
        },
    )
}
"""Orders of server 0, one of each kind."""
WHERE = {"address": '[["node1", ["127.0.0.1", 29500], ""]]'}
"""Where a standby listens."""
FROM_SUPERVISOR: dict[str, dict[str, Any]] = {
    "job": {"settings": {"workers": 3, "servers": 1, "slow": [], "kill": [], "late": []}, "servers": "[]"},
    "finish": {"ok": True, "reason": "enough"},
    "process": {"fields": {"role": "worker", "number": 1, "what": "exited", "detail": ""}},
    "lost": {"worker": 0, "reason": "gone"},
    "ended": {"worker": 0},
    "checkpoint": {"within_s": 18.0},
    "records_taken": {},
    "kept": {"name": "log"},
    "stand_by": {"settings": {"workers": 3, "servers": 1, "slow": [], "kill": [], "late": []}, "servers": "[]", "key": "c4"}
    | WHERE
    | {"runs": True},
    "lead": {"term": 2, "servers": "[]"},
    "alone": {},
    "fenced": {"term": 2},
    "moved": {"servers": "[]"},
}
FROM_STANDBY: dict[str, dict[str, Any]] = {
    "follow": {"number": 0, "key": "c4", **WHERE},
    "acknowledged": {"at": 1},
    "serves": {"session": "3f"},
}
FROM_LEADER: dict[str, dict[str, Any]] = {
    "record": {"at": 1, "done": [0, 0]},
    "bytes": {"start": 0, "nbytes": 0, "fold": {"hyper": None, "scale": 1.0, "released": [0]}},
    "state": {"at": 1, "now": 0.5, "done": [0, 0], "blocks": 1},
}
AWAIT = {"await": {"session": "3f"}}
LEADING = {"leading": {"term": 2}}
STANDBY = {"standby": WHERE}
HEARD = {"confirm": {"received": 0}, "again": {"received": 0}}
RESUME = {"resume": {"session": "3f", "received": 0}}
"""The first message of a link over a socket, from either end."""
SUMMARY = Tally.of(
    [
        {"kind": "job", "t": 0, "format": 1, "sync": "asp", "workers": 2, "servers": 1, "seed": 0},
        {"kind": "release", "t": 0.5, "worker": 0, "incarnation": 1, "version": 0, "clock": 0, "reason": ""},
        {"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "version": 0, "samples": 8, "compute_s": 0.9},
        {"kind": "warning", "t": 1.5, "about": "clip", "workers": [0], "step": 3, "detail": "gradients are clipped"},
        {"kind": "fault", "t": 1.5, "worker": 0, "what": "slow", "detail": ""},
        {"kind": "metrics", "t": 1.5, "worker": 0, "version": 0, "values": {"accuracy": float("nan")}},
    ]
).summary()
TO_SUPERVISOR: dict[str, dict[str, Any]] = {
    "listening": {"number": 0, "address": ["host", ["127.0.0.1", 80], "local"]},
    "loading": {},
    "alive": {},
    "standing": {"worker": 1, "pid": 77, "standing": "stuck", "seconds": 1.0},
    "status": {"snapshot": SUMMARY},
    "summary": {"summary": SUMMARY},
    "failed": {"reason": "enough", "mistake": False},
    "failing": {**FAILING["failing"], "before": 1},
    "journal_failed": {"reason": "no space left on device"},
    "noticed": {"signal": "SIGTERM"},
    "checkpoint": {"version": 3, "failed": None, "missing": [1]},
    "kill": {"worker": 0},
    "records": {"first": 0, "count": 2},
    "keep": {"name": "log"},
    "drop": {"name": "log"},
    "mortal": {"reason": "a rule of shard scope", "lack": False},
    "followed": WHERE,
    "standby_gone": {"reason": "end of stream", **WHERE},
}
RELEASE = {"serial": 1, "incarnation": 1, "version": 3, "chief": 0, "begins": True, "plan": [None, None, None]}
TO_WORKER: dict[str, dict[str, Any]] = {
    "welcome": {"in_place": False, "sync": "asp", "checkpoints": True},
    "attached": {},
    "joined": {"incarnation": 1},
    "provide": {},
    "parameters": RELEASE,
    "block": {"shard": 0, "block": 2, "chief": None},
    "buffers": {"layout": FROM_WORKER["buffers"]["layout"]},
    "interrupt": {"version": 3, "at_once": False},
    "donate": {"to": 1, "number": 2, "ticket": [4]},
    "meet": {"addresses": [[[0, ["host", ["127.0.0.1", 80], "local"]]]]},
    "fence": {"incarnation": 1},
    "unused": {"incarnation": 1, "number": 7},
    "grant": {"lease": 0, "epoch": 0, "start": 0, "stop": 4, "parts": []},
    "no_more": {"epoch": 0, "refreshed": False, "report": None, "over": False},
    "barrier_passed": {"number": 0, "version": 3, "workers": [0, 1], "past": False},
    "goes_on": {"steps": 3, "restarted": True},
    "job_over": {"reason": "the scripts of the first workers have ended"},
    "epoch_ended": {"epoch": 0, "report": {"indices": 4}},
    "farewell": {},
    "chief": {"chief": 1},
    "place": {"released": True, "version": 3, "places": [[0, None]]},
    "parts": {"awaited": [1], "parts": [[0, [["torch", 1]], 8]]},
    "checkpoint": {"version": 3, "random": True, "rest": True, "frozen": False, "others": [[0, True, False]]},
    "resume_part": {"part": {"map": [["buffers", {"list": []}], ["groups", {"list": []}], ["schedulers", {"list": []}]]}},
    "noted": {},
    "refused": {"reason": "no"},
    "state": {"pieces": []},
}

FROM_AGENT: dict[str, dict[str, Any]] = {
    "agent": {
        "seat": None,
        "node": "node1",
        "host": "host 1",
        "local_size": 1,
        "workers": 2,
        "port": 4000,
        "address": "",
        "versions": ["offbeat 0.1.0", "torch 2.9.1"],
    },
    "started": {"child": 1, "pid": 77},
    "said": {"child": 1, "error": False},
    "ended": {"child": 1, "status": -9},
    "alive": {},
    "leaving": {"reason": "told to end"},
}
TO_AGENT: dict[str, dict[str, Any]] = {
    "seated": {"seat": 0, "timeout_s": 10.0},
    "refused": {"reason": "no free seat"},
    "start": {"child": 1, "role": "worker", "number": 0, "variables": ["OFFBEAT_WORKER", "0"]},
    "signal": {"child": 1, "number": 15},
    "stacks": {"child": 1},
    "strike": {"child": 1},
    "heard": {},
    "alive": {},
    "over": {"status": 0, "reason": "every worker's script has ended", "says": False},
}
FIRST: dict[str, dict[str, Any]] = {"hello": {"peer": 2}}
"""Of rounds across hosts."""
GO = [0, 0, [[0, 0, 0, 1.0], [1, 1, 1, 0.5]], 3, [0, 1, 2], 0, 1]
TO_SEAT: dict[str, dict[str, Any]] = {
    "arrive": {"b": 0, "f": 1.0, "w": 1},
    "catch": {},
    "read": {"n": 0},
    "resume": {},
    "let": {"rank": 1, "version": 0, "ticket": 1, "pause": True},
    "part": {},
    "report": {"v": 1, "upto": 0, "held": [0], "writes": [0] * 6},
    "has": {"n": 0},
    "cut": {"rank": 0, "why": "nonsense"},
}
BETWEEN_RANKS: dict[str, dict[str, Any]] = {
    "on": {"go": [*GO[:4], [2, 0, 1], *GO[5:]]},
    "piece": {"n": 0, "v": 0, "t": 2},
    "handed": {"n": 0, "v": 0, "s": 0},
    "done": {"n": 0, "f": 0, "s": 0},
    "what": {},
    "memory": {},
}
FROM_SEAT: dict[str, dict[str, Any]] = {
    "answer": {"answer": [2, 0, False, True, 1]},
    "go": {"go": GO},
    "halt": {"v": 1, "f": 0, "s": 0, "ranks": [0, 1, 2]},
    "hand": {"n": 0, "v": 1, "to": [1]},
    "hold": {},
    "say": {"n": 0},
    "fence": {"why": "declared dead"},
}
"""Of rounds across hosts, three ranks; the sender is rank 2."""
TO_TABLE: dict[str, dict[str, Any]] = {
    "begin": {},
    "step": {"gradient": True},
    "rest": {},
    "took": {"got": [[1, 3]]},
    "resume": {},
    "let": {"rank": 1, "ticket": 1},
}
FROM_TABLE: dict[str, dict[str, Any]] = {
    "answer": {"n": 1, "all": 3, "ahead": [[1, 2]], "own": 0.5, "sent": [[1, 1, 0.5, 0.5]], "mass": 1.0, "partner": None},
    "raised": {"n": 2},
    "gone": {"rank": 1},
    "fence": {"why": "declared dead"},
}
BETWEEN_GOSSIPS: dict[str, dict[str, Any]] = {kind: {"n": 1} for kind in ("want", "none", "vector", "pair", "mean")}
"""Of gossip across hosts, three ranks."""


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


NASTY: list[Any] = [
    None,
    True,
    -1,
    -(1 << 63),
    3,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
    float("nan"),
    float("inf"),
    -1e308,
    0.5,
    "",
    "x" * 70_000,
    "\0\n\x1b[2J",
    b"bytes",
    [],
    [[]],
    [1, 1],
    {},
    {"a": {}},
    {1: 2},
    nested(30),
    nested(400),
    list(range(5000)),
    {"tensor": ["float32", [1 << 40], -1]},
]
"""Values that some field is not made for."""


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a message something stands."""
    found = [at]
    if isinstance(value, dict | list) and len(at) < 12 and len(value) < 100:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(item, (*at, key))
    return found


def _copied(value: Any, depth: int = 12) -> Any:
    """A copy of what `paths` can reach; what is deeper, or long, is nobody's to change."""
    if depth and isinstance(value, dict):
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list) and len(value) < 100:
        return [_copied(item, depth - 1) for item in value]
    return value


def mutated(header: dict[str, Any], draw: random.Random, *, times: int = 1) -> dict[str, Any]:
    """A header in which something has been replaced, removed, doubled or added."""
    for _ in range(times):
        header = _copied(header)
        *above, last = draw.choice(paths(header)[1:])
        holder: Any = header
        for key in above:
            holder = holder[key]
        what = draw.random()
        if what < 0.15 and isinstance(holder, dict):
            del holder[last]
        elif what < 0.25 and isinstance(holder, list):
            holder.append(_copied(holder[last]))
        elif what < 0.3 and isinstance(holder, dict):
            holder[draw.choice(["extra", "worker", "shard", "_region", "_x", ""])] = draw.choice(NASTY)
        else:
            holder[last] = draw.choice(NASTY)
        if len(header) == 0:
            break
    return header
