"""Gives each process of a test's job the fake GPU of ``tests/support``, if OFFBEAT_FAKE_GPU has the folder that ``tests`` is in.

A server's process meets an error of the GPU, once, when the file is there that OFFBEAT_GPU_FAULT names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from soon_written import Changed  # type: ignore[import-not-found]


def have_gpu(module: ModuleType) -> None:
    sys.path.append(os.environ["OFFBEAT_FAKE_GPU"])
    from tests.support import fake_cuda

    fake_cuda.install()
    order = Path(os.environ.get("OFFBEAT_GPU_FAULT", "/nowhere"))

    def synchronize(ordinal: int) -> None:
        if "OFFBEAT_SERVER" in os.environ and order.exists():
            order.unlink()
            raise RuntimeError("CUDA error: unspecified launch failure")

    module.synchronize = synchronize  # type: ignore[attr-defined]


if "OFFBEAT_FAKE_GPU" in os.environ:
    sys.meta_path.insert(0, Changed("offbeat.tensors.gpu", have_gpu))
