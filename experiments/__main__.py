"""``python -m experiments --list`` and ``python -m experiments NAME [NAME...] [--quick] [--check] [--out DIR]``: runs experiments.

An experiment is a package beside this file that says in ``PAPER`` what it reproduces. Looking for them reads source and imports nothing,
so that the list costs no torch; only what is run is imported. Packages whose names begin with an underscore are shared code.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.claims import MECHANISM, Claim, Verdict, judge, table
from experiments.data import MissingDataError
from experiments.result import Row, new_figure, report
from offbeat.errors import ConfigurationError, OffbeatError

HERE: Final = Path(__file__).parent
FAILED, MISTAKEN, NO_DATA = 1, 2, 3
"""Exit statuses, beside 0: an experiment failed or broke a claim; the command line is wrong; nothing failed but a data set is not here."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def find(folder: Path = HERE) -> dict[str, Path]:
    """The file of each experiment under ``folder``, by name."""
    found = {path.parent.name: path for path in sorted(folder.glob("*/__init__.py"))}
    return {name: path for name, path in found.items() if not name.startswith("_")}


def paper_of(path: Path) -> str:
    """What an experiment reproduces: its ``PAPER``, read without running it.

    Raises:
        ConfigurationError: it says nothing, or not in one string.
    """
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "PAPER" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return node.value.value
    raise ConfigurationError(f'{path}: write PAPER = "..." on a line of its own: which table or figure of which paper it reproduces')


@dataclass(frozen=True, kw_only=True)
class Options:
    """How experiments are run."""

    quick: bool = False
    check: bool = False
    """Whether their claims are compared with what came out."""
    seeds: int | None = None
    """Over how many seeds; None: as many as the experiment has by itself."""
    variant: str = ""
    """One of the experiment's ``VARIANTS``; empty: the experiment itself."""

    @property
    def mode(self) -> str:
        return "quick" if self.quick else "full"

    def title(self, name: str) -> str:
        """The experiment's name with what is not as usual, as it would be typed.

        >>> Options(seeds=3).title("psp_fig4")
        'psp_fig4 --seeds 3'
        """
        return name + (f" --variant {self.variant}" if self.variant else "") + (f" --seeds {self.seeds}" if self.seeds else "")


def runnable(name: str, module: ModuleType, options: Options) -> Callable[..., list[Row]]:
    """The function that runs the experiment, or the variant, as the options want it.

    Raises:
        ConfigurationError: the experiment has no such variant, or takes no number of seeds.
    """
    variants = getattr(module, "VARIANTS", {})
    if options.variant and options.variant not in variants:
        known = f"the known ones are {', '.join(variants)}" if variants else "it has none"
        raise ConfigurationError(f"{name} has no variant {options.variant!r}; {known}")
    function: Callable[..., list[Row]] = variants[options.variant] if options.variant else module.run
    if options.seeds is not None and "seeds" not in inspect.signature(function).parameters:
        raise ConfigurationError(f"{options.title(name)}: it takes no number of seeds; leave out --seeds")
    return function


def claims_of(module: ModuleType, options: Options) -> list[Claim]:
    """The claims that an experiment makes of such a run."""
    return [claim for claim in getattr(module, "CLAIMS", ()) if claim.variant == options.variant and claim.mode in ("both", options.mode)]


def run(name: str, *, out: Path, screen: Console, options: Options) -> list[Verdict]:
    """Run one experiment: its picture and ``result.json`` into ``out``, its table on the screen.

    Returns:
        With ``check`` what became of each of its claims, else nothing.

    Raises:
        OffbeatError: it cannot run here; what else it raises is its own failure.
    """
    new_figure()  # a missing matplotlib is better known before an hour of work than after it
    module = importlib.import_module(f"experiments.{name}")
    function, title = runnable(name, module, options), options.title(name)
    claims = claims_of(module, options)
    if options.check and not claims:
        raise ConfigurationError(f"{title} claims nothing in {options.mode} mode: list its claims in CLAIMS, or leave out --check")
    _one_thread()
    paper, seed = paper_of(HERE / name / "__init__.py"), int(getattr(module, "SEED", 0))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{name}.png"
    for stale in (picture, out / "result.json"):
        stale.unlink(missing_ok=True)
    began = time.perf_counter()
    settings: dict[str, Any] = {} if options.seeds is None else {"seeds": options.seeds}
    rows = function(quick=options.quick, out=out, **settings)
    wall_s = time.perf_counter() - began
    if not picture.is_file() and options.variant != MECHANISM:
        raise ConfigurationError(f"{name}: run() drew no {picture}; it must write NAME.png into the folder that it is given")
    result = report(title, paper, rows, out, quick=options.quick, wall_s=wall_s, seed=seed, screen=screen)
    screen.print(f"{wall_s:.1f} s; wrote {result}{f' and {picture}' * picture.is_file()}", soft_wrap=True, markup=False, highlight=False)
    if not options.check:
        return []
    verdicts = judge(claims, rows)
    screen.print(table(verdicts))
    return verdicts


def _one_thread() -> None:
    """What is computed in this process takes one core: with products this small a second thread costs more than it brings, and where
    other work holds the second core, many times more."""
    import torch  # the list of experiments costs no torch

    torch.set_num_threads(1)


def show(found: dict[str, Path], screen: Console) -> None:
    """Print the names and what each reproduces, or why that is not known."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, path in found.items():
        try:
            made.add_row(name, escape(paper_of(path)))
        except ConfigurationError as error:
            made.add_row(name, f"[red]{escape(str(error))}")
    screen.print(made)


def unknown(name: str, found: dict[str, Path]) -> str:
    """A sentence about a name that is no experiment's.

    >>> unknown("ziplin", {"zipline_table2": Path(), "dbw_fig1": Path()})
    "there is no experiment 'ziplin' (did you mean 'zipline_table2'?); the known ones are zipline_table2, dbw_fig1"
    """
    close = difflib.get_close_matches(name.lower(), list(found), n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"there is no experiment {name!r}{hint}; the known ones are {', '.join(found)}"


@app.command(no_args_is_help=True)
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="What to run, one after another.")] = None,
    every: Annotated[bool, typer.Option("--list", help="Say what there is and which table or figure it reproduces.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller: under a minute on two cores where it can be.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with what the experiment claims; status 1 if a claim is broken.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Over so many seeds, with the ranges; where an experiment has seeds.")] = None,
    variant: Annotated[str, typer.Option(metavar="NAME", help="Another comparison that an experiment's README describes.")] = "",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where to write; for several names a folder in it each. [default: out/NAME]")
    ] = None,
) -> None:
    """Make tables and figures of the papers anew: prints the paper's numbers beside ours, writes result.json and a picture."""
    found = find()
    screen = Console()
    screen = screen if screen.is_terminal else Console(width=150)
    strangers = [name for name in names or [] if name not in found]
    if strangers:
        typer.echo(f"experiments: {unknown(strangers[0], found)}", err=True)
        raise typer.Exit(MISTAKEN)
    if every or not names:
        show(found, screen)
        return
    options = Options(quick=quick, check=check, seeds=seeds, variant=variant)
    statuses = set()
    for name in dict.fromkeys(names):
        folder = Path("out", name) if out is None else out if len(set(names)) == 1 else out / name
        statuses.add(attempt(name, out=folder, screen=screen, options=options))
    raise typer.Exit(FAILED if FAILED in statuses else NO_DATA if NO_DATA in statuses else 0)


def attempt(name: str, *, out: Path, screen: Console, options: Options) -> int:
    """Run one experiment and say what became of it, as an exit status; the ones after it get their turn either way."""
    try:
        verdicts = run(name, out=out, screen=screen, options=options)
    except MissingDataError as error:
        typer.echo(f"{name}: {error}", err=True)
        return NO_DATA
    except OffbeatError as error:
        typer.echo(f"{name} failed: {error}", err=True)
        return FAILED
    except Exception as error:
        traceback.print_exc()
        typer.echo(f"{name} failed: {type(error).__name__}: {error}", err=True)
        return FAILED
    broken = [verdict for verdict in verdicts if not verdict.holds]
    for verdict in broken:
        typer.echo(f"{name}: broken claim: {verdict}", err=True)
    return FAILED if broken else 0


if __name__ == "__main__":
    app(prog_name="python -m experiments")
