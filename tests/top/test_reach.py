"""Which job a user means by the name of a script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.watchers import Entry
from offbeat.top import reach
from offbeat.transport.base import Address


def entry(pid: int) -> Entry:
    return Entry(f"job-{pid}-0", Address("host", ("127.0.0.1", 1), ""), "token", "process", pid, "/home/me/train.py", 2, time.time())


def answering(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    """Let the jobs with these pids answer, and no others."""

    def ask_all(found: Sequence[Entry]) -> list[tuple[dict[str, Any], None, str]]:
        return [({"pid": one.pid}, None, "" if one.pid in pids else "does not answer") for one in found]

    monkeypatch.setattr(reach, "ask_all", ask_all)


def test_a_script_means_the_one_job_of_it_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 3226)
    assert reach.chosen([entry(7), entry(3226)], "train.py").pid == 3226
    assert reach.chosen([entry(7), entry(3226)], "7").pid == 7, "a pid is a choice"


@pytest.mark.parametrize("alive", [(7, 3226), ()])
def test_where_several_or_none_answer_the_user_chooses(alive: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, *alive)
    with pytest.raises(ConfigurationError, match=r"train\.py: 2 jobs run it; give the pid of one: 7, 3226"):
        reach.chosen([entry(7), entry(3226)], "train.py")
