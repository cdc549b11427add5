"""A machine without processes, for the injector: each signal works at once, and is written down."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from offbeat.chaos.injector import Victim
from offbeat.chaos.schedule import chosen


@dataclass
class FakeVictim:
    """A process, or a link."""

    name: str
    worker: int | None
    log: list[tuple[str, str]]
    now: str = "S"
    deaf: bool = False
    """True: signals are sent, and nothing comes of them."""

    @property
    def key(self) -> str:
        return self.name

    def signal(self, number: signal.Signals) -> bool:
        if self.now in ("", "up", "down"):
            return False
        self.log.append((self.name, number.name))
        if not self.deaf:
            self.now = {"SIGKILL": "", "SIGTERM": "", "SIGSTOP": "T", "SIGCONT": "S"}[number.name]
        return True

    def state(self) -> str:
        return self.now

    def down(self) -> bool:
        self.log.append((self.name, "down"))
        self.now = "down"
        return True

    def up(self) -> None:
        self.log.append((self.name, "up"))
        self.now = "up"


@dataclass
class FakeMachine:
    """Some workers and a link."""

    workers: int
    log: list[tuple[str, str]] = field(default_factory=list)
    victims: dict[int, FakeVictim] = field(default_factory=dict)
    only_one: bool = False

    def __post_init__(self) -> None:
        self.victims = {number: FakeVictim(f"worker {number}", number, self.log) for number in range(self.workers)}
        self.link = FakeVictim("a link", None, self.log, "up")

    def choose(self, target: str, pick: float, busy: set[str]) -> Victim | None:
        if target in ("link", "journal"):
            return None if self.link.key in busy else self.link
        there = {number: victim for number, victim in self.victims.items() if victim.now and victim.key not in busy}
        number = chosen(pick, there, self.workers)
        return None if number is None else there[number]

    def last(self, victim: Victim) -> bool:
        return self.only_one

    def revive(self) -> None:
        """Restart the dead."""
        for victim in self.victims.values():
            victim.now = victim.now or "S"


class FakeClock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += max(seconds, 0.001)
