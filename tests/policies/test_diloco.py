"""DiLoCo with fragments: with one it is EnsembleSync bit for bit, workers wait only for what is late, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples
from torch import nn

from offbeat.core.fragments import Fragments
from offbeat.core.policy import Averaging, Plan
from offbeat.errors import ConfigurationError
from offbeat.policies import DiLoCo
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

REFUSED = [
    ("diloco(steps=0)", "steps must be a whole number, at least 1"),
    ("diloco(delay=-1)", "delay must be a whole number, at least 0"),
    ("diloco(alpha=1.5)", "alpha must be a number, at least 0 and at most 1"),
    ("diloco(outer_lr=0)", "outer_lr must be a number, above 0"),
    ("diloco(outer_momentum=1)", "outer_momentum must be a number, at least 0 and at most 0.999"),
]

pytestmark = pytest.mark.usefixtures("a_single_thread")

FAULTS = "kill worker=1 at=11; restart worker=1 at=20; kill worker=2 at=33"


def trained(sync: str, work: Work | None = None, **cluster: Any) -> tuple[Any, torch.Tensor]:
    """A simulated run of four workers with real gradients, and the parameters at its end."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(256, 4)
    y = x.sum(dim=1, keepdim=True).tanh()
    training = Training(
        model,
        nn.functional.mse_loss,
        (x, y),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        evaluate=lambda m: {"loss": float(nn.functional.mse_loss(m(x), y))},
    )
    cluster = {"compute": "uniform(low=0.5, high=1.5)", **cluster}
    result = simulate(sync, Cluster(workers=4, **cluster), work or Work(versions=12, batch=16), content=training)
    assert "for ever" not in result.reason
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("faults", ["", FAULTS])
@pytest.mark.parametrize("delay", ["constant(seconds=0)", "uniform(low=0, high=0.4)"])
def test_one_fragment_without_delay_is_ensemble_to_the_bit(faults: str, delay: str) -> None:
    outer = "outer_lr=0.7, outer_momentum=0.9"
    places = {"faults": faults, "delay": delay, "push_delay": delay}
    ensemble, expected = trained(f"ensemble(steps=5, {outer})", **places)
    diloco, found = trained("diloco(steps=5)", **places)
    assert [point.t for point in diloco.curve] == [point.t for point in ensemble.curve] and len(diloco.curve) == 12
    assert torch.equal(found, expected)


def test_the_delay_hides_what_takes_as_long() -> None:
    """Four fragments, each 1.5 s there and 1.5 s back: a step takes 1 s."""
    slow = {"servers": 4, "compute": "constant(seconds=1)", "delay": "constant(seconds=1.5)", "push_delay": "constant(seconds=1.5)"}
    took = {delay: trained(f"diloco(steps=16, delay={delay})", **slow)[0].curve[-1].t for delay in (0, 2, 3)}
    turns = 4 * 12  # the twelfth version of the last fragment
    first = 1.5  # of the model
    assert took[0] == pytest.approx(first + turns * 4 + (turns - 1) * 3 + 1.5)
    assert took[2] == pytest.approx(first + turns * 4 + (turns - 1) * 1 + 1.5)
    assert took[3] == pytest.approx(first + turns * 4 + 1.5), "nothing is waited for"


def test_what_has_come_is_mixed() -> None:
    _, replaced = trained("diloco(steps=8, delay=1)", servers=4)
    result, mixed = trained("diloco(steps=8, delay=1, alpha=0.5)", servers=4)
    _, kept = trained("diloco(steps=8, delay=1, alpha=1.0)", servers=4)
    assert not torch.equal(replaced, mixed) and not torch.equal(mixed, kept)
    assert result.curve[-1].values["loss"] < 0.5 * result.curve[0].values["loss"]


@examples(100)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_each_fragment_has_its_turn_once_in_h_steps(shards: int, steps: int, delay: int, waits: bool) -> None:
    if steps < shards or delay >= max(1, steps // shards):
        return
    own = Fragments(shards, owner="diloco", steps=steps, delay=delay, waits=waits)
    for shard in range(shards):
        own.received(shard, 0, 0.0)
    own.released()
    own.advance()
    at, pushed = 0, []
    for _ in range(3 * shards):
        plan = own.planned(Plan())
        done = 0
        while done < plan.steps:
            done += own.leg(done, plan.steps - done)
            if own.pauses(done):
                assert done == delay and own.ready(0.0)
                own.advance()
        at += plan.steps
        target = own.pushed()
        assert target is not None
        pushed.append((target, at))
        assert own.ready(0.0) == (not waits or delay > 0)
        own.received(target, own.held[target] + 1, 0.0)
        assert own.ready(0.0)
        before = own.used
        own.advance()
        assert (own.used == before) == (delay > 0), "not earlier than the delay"
    assert [shard for shard, _ in pushed] == list(range(shards)) * 3
    assert all(later - earlier == steps for (_, earlier), (_, later) in zip(pushed, pushed[shards:], strict=False))


def test_how_parameters_are_exchanged() -> None:
    policy = DiLoCo(steps=20)
    assert policy.averaging == Averaging(outer_lr=0.7, outer_momentum=0.9) and policy.scope == "shard" and policy.local_optimizer


def test_servers_that_do_not_fit_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"diloco\(steps=3\) with 4 servers.*give steps=4 or more, or fewer servers"):
        simulate("diloco(steps=3)", Cluster(workers=2, servers=4), Work(versions=1))
    with pytest.raises(ConfigurationError, match=r"every 2 steps and must have taken one before the next; give delay=1 or less"):
        DiLoCo(steps=8, delay=2).blocks(4)
