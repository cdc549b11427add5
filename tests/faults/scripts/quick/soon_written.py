"""Lets each process of a test's job write its journal four times a second, not once: tests wait for its records, several times each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

FLUSH_S = 0.25


class Changed(MetaPathFinder):
    """Changes a module when it is imported.

    Args:
        name: of the module.
        change: is given the module.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        executed = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            executed(module)
            self._change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def write_soon(module: ModuleType) -> None:
    module.FLUSH_S = FLUSH_S  # type: ignore[attr-defined]


sys.meta_path.insert(0, Changed("offbeat.journal.file", write_soon))
