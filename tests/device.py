"""Where the models of tests are that can be anywhere: on the CPU, or where ``OFFBEAT_TEST_DEVICE`` says, for instance on ``cuda``.

Scripts of fault tests read the variable themselves, since they run in workers.
"""

from __future__ import annotations

import os

import torch

from offbeat.runtime.job.wire_choice import plane_choice

PLANE = plane_choice(os.environ.get("OFFBEAT_TEST_PLANE", "host"))
"""Whose memory jobs in the test's process exchange gradients in. For ``auto`` without a GPU there is a fake one."""
DEVICE = torch.device(os.environ.get("OFFBEAT_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    torch.backends.cudnn.allow_tf32 = False  # jobs are compared with one process up to the rounding of float32
    torch.linalg.inv(torch.eye(2, device=DEVICE))  # torch loads its linear algebra once, and not in two threads at a time
elif PLANE != "host":
    from tests.support import fake_cuda

    fake_cuda.install()
