"""DiLoCo with fragments (Streaming DiLoCo): local steps; each fragment of the model is averaged at its own step, while workers compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offbeat.core.about import About, Row
from offbeat.core.fragments import Fragments
from offbeat.core.policy import Averaging, Decision, ServerRule, View
from offbeat.core.settings import number, whole_number

if TYPE_CHECKING:
    from offbeat.policies.decoupled import Decoupled


def check_fragments(rule: DiLoCo | Decoupled) -> None:
    """Check the settings that rules share which average the model fragment by fragment.

    Raises:
        ConfigurationError: a setting is out of its range.
    """
    whole_number(rule.called(), "steps", rule.steps, least=1)
    whole_number(rule.called(), "delay", rule.delay, least=0)
    number(rule.called(), "alpha", rule.alpha, least=0.0, most=1.0)
    number(rule.called(), "outer_lr", rule.outer_lr, above=0.0)
    number(rule.called(), "outer_momentum", rule.outer_momentum, least=0.0, most=0.999)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(ServerRule):
    """Let each worker make local steps, and average one fragment of the model after the other, each every H steps.

    Update rule, of fragment p at its version v, once every active worker has pushed it: ``d = w_p[v] - mean_j theta_jp``, ``m = mu * m +
    d``, ``w_p[v+1] = w_p[v] - eta * (d + mu * m)``. A worker goes on computing after its push. ``delay`` steps later it waits for the new
    version, if it is not there, and takes it: ``theta_jp <- alpha * theta_jp + (1 - alpha) * w_p[v+1]``. Each server has one fragment, a
    contiguous part of the parameters: ``--servers P`` gives P fragments. With one, and ``delay=0``, this is `EnsembleSync` with the same
    ``steps``, ``outer_lr`` and ``outer_momentum``.

    At an epoch's end, as after a `pull`, workers take the newest version of every fragment; what they have come to in a fragment since
    they pushed it, at most H - 1 steps, is in no version. One that dies between two pushes loses as much.

    Source: DiLoCo (Douillard et al. 2023, arXiv 2311.08105): local steps, outer Nesterov step with 0.7 and 0.9. Streaming DiLoCo
    (Douillard et al. 2025, arXiv 2501.18512): fragments, overlap tau (``delay``), mixing factor alpha. From torchft's ``local_sgd.py``:
    the offsets of the fragments, ``tau < H / P``, and 0 as the default of both. Departures: a death changes the number of workers in the
    mean, where torchft discards all steps since the last exchange; fragments are contiguous, where the paper also strides over layers.

    >>> DiLoCo(steps=100, delay=10, alpha=0.5).spelling
    'diloco(steps=100, delay=10, alpha=0.5)'

    Raises:
        ConfigurationError: a setting is out of its range.
    """

    about = About(
        examples=("diloco(steps=5)", "diloco(steps=10, delay=1, alpha=0.5)", "diloco(steps=11, delay=1, outer_lr=1.0, outer_momentum=0.0)"),
        draws=lambda workers: [
            {"steps": range(5, 8), "outer_momentum": (0.0, 0.9)},
            {"steps": range(10, 14), "delay": (0, 1), "alpha": (0.0, 0.5)},
        ],
        row=Row(
            "`diloco(steps=100, delay=10)`",
            "each fragment by itself: the mean of all workers' parameters",
            "all workers; they wait for a fragment only if it is not back after `delay` steps",
            "slow links: a fragment is exchanged once in H steps, one at a time, while workers compute",
        ),
    )

    word = "diloco"
    always_spelled = ("steps",)

    steps: int = 100
    """H, the local steps between two pushes of one fragment; at least the number of servers."""
    delay: int = 0
    """tau, the local steps from a push until the worker needs the fragment's new version; less than ``steps / servers``. 0: it waits."""
    alpha: float = 0.0
    """The share of the worker's own parameters in the mixture, from 0 to 1. 0: it takes the new version, and what its fragment
    has come to in the ``delay`` steps is lost."""
    outer_lr: float = 0.7
    """eta, above 0. With 1, and without momentum, the new version is the mean."""
    outer_momentum: float = 0.9
    """mu, Nesterov's momentum as torch has it; at least 0, at most 0.999."""

    def __post_init__(self) -> None:
        check_fragments(self)

    @property
    def scope(self) -> Literal["job", "shard"]:
        return "shard"

    @property
    def averaging(self) -> Averaging:
        return Averaging(outer_lr=float(self.outer_lr), outer_momentum=float(self.outer_momentum))

    def blocks(self, shards: int) -> Fragments:
        return Fragments(shards, owner=self.called(), steps=self.steps, delay=self.delay, alpha=float(self.alpha))

    def fold(self, view: View) -> Decision | None:
        late = tuple(c for c in [*view.gathered, *view.pending.values()] if c.version < view.version)
        if late:
            return Decision((), f"of an earlier version than {view.version}, this fragment's", drop=late)
        if not view.pending or view.missing:
            return None
        parts = tuple(view.pending.values())
        reason = f"all {len(view.active)} active workers have pushed this fragment"
        return Decision(parts, reason, weights=(1.0 / len(parts),) * len(parts))
