"""`OffbeatStrategy` for the ``Trainer`` of the package ``lightning``; that for ``pytorch_lightning`` has a module of its own."""

from __future__ import annotations

from offbeat.integrations.loops import MissingExtraError

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError:
    raise MissingExtraError("lightning", "lightning") from None

from offbeat.integrations.lightning_strategy import JobStrategy


class OffbeatStrategy(JobStrategy, SingleDeviceStrategy):
    """Trains a ``LightningModule`` in a job of offbeat: under ``offbeat run``, or alone without a launcher.

    The strategy wraps the module's optimizers with `offbeat.DistributedOptimizer` and lets the job deal out the training batches.
    Gradient clipping, accumulation, learning-rate schedulers, callbacks and loggers work as on one device. Only the chief prints, logs and
    writes checkpoints, which plain PyTorch loads.

    Args:
        sync: the rule, as an object (``offbeat.SSP(staleness=3)``) or as a string; ``--sync`` on the command line replaces it.
        nonfinite: for a gradient with infinity or NaN: ``"reject"`` it or ``"stop"`` the job.
        device: the device of this worker; default: a GPU by the worker's number if there are any, otherwise the CPU.
        others: the arguments of Lightning's ``SingleDeviceStrategy``.

    Raises:
        ConfigurationError: from ``Trainer.fit``, if an optimizer cannot be wrapped, or ``fit`` is called twice in one job.

    >>> import lightning, torch
    >>> trainer = lightning.Trainer(strategy=OffbeatStrategy(sync="ssp(staleness=3)"), logger=False)
    >>> trainer.strategy.is_global_zero
    True
    """
