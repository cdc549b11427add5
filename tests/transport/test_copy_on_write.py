"""A view in which writes stay in this process, until they are taken away."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from offbeat.transport import copy_on_write
from offbeat.transport.copy_on_write import OwnView, own_view
from offbeat.transport.shm import MemoryBlock, PrivateBlock

PAGES = 20


def made(pages: int = PAGES) -> tuple[MemoryBlock, OwnView]:
    block = MemoryBlock.allocate(pages * mmap.PAGESIZE - 100, "a test")
    block.view[:] = bytes(range(256)) * (block.nbytes // 256) + bytes(block.nbytes % 256)
    own = own_view(block)
    assert own is not None
    return block, own


@pytest.mark.parametrize("at", [0, mmap.PAGESIZE, PAGES * mmap.PAGESIZE - 101])
def test_what_is_written_is_seen_here_only_and_taken_away(at: int) -> None:
    block, own = made()
    before = bytes(block.view)
    own.view[at] = 255 - before[at]
    assert bytes(block.view) == before != bytes(own.view)
    assert own.renew() and bytes(own.view) == before
    assert not own.renew()


def test_a_page_that_was_written_shows_later_values_of_others_once_it_is_renewed() -> None:
    block, own = made()
    own.view[0] = own.view[0]  # as after a value that was put there and taken back
    block.view[0] = block.view[-1] = 77
    assert own.view[-1] == 77 != own.view[0]
    assert own.renew() and own.view[0] == 77


def test_the_view_outlives_the_block() -> None:
    block, own = made()
    block.close()
    own.view[5] = 99
    assert own.renew() and own.view[5] == 5


def test_there_is_none_without_shared_memory() -> None:
    assert own_view(PrivateBlock.allocate(100, "a test")) is None
    assert own_view(MemoryBlock.allocate(0, "a test")) is None


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(None, id="nothing"),
        pytest.param(0, id="no page is there"),
        pytest.param(5 << 61, id="all pages are files'"),
        pytest.param(4 << 61, id="all pages are copies"),
    ],
)
def test_there_is_none_where_the_system_does_not_tell_what_was_copied(entry: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if entry is None:
            return 0
        buffers[0][:] = entry.to_bytes(8, sys.byteorder) * (len(buffers[0]) // 8)
        return len(buffers[0])

    block = MemoryBlock.allocate(100, "a test")
    monkeypatch.setattr(os, "preadv", read)
    assert own_view(block) is None


def test_there_is_none_without_a_pagemap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "PAGEMAP", str(tmp_path / "missing"))
    assert own_view(MemoryBlock.allocate(100, "a test")) is None
