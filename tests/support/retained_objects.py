"""Count what an object holds, so that a test can say that it does not grow with the length of a job."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

CONTAINERS: Final = (dict, list, set, frozenset, tuple, deque)


def sizes(root: object, name: str = "") -> Counter[str]:
    """Return the number of elements in all containers that an object reaches, by the path of attributes that leads to them.

    Only attributes of this package's objects and elements of containers are followed, each object once. Closures and bound methods hold
    nothing of their own in this package, and are not followed.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(name or type(root).__name__, root)]
    while waiting:
        path, item = waiting.pop()
        if id(item) in seen or isinstance(item, str | bytes | int | float | None):
            continue
        seen.add(id(item))
        if isinstance(item, CONTAINERS):
            found[path] += len(item)
            members = [*item.keys(), *item.values()] if isinstance(item, Mapping) else list(item)
            waiting += [(f"{path}[]", member) for member in members]
        elif type(item).__module__.startswith("offbeat"):
            waiting += [(f"{path}.{attribute}", value) for attribute, value in _attributes(item)]
    return found


def grown(before: Counter[str], after: Counter[str], slack: int) -> dict[str, tuple[int, int]]:
    """Return the paths whose containers have gained more than ``slack`` elements, with the two numbers."""
    return {path: (before[path], after[path]) for path in after if after[path] > before[path] + slack}


def _attributes(item: object) -> Iterator[tuple[str, Any]]:
    yield from vars(item).items() if hasattr(item, "__dict__") else ()
    for cls in type(item).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(item, slot):
                yield slot, getattr(item, slot)
