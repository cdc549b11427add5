"""Who is whose neighbour in gossip: graphs over places 0 .. count-1, which are the living ranks in order. Plain arithmetic.

A graph is a cycle of *hops*; at each step some of them are in use, the next ones at the next step. On a circulant graph the rank at place
p sends to ``p + hop``, modulo the count. On a bipartite one the odd places and the even ones face each other: an odd place p exchanges
with ``p + hop``, an even one with ``p - hop``, so that each pair is a pair from either side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["exponential", "bipartite_exponential", "linear", "bipartite_linear", "ring", "n_peer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order of the numbers, 0 to 5, that the code of stochastic gradient push has for them."""


class Graph(NamedTuple):
    """Directed edges, step by step.

    >>> [Graph("exponential", 1).out(0, count=8, step=step) for step in range(4)]
    [(1,), (2,), (4,), (1,)]
    >>> Graph("ring", 2).out(0, count=8, step=5), Graph("n_peer", 2).out(1, count=8, step=1)
    ((1, 7), (4, 7))
    >>> Graph("bipartite_linear", 1).out(1, count=8, step=2), Graph("bipartite_linear", 1).out(4, count=8, step=2)
    ((4,), (1,))
    """

    kind: Kind
    degree: int
    """To how many places each sends in a step, at least 1; fewer where there are not so many."""

    def out(self, place: int, count: int, step: int) -> tuple[int, ...]:
        """The places that this one sends to at a step."""
        if self.bipartite:
            return _partners(place, count, _used(self.kind, self.degree, count, step))
        return tuple((place + hop) % count for hop in _used(self.kind, self.degree, count, step))

    def into(self, place: int, count: int, step: int) -> tuple[int, ...]:
        """The places that send to this one at a step."""
        if self.bipartite:
            return self.out(place, count, step)
        return tuple((place - hop) % count for hop in _used(self.kind, self.degree, count, step))

    @property
    def bipartite(self) -> bool:
        """True if each edge joins an odd place with an even one, and goes both ways."""
        return self.kind.startswith("bipartite")

    def partners(self, place: int, count: int) -> tuple[int, ...]:
        """All that a place of a bipartite graph ever exchanges with."""
        assert self.bipartite, self.kind
        return _partners(place, count, hops(self.kind, self.degree, count))


def _partners(place: int, count: int, used: tuple[int, ...]) -> tuple[int, ...]:
    """With an odd count the circle has a seam, and pairs that would lie across it are left out: both of a pair see that."""
    found = ((place + hop if place % 2 else place - hop) % count for hop in used)
    return tuple(dict.fromkeys(other for other in found if (other - place) % 2))


@lru_cache(maxsize=4096)
def hops(kind: Kind, degree: int, count: int) -> tuple[int, ...]:
    """All hops of a graph, in the order of their turns; each is 1 to count - 1.

    >>> hops("exponential", 1, 6), hops("bipartite_exponential", 1, 8), hops("linear", 1, 6), hops("n_peer", 2, 10)
    ((1, 2, 4), (1, 7, 3, 5), (1, 3, 5), (1, 2, 3, 6, 9))
    """
    powers = [2**i for i in range(count.bit_length()) if 2**i < count]
    distances = {
        "exponential": powers,
        "bipartite_exponential": [d for power in powers for d in _both(1 if power == 1 else 1 + power) if abs(d) < count],
        "linear": list(range(1, count, 2)),
        "bipartite_linear": [d for distance in range(1, count, 2) for d in _both(distance)],
        "ring": [1, -1][:degree],
        "n_peer": [hop for turn in _turns(degree, count) for hop in turn],
    }[kind]
    return tuple(dict.fromkeys(d % count for d in distances if d % count))


@lru_cache(maxsize=65536)
def _used(kind: Kind, degree: int, count: int, step: int) -> tuple[int, ...]:
    """The hops whose turn it is."""
    if kind == "n_peer":
        turns = _turns(degree, count)
        return turns[step % len(turns)] if turns else ()
    cycle = hops(kind, degree, count)
    if len(cycle) <= degree:
        return cycle
    return tuple(cycle[(step * degree + i) % len(cycle)] for i in range(degree))


def _turns(degree: int, count: int) -> list[tuple[int, ...]]:
    """Hops ``j * (degree + 1)^i``, j = 1 .. degree, those with one i in one turn."""
    turns, base = [], 1
    while base < count:
        turns.append(tuple(j * base for j in range(1, degree + 1) if j * base < count))
        base *= degree + 1
    return turns


def _both(distance: int) -> tuple[int, int]:
    return distance, -distance
