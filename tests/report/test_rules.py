"""``offbeat rules``: from the rules' classes, so every rule is there, whole, with bounds; and an unknown name gets the nearest ones."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES
from offbeat.report.rules import details, formula_of, overview, paper_of, row_of, settings_of

BOUND = re.compile(r"at least|at most|above|less than|more than|0 to 1|0 at the")


def test_the_list_has_every_rule_once_in_two_groups() -> None:
    lines = overview(80)
    words = [match[1] for line in lines if (match := re.match(r"^  (\w+)  ", line))]
    assert sorted(words) == sorted(RULES)
    place = lines.index("Rules without servers:")
    served = {match[1] for line in lines[:place] if (match := re.match(r"^  (\w+)  ", line))}
    assert served == {word for word, kind in RULES.items() if issubclass(kind, ServerRule)}
    assert all(len(line) <= 80 and line.isascii() for line in lines)


@pytest.mark.parametrize("word", RULES)
def test_a_rule_is_told_whole(word: str) -> None:
    kind = RULES[word]
    assert formula_of(kind) and paper_of(kind) and row_of(kind) is not None
    settings = settings_of(kind)
    assert [setting.name for setting in settings] == [field.name for field in fields(kind) if field.repr]  # type: ignore[arg-type]
    for setting in settings:
        assert setting.meaning, f"{word}: {setting.name} has no sentence under it"
        assert "number" not in setting.kind or setting.name == "lr_table" or BOUND.search(setting.meaning.lower()), (
            f"{word}: the sentence under {setting.name} names no bound: {setting.meaning!r}"
        )
    lines = details(word, 80)
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines[1:-1])
    assert not any("`" in line for line in lines)
    assert details(kind.__name__, 80) == details(f"{word}(a=1)", 80) == lines


def test_a_default_is_spelled_and_a_missing_one_required() -> None:
    assert settings_of(RULES["ssp"])[0].default == "required"
    assert {setting.name: setting.default for setting in settings_of(RULES["dssp"])} == {"lower": "default 3", "upper": "default 15"}
    assert settings_of(RULES["solo"])[0].meaning.endswith(
        "The default is that of the paper's code, which makes every 32nd round synchronous."
    )


@pytest.mark.parametrize(("word", "near"), [("sps", "ssp"), ("ELASTICK", "elastic"), ("back up", "backup"), ("majorty(1)", "majority")])
def test_an_unknown_name_gets_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"did you mean .*\b{near}\b"):
        details(word, 80)


@pytest.mark.parametrize("word", ["zzzz", "", " ", "\x1b[2J", "x" * 10_000])
def test_an_unknown_name_without_a_near_one(word: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no synchronization rule"):
        details(word, 80)


@pytest.mark.parametrize(("words", "said"), [([], "Rules with servers:"), (["psp"], "  c  a whole number; required")])
def test_what_goes_to_a_pager_is_as_wide_as_a_usual_terminal(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["rules", *words], catch_exceptions=False)
    lines = done.output.splitlines()
    assert done.exit_code == 0 and said in lines and 70 <= max(map(len, lines)) <= 80
