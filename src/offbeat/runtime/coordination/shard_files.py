"""Write the shard of a server other than 0 to a file of a checkpoint, and report it to server 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offbeat.runtime.coordination.checkpoint_content import shard_file, write_copy
from offbeat.runtime.coordination.file_writer import FileWriter, Written
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.tensors.whole import ShardCopy


class ShardFiles:
    """Write copies of one server's shards.

    Args:
        folder: of the job's checkpoints.
        server: its number.
        report: sends server 0 a message about an optimizer.
        writer: writes the files.
    """

    def __init__(self, folder: str, server: int, report: Callable[[int, dict[str, Any]], None], writer: FileWriter) -> None:
        self.folder, self._server, self._report, self._writer = CheckpointFolder(folder), server, report, writer

    def save(self, number: int, order: Mapping[str, Any], copy: Callable[[], ShardCopy]) -> None:
        """Begin to write a copy of optimizer ``number``'s shard, as server 0 has ordered."""
        copied = None if self._writer.replays else copy()  # an earlier process has copied it; the memory is of a later version by now

        def write() -> None:
            assert copied is not None
            write_copy(shard_file(self.folder.begin(order["version"]), self._server, number), copied)

        self._writer.begin(number, order["version"], write)

    def on_written(self, result: Written) -> None:
        """Report what has been written, or could not be."""
        failed = None if result.failed is None else f"server {self._server}: {result.failed}"[:1000]
        self._report(result.number, {"kind": "saved", "version": result.version, "failed": failed, "cut_off": result.cut_off})
