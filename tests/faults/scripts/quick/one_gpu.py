"""Gives each process of a test's job the fake GPU of ``tests/support``, if OFFBEAT_FAKE_GPU has the folder that ``tests`` is in.

A server's process meets an error of the GPU, once, when the file is there that OFFBEAT_GPU_FAULT names; and finds no room on the GPU
while the file is there that OFFBEAT_GPU_FULL names.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from soon_written import Changed  # type: ignore[import-not-found]


class Bindings(MetaPathFinder, Loader):
    """Finds the fake driver where the package with CUDA's is looked for: a new server gets memory before it imports PyTorch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in ("cuda", "cuda.bindings", "cuda.bindings.driver") else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Take an ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.endswith("driver"):
            import_module("offbeat.tensors.gpu")


def have_gpu(module: ModuleType) -> None:
    sys.path.append(os.environ["OFFBEAT_FAKE_GPU"])
    from tests.support import fake_cuda

    driver = fake_cuda.install()
    create, order, full = driver.cuMemCreate, *(Path(os.environ.get(f"OFFBEAT_GPU_{name}", "/nowhere")) for name in ("FAULT", "FULL"))

    def create_if_there_is_room(*arguments: Any) -> Any:
        no_room = "OFFBEAT_SERVER" in os.environ and full.exists()
        return (fake_cuda.Result.CUDA_ERROR_OUT_OF_MEMORY, None) if no_room else create(*arguments)

    def synchronize(ordinal: int) -> None:
        if "OFFBEAT_SERVER" in os.environ and order.exists():
            order.unlink()
            raise RuntimeError("CUDA error: unspecified launch failure")

    driver.cuMemCreate = create_if_there_is_room  # type: ignore[assignment, method-assign]
    module.synchronize = synchronize  # type: ignore[attr-defined]


if "OFFBEAT_FAKE_GPU" in os.environ:
    sys.meta_path[:0] = [Changed("offbeat.tensors.gpu", have_gpu), Bindings()]
