"""A view in which writes stay in this process, until they are taken away."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from offbeat.transport import copy_on_write
from offbeat.transport.copy_on_write import COPIED_NBYTES, OwnCopy, OwnView, own_view
from offbeat.transport.shm import MemoryBlock, PrivateBlock

PAGES = 20


def made(pages: int = PAGES) -> tuple[MemoryBlock, OwnView]:
    block = MemoryBlock.allocate(pages * mmap.PAGESIZE - 100, "a test")
    block.view[:] = bytes(range(256)) * (block.nbytes // 256) + bytes(block.nbytes % 256)
    return block, OwnView(block, block.nbytes)


@pytest.mark.parametrize("at", [0, mmap.PAGESIZE, PAGES * mmap.PAGESIZE - 101])
def test_what_is_written_is_seen_here_only_and_taken_away(at: int) -> None:
    block, own = made()
    before = bytes(block.view)
    own.view[at] = 255 - before[at]
    assert bytes(block.view) == before != bytes(own.view)
    block.close()
    assert own.renew() and bytes(own.view) == before
    assert not own.renew()


def test_a_page_that_was_written_shows_later_values_of_others_once_it_is_renewed() -> None:
    block, own = made()
    own.view[0] = own.view[0]  # as after a value that was put there and taken back
    block.view[0] = block.view[-1] = 77
    assert own.view[-1] == 77 != own.view[0]
    assert own.renew() and own.view[0] == 77


@pytest.mark.parametrize("moves", [True, False], ids=["its tables change places", "it is mapped anew"])
def test_another_part_is_shown_at_the_same_address(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `mremap` as a kernel before 5.13 refuses it. What is written to either part is gone when the part is shown again."""
    if not moves:
        monkeypatch.setattr(copy_on_write, "_mremap", lambda *arguments: copy_on_write.FAILED)
    nbytes = 3 * copy_on_write.TABLE_NBYTES + 7 * mmap.PAGESIZE
    block = MemoryBlock.allocate(2 * nbytes, "a test")
    own = own_view(block, nbytes)
    assert own is not None
    tensor, places = torch.frombuffer(own.view, dtype=torch.uint8), (0, nbytes // 2, nbytes - 1)
    for turn in range(1, 6):
        start = turn % 2 * nbytes
        for place in places:
            block.view[start + place] = turn
        assert own.renew(start) and [int(tensor[place]) for place in places] == [turn] * 3
        tensor[nbytes // 2] = 99
        assert block.view[start + nbytes // 2] == turn
    assert own.renew(nbytes) and int(tensor[nbytes // 2]) == 5, "the same part: what was written is gone"


def test_a_small_part_is_copied() -> None:
    block = MemoryBlock.allocate(2 * mmap.PAGESIZE, "a test")
    own = own_view(block, 100)
    assert isinstance(own, OwnCopy)
    block.view[7] = block.view[mmap.PAGESIZE + 7] = 1
    own.view[8] = 9
    assert not block.view[8]
    assert own.renew() and list(own.view[7:9]) == [1, 0]
    block.view[mmap.PAGESIZE + 7] = 2
    block.close()
    assert own.renew(mmap.PAGESIZE) and own.view[7] == 2 and len(own.view) == 100


def test_there_is_none_without_shared_memory() -> None:
    assert own_view(PrivateBlock.allocate(100, "a test"), 100) is None
    assert own_view(MemoryBlock.allocate(0, "a test"), 0) is None


@pytest.mark.parametrize("entry", ["no pagemap", None, 0, 5 << 61, 4 << 61])
def test_there_is_none_where_the_system_does_not_tell_what_was_copied(
    entry: int | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no page map, or one that says nothing, or that no page is there, or that all pages are files', or that all are copies."""

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if not isinstance(entry, int):
            return 0
        buffers[0][:] = entry.to_bytes(8, sys.byteorder) * (len(buffers[0]) // 8)
        return len(buffers[0])

    block = MemoryBlock.allocate(COPIED_NBYTES + 1, "a test")
    if entry == "no pagemap":
        monkeypatch.setattr(copy_on_write, "PAGEMAP", str(tmp_path / "missing"))
    else:
        monkeypatch.setattr(os, "preadv", read)
    assert own_view(block, block.nbytes) is None
