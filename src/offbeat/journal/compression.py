"""Write a journal as a stream of compressed frames, and read it back, whole or cut off. A file's name decides how it is written.

Each block of lines that a journal gives to the operating system becomes one frame (``.zst``), or one member (``.gz``), with a checksum. A
file of several frames is what ``zstd -dc`` and ``gzip -dc`` read too. A writer that is killed leaves whole frames and at most one that is
cut. What a file holds is found out from its first bytes, so that a journal which was renamed, or compressed later, can be read as well.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from offbeat.errors import ConfigurationError

Pack: TypeAlias = Callable[[bytes], bytes]
"""Makes one frame of a block of lines."""

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC: Final = b"\x1f\x8b"
GZIP_WINDOW: Final = zlib.MAX_WBITS | 16
"""For zlib: with the header and the checksum of gzip."""
LEVEL: Final = 1
"""Of both: in frames of up to 64 KiB, zstd's higher levels make a journal no smaller, and gzip's cost server 0 more than they save."""
CHUNK_NBYTES: Final = 1 << 16


def packer(path: Path) -> Pack:
    """Return the function that makes a frame of a block of lines for a file of this name: of ``.zst``, of ``.gz``, else the block itself.

    Raises:
        ConfigurationError: the name asks for zstd, and there is none.
    """
    if path.suffix == ".zst":
        zstd = _zstd(path)
        options = {zstd.CompressionParameter.compression_level: LEVEL, zstd.CompressionParameter.checksum_flag: 1}
        return lambda block: bytes(zstd.compress(block, options=options))
    return _gzip if path.suffix == ".gz" else bytes


class Lines:
    """Iterate over the lines of a file, compressed or not, each with its newline; a last line may lack it.

    Args:
        path: the file.
        start: bytes to leave out at the beginning: up to the end of a line or frame.
        growing: leave out the line or frame that is not whole yet; it is there when the file is read again from `whole`.

    Raises:
        OSError: from the iteration: the file cannot be read.
        ConfigurationError: from the iteration: the file is compressed with zstd, and there is none.
    """

    def __init__(self, path: Path, start: int = 0, *, growing: bool = False) -> None:
        self._path, self._start, self._growing = path, start, growing
        self.nbytes = start
        """Bytes of the file that have been read."""
        self.whole = start
        """Bytes of the file up to the end of the last whole frame, or of the last whole line in a file that is not compressed."""
        self.unit = "line"
        """What the file consists of: "frame" or "line"."""

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            head = file.read(len(ZSTD_MAGIC))
            file.seek(self._start)
            if (begin := _decompressor(self._path, head)) is None:
                for line in file:
                    self.nbytes += len(line)
                    if line.endswith(b"\n"):
                        self.whole = self.nbytes
                    elif self._growing:
                        return
                    yield line
                return
            self.unit = "frame"
            rest = b""
            for part in self._parts(iter(lambda: file.read(CHUNK_NBYTES), b""), begin):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line + b"\n" for line in lines)
            if rest:
                yield rest

    def _parts(self, chunks: Iterator[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
        """Return what the frames hold, piece by piece, or frame by frame if the file grows, up to the first that is cut or damaged."""
        frame, readable, held = begin(), True, bytearray()
        for data in chunks:
            self.nbytes += len(data)
            while data and readable:
                try:
                    held += frame.decompress(data)
                except (_zstd_error(), zlib.error):
                    readable = False  # goes on counting bytes: they are missing
                    break
                data = frame.unused_data if frame.eof else b""
                if frame.eof or not self._growing:
                    yield bytes(held)
                    held.clear()
                if frame.eof:
                    self.whole = self.nbytes - len(data)
                    frame = begin()


def beginning(path: Path) -> bytes:
    """Return the first line of a file, compressed or not, or what there is of it. Raises what iterating over `Lines` raises."""
    return next(iter(Lines(path)), b"")


def _decompressor(path: Path, head: bytes) -> Callable[[], Any] | None:
    """Return what makes a decompressor for each frame of a file that begins so; None: it is not compressed."""
    if head.startswith(ZSTD_MAGIC):
        found: Callable[[], Any] = _zstd(path).ZstdDecompressor
        return found
    return (lambda: zlib.decompressobj(GZIP_WINDOW)) if head.startswith(GZIP_MAGIC) else None


def _gzip(block: bytes) -> bytes:
    member = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    return member.compress(block) + member.flush()


def _zstd(path: Path) -> Any:
    """Return the module for zstd: the standard library's, or for older versions of Python the same one as a package."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        how = "this Python was built without it" if sys.version_info >= (3, 14) else "pip install backports.zstd"
        raise ConfigurationError(f"{path}: zstd is not there ({how}); a journal can also be run.jsonl.gz or run.jsonl") from None
    return zstd


def _zstd_error() -> type[Exception]:
    """Return the error of a damaged frame, if zstd has been loaded at all."""
    module = sys.modules.get("compression.zstd") or sys.modules.get("backports.zstd")
    return module.ZstdError if module is not None else zlib.error
