"""What all tests share. How hypothesis runs: no deadline for one example, since a busy machine may stop any process for a while.

Where ``CI`` is set the examples are always the same ones, so that a change is judged by itself and not by chance; elsewhere each run looks
at new ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from offbeat import session

settings.register_profile("offbeat", deadline=None)
settings.register_profile("offbeat-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("offbeat-ci" if os.environ.get("CI") else "offbeat")


@pytest.fixture(autouse=True)
def a_process_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one session; the tests share theirs."""
    monkeypatch.setattr(session, "current", None)
