"""The command line: what is wrong with it is said before anything is started, in one sentence and with status 2."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console
from tests.journal.records import round_of_two
from typer.testing import CliRunner

import offbeat
from offbeat import cli
from offbeat.cli import app, finish
from offbeat.errors import ConfigurationError, JobError
from offbeat.journal.file import Journal
from offbeat.journal.records import job_record, metrics_record
from offbeat.journal.summary import Tally
from offbeat.launch.agent import Duties
from offbeat.launch.missing import Missing
from offbeat.launch.outcome import Outcome
from offbeat.launch.program import Program
from offbeat.options import RunOptions, check
from offbeat.policies import RULES
from offbeat.runtime.job.settings import CheckpointOrder, InjectedKill, InjectedSlowdown, JobSettings
from offbeat.types import WorkerId

SCRIPT = str(Path(__file__).parent / "faults" / "scripts" / "train.py")


def checked(**changes: Any) -> JobSettings:
    """The check of a good command line, but for these options."""
    good: dict[str, Any] = {"program": Program(SCRIPT), "workers": 4, **changes}
    of_job = {name: good.pop(name) for name in ("program", "workers", "checkpoint", "on_driver") if name in good}
    return check(RunOptions(**good), **of_job)


def test_a_good_command_line(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    settings = checked(sync=" SSP( staleness = 3 ) ", slow=["2=0.5"], kill=["1@40"], journal=journal, seed=7, servers=2)
    assert settings.sync == "ssp(staleness=3)"
    assert (settings.slow, settings.kill) == (
        (InjectedSlowdown(worker=WorkerId(2), seconds=0.5),),
        (InjectedKill(worker=WorkerId(1), version=40),),
    )
    assert (settings.workers, settings.servers, settings.seed, settings.journal) == (4, 2, 7, str(journal))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"sync": "backup(b=4)"}, r"backup\(b=4\) with 4 workers leaves no gradient to wait for: b must be at most 3"),
    ({"workers": 0}, r"--workers 0: must be at least 1"),
    ({"servers": 0}, r"--servers 0: must be at least 1"),
    ({"max_restarts": -1}, r"--max-restarts -1: must be at least 0"),
    ({"port": -1}, r"--port -1: must be at least 0"),
    ({"port": 65536}, r"--port 65536: must be at most 65535"),
    ({"timeout": 0.0}, r"--timeout 0: must be a number of seconds of at least 0.1"),
    ({"timeout": float("nan")}, r"--timeout nan: must be a number of seconds of at least 0.1"),
    ({"timeout": float("inf")}, r"--timeout inf: must be a number of seconds of at least 0.1"),
    ({"grace": -1.0}, r"--grace -1: must be a number of seconds of at least 0"),
    ({"program": Program("no_such.py")}, r"there is no script 'no_such.py' here"),
    ({"program": Program(".")}, r"there is no script '.' here"),
    ({"slow": ["4=0.1"]}, r"--slow 4=0.1: there is no worker 4, 4 workers are numbered 0 to 3"),
    ({"kill": ["9@5"]}, r"--kill 9@5: there is no worker 9"),
    ({"wire": "fp8"}, r"wire='fp8': must be one of float32, bf16, int8"),
    ({"wire": "bf16", "sync": "solo"}, r"wire='bf16': solo has no servers"),
    ({"journal": Path("no_such_folder/j.jsonl")}, r"--journal no_such_folder/j.jsonl: there is no folder .*no_such_folder"),
    ({"summary": Path("no_such_folder/s.json")}, r"--summary no_such_folder/s.json: there is no folder .*no_such_folder"),
    ({"journal": Path()}, r"--journal .: this is a folder; name a file in it"),
    ({"summary": Path()}, r"--summary .: this is a folder; name a file in it"),
    ({"journal": Path("/dev/null/j")}, r"--journal /dev/null/j: there is no folder /dev/null"),
    (
        {"procs_per_worker": 2, "checkpoint": CheckpointOrder(folder="job")},
        r"--procs-per-worker 2: checkpoints of the whole job do not have",
    ),
    ({"replicas": 2}, r"--replicas 2: each server can have no standby \(0\) or one \(1\)"),
    ({"replicas": 1, "sync": "dpsgd"}, r"--replicas 1: dpsgd mixes parameters, and no standby follows that"),
    ({"replicas": 1, "on_driver": True}, r"--replicas 1: .* add --servers-on nodes"),
    ({"journal": Path("one"), "summary": Path("one")}, r"--journal and --summary are the same file, one"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[str(changes) for changes, _ in MISTAKES])
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        checked(**changes)


def test_no_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # a test may run as root, who may write anywhere
    with pytest.raises(ConfigurationError, match=r"--summary .*/s.json: no permission to write there"):
        checked(summary=tmp_path / "s.json")


def test_words_that_are_no_options() -> None:
    result = CliRunner().invoke(app, ["run", "--worker", "4", SCRIPT])
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert CliRunner().invoke(app, ["run"]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["--preload", "json", "--preload", "csv"], ["json", "csv", "torch._dynamo"]),
        (["--no-preload", "--preload", "json"], []),
    ],
)
def test_an_agents_interpreter_has_what_optimizers_load(monkeypatch: pytest.MonkeyPatch, words: list[str], modules: list[str]) -> None:
    duties: list[Duties] = []

    def take_part(task: object, listen: object, own: Duties, token: object, arguments: object) -> int:
        duties.append(own)
        return 0

    monkeypatch.setattr("offbeat.cli.take_part", take_part)
    command = ["agent", "--nnodes=1", "--node-rank=0", "--rdzv-endpoint=127.0.0.1:7100", *words, SCRIPT]
    assert CliRunner().invoke(app, command, env={"OFFBEAT_TLS": None}).exit_code == 0
    assert [list(own.preload.modules) for own in duties] == [modules]


@pytest.mark.parametrize(
    ("text", "words", "modules", "says"),
    [
        ("", [], ["torch._dynamo"], False),
        ("", ["--no-preload"], [], False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n", [], [], True),
    ],
)
def test_workers_of_one_machine_are_forked_unless_the_script_sets_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, words: list[str], modules: list[str], says: bool
) -> None:
    given: list[dict[str, Any]] = []

    def engine(program: object, **options: Any) -> NoReturn:
        given.append(options)
        raise JobError("no engine")

    monkeypatch.setattr("offbeat.cli.LocalEngine", engine)
    script = tmp_path / "script.py"
    script.write_text(text)
    CliRunner().invoke(app, ["run", *words, str(script)])
    assert [list(options["preload"].modules) for options in given] == [modules]
    assert ("line 2" in str(given[0]["preload"].note)) == says


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"offbeat {offbeat.__version__}, torch 2.")


def test_a_report_has_what_was_logged_and_writes_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(tmp_path / "run.jsonl", now=lambda: 0.0)
    metrics = {"kind": "metrics", "t": 2.5, "worker": 0, "version": 1, "values": {"test_accuracy": 0.96875, "loss": 0.5}}
    for entry in [*round_of_two()[:-1], metrics, round_of_two()[-1]]:
        journal.write(entry)
    journal.close()
    result = CliRunner().invoke(app, ["report", "run.jsonl", "--trace", "trace.json"])
    assert result.exit_code == 0, result.output
    assert "test_accuracy: 0.96875\nloss: 0.5\n" in result.output
    assert {event["ph"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]} == {"M", "X", "s", "f"}
    refused = CliRunner().invoke(app, ["report", "run.jsonl", "run.jsonl", "--trace", "trace.json"])
    assert refused.exception is not None and "--trace trace.json: a trace is of one job, but 2 journals are given" in str(refused.exception)


def test_help_names_the_rules() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Rules: {', '.join(sorted(RULES))}." in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["run", "agent", "simulate", "chaos", "doctor", "rules", "view", "report", "compare", "top"])
def test_help_shows_no_marks_of_the_markup_it_is_written_in(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "\\" not in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_a_loss_that_is_not_finite_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """It is text in a summary, as JSON has neither."""
    tally = Tally.of(
        [
            job_record(sync="asp", workers=1, servers=1, seed=0, started="2026-01-01T00:00:00+00:00", script="train.py"),
            metrics_record(0.5, WorkerId(0), 1, {"loss": math.nan, "top": math.inf, "rate": 0.25}),
        ]
    )
    finish(Console(), Outcome(0, "", {**tally.summary(), "pushes": 1}), None)
    assert "loss: nan\ntop: inf\nrate: 0.25\n" in capsys.readouterr().out


def test_the_table_is_only_for_looking(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The summary is written before it, and the job's status is the job's."""

    def fails(*_: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(cli, "job_tables", fails)
    written = tmp_path / "summary.json"
    assert finish(Console(), Outcome(0, "all is well", {"pushes": 1}), written) == 0
    assert json.loads(written.read_text()) == {"pushes": 1, "ok": True, "reason": "all is well", "missing": []}
    assert capsys.readouterr().err == "offbeat: the table cannot be shown: MemoryError\n"


def test_a_summary_is_written_of_a_job_without_figures(tmp_path: Path) -> None:
    missing = Missing()
    missing.report("the log of server 0 is not complete", "No space left on device")
    written = tmp_path / "summary.json"
    assert finish(Console(), Outcome(1, "no worker finished", None, missing), written) == 1
    assert json.loads(written.read_text())["missing"] == ["the log of server 0 is not complete: No space left on device"]


def test_a_full_disk_does_not_end_with_a_traceback() -> None:
    words = ["simulate", "--versions", "3", "--summary", "/dev/full"]
    ended = subprocess.run([sys.executable, "-m", "offbeat", *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    words = f"cd {tmp_path}/gone && rmdir ../gone && exec {sys.executable} -m offbeat simulate"
    (tmp_path / "gone").mkdir()
    ended = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("offbeat: the current folder is gone")


def test_the_command_as_a_module_says_a_mistake_in_one_sentence_on_stderr() -> None:
    ended = subprocess.run([sys.executable, "-m", "offbeat", "run", "--workers", "0", "x.py"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "offbeat: --workers 0: must be at least 1\n")


def test_the_command_starts_without_torch() -> None:
    """Help and mistakes come at once."""
    program = "import sys, offbeat.cli; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr


COMPLETIONS = [
    (["ru"], {"run", "rules"}),
    (["run", "--quiet", "--sync", "'b"], {"backup", "bsp", "b_dbw"}),
    (["rules", "dss"], {"dssp"}),
]


def test_bash_completes_commands_options_and_rules(tmp_path: Path) -> None:
    """In a real bash, with the function that ``--install-completion`` installs."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    command = tmp_path / "offbeat"
    main_of_it = "import sys; sys.argv[0] = 'offbeat'; from offbeat.cli import main; main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{main_of_it}" "$@"\n')
    command.chmod(0o755)
    asked = [f"COMP_WORDS=(offbeat {shlex.join(words)}); COMP_CWORD={len(words)}; complete_it" for words, _ in COMPLETIONS]
    begin = [f"PATH={tmp_path}:$PATH", 'eval "$(offbeat --show-completion bash)"', "complete -p offbeat"]
    script = "\n".join([*begin, "complete_it() { _offbeat_completion offbeat; echo ${COMPREPLY[*]}; }", *asked])
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=280, env=environment)
    first, *lines = done.stdout.splitlines()
    assert first == "complete -o default -F _offbeat_completion offbeat", done
    assert [set(line.split()) for line in lines] == [expected for _, expected in COMPLETIONS], done
