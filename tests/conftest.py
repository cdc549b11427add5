"""What all tests share: how hypothesis runs, and which tests are run where not everything is asked for (``tests/tiers.py``).

No deadline for one example, since a busy machine may stop any process for a while. The examples are new ones in each run: ``make`` prints
the seed, and ``make test SEED=...`` repeats them; a failure prints how to repeat it alone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests import tiers

from offbeat import session
from offbeat.policies import RULES

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts a command in the background has it ignore Ctrl-C, which its children inherit: some tests send it to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("offbeat", tiers.examples(100), deadline=None, print_blob=True)
settings.load_profile("offbeat")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the million objects of modules and tests out of all collections of garbage: each took a second, and there are hundreds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Before a commit, import no file of which everything would be left out; one that the command line names is imported."""
    everything = all(Path(argument).name == "tests" for argument in config.args)
    long = collection_path.suffix == ".py" and collection_path.relative_to(config.rootpath).as_posix().startswith(tiers.PROCESSES)
    return (everything and not tiers.ALL and long and not tiers.SMOKE.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for, see ``tests/tiers.py``: of what the command line has left.

    Tests that start processes come first: pytest-xdist gives each of its processes a stretch, and those of the first one are for the most
    part run one by one, beside tests that compute.
    """

    def wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("night") is not None:
            return tiers.NIGHT
        return tiers.ALL or not long(item) or item.get_closest_marker("smoke") is not None

    def long(item: pytest.Item) -> bool:
        return item.nodeid.startswith(tiers.PROCESSES) or item.get_closest_marker("slow") is not None

    chosen = sorted(filter(wanted, items), key=long, reverse=True)
    if not tiers.ALL:
        chosen = tiers.few(chosen, str(config.getoption("--hypothesis-seed")))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Import the rules' own tests before any test runs: their promises are asked for inside running tests, where none can be defined."""
    if (promises := sys.modules.get("tests.core.promises")) is not None:
        for kind in RULES.values():
            promises.promised(kind)


@pytest.fixture(autouse=True)
def a_process_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one session; the tests share theirs."""
    monkeypatch.delenv("OFFBEAT_SERVERS", raising=False)
    monkeypatch.setattr(session, "current", None)
    monkeypatch.setattr(session, "_waiting", [])


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Simulated processes that die leave cycles of objects, some with shared memory. A test process that has over 1,024 descriptors fails
    in `select`, and the garbage collector comes late, since it counts objects."""
    yield
    if _descriptors() > _kept[0] + 256:
        gc.collect()
        _kept[0] = _descriptors()


_kept = [0]
"""How many descriptors the last collection has left."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def a_single_thread() -> Iterator[None]:
    """For small tensors: a second thread would only be waited for, and long where other processes are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
