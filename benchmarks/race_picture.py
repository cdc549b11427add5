"""Draw the race: accuracy over time, a panel for each task, trace and kind of run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import race_tasks


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one curve for each system: of its run with the median time. Runs end at the target, which is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(row["task"], row["trace"], row["kill_s"] is not None) for row in rows}, key=str)
    colours = dict(zip(race_tasks.SYSTEMS, pyplot.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    wide = min(2, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = pyplot.subplots(high, wide, figsize=(6.5 * wide, 3.8 * high), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        task, trace, killed = panel
        axis.set_title(f"{task}, {'no stragglers' if trace == 'none' else f'{trace} trace'}{', worker 3 killed' if killed else ''}")
        axis.axhline(race_tasks.TASKS[task].target, color="grey", linestyle="--", linewidth=1)
        for system, colour in colours.items():
            mine = [row for row in rows if (row["task"], row["trace"], row["kill_s"] is not None, row["system"]) == (*panel, system)]
            if not mine:
                continue
            ordered = sorted(mine, key=lambda row: float("inf") if row["seconds"] is None else row["seconds"])
            curve = ordered[(len(ordered) - 1) // 2]["curve"]
            axis.plot(
                *zip(*curve, strict=True),
                drawstyle="steps-post",
                label=system,
                color=colour,
                linewidth=2.5 if system in ("DDP", "torchft") else 1.3,
            )
        axis.set_xlabel("seconds")
        axis.set_ylabel("test accuracy")
        axis.legend(fontsize=7, loc="lower right")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
