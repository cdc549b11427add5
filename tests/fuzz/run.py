"""Attack all receivers in turn, and count what has come of it."""

from __future__ import annotations

import gc
import os
import random
import resource
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tests.fuzz.frames import drawn
from tests.fuzz.launchers import FromAgent, ToAgent, ToSupervisor
from tests.fuzz.ranks import BetweenRanks, FirstOfRank, FromSequencer, ToWorker, WithinWorker
from tests.fuzz.receiver import Finding, Outcome, Receiver, Tracebacks
from tests.fuzz.replicas import FromLeader, FromStandby
from tests.fuzz.servers import FromServer0, FromShard, FromSupervisor, FromWorker, FromWorkerToShard
from tests.fuzz.sockets import Carried, Stranger

RECEIVERS: tuple[type[Receiver], ...] = (
    FromWorker,
    FromWorkerToShard,
    FromShard,
    FromServer0,
    FromSupervisor,
    FromLeader,
    FromStandby,
    ToSupervisor,
    ToWorker,
    FromAgent,
    ToAgent,
    BetweenRanks,
    FromSequencer,
    FirstOfRank,
    WithinWorker,
    Carried,
    Stranger,
)
SHOWN_MAX = 20
WARM = 0.2
"""The share of the frames after which memory is first looked at: until then caches fill."""


@dataclass
class Report:
    """What has come of an attack."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    """Of this process in KiB: after the warming up, and at the end."""
    files: tuple[int, int] = (0, 0)
    """Open descriptors, likewise."""

    @property
    def frames(self) -> int:
        return sum(count.total() for count in self.counts.values())


def attack(frames: int, seed: int, receivers: Sequence[type[Receiver]] = RECEIVERS, *, watch: bool = False) -> Report:
    """Let each receiver have its share of so many frames, in turns; ``watch``: look at memory and open files, which takes seconds."""
    report = Report({receiver.name: Counter() for receiver in receivers})
    made = [receiver(random.Random(f"{receiver.name} {seed}")) for receiver in receivers]
    with Tracebacks() as tracebacks, _one_thread():
        for number in range(frames):
            if watch and number == int(WARM * frames):
                report.memory, report.files = (_memory(made), 0), (_files(), 0)
            receiver = made[number % len(made)]
            _one(report, receiver, tracebacks, f"frame {number} of seed {seed}")
        if watch:
            report.memory, report.files = (report.memory[0], _memory(made)), (report.files[0], _files())
        for receiver in made:
            receiver.close()
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _one(report: Report, receiver: Receiver, tracebacks: Tracebacks, which: str) -> None:
    data = drawn(receiver.draw, receiver.frames)
    try:
        outcome = receiver.feed(data)
        tracebacks.check()
    except Exception as error:
        if len(report.findings) < SHOWN_MAX:
            where = "" if isinstance(error, Finding) else "".join(traceback.format_tb(error.__traceback__)[-3:])
            report.findings.append(f"{receiver.name}, {which}: {type(error).__name__}: {error}\n{where}    {data[:300].hex()}")
        receiver.close()
        tracebacks.seen.clear()
        report.counts[receiver.name]["finding"] += 1  # type: ignore[index]
    else:
        report.counts[receiver.name][outcome] += 1


def _memory(receivers: Sequence[Receiver]) -> int:
    """The memory of this process without what the receivers hold at the moment."""
    for receiver in receivers:
        receiver.close()
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() >> 10


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def table(report: Report) -> str:
    """The counts by conversation and outcome."""
    outcomes = [*Outcome, "finding"]
    lines = [f"{'conversation':<16}" + "".join(f"{outcome:>12}" for outcome in outcomes)]
    for name, count in report.counts.items():
        lines.append(f"{name:<16}" + "".join(f"{count[outcome]:>12,}" for outcome in outcomes))
    total = sum(report.counts.values(), Counter[Outcome]())
    lines.append(f"{'all':<16}" + "".join(f"{total[outcome]:>12,}" for outcome in outcomes))
    return "\n".join(lines)
