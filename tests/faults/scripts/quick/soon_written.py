"""Lets each process of a test's job write its journal four times a second, not once: tests wait for its records, several times each."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

FLUSH_S = 0.25


class SoonWritten(MetaPathFinder):
    """Changes the module when it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "offbeat.journal.file":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        executed = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            executed(module)
            module.FLUSH_S = FLUSH_S  # type: ignore[attr-defined]

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, SoonWritten())
