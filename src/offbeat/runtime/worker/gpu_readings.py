"""Read clock rate, temperature and throttling of the GPU on which this process computes, if ``nvidia-ml-py`` is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def gauges(device: torch.device) -> Mapping[str, Callable[[], float]]:
    """Return the readers for a CUDA device, by name; empty without the package or a driver. A reader raises `OSError` if it fails.

    ``gpu_mhz`` is the clock rate of its multiprocessors in MHz, ``gpu_celsius`` its temperature, ``gpu_throttled`` 1 while heat or a power
    limit lowers the clock rate, else 0.
    """
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml, device)
    except pynvml.NVMLError:
        return {}

    def reading(ask: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
        def read() -> float:
            try:
                return float(ask(handle, *arguments))
            except pynvml.NVMLError as error:
                raise OSError(str(error)) from error

        return read

    reasons = reading(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    lowered = (
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        | pynvml.nvmlClocksThrottleReasonSwPowerCap
    )
    return {
        "gpu_mhz": reading(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "gpu_celsius": reading(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "gpu_throttled": lambda: float(bool(int(reasons()) & lowered)),
    }


def _handle(pynvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a device. NVML numbers all devices, CUDA those that this process sees, so the UUID is used if known."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    index: int | None = device.index
    return pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device() if index is None else index)
