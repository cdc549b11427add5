"""``python -m offbeat ...``: the command ``offbeat ...``, with this interpreter."""

from __future__ import annotations

from offbeat.cli import main

if __name__ == "__main__":
    main()
