"""Write the shard of a server other than 0 to a file of a checkpoint, in a thread, and report it to server 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offbeat.runtime.coordination.checkpoint_content import make_way, shard_file, write_copy
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.tensors.whole import ShardCopy


class ShardFiles:
    """Write copies of one server's shards.

    Args:
        folder: of the job's checkpoints.
        server: its number.
        report: sends server 0 a message about an optimizer.
        wake: wakes the server's loop, from any thread.
    """

    def __init__(self, folder: str, server: int, report: Callable[[int, dict[str, Any]], None], wake: Callable[[], None]) -> None:
        self._folder, self._server, self._report, self._wake = Path(folder), server, report, wake
        self._pool = ThreadPoolExecutor(1, "offbeat-checkpoint", make_way)
        self._open: list[tuple[int, dict[str, Any], Future[None]]] = []

    def save(self, number: int, order: Mapping[str, Any], copy: ShardCopy) -> None:
        """Begin to write the copy of optimizer ``number``'s shard, as server 0 has ordered.

        Raises:
            ProtocolError: the order does not name a checkpoint in the making.
        """
        path = shard_file(CheckpointFolder(self._folder).partial(order["name"]), self._server, number)
        future = self._pool.submit(write_copy, path, copy)
        self._open.append((number, {"kind": "saved", "version": order["version"]}, future))
        future.add_done_callback(lambda _: self._wake())

    def close(self) -> None:
        """End with the server; what is being written is of no use any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def tick(self) -> None:
        """Report what has been written since the last call, or could not be written."""
        for entry in [entry for entry in self._open if entry[2].done()]:
            self._open.remove(entry)
            number, header, future = entry
            error = future.exception()
            self._report(number, {**header, "failed": None if error is None else f"server {self._server}: {error}"[:1000]})
