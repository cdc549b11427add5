"""Results of writes, in the process that writes and in the one after it."""

from __future__ import annotations

import errno
import io
import threading
from typing import Any

import pytest
import torch

from offbeat.runtime.coordination.file_writer import FileWriter, Written


def nothing() -> None:
    """A hub that needs no waking."""


def yes() -> bool:
    return True


def next_process(writer: FileWriter) -> FileWriter:
    """The writer after the death of its process."""
    again = FileWriter(nothing)
    again.follow(writer.open)
    assert again.replays
    return again


def test_a_result_is_reported_until_it_is_handled() -> None:
    woken, go = threading.Event(), threading.Event()
    writer = FileWriter(woken.set)
    writer.begin(0, 7, go.wait)
    assert writer.results() == []
    go.set()
    assert woken.wait(10.0)
    writer.wait(10.0)
    assert writer.results() == writer.results() == [Written(0, 7, None)]
    writer.handled(Written(0, 7, None))
    assert writer.results() == []
    writer.close()


@pytest.mark.parametrize("error", [OSError("no space left"), ZeroDivisionError("a mistake of ours")])
def test_an_error_is_the_reason(error: Exception) -> None:
    def write() -> None:
        raise error

    writer = FileWriter(nothing)
    writer.begin(1, 7, write)
    writer.wait(10.0)
    assert writer.results() == [Written(1, 7, str(error))]
    writer.close()


def test_a_full_disk_is_the_reason_whatever_was_raised_while_cleaning_up(caplog: pytest.LogCaptureFixture) -> None:
    """As PyTorch does: its archive is closed by a destructor that finds less than it has written."""

    def write() -> None:
        class Full(io.BytesIO):
            def write(self, data: Any) -> int:
                if len(data) > 1024:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        torch.save({"weight": torch.zeros(4096)}, Full())

    with pytest.raises(RuntimeError, match="unexpected pos"):
        write()
    writer = FileWriter(nothing)
    writer.begin(1, 7, write)
    writer.wait(10.0)
    assert writer.results() == [Written(1, 7, "No space left on device")]
    assert not caplog.records, "a full disk is no mistake of ours, and needs no traceback"
    writer.close()


def test_what_was_open_at_a_death_was_cut_off_unless_it_is_on_the_disk() -> None:
    writer = FileWriter(nothing)
    for number in range(4):
        writer.begin(number, 7, nothing, yes if number == 1 else None)
    writer.wait(10.0)
    writer.handled(Written(3, 7, None))
    again = next_process(writer)
    again.handled(Written(2, 7, None))  # was in the log
    again.replays = False
    assert [(result.number, result.cut_off, result.failed is None) for result in again.results()] == [(0, True, False), (1, False, True)]
    writer.close()


def test_a_process_that_is_told_again_what_has_happened_begins_no_write() -> None:
    def fail() -> None:
        raise AssertionError("it was written before")

    again = next_process(FileWriter(nothing))
    again.begin(0, 7, fail)
    again.aside(fail)
    again.replays = False
    again.wait(10.0)
    assert again.results() == [Written(0, 7, "its writer has died", cut_off=True)]
