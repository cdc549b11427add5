"""Let a standby make its leader's fold while the sum of the gradients is still on its way.

On a network the sum of a large model travels for as long as a gradient. A standby that waited for all of it would step after that, and then
send the workers of its machine their parameters. So the leader says with the first bytes of the sum what it makes of it, and the standby
writes the new version into the half that nobody reads, and sends it on, as far as the sum has come. The version counts when the leader's
record is handled, which makes the same fold. If the leader dies before that, the half is as good as empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.runtime.parameter_server.deliveries import Delivery
from offbeat.runtime.recovery.replica import Coming
from offbeat.tensors.shard import Folding
from offbeat.types import WorkerId


class FoldAhead(NamedTuple):
    """A fold in the making, whose gradients are the sum that comes.

    Args:
        coming: what was known of the sum at first.
        folding: writes the half that nobody reads.
        deliveries: to the workers of this machine that the fold releases. Their links are bound to that half.
    """

    coming: Coming
    folding: Folding
    deliveries: Mapping[WorkerId, Delivery]

    def advance(self, come: int) -> None:
        """Go on, now that so many bytes of the sum are there."""
        while (needed := self.folding.next) is not None and needed <= come:
            self.folding.step()
        made = come if self.folding.next is None else self.folding.made
        for delivery in self.deliveries.values():
            delivery.advance(made)

    def is_of(self, order: Mapping[str, Any], total: memoryview) -> bool:
        """Return True if this is the fold that an order tells to make with a sum."""
        fold = self.coming.fold
        return total is self.coming.total and (fold["hyper"], fold["scale"]) == (order["hyper"], order["scale"])
