"""`OffbeatStrategy` for the ``Trainer`` of the package ``pytorch_lightning``, whose classes are others than those of ``lightning``."""

from __future__ import annotations

from offbeat.integrations.loops import MissingExtraError

try:
    from pytorch_lightning.strategies import SingleDeviceStrategy
except ModuleNotFoundError:
    raise MissingExtraError("pytorch_lightning", "lightning") from None

from offbeat.integrations.lightning_strategy import JobStrategy


class OffbeatStrategy(JobStrategy, SingleDeviceStrategy):
    """As `offbeat.integrations.lightning.OffbeatStrategy`, for ``pytorch_lightning.Trainer``.

    Args:
        sync, nonfinite, device, others: see `offbeat.integrations.lightning.OffbeatStrategy`.

    Raises:
        ConfigurationError: see `offbeat.integrations.lightning.OffbeatStrategy`.

    >>> import pytorch_lightning
    >>> pytorch_lightning.Trainer(strategy=OffbeatStrategy(sync="bsp"), logger=False).world_size
    1
    """
