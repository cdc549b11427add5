"""``offbeat run --on ray`` without Ray: options, refusals, and how much room there is."""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.errors import ConfigurationError, JobError
from offbeat.launch.environment import common_environment
from offbeat.launch.program import Program
from offbeat.launch.ray_engine import RayOptions, _enter, connect, lack, room
from offbeat.options import RunOptions, ray_options

OF_RAY = ("ray_address", "cpus_per_worker", "gpus_per_worker", "servers_on", "start_timeout", "tls", "tls_cert", "tls_key", "tls_ca")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_defaults() -> None:
    assert ray_options(RunOptions()) is None
    assert ray_options(RunOptions(on="ray")) == RayOptions(cpus=1.0, gpus=0.0, start_s=600.0, spread_servers=False)


@pytest.mark.parametrize("name", OF_RAY)
def test_options_of_ray_need_ray(name: str) -> None:
    value: Any = {"tls": False}.get(name, "1")
    with pytest.raises(ConfigurationError, match=r"--[\w-]+ is for jobs on a Ray cluster: add --on ray, or leave it out"):
        ray_options(RunOptions(**{name: value}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": "slurm"}, "--on slurm: must be local or ray; under torchrun, Slurm"),
        ({"cpus_per_worker": -1.0}, "--cpus-per-worker -1: must be a number of at least 0"),
        ({"cpus_per_worker": 0.0}, "--cpus-per-worker 0 without --gpus-per-worker"),
        ({"gpus_per_worker": float("nan")}, "--gpus-per-worker nan: must be"),
        ({"gpus_per_worker": 1.5}, "--gpus-per-worker 1.5: Ray gives a fraction of one GPU, or whole GPUs"),
        ({"servers_on": "mars"}, "--servers-on mars: must be driver .* or nodes"),
        ({"start_timeout": 0.0}, "--start-timeout 0: must be a number of seconds above 0"),
        ({"ray_address": "ray://head:10001"}, "ray://head:10001 .* must run on one of its machines: .* ray job submit"),
        ({"tls": False, "tls_cert": "a"}, "--no-tls with --tls-cert"),
    ],
)
def test_refusals(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ray_options(RunOptions(**{"on": "ray", **given}))


def test_an_address_of_ray_jobs_in_the_environment_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigurationError, match="RAY_ADDRESS"):
        RayOptions()


def test_ray_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"--on ray: Ray is not installed here; type: pip install 'offbeat\[ray\]'"):
        connect("")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:{free}"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # nobody listens at it
        with pytest.raises(ConfigurationError, match=r"no Ray cluster can be reached at .* \(--ray-address"):
            connect(address.format(free=probe.getsockname()[1]))


def test_a_cluster_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's daemons give up after 30 s where the machine is busy, with an exception of no class of its own."""

    def init(address: str, **options: object) -> None:
        raise (
            ConnectionError if address == "auto" else Exception("The current node timed out during startup.\nThis could happen because ...")
        )

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(JobError, match=r"no Ray cluster could be started here \(The current node timed out during startup.\): start one"):
        connect("")


@pytest.mark.parametrize("asked", [True, False])
def test_a_cluster_that_wants_a_token_is_refused_with_what_to_set(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says no more than that it cannot connect, and takes up its token by itself only where no address is given."""

    def init(**options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("RAY_AUTH_MODE", "token") if asked else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        with pytest.raises(ConfigurationError, match="Failed to connect to Ray cluster") as refused:
            connect(f"127.0.0.1:{head.getsockname()[1]}")
    assert ("set RAY_AUTH_MODE=token" in str(refused.value)) is not asked


def test_a_script_that_is_not_on_the_node_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no script 'train.py' .* every node: .* ray job submit --working-dir"):
        _enter("/no/such/folder", Program("train.py"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "train.py").touch()
    _enter(str(there), Program("train.py"))
    assert Path.cwd() == there


def test_the_gpus_that_ray_has_chosen_reach_the_worker() -> None:
    assert common_environment(1, {"CUDA_VISIBLE_DEVICES": "2,3"})["CUDA_VISIBLE_DEVICES"] == "2,3"


@examples(100)
@given(st.lists(st.integers(0, 8), max_size=5), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]))
def test_workers_fit_into_whole_nodes(cpus: list[int], each: float) -> None:
    nodes = [{"CPU": float(count)} for count in cpus]
    fit = room(nodes, {"CPU": each})
    assert fit * each <= sum(cpus) + 1e-6
    assert fit == sum(room([node], {"CPU": each}) for node in nodes)
    assert all(room([node], {"CPU": each}) == round(node["CPU"] / each) for node in nodes if (node["CPU"] / each) % 1.0 < 1e-9)


def test_a_gpu_may_be_shared_and_a_node_without_one_has_no_room() -> None:
    assert room([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}], {"CPU": 1.0, "GPU": 0.25}) == 4
    assert lack(8, {"CPU": 1.0, "GPU": 0.25}, [{"CPU": 8.0, "GPU": 1.0}], {"CPU": 7.0, "GPU": 0.5}) == (
        "8 workers with 1 CPU and 0.25 GPU each need 8 CPU and 2 GPU; the Ray cluster has 8 CPU (7 of it free) and 1 GPU (0.5 of it free) "
        "on 1 node"
    )
