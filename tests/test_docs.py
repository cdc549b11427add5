"""What the documents say is so: every rule with its settings and defaults, every command and option, every link and public name."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from experiments.__main__ import app as experiments_app
from experiments.__main__ import find
from tests.generate import sections
from typer.testing import CliRunner

import offbeat
import offbeat.types
from offbeat import errors
from offbeat.chaos.schedule import KINDS, TARGETS, chances
from offbeat.cli import app
from offbeat.core.policy import ServerRule
from offbeat.doctor.pairs import targets
from offbeat.launch import checkpointing
from offbeat.launch.preload import chosen
from offbeat.launch.program import Program
from offbeat.launch.tasks import task_of
from offbeat.options import RunOptions, check, followers_of, ray_options, span_of
from offbeat.policies import RULES
from offbeat.runtime.job.notices import ends_in_order
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.latency.registry import LAWS
from offbeat.sim.run import simulate

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "experiments/*.md", "experiments/*/*.md") for path in ROOT.glob(pattern)
)
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
SCRIPT = ROOT / "examples" / "digits.py"
"""Stands in for the reader's own script."""


def commands_of(application: typer.Typer) -> dict[str, Any]:
    """By name; under the empty name where there is only one. What they are is click's business, or that of typer's copy of it."""
    found: Any = typer.main.get_command(application)
    names = found.list_commands(None) if hasattr(found, "list_commands") else None
    return {"": found} if names is None else {name: found.get_command(None, name) for name in names}


COMMANDS = commands_of(app)


class Block(NamedTuple):
    """A fenced block."""

    document: Path
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            yield Block(document, language, text)


def lines() -> Iterator[tuple[str, list[str]]]:
    """Each command line in a fenced block or between backquotes: where it stands, and its words; no synopses (brackets, an ellipsis)."""
    for block in blocks():
        if block.language in ("", "sh", "bash", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"^(\$ )?([A-Z_]+=\S+ )*", "", line)  # a prompt, variables
                if re.match(r"(offbeat|python|make) ", command) and not re.search(r"\[-|\[[A-Z]|\.\.\.| [A-Z]{3,}( |$)", command):
                    yield f"{block.document.relative_to(ROOT)}: {line}", shlex.split(command, comments=True)
    for document in DOCUMENTS:
        for command in re.findall(r"`(offbeat (?:run|simulate) [^`\n]+)`", document.read_text(encoding="utf-8")):
            whole = ".py" in command if command.startswith("offbeat run") else "=" in command  # else a command's name with an option
            if whole and not re.search(r"\[|\.\.\.|…| [A-Z]{3,}( |$)", command):
                yield f"{document.relative_to(ROOT)}: `{command}`", shlex.split(command)


LINES = dict(lines())


def beginning(*words: str) -> pytest.MarkDecorator:
    """Parametrizes a test with the command lines that begin so."""
    return pytest.mark.parametrize("where", [where for where, line in LINES.items() if line[: len(words)] == list(words)])


def options(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts if name.startswith("--")} - {"--help"}


def section(text: str, heading: str) -> str:
    """What stands under a heading, to the next one of its rank."""
    rank = heading.split(maxsplit=1)[0]
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{rank} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"there is no section {heading!r}"
    return match[1]


@pytest.mark.parametrize("word", RULES)
def test_every_rule_has_a_section_with_its_settings_and_their_defaults(word: str) -> None:
    said = section((ROOT / "docs" / sections()[word]).read_text(encoding="utf-8"), f"## {word}")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", said, re.MULTILINE)
    settings = fields(RULES[word])  # type: ignore[arg-type]
    assert {name for name, _ in rows} == {f.name for f in settings}
    assert dict(rows) == {f.name: "(required)" if f.default is MISSING else str(f.default) for f in settings}
    for part in ("*Choose it*", "*Paper:*"):
        assert part in said


def test_every_rule_is_in_the_measured_table_or_named_as_missing_from_it() -> None:
    text = section((ROOT / "docs" / "rules.md").read_text(encoding="utf-8"), "## Which one")
    rows = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    missing = re.search(r"^Rules without a row:.*?^$", text, re.MULTILINE | re.DOTALL)
    assert missing is not None, "docs/rules.md, Which one: no paragraph 'Rules without a row: ...'"
    named = set(re.findall(r"`(\w+)`", missing[0]))
    assert set(RULES) <= rows | named, f"rules without a row and not in the paragraph: {set(RULES) - rows - named}"
    assert named & rows <= set(re.findall(r"as `(\w+)`", missing[0])), "a rule with a row is named as missing"


def test_every_rule_with_servers_is_in_the_table_of_what_it_exchanges() -> None:
    text = section((ROOT / "docs" / "rules.md").read_text(encoding="utf-8"), "## What all rules have in common")
    rows = re.findall(r"^\| (`.*?) \| (?:gradients|parameters)", text, re.MULTILINE)
    assert {word for word, kind in RULES.items() if issubclass(kind, ServerRule)} == {
        word for row in rows for word in re.findall(r"`(\w+)", row)
    }


def test_every_word_of_the_vocabulary_is_in_the_glossary() -> None:
    assert offbeat.types.__doc__ is not None
    words = set(re.findall(r"^(\w+) {2,}", offbeat.types.__doc__, re.MULTILINE))
    said = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(words) > 15 and words <= set(re.findall(r"^\| (\w+) \|", said, re.MULTILINE))


def test_every_option_of_a_job_is_explained() -> None:
    said = section((ROOT / "docs" / "run.md").read_text(encoding="utf-8"), "# `offbeat run`")
    assert set(re.findall(r"^\| `(--[\w-]+)", said, re.MULTILINE)) == options("run")


@pytest.mark.parametrize(
    ("command", "pages"),
    [
        ("simulate", ["simulate"]),
        ("advise", ["advise"]),
        ("doctor", ["doctor"]),
        ("chaos", ["chaos"]),
        ("agent", ["clusters", "torchrun", "slurm", "mpi", "by-hand"]),
    ],
)
def test_every_option_is_mentioned(command: str, pages: list[str]) -> None:
    """Of an agent those that a job lacks."""
    said = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    own = options(command) - (options("run") if command == "agent" else set())
    assert {option for option in own if not re.search(rf"{option}(?![\w-])", said)} == set()


def test_every_law_and_every_kind_of_chaos_is_mentioned() -> None:
    said = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("simulate", "chaos")}
    assert {word for word in LAWS if f"`{word}(" not in said["simulate"]} == set()
    assert {name for name in (*KINDS, *TARGETS) if f"`{name}`" not in said["chaos"]} == set()


def test_every_experiment_is_listed_with_its_readme() -> None:
    said = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert {name for name in find() if f"[{name}]({name}/README.md)" not in said} == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), f"{document.relative_to(ROOT)} links to {target}, and there is no such file"
        if anchor:
            assert anchor in anchors(there), f"{document.relative_to(ROOT)} links to {target}, and there is no such heading"


def test_the_walks_through_the_code_lead_through_files_that_are_there() -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert len(named) > 30 and {path for path in named if not (ROOT / "src" / "offbeat" / path).exists()} == set()


def anchors(document: Path) -> set[str]:
    """Of a document's headings, as code hosts make them.

    >>> "splits-and-overlap" in anchors(ROOT / "docs" / "rules.md")
    True
    """
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_public_names_exist() -> None:
    named = {
        (document.name, name)
        for document in DOCUMENTS
        for name in re.findall(r"\boffbeat\.([A-Z]\w+|chief|log|rule)\b", document.read_text(encoding="utf-8"))
    }
    assert {(document, name) for document, name in named if not hasattr(offbeat, name)} == set()


def test_python_in_the_documents_is_python() -> None:
    for block in blocks():
        if block.language == "python":
            ast.parse(block.text, filename=str(block.document))


def test_there_are_commands_to_look_at() -> None:
    """Else the tests below prove nothing."""
    for words in (["offbeat", "run"], ["offbeat", "simulate"], ["offbeat", "report"], ["make"]):
        assert any(line[: len(words)] == words for line in LINES.values()), words


@beginning("offbeat", "simulate")
def test_simulations_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*LINES[where][1:], "--versions", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@beginning("offbeat", "advise")
def test_advice_is_given(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    simulate("bsp", Cluster(workers=4), Work(versions=30), journal=Path("run.jsonl"))
    quickly = ["--seeds", "1", "--pushes", "100", "--jobs", "1"]
    done = CliRunner().invoke(app, [*LINES[where][1:], *quickly], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@beginning("offbeat", "run")
def test_jobs_could_start(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = dict(COMMANDS["run"].make_context("run", LINES[where][2:]).params)
    if not given.pop("module") and given["join"] is None:
        assert Path(given["script"]).suffix == ".py"
    if given.pop("script") is None:
        assert given["join"] is not None
    options = RunOptions(**given)
    ray_options(options)
    chosen(options.preload or [], Program(str(SCRIPT)), none=options.no_preload)
    order = None
    if options.resume is None:  # the folder of a job that resumes is not here
        order = checkpointing.order_of(options.checkpoint, options.every, options.keep, None)
    least, most = span_of(options.workers)
    check(options, Program(str(SCRIPT)), most, least=least, followers=followers_of(options), checkpoint=order)


@beginning("offbeat", "agent")
def test_agents_could_start(where: str) -> None:
    given = COMMANDS["agent"].make_context("agent", LINES[where][2:]).params
    task_of(nnodes=given["nnodes"], endpoint=given["rdzv_endpoint"], environment={})


@beginning("offbeat", "doctor")
def test_the_doctor_is_asked_rightly(where: str) -> None:
    given = COMMANDS["doctor"].make_context("doctor", LINES[where][2:]).params
    targets(given["connect"] or [])


@beginning("offbeat", "report")
def test_reports_are_asked_for_rightly(where: str) -> None:
    COMMANDS["report"].make_context("report", LINES[where][2:])


@beginning("offbeat", "chaos")
def test_faults_are_asked_for_rightly(where: str) -> None:
    context = COMMANDS["chaos"].make_context("chaos", LINES[where][2:])
    given = context.params
    assert chances(given["faults"].split(","), given["targets"].split(","))
    if context.args[:2] == ["offbeat", "run"]:
        COMMANDS["run"].make_context("run", context.args[2:])


@beginning("python", "-m")
def test_modules_exist(where: str) -> None:
    module, *arguments = LINES[where][2:]
    assert importlib.util.find_spec(module) is not None
    if module == "experiments":
        given = commands_of(experiments_app)[""].make_context("experiments", arguments).params
        assert set(given["names"] or ()) <= set(find())


@beginning("make")
def test_make_has_these_targets(where: str) -> None:
    target = re.escape(LINES[where][1])
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_exit_statuses() -> None:
    """The table has every status that the commands end with, and no other."""
    text = section(SETTINGS, "## Exit statuses")
    listed = {int(status) for status in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    signals = {errors.BY_SIGNAL + number for number in (*ends_in_order(), signal.SIGHUP, signal.SIGKILL)}  # nohup has SIGHUP ignored
    constants = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int) and name != "BY_SIGNAL"}
    assert listed == {0, *constants, *signals} and constants == {1, 2, 141}


def test_environment_variables() -> None:
    """The tables have every variable of offbeat that the source names, and no other."""
    listed = re.findall(r"^\| (`OFFBEAT_.*?`) \|", section(SETTINGS, "## Environment variables"), re.MULTILINE)
    names = [name for cell in listed for name in re.findall(r"`(\w+)`", cell)]
    used = {name for text in SOURCES.values() for name in re.findall(r"\bOFFBEAT_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert used == set(names) and len(names) == len(set(names))


def test_loggers() -> None:
    """The table has every module that logs, and no other."""
    rows = re.findall(r"^\| (`offbeat.*?) \|", section(SETTINGS, "## Logging"), re.MULTILINE)
    modules = {path for path, text in SOURCES.items() if "log = logging.getLogger(__name__)" in text}
    assert set(re.findall(r"`(.+?)`", "".join(rows))) == {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in modules
    }
