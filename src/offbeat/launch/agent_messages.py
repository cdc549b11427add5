"""Define the messages between the supervisor and the agents that start processes for it."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from offbeat.launch.environment import TORCHRUN
from offbeat.transport.schema import Kinds, MessageSchema, Unfit, fields, flag, many, maybe, number, one_of, shown, text, whole

_child: Final = whole()
_words: Final = text(1 << 16)
_SEATS_MAX: Final = 1 << 16


def _variables(value: Any) -> None:
    """Accept variables as [name, value, name, value, ...], only offbeat's and torchrun's: others decide which code a process runs."""
    many(text(1 << 17), 1000)(value)
    if len(value) % 2:
        raise Unfit("a value for each name", shown(value))
    for index, (name, content) in enumerate(zip(value[::2], value[1::2], strict=True)):
        if name not in TORCHRUN and not (name.startswith("OFFBEAT_") and name.isidentifier()):
            raise _at(2 * index, Unfit(f"OFFBEAT_... or one of {', '.join(sorted(TORCHRUN))}", shown(name)))
        if "\0" in content:
            raise _at(2 * index + 1, Unfit("a text without zero bytes", shown(content)))


def _at(index: int, unfit: Unfit) -> Unfit:
    unfit.path.insert(0, str(index))
    return unfit


def versions() -> list[str]:
    """Return the versions of software that must be equal on all machines of a job, as texts."""
    torch = importlib.metadata.version("torch").partition("+")[0]
    return [f"offbeat {importlib.metadata.version('offbeat')}", f"torch {torch}"]


HELLO: Final = "agent"
"""The kind of an agent's first message."""

FROM_AGENT: Final = Kinds(
    {
        HELLO: MessageSchema(
            fields(
                {
                    "seat": maybe(whole(0, _SEATS_MAX)),
                    "node": text(1000),
                    "host": text(1000),
                    "local_size": whole(1, _SEATS_MAX),
                    "workers": whole(1, 1 << 16),
                    "port": whole(0, 65535),
                    "address": text(1000),
                    "versions": many(text(1000), 10),
                }
            )
        ),
        "started": MessageSchema(fields({"child": _child, "pid": whole()})),
        "said": MessageSchema(fields({"child": _child, "error": flag}), payload=True),
        "ended": MessageSchema(fields({"child": _child, "status": whole(-(1 << 10), 1 << 10)})),
        "alive": MessageSchema(),
        "leaving": MessageSchema(fields({"reason": _words})),
    }
)
"""From an agent to the supervisor."""

TO_AGENT: Final = Kinds(
    {
        "seated": MessageSchema(fields({"seat": whole(0, _SEATS_MAX), "timeout_s": number(0.0)})),
        "refused": MessageSchema(fields({"reason": _words})),
        "start": MessageSchema(fields({"child": _child, "role": one_of("server", "worker"), "number": whole(), "variables": _variables})),
        "signal": MessageSchema(fields({"child": _child, "number": whole(1, 64)})),
        "stacks": MessageSchema(fields({"child": _child})),
        "strike": MessageSchema(fields({"child": _child})),
        "heard": MessageSchema(),
        "alive": MessageSchema(),
        "over": MessageSchema(fields({"status": whole(0, 255), "reason": _words, "says": flag})),
    }
)
"""From the supervisor to an agent."""
