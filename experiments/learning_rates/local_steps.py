"""How many local steps AdaComm makes while the loss falls, on simulated times and given losses."""

from __future__ import annotations

from typing import Final

from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.policies.rounds import INTERVAL
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.workload import Handed, Workload

FALLING: Final = (0.80, 0.48, 0.24, 0.08, 0.08)
"""The loss of all folds of an interval but the very first, which has 1."""
STEPS: Final = "adacomm(steps=20): local steps, loss falling from 1 to 0.80, 0.48, 0.24, 0.08"

CLAIMS: Final = mechanism(Claim(row=STEPS, says="20, 18, 14, 10, 6", why="ceil(20 sqrt(F / F_0)), F the mean loss of the interval before"))


class GivenLosses(Workload):
    """Contributions whose loss depends on their version only."""

    empty = False

    def __init__(self) -> None:
        self.steps: dict[int, None] = {}
        """The numbers of local steps, in the order in which they have come up."""

    def handed_in(self, push: Handed) -> float:
        self.steps[len(push.steps)] = None
        return FALLING[push.version // INTERVAL] if push.version else 1.0


def rows() -> list[Row]:
    """Return what is claimed."""
    losses = GivenLosses()
    simulate("adacomm(steps=20)", Cluster(workers=2), Work(versions=len(FALLING) * INTERVAL), content=losses, counted=False)
    return [Row(STEPS, None, ", ".join(map(str, losses.steps)), "")]
