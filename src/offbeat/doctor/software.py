"""Read which packages are installed, and ask PyTorch and NVIDIA's driver, in processes and calls that may fail."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
from typing import Any, Final

from offbeat.doctor.readings import Driver, Gpu, Package, Torch
from offbeat.types import Seconds

IMPORT_S: Final[Seconds] = 120.0
"""Seconds for which PyTorch may take to be imported, from a cold disk over a network."""
_ASK_TORCH: Final = """
import json, resource, time
began = time.monotonic()
import torch
took = time.monotonic() - began
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
for name in names[:1]:
    torch.ones(1, device="cuda").add_(1).cpu()
kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([torch.__version__, took, kib * 1024, torch.version.cuda, names]))
"""
_NEEDED: Final = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?")
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_PYTHON: Final = re.compile(r"python_version\s*<\s*['\"]([\d.]+)['\"]")
_NOT_FOR_USERS: Final = {"dev", "docs"}


def packages() -> tuple[Package, ...]:
    """Return what this installation of offbeat says that it needs and can use; (): it is not installed, but run from its source."""
    try:
        needed = importlib.metadata.requires("offbeat") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    extras: dict[str, list[str]] = {}  # by name, those that install it; "" stands for offbeat itself
    least: dict[str, str] = {}
    for text in needed:
        what, _, condition = text.partition(";")
        older = _PYTHON.search(condition)
        match = _NEEDED.match(what.strip())
        if match is None or (older is not None and sys.version_info[:2] >= tuple(map(int, older[1].split(".")))):
            continue
        name = match[1].lower().replace("_", "-")
        extra = _EXTRA.search(condition)
        if name == "offbeat" or (extra is not None and extra[1] in _NOT_FOR_USERS):
            continue
        least.setdefault(name, match[2] or "")
        extras.setdefault(name, []).append("" if extra is None else extra[1])
    return tuple(
        Package(name=name, least=version, version=_installed(name), extras=() if "" in extras[name] else tuple(extras[name]))
        for name, version in least.items()
    )


def _installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def torch(command: str = _ASK_TORCH) -> Torch:
    """Return what a child process finds by importing PyTorch: a crash or a hang there ends nothing here."""
    try:
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=IMPORT_S, check=False)
        if done.returncode == 0:
            version, took_s, nbytes, cuda, names = json.loads(done.stdout.splitlines()[-1])
            return Torch(version=version, import_s=took_s, resident_nbytes=nbytes, cuda=cuda, devices=tuple(names))
        last = (done.stderr.strip().splitlines() or [""])[-1]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        return Torch(failure=last or f"the process that imports it ended with {ended}")
    except subprocess.TimeoutExpired:
        return Torch(failure=f"its import has not ended within {IMPORT_S:g} s")
    except (OSError, ValueError, IndexError) as error:
        return Torch(failure=f"{type(error).__name__}: {error}")


def driver() -> Driver:
    """Return what NVIDIA's driver says, through nvidia-ml-py if it is installed; else only whether there is a driver."""
    version = _driver_of_kernel()
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return Driver(version=version, failure="nvidia-ml-py is not installed" if version else "")
    try:
        pynvml.nvmlInit()
        try:
            said = pynvml.nvmlSystemGetDriverVersion()
            gpus = tuple(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(pynvml.nvmlDeviceGetCount()))
            return Driver(version=_text(said), gpus=gpus)
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # the library's own kinds, which are made at run time
        return Driver(version=version, failure=f"nvidia-ml-py: {error}" if version else "")


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    temperature, throttled = None, ""
    with contextlib.suppress(Exception):
        temperature = int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    with contextlib.suppress(Exception):
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        known = {"heat": 0x20 | 0x40, "power": 0x4 | 0x80, "hardware slowdown": 0x8}
        throttled = ", ".join(name for name, bits in known.items() if reasons & bits)
    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        nbytes=int(memory.total),
        free_nbytes=int(memory.free),
        temperature_c=temperature,
        throttled=throttled,
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _driver_of_kernel() -> str | None:
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        found = re.search(r"\s(\d{3,}\.[\d.]+)", file.read())
        return found[1] if found else "unknown"
    return None
