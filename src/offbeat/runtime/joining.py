"""Choose the session of a process by the job's rule: that of a worker of servers, or that of a rank."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch

from offbeat.core.policy import Policy, ServerRule
from offbeat.policies import rule
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.job.wire_choice import check_plane, check_rule
from offbeat.runtime.members import part_of
from offbeat.runtime.parameter_server.worker_side import WorkerSession
from offbeat.runtime.ranks.worker_side import RankSession
from offbeat.runtime.worker.job_session import JobSession, SessionOptions
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.types import WireFormat


def session_of(
    settings: WorkerSettings,
    policy: Policy,
    layout: Layout,
    spec: OptimizerSpec,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    wire: WireFormat = "float32",
    grouped: bool = False,
    **options: Unpack[SessionOptions],
) -> JobSession:
    """Return a session that has not joined yet, for the launcher's rule and wire format, or else the script's (``policy``, ``wire``).

    Raises:
        ConfigurationError: the rule cannot use the wire format, or the memory of ``--plane``.
        JobError: a server cannot be reached.
    """
    chosen = policy if settings.sync is None else rule(settings.sync)
    wire = settings.wire or wire
    check_rule(chosen, wire)
    check_plane(chosen, settings.plane)
    made = partial(WorkerSession, wire=wire) if isinstance(chosen, ServerRule) else partial(RankSession, part_of=part_of)
    return made(settings, layout, spec, model, optimizer, grouped=grouped, **options)
