"""Read clock, temperature and throttling of the GPU that this process computes on, where ``nvidia-ml-py`` is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def gauges(device: torch.device) -> Mapping[str, Callable[[], float]]:
    """Return the readings of a CUDA device, by name; none without the package, or without a driver.

    ``gpu_mhz`` is the clock of its processors, ``gpu_celsius`` the temperature, ``gpu_throttled`` 1 while its clock is lowered because of
    heat or power.
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
    """Return the library's handle: CUDA counts only the devices that this process sees, the library all."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    index: int | None = device.index
    return pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device() if index is None else index)
