"""Victims without processes, for the injector: each fault works at once, and is written down; and time that passes when somebody waits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeVictim:
    """A process, or a link."""

    name: str
    worker: int | None
    log: list[tuple[str, str]]
    now: str = "up"
    deaf: bool = False
    """True: signals are sent, and nothing comes of them."""
    key: str = ""
    spared: str = "it was gone already"

    def __post_init__(self) -> None:
        self.key = self.name

    def down(self, kind: str) -> bool:
        if self.now == "gone":
            return False
        self.log.append((self.name, kind))
        if not self.deaf:
            self.now = "gone" if kind in ("kill", "term") else "down"
        return True

    def is_down(self, kind: str) -> bool:
        return self.now == ("gone" if kind in ("kill", "term") else "down")

    def up(self) -> None:
        if self.now == "down":
            self.log.append((self.name, "up"))
            self.now = "up"


@dataclass
class FakeMachine:
    """Some workers and a link."""

    workers: int
    log: list[tuple[str, str]] = field(default_factory=list)
    victims: dict[int, FakeVictim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.victims = {number: FakeVictim(f"worker {number}", number, self.log) for number in range(self.workers)}
        self.link = FakeVictim("a link", None, self.log)

    def find(self, target: str) -> tuple[dict[int, FakeVictim], int]:
        if target in ("link", "journal"):
            return {0: self.link}, 1
        return {number: victim for number, victim in self.victims.items() if victim.now != "gone"}, self.workers

    def revive(self) -> None:
        """Restart the dead."""
        for number, victim in self.victims.items():
            if victim.now == "gone":
                self.victims[number] = FakeVictim(victim.name, number, self.log)


class FakeClock:
    """Time that passes when somebody waits."""

    def __init__(self, time: float = 100.0) -> None:
        self.time = time

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += max(seconds, 0.001)
