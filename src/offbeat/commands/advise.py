"""``offbeat advise``: its options, and how the answer is shown."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from offbeat.advise.advice import PUSHES, SEEDS, Question, advice
from offbeat.advise.table import page_rows, plain, table
from offbeat.advise.words import assumptions, conclusion, of_links, of_sizes, warnings
from offbeat.errors import ConfigurationError
from offbeat.files import write_result
from offbeat.journal.file import read
from offbeat.policies import rule
from offbeat.report.progress import progress_bar
from offbeat.report.table import console
from offbeat.sim.cluster import quantity

SHORT: Final = Question(seeds=1, pushes=800)
"""For a page: some seconds of one process."""
MOST_WORKERS: Final = 1_000


def advise(
    journal: Annotated[Path, typer.Argument(help="The journal of a job, finished or not, compressed or not.", show_default=False)],
    sync: Annotated[list[str] | None, typer.Option(help="Compare with this rule too; may be repeated.", show_default=False)] = None,
    workers: Annotated[
        str | None, typer.Option(help="Other numbers of workers too: 6, 2..8, 4,8, +1 (one more), -1, or ±1.", show_default=False)
    ] = None,
    servers: Annotated[str | None, typer.Option(help="Other numbers of servers too, spelled likewise.", show_default=False)] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="Another link of every host too, such as 10gbit; may be repeated.", show_default=False)
    ] = None,
    model_size: Annotated[
        str | None,
        typer.Option(help="Bytes of the parameters, such as 400MB, for --link: the journal does not have them.", show_default=False),
    ] = None,
    target_loss: Annotated[
        float | None, typer.Option(help=r"Estimate the time to this loss.  \[default: the run's own at its end]", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Simulations of each rule, over which ranges are.")] = SEEDS,
    pushes: Annotated[
        int, typer.Option(help="How many of the run's pushes a simulation replays; of a longer run it takes parts.")
    ] = PUSHES,
    jobs: Annotated[int | None, typer.Option(help=r"Processes.  \[default: the cores]", show_default=False)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures and sentences to this file.")] = None,
) -> None:
    """Say what another rule, or one machine more, would have made of a run."""
    for option, number, least in (("--seeds", seeds, 1), ("--pushes", pushes, 100), ("--jobs", jobs if jobs is not None else 1, 1)):
        if number < least:
            raise ConfigurationError(f"{option} {number}: must be at least {least}")
    job = next(read(journal))
    rules = tuple(" ".join(spec.split()) for spec in sync or ())
    for spec in rules:
        try:
            rule(spec).check(job["workers"])
        except ConfigurationError as error:
            raise ConfigurationError(f"--sync: {error}") from None
    of_workers = counts("--workers", workers, job["workers"])
    of_servers = counts("--servers", servers, job["servers"])
    links = tuple(quantity("--link", text, "bit", "10gbit") for text in dict.fromkeys(link or ()))
    nbytes = None if model_size is None else quantity("--model-size", model_size, "b", "400MB")
    if nbytes is not None and not links:
        raise ConfigurationError(f"--model-size {model_size}: it is for --link, which is not given; give --link 10gbit too")
    if nbytes is None and links:
        asked = ", ".join(link or ())
        raise ConfigurationError(f"--link {asked}: the journal does not say how large a push is; give --model-size 400MB too")
    screen = console()
    question = Question(rules, of_workers, of_servers, links, nbytes, target_loss, seeds, pushes, jobs or os.cpu_count() or 1)
    with progress_bar() as done:
        found = advice(journal, question, done)
    said = conclusion(found) + warnings(found)
    if target_loss is not None and found.reached is None:
        said.append(f"--target-loss {target_loss:g}: the run never had it, or its losses are not in the journal (offbeat.log(loss=...)).")
    said += of_sizes(found, of_workers, of_servers) + of_links(found, links, nbytes or 0.0) + assumptions(found, platform.node())
    if json_file is not None:
        write_result(json_file, json.dumps(plain(found, said), indent=1) + "\n")
    screen.print(table(found))
    for text in said:
        screen.print(f"\n{escape(text)}" if text == said[0] else escape(text), highlight=False)


def rows_of(path: Path, question: Question = SHORT) -> list[dict[str, Any]]:
    """Return the first rows of an advice for a page; where none can be given, the only row's ``notes`` say why."""
    try:
        return page_rows(advice(path, question))
    except ConfigurationError as error:
        return [{"name": "", "measured": True, "best": False, "notes": [f"No advice: {error}."]}]


def counts(option: str, text: str | None, now: int) -> tuple[int, ...]:
    """Return the numbers that an option asks for.

    >>> counts("--workers", "+1", 4), counts("--workers", "±1", 4), counts("--workers", "2..4,8", 4)
    ((5,), (3, 5), (2, 3, 8))

    Raises:
        ConfigurationError: they are spelled otherwise, or there is none or too many.
    """
    if text is None:
        return ()
    found: list[int] = []
    for word in text.replace(" ", "").split(","):
        if match := re.fullmatch(r"(±|\+-|\+|-)(\d+)", word, re.ASCII):
            by = int(match[2])
            found += [now + by] if match[1] == "+" else [now - by] if match[1] == "-" else [now - by, now + by]
        elif match := re.fullmatch(r"(\d+)\.\.(\d+)", word, re.ASCII):
            if int(match[1]) > int(match[2]):
                raise ConfigurationError(f"{option} {text}: {word} runs backwards; write {match[2]}..{match[1]}")
            found += range(int(match[1]), min(int(match[2]), MOST_WORKERS + 1) + 1)
        elif re.fullmatch(r"\d+", word, re.ASCII):
            found.append(int(word))
        else:
            raise ConfigurationError(f"{option} {text}: cannot read {word!r}; write a number, 2..8, 4,8, +1, -1 or ±1 (the job has {now})")
    for count in found:
        if not 1 <= count <= MOST_WORKERS:
            raise ConfigurationError(f"{option} {text}: {count} is not between 1 and {MOST_WORKERS:,} (the job has {now})")
    return tuple(sorted(set(found) - {now}))


def main(journal: str) -> None:
    """Print the rows for a page, as JSON, and take no core from a job that runs."""
    os.nice(15)
    print(json.dumps(rows_of(Path(journal))))


if __name__ == "__main__":
    main(*sys.argv[1:])
