"""What a script does is noticed without a mark in it, whatever it calls: the model, its parts, or a compiled model."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offbeat.core.phases import Phase, PhaseClock
from offbeat.runtime.worker.device_phases import EVENTS, DevicePhases
from offbeat.runtime.worker.gpu_readings import gauges
from offbeat.runtime.worker.host_readings import HostReadings
from offbeat.runtime.worker.own_hooks import unhooked
from offbeat.runtime.worker.phase_watch import PhaseWatch


class Recorder(PhaseClock):
    """Keeps the phases that follow each other; time passes by one second with each."""

    def __init__(self) -> None:
        self.seen: list[Phase] = []
        super().__init__(lambda: len(self.seen) * 10**9)

    def turn(self, phase: Phase) -> Phase:
        before = super().turn(phase)
        self.seen.append(phase)
        return before


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        y: torch.Tensor = self.head(x)
        return y


@pytest.fixture
def watch() -> PhaseWatch:
    return PhaseWatch(Recorder(), HostReadings({}, {}))


def phases(watch: PhaseWatch) -> list[str]:
    assert isinstance(watch.clock, Recorder)
    return [phase.label for phase in watch.clock.seen]


def test_a_step_of_a_model(watch: PhaseWatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    watch.follow(model)
    backward: Callable[..., Any] = watch._timed(torch.autograd.backward, Phase.BACKWARD)
    backward(model(torch.ones(1, 2)).sum())
    assert phases(watch) == ["forward", "own", "backward", "own"], "parts are within the whole"


def test_parts_that_a_script_calls_in_place_of_the_model(watch: PhaseWatch) -> None:
    model = Parts()
    watch.follow(model)
    model.head(model.layers[1](torch.ones(1, 2)))
    assert phases(watch) == ["forward", "own", "forward", "own"]


class Plain(nn.Sequential):
    """Is of a class that no other test follows: what is kept out of pickles goes by class."""


def scripts_own(module: nn.Module, inputs: Any) -> None:
    """A hook of the script."""


def test_a_whole_model_is_saved_without_what_watches_it(tmp_path: Path) -> None:
    watch = PhaseWatch(Recorder(), HostReadings({"preempted": lambda: 0.0}, {}))  # a lambda, which cannot be pickled
    model = Plain(nn.Linear(2, 1))
    watch.follow(model)
    model.register_forward_pre_hook(scripts_own)
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([Plain, nn.Linear, scripts_own]):
        loaded = torch.load(tmp_path / "model.pt")  # needs nothing of this library
    assert [*loaded._forward_pre_hooks.values()] == [scripts_own]
    assert not loaded._forward_hooks and not loaded._forward_hooks_always_called
    copy.deepcopy(model)(torch.ones(1, 2))
    assert not phases(watch), "a copy is another model"
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert phases(watch) == ["forward", "own"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_model_is_compiled_by_torchscript_without_what_watches_it(watch: PhaseWatch) -> None:
    from torch import Tensor as Values

    model, inputs = Plain(nn.Linear(2, 1)), torch.ones(1, 2)
    watch.follow(model)
    compiled = unhooked(torch.jit.script)(model)
    assert torch.equal(compiled(inputs), model(inputs))
    assert phases(watch) == ["forward", "own"], "the model is watched, and what is made of it is not"
    watch.follow(compiled)  # takes no hooks
    compiled(inputs)

    @unhooked(torch.jit.script)
    class Pair:
        def __init__(self, first: Values) -> None:
            self.first = first

    assert torch.equal(Pair(inputs).first, inputs)


def test_activations_that_the_backward_pass_computes_anew_belong_to_it(watch: PhaseWatch) -> None:
    model = Parts()
    watch.follow(model)
    backward: Callable[..., Any] = watch._timed(torch.autograd.backward, Phase.BACKWARD)
    backward(model(torch.ones(1, 2, requires_grad=True)).sum())
    assert phases(watch) == ["forward", "own", "backward", "own"]


def test_a_model_that_raises_is_left(watch: PhaseWatch) -> None:
    model = nn.Linear(2, 1)
    watch.follow(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert watch.clock.at is Phase.OWN
    model(torch.ones(1, 2))
    assert phases(watch) == ["forward", "own", "forward", "own"]


def test_an_evaluation_lasts_until_the_script_trains_again(watch: PhaseWatch) -> None:
    model = nn.Linear(2, 1)
    watch.follow(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
        assert watch.clock.at is Phase.EVALUATION, "what is done with the result is a part of it"
    model(torch.ones(1, 2))
    assert phases(watch) == ["evaluation", "evaluation", "forward", "own"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_is_one_graph(watch: PhaseWatch, before: bool) -> None:
    torch._dynamo.reset()
    net: Any = nn.Linear(2, 1)
    model = torch.compile(net, backend="eager", fullgraph=True) if before else net
    watch.follow(model)
    compiled = model if before else torch.compile(net, backend="eager", fullgraph=True)
    compiled(torch.ones(1, 2))
    assert phases(watch) == (["forward", "own"] if before else []), "compiled after the wrapping, it is a part of the script's own code"
    torch._dynamo.reset()


def test_other_threads_are_not_noticed(watch: PhaseWatch) -> None:
    model = nn.Linear(2, 1)
    watch.follow(model)
    thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
    thread.start()
    thread.join()
    assert phases(watch) == []


def test_garbage_is_collected_within_another_phase(watch: PhaseWatch) -> None:
    watch.clock.turn(Phase.FORWARD)
    gc.callbacks.append(watch._collecting)
    try:
        gc.collect()
        gc.collect(0)
    finally:
        gc.callbacks.remove(watch._collecting)
    assert phases(watch) == ["forward", "gc", "forward"], "young objects are collected too often to tell"


class Event:
    """One of a device that has reached it or not."""

    now = 0.0
    done = True

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def of_device(marks: list[tuple[float, Phase]], *, done: bool = True) -> dict[Phase, float] | None:
    Event.done = done
    device = DevicePhases(Event)
    for Event.now, phase in marks:
        device.begins(phase)
    return device.take()


def test_a_device_is_measured_between_its_own_events() -> None:
    marks = [(0.0, Phase.DATA), (1.0, Phase.FORWARD), (3.0, Phase.OWN), (3.5, Phase.BACKWARD), (8.0, Phase.OWN), (9.0, Phase.DATA)]
    assert of_device(marks) == {Phase.FORWARD: 2.0, Phase.BACKWARD: 4.5}


def test_a_device_that_has_not_finished_is_not_waited_for() -> None:
    assert of_device([(1.0, Phase.FORWARD), (3.0, Phase.OWN)], done=False) is None
    assert of_device([(float(at), Phase.FORWARD if at % 2 else Phase.OWN) for at in range(2 * EVENTS)]) is None
    assert of_device([]) == {}, "nothing was measured: as where the script calls no model"


def test_readings_that_a_system_lacks_are_left_out() -> None:
    def lacks() -> float:
        raise FileNotFoundError

    count = 0.0
    readings = HostReadings({"there": lambda: count, "absent": lacks}, {"host": lambda: count}, clock=lambda: count)
    count = 0.125
    assert readings.take() == {"there": 0.125}, "the host is read four times a second"
    count = 1.0
    assert readings.take() == {"there": 0.875, "host": 1.0}
    assert readings.take() is None


def test_this_process_has_readings() -> None:
    readings = HostReadings.of_process()
    assert "preempted" in readings._own


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell the processor seconds of processes")
def test_the_processes_of_a_loader_are_read_until_they_have_ended() -> None:
    """Their children too: a process that starts others on request stands between."""
    read = HostReadings.of_process()._host["children_s"][0]
    before = read()
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        there = read()
        process.communicate(b"\n")
    assert there >= before + 0.2
    assert read() >= there


def test_a_gpu_is_read_once_a_second_where_the_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver(types.SimpleNamespace):
        NVMLError = RuntimeError

        def __getattr__(self, name: str) -> Any:
            if name.startswith("nvmlClocksThrottleReason"):
                return 0x40
            return lambda *arguments: 1410 if name == "nvmlDeviceGetClockInfo" else 0x44 if "Throttle" in name else 71

    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    now = 0.0
    readings = HostReadings({}, {}, clock=lambda: now)
    readings.follow(gauges(torch.device("cuda", 0)))
    assert readings.take() == {"gpu_mhz": 1410.0, "gpu_celsius": 71.0, "gpu_throttled": 1.0}
    now = 0.9
    assert readings.take() is None
    now = 1.0
    assert readings.take() is not None


def test_without_the_package_a_gpu_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gauges(torch.device("cuda", 0)) == {}
