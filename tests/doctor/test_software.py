"""What is installed and what PyTorch and the driver say: also where they are missing, crash, hang or answer nonsense."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import pytest

from offbeat.doctor import software


def test_what_this_installation_needs_and_can_use() -> None:
    found = {package.name: package for package in software.packages()}
    assert found["torch"].extras == () and found["torch"].version and found["torch"].least
    assert found["matplotlib"].extras == ("plots",) and "pytest" not in found and "offbeat" not in found


def test_run_from_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert software.packages() == ()


def test_requirements_of_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [
        "no-such-package>=1.0; extra == 'one'",
        'No_Such-Package>=1.0; extra == "two"',
        "ray[train]>=2; extra == 'dev'",
        "old; python_version < '3.0'",
        "",
        ">=nonsense",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    (only,) = software.packages()
    assert (only.name, only.version, only.extras) == ("no-such-package", None, ("one", "two"))


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("raise ImportError('libc10.so is missing')", "libc10.so is missing"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("print('no json')", "JSONDecodeError"),
        ("pass", "IndexError"),
        ("print('[1, 2]')", "not enough values"),
        ("import time; time.sleep(60)", "has not ended within"),
    ],
)
def test_pytorch_that_cannot_be_imported(command: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in command:
        monkeypatch.setattr(software, "IMPORT_S", 0.5)
    assert failure in software.torch(command).failure


def fake_library(**changes: Any) -> types.ModuleType:
    """A pynvml with one device."""
    library = types.ModuleType("pynvml")
    memory = types.SimpleNamespace(total=1000, free=900)
    calls: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"550.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetName": lambda handle: "H100",
        "nvmlDeviceGetTemperature": lambda handle, kind: 41,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x20,
    }
    vars(library).update({**calls, **changes})
    return library


def test_the_driver_through_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_library())
    driver = software.driver()
    (gpu,) = driver.gpus
    assert (driver.version, gpu.name, gpu.free_nbytes, gpu.temperature_c, gpu.throttled) == ("550.1", "H100", 900, 41, "heat")

    def unsupported(*_: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", fake_library(nvmlDeviceGetTemperature=unsupported))
    assert software.driver().gpus[0].temperature_c is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_library(nvmlInit=unsupported))
    monkeypatch.setattr(software, "_driver_of_kernel", lambda: "550.1")
    assert (software.driver().gpus, software.driver().failure) == ((), "nvidia-ml-py: not supported")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert software.driver().failure == "nvidia-ml-py is not installed"
