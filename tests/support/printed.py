"""What a console shows."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def printed(*what: RenderableType, width: int = 160, height: int = 40) -> str:
    """Return what is printed to a file, in lines of so many characters."""
    file = io.StringIO()
    Console(file=file, width=width, height=height, force_terminal=False).print(*what, sep="\n", highlight=False)
    return file.getvalue()
