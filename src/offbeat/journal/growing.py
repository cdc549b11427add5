"""Read a journal that may still grow: the records that are whole, and later those that have come since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.journal.compression import Lines
from offbeat.journal.file import check_first, parse
from offbeat.journal.records import Record


class Growing:
    """A journal, read piece by piece.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0
        self.place = 0
        """Bytes up to the end of the last whole line or frame that was read."""
        self.nbytes = 0
        """Bytes of the file when it was read last."""
        self.unit = "line"
        """What the file consists of: "frame" or "line"."""

    def read(self) -> Iterator[Record]:
        """Return the whole records that have come since the last call.

        Raises:
            ConfigurationError: there is no such file, it is no journal, it is not to be read by this version, or a line in it is no record.
            Replaced: another journal has this name now, or this one was cut: begin with a new object.
        """
        try:
            self.nbytes = self._path.stat().st_size
            if self.nbytes < self.place:
                raise Replaced
            lines = Lines(self._path, self.place, growing=True)
            for line in lines:
                self._lines += 1
                if (entry := parse(line)) is None:
                    rest = "; what comes before it is shown" if self._lines > 1 else ""
                    raise ConfigurationError(f"{self._path}, line {self._lines}: not a record of a journal{rest}")
                if self._lines == 1:
                    check_first(self._path, entry)
                yield entry
            self.place, self.unit = lines.whole, lines.unit
        except OSError as error:
            raise ConfigurationError(f"cannot read the journal {self._path}: {error.strerror}") from error

    @property
    def rest(self) -> str | None:
        """A sentence on what is no whole line or frame at the end; None: nothing is."""
        missing = self.nbytes - self.place
        return f"The last {missing:,} bytes of {self._path.name} are no whole {self.unit}." if missing > 0 else None


class Replaced(Exception):
    """Raised where a journal is not the one that was read before."""
