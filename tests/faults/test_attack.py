"""One worker of a real job sends malformed messages with the right token: the others train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.attack import attacked, harmed


@pytest.mark.parametrize(("way", "sync"), [("local", "asp"), ("tcp", "solo")])
def test_a_job_outlives_malformed_messages_and_connections(way: str, sync: str, tmp_path: Path) -> None:
    ended = attacked(tmp_path, way, sync, messages=400, connections=900, bound_s=120.0)
    assert harmed(ended) == []
    assert "TOTAL 400 messages" in ended.out, ended.out
