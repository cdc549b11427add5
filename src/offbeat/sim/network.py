"""Carry bytes between hosts whose links are shared: a host's link sends and receives at one rate each, and messages under way share it.

A connection sends one message after another, as TCP does; connections share links as `sharing.fair_rates` says, and share anew whenever one
begins or ends. Processes of one host share memory: between them a message takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from offbeat.sim.event_queue import SHARE, Action, EventQueue
from offbeat.sim.sharing import fair_rates
from offbeat.types import Seconds

DONE: Final = 1e-9
"""The part of a message that may be left through rounding when it counts as sent."""


class _Connection:
    """One connection between two hosts, while it has something to send."""

    __slots__ = ("bits", "left", "links", "rate", "waiting")

    def __init__(self, links: tuple[int, int], bits: float, then: Action) -> None:
        self.links = links
        self.bits = self.left = bits
        self.rate = 0.0
        self.waiting: deque[tuple[float, Action]] = deque([(bits, then)])
        """The message under way, and those behind it, with what happens once each has arrived."""


class Network:
    """The links of all hosts, and the messages under way.

    Args:
        queue: the event queue of the run.
        bits_per_s: what each host sends at most, and what it receives at most.
        hosts: how many there are.

    >>> queue, arrived = EventQueue(), []
    >>> network = Network(queue, bits_per_s=8.0, hosts=3)
    >>> for sender in (1, 2):  # to host 0, whose link both share until the shorter message has arrived
    ...     network.send(sender, sender, 0, nbytes=2.0 * sender, then=lambda _, sender=sender: arrived.append((sender, queue.now)))
    >>> while queue.step(until=100.0):
    ...     pass
    >>> arrived
    [(1, 4.0), (2, 6.0)]
    """

    def __init__(self, queue: EventQueue, bits_per_s: float, hosts: int) -> None:
        self._queue = queue
        self._capacities = [bits_per_s] * (2 * hosts)
        """Of host h: 2 h for what it sends, 2 h + 1 for what it receives."""
        self._active: dict[Hashable, _Connection] = {}
        self._since: Seconds = 0.0
        self._changed = False
        self._due = 0
        """The serial number of the entry at which the next messages end; other entries are obsolete."""
        self._next: list[Hashable] = []
        """The connections whose messages end then."""

    def send(self, connection: Hashable, source: int, target: int, nbytes: float, then: Action) -> None:
        """Send a message now, behind those of the same connection; call ``then`` when its last byte has arrived."""
        if source == target:
            then(0)
            return
        bits = 8.0 * nbytes
        there = self._active.get(connection)
        if there is not None:
            there.waiting.append((bits, then))
            return
        self._active[connection] = _Connection((2 * source, 2 * target + 1), bits, then)
        self._change()

    def cut(self, concerned: Callable[[Hashable], bool]) -> None:
        """Close connections, as the death of a process does: what is under way on them is lost."""
        for name in [name for name in self._active if concerned(name)]:
            del self._active[name]
            self._change()

    def _change(self) -> None:
        """Share anew after all other entries of this instant."""
        if not self._changed:
            self._changed = True
            self._queue.at(self._queue.now, self._share, SHARE)

    def _advance(self) -> None:
        passed_s, self._since = self._queue.now - self._since, self._queue.now
        for one in self._active.values():
            one.left -= one.rate * passed_s

    def _share(self, serial: int) -> None:
        self._changed = False
        self._advance()
        active = self._active
        if not active:
            self._due = 0
            return
        rates = fair_rates([one.links for one in active.values()], self._capacities)
        for one, rate in zip(active.values(), rates, strict=True):
            one.rate = rate
        soonest = min(one.left / one.rate for one in active.values())
        self._next = [name for name, one in active.items() if one.left - one.rate * soonest <= DONE * one.bits]
        self._due = self._queue.at(self._queue.now + max(0.0, soonest), self._end)

    def _end(self, serial: int) -> None:
        if serial != self._due:
            return
        self._advance()
        ended = [(name, self._active[name]) for name in self._next if name in self._active]
        actions = []
        for name, one in ended:
            actions.append(one.waiting.popleft()[1])
            if one.waiting:
                one.bits = one.left = one.waiting[0][0]
                one.rate = 0.0
            else:
                del self._active[name]
        self._change()
        for action in actions:
            action(serial)
