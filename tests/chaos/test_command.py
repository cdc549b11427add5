"""The command line of ``offbeat chaos``: what cannot be had is said before anything is started, in one sentence and with status 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from offbeat.chaos.command import JobCommand, job_command
from offbeat.cli import app, main

SCRIPT = str(Path(__file__).parents[1] / "faults" / "scripts" / "train.py")
RUN = [sys.executable, "-m", "offbeat.cli", "run"]


def _options_of(name: str, words: list[str]) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands[name].make_context(name, words).params)


def command(*words: str) -> JobCommand:
    return job_command(words, _options_of)


def test_a_journal_is_added_unless_the_command_has_one() -> None:
    job = command(*RUN, "--timeout", "3", "--max-restarts", "7", SCRIPT, "--journal", "of the script")
    assert (job.journal, job.timeout_s, job.max_restarts, job.local) == (None, 3.0, 7, True)
    assert job.writing(Path("j")) == [*RUN, "--journal", "j", "--timeout", "3", "--max-restarts", "7", SCRIPT, "--journal", "of the script"]
    own = (*RUN, "--workers", "3", "--journal=mine.jsonl", SCRIPT)
    assert command(*own).journal == Path("mine.jsonl") and command(*own).writing(Path("j")) == list(own)


def test_agents_under_an_engine_and_commands_that_are_not_understood() -> None:
    agent = command(sys.executable, "-m", "offbeat.agent", "--timeout", "5", SCRIPT)
    assert (agent.place, agent.timeout_s, agent.local) == (3, 5.0, False)
    other = job_command(["sh", "start-agents.sh"], _options_of, Path("j.jsonl"))
    assert (other.place, other.journal, other.writing(Path("k"))) == (None, Path("j.jsonl"), ["sh", "start-agents.sh"])


JOB = ("--", *RUN, SCRIPT)
MISTAKES = [
    ((), "there is no command: write the job after --, for instance offbeat chaos -- offbeat run train.py"),
    (("--", "no-such-command"), "there is no command 'no-such-command' here"),
    (("--", "true"), "true: no 'offbeat run' or 'offbeat agent' in this command; name its journal with --journal FILE"),
    (("--faults", "kill,sloth", *JOB), "--faults: 'sloth' is not known; it may name kill, stop, term, slow, cut, disk"),
    (("--targets", "all", *JOB), "--targets: 'all' is not known; it may name worker, server, standby, supervisor, agent, forkserver"),
    (("--mix", "worker:3", *JOB), "--mix worker:3: write GROUP=SHARE, for instance worker=50"),
    (("--mix", "workers=1", *JOB), "--mix: 'workers' is not known; it may name worker, server, freeze, cut, other"),
    (("--mix", "worker=-1", *JOB), "--mix worker=-1: must be a number of at least 0"),
    (("--mix", "worker=0", *JOB), "--faults kill,stop,slow --targets worker: with these shares of --mix nothing can happen"),
    (("--faults", "", *JOB), "--faults  --targets worker: with these shares of --mix nothing can happen"),
    (
        ("--plan", "kill:link=3", *JOB),
        "--plan kill:link=3: write KIND:TARGET=NUMBER, for instance kill:worker=12, cut:link=3 or disk:journal=1",
    ),
    (
        ("--plan", "kill:worker=3", "--count", "3", *JOB),
        "--plan kill:worker=3: it says which faults there are; leave out --faults, --targets, --mix and --count",
    ),
    (("--mtbf", "0", *JOB), "--mtbf 0: must be a number above 0"),
    (("--time", "-3", *JOB), "--time -3: must be a number above 0"),
    (("--count", "0", *JOB), "--count 0: must be a number above 0"),
    (("--patience", "inf", *JOB), "--patience inf: must be a number above 0"),
    (("--timeout", "5", *JOB), "--timeout 5: the options of run say it; leave it out"),
    (
        ("--journal", "j", "--", *RUN, "--journal", "k", SCRIPT),
        "--journal j: the command has a --journal of its own, k; leave out one of them",
    ),
]


def said(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["offbeat", "chaos", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("offbeat: ")


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES, ids=[" ".join(arguments[:2]) for arguments, _ in MISTAKES])
def test_mistakes(arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(arguments, monkeypatch, capsys) == sentence


@pytest.mark.parametrize(
    ("why_not", "sentence"),
    [
        ("only root may take a link down", "--faults cut: only root may take a link down; leave cut out"),
        (
            None,
            "--faults cut: this job has no links of its own: all its processes are on this machine; leave cut out",
        ),
    ],
)
def test_cuts_that_cannot_be_had(
    why_not: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offbeat.chaos.machine.why_no_cuts", lambda: why_not)
    assert said(("--faults", "kill,cut", *JOB), monkeypatch, capsys) == sentence


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert said(JOB, monkeypatch, capsys) == "offbeat chaos needs /proc and pidfd, which darwin does not have: run it on Linux"
