"""Numbers of local steps that do not follow the loss."""

from __future__ import annotations

from math import ceil
from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.policies import adacomm

HOME: Final = "learning_rates"
MUTATIONS: Final = (
    Mutation("adacomm", "as many steps as at first", HOME, replaced(adacomm, "next_period", lambda ratio, first, last: first)),
    Mutation(
        "adacomm", "half of the steps, whatever the loss", HOME, replaced(adacomm, "next_period", lambda ratio, first, last: ceil(last / 2))
    ),
)
