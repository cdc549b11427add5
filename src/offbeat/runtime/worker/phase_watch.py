"""Measure what this process does, phase by phase, without marks in its script.

Hooks in ``DataLoader``, the model, ``backward`` and garbage collection switch the process's `PhaseClock` when each begins and ends. Pushes,
waits and pulls happen in calls of the library, which switch it themselves. The remaining time counts as the script's own code.

A process has one watch, whatever the number of its optimizers: the time between two pushes, of the same optimizer or not, is accounted for
once. The watch follows the thread that makes it; work of other threads is not measured.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from offbeat.core.phases import Phase, PhaseClock, Spent
from offbeat.runtime.worker.device_phases import DevicePhases
from offbeat.runtime.worker.gpu_readings import gauges
from offbeat.runtime.worker.host_readings import HostReadings
from offbeat.runtime.worker.own_hooks import hook_forward, unhooked

OLD: Final = 1
"""Youngest generation whose collection is measured: collections of generation 0 are many and short."""

Account = tuple[Spent | None, Mapping[str, float] | None]
"""The account of the time since the last push: seconds by phase (None: unknown), and `HostReadings.take`'s counters."""

_watch: PhaseWatch | None = None


class PhaseWatch:
    """Follow the phases of this process. Made by `of_process`.

    Args:
        clock: accounts for the time; switched when a phase begins.
        host: reads what the operating system has done to this process.
    """

    def __init__(self, clock: PhaseClock, host: HostReadings) -> None:
        self.clock, self.host = clock, host
        self._thread = threading.get_ident()
        self._before_gc = Phase.OWN
        self._outer: torch.nn.Module | None = None
        """The module whose forward pass is in progress; None: none is."""
        self._device: DevicePhases | None = None

    @classmethod
    def of_process(cls) -> PhaseWatch:
        """Return the watch of this process, making it in the first call."""
        global _watch
        if _watch is None:
            _watch = cls(PhaseClock(time.monotonic_ns, time.process_time_ns), HostReadings.of_process())
            _watch._listen()
        return _watch

    def follow(self, model: torch.nn.Module) -> None:
        """Measure the forward passes of a model, or of its parts where the script calls these."""
        device = next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), None)
        if self._device is None and device is not None:
            self._device = DevicePhases(partial(torch.cuda.Event, enable_timing=True))
            self.host.follow(gauges(device))
        for module in (model, *_parts(model)):
            hook_forward(module, self._forward_begins, self._forward_ends)

    def take(self) -> Account:
        """Return the account of the time since the last call, and begin the next."""
        device = None
        if self._device is not None and (device := self._device.take()) is None:
            return _unseparated(self.clock.take()), self.host.take()
        return self.clock.take(device), self.host.take()

    # Hooks.

    def _listen(self) -> None:
        gc.callbacks.append(self._collecting)
        _BaseDataLoaderIter.__next__ = self._timed(_BaseDataLoaderIter.__next__, Phase.DATA)  # type: ignore[method-assign]
        DataLoader.__iter__ = self._timed(DataLoader.__iter__, Phase.DATA)  # type: ignore[method-assign]
        torch.autograd.backward = self._timed(torch.autograd.backward, Phase.BACKWARD)
        torch.jit.script = unhooked(torch.jit.script)

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def _timed(self, function: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        """Return ``function`` wrapped so that its time counts as ``phase``, or as an evaluation while gradients are disabled."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._here():
                return function(*args, **kwargs)
            before = self._begin(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._end(before)

        return timed

    def _begin(self, phase: Phase) -> Phase:
        phase = phase if torch.is_grad_enabled() else Phase.EVALUATION
        before = self.clock.turn(phase)
        if self._device is not None:
            self._device.begins(phase)
        return before

    def _end(self, before: Phase) -> None:
        """Return to the phase before. After an evaluation's forward pass it is still the evaluation, until gradients are enabled."""
        if before is Phase.OWN and not torch.is_grad_enabled():
            before = Phase.EVALUATION
        elif before is Phase.EVALUATION and torch.is_grad_enabled():
            before = Phase.OWN
        self.clock.turn(before)
        if self._device is not None:
            self._device.begins(before)

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        # A forward pass inside a backward pass recomputes checkpointed activations, so it counts as backward.
        if torch.compiler.is_compiling() or self._outer is not None or not self._here():
            return
        if self.clock.at in (Phase.OWN, Phase.EVALUATION):
            self._outer = module
            self._begin(Phase.FORWARD)

    def _forward_ends(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._outer is not module or not self._here():
            return
        self._outer = None
        self._end(Phase.OWN)

    def _collecting(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < OLD or not self._here():
            return
        if phase == "start":
            self._before_gc = self.clock.turn(Phase.GC)
        elif self.clock.at is Phase.GC:
            self.clock.turn(self._before_gc)


def _parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the parts of a model that a script may call in its place: its children, and the items of lists and dicts among them."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _parts(child)
        else:
            yield child


def _unseparated(spent: Spent | None) -> Spent | None:
    """Return an account with forward pass, backward pass, own code and push as one phase: the device had not finished."""
    if spent is None:
        return None
    together = {"forward", "backward", "own", "push"}
    phases, processor = (
        {name: value for name, value in one.items() if name not in together}
        | {"compute": round(sum(value for name, value in one.items() if name in together), 6)}
        for one in spent
    )
    return Spent(phases, processor)
