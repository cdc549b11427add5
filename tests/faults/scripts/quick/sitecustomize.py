"""Python imports this by itself in each process of a test's job, whose PYTHONPATH has this folder.

A PyTorch optimizer imports ``torch._dynamo``, to keep its own methods out of compiled functions: 1.3 s of a core in each new process.
These jobs compile nothing. They get a module of that name with the two functions that optimizers call, and nothing else.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class NothingCompiled(MetaPathFinder, Loader):
    """Finds the small module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch._dynamo" else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Take an ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        def disable(function: Any = None, *_: object, **__: object) -> Any:
            return disable if function is None else function

        vars(module).update(disable=disable, graph_break=lambda **_: None)


sys.meta_path.insert(0, NothingCompiled())
