"""Leaves out of PyTorch what compiles and exports models, in each process of a test's job: its PYTHONPATH has this folder.

They are two thirds of the 3 s of a core that the import of PyTorch and the first optimizer cost a new process. Optimizers import
``torch._dynamo``, to keep their own methods out of compiled functions; PyTorch itself imports what computes shapes without values, and
``torch.export``. These jobs compile nothing. They get modules of those names with the two functions that optimizers call, and nothing else.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LEFT_OUT = ("torch._dynamo", "torch._meta_registrations", "torch.export")


class NothingCompiled(MetaPathFinder, Loader):
    """Finds the small modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in LEFT_OUT else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Take an ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        def disable(function: Any = None, *_: object, **__: object) -> Any:
            return disable if function is None else function

        vars(module).update(disable=disable, graph_break=lambda **_: None, ExportedProgram=object)  # the last is asked for by torch 2.6
        if module.__name__ == "torch._meta_registrations":
            make_generators_possible()


def make_generators_possible() -> None:
    """Do what newer versions of PyTorch do in one of the modules left out: before it, `torch.Generator` cannot be called."""
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


sys.meta_path.insert(0, NothingCompiled())
