"""How injected faults are written, and what is wrong with those that are not."""

from __future__ import annotations

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.faults import parse_kill, parse_late, parse_slow
from offbeat.runtime.job.settings import ANY, InjectedKill, InjectedSlowdown, Late
from offbeat.types import WorkerId


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("2=0.2", InjectedSlowdown(worker=WorkerId(2), seconds=0.2)),
        ("0=3", InjectedSlowdown(worker=WorkerId(0), seconds=3.0)),
        ("any=.5", InjectedSlowdown(worker=ANY, seconds=0.5)),
        ("1=2.@5-5", InjectedSlowdown(worker=WorkerId(1), seconds=2.0, start=5, stop=5)),
        ("any=0.1@0-100", InjectedSlowdown(worker=ANY, seconds=0.1, start=0, stop=100)),
    ],
)
def test_stragglers(text: str, slow: InjectedSlowdown) -> None:
    assert parse_slow(text, workers=3) == slow


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write WORKER=SECONDS"),
        ("2", "write WORKER=SECONDS"),
        ("2=", "write WORKER=SECONDS"),
        ("2=-1", "write WORKER=SECONDS"),
        ("2=nan", "write WORKER=SECONDS"),
        ("2=1e3", "write WORKER=SECONDS"),
        ("2=0.1@5", "write WORKER=SECONDS"),
        ("all=0.1", "write WORKER=SECONDS"),
        ("3=0.1", "there is no worker 3, 3 workers are numbered 0 to 2"),
        ("1=0.1@9-3", "the last version, 3, comes before the first, 9"),
    ],
)
def test_what_is_no_straggler(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--slow {text}: .*{message}"):
        parse_slow(text, workers=3)


def test_deaths() -> None:
    assert parse_kill("0@200", workers=1) == InjectedKill(worker=WorkerId(0), version=200)
    for text in ("", "1", "1@", "@5", "any@5", "1@-5", "1@5.0"):
        with pytest.raises(ConfigurationError, match=f"^--kill {text}: write WORKER@VERSION"):
            parse_kill(text, workers=3)
    with pytest.raises(ConfigurationError, match=r"^--kill 1@5: there is no worker 1, 1 workers are numbered 0 to 0"):
        parse_kill("1@5", workers=1)


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("1=0.5", Late(server=1, seconds=0.5)),
        ("any=4@.16%", Late(server=ANY, seconds=4.0, share=0.0016)),
        ("0=2@100%", Late(server=0, seconds=2.0, share=1.0)),
    ],
)
def test_late_blocks(text: str, late: Late) -> None:
    assert parse_late(text, servers=2) == late


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write SERVER=SECONDS"),
        ("1=0.5@3", "write SERVER=SECONDS"),
        ("1=-2", "write SERVER=SECONDS"),
        ("2=0.5", "there is no server 2, 2 servers are numbered 0 to 1"),
        ("1=0.5@101%", "101 % of the replies are late; write at most 100 %"),
    ],
)
def test_what_is_not_late(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--late {text}: .*{message}"):
        parse_late(text, servers=2)
