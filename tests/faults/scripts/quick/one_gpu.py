"""Gives each process of a test's job the fake GPU of ``tests/support``, if OFFBEAT_FAKE_GPU has the folder that ``tests`` is in."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from soon_written import Changed  # type: ignore[import-not-found]


def have_gpu(module: ModuleType) -> None:
    sys.path.append(os.environ["OFFBEAT_FAKE_GPU"])
    from tests.support import fake_cuda

    fake_cuda.install()


if "OFFBEAT_FAKE_GPU" in os.environ:
    sys.meta_path.insert(0, Changed("offbeat.tensors.gpu", have_gpu))
