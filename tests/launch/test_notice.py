"""A command of the user says when the machine will be taken away."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.waiting import alive, until

from offbeat.errors import ConfigurationError
from offbeat.launch.notice import LIMIT_S, PERIOD_S, NoticeCommand
from offbeat.runtime.job.settings import TOKEN


def ended(command: NoticeCommand, now: float) -> bool:
    """Wait until the run that is under way has ended; return what was seen of it."""
    seen: list[bool] = []

    def over() -> bool:
        seen.append(command.look(now))
        return command._running is None

    until("the end of the command", over)
    return seen[-1]


def test_status_0_is_the_notice_and_any_other_status_is_asked_for_again(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    command = NoticeCommand(f"test -e '{notice}'")
    assert not command.look(100.0) and not ended(command, 100.0)
    assert not command.look(100.0 + PERIOD_S - 0.1) and command._running is None, "it is not due yet"
    notice.touch()
    assert not command.look(100.0 + PERIOD_S) and ended(command, 100.0 + PERIOD_S)


def test_a_run_that_does_not_end_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = NoticeCommand(f"sleep 1000 & echo $! > '{child}'; wait")
    command.look(0.0)
    until("the child's number", lambda: child.exists() and child.read_text().strip())
    pid = int(child.read_text())
    assert not command.look(LIMIT_S - 0.1) and alive(pid)
    assert not command.look(LIMIT_S) and command._running is None
    until("the child's end", lambda: not alive(pid))


def test_the_command_does_not_see_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a secret of this test")
    out = tmp_path / "out"
    command = NoticeCommand(f"env > '{out}'")
    command.look(0.0)
    assert ended(command, 0.0)
    assert "a secret of this test" not in out.read_text()


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--notice-command"):
        NoticeCommand(" ")
