"""The registry: a rule by its spelling, what all rules have in common, and errors that say what to write instead."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest
from tests.core.promises import BoundedRounds, Promises, promised
from tests.generate import PLACES, generated
from tests.policies.views import StillView
from tests.support.rule_examples import spelled

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Admit, Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import BSP, RULES, Backup, rule, rule_of
from offbeat.spec import build, parse_call

MODULES = [*dict.fromkeys(kind.__module__.rpartition(".")[2] for kind in RULES.values())]


@pytest.mark.parametrize("spelling", spelled())
def test_every_rule_keeps_the_contract(spelling: str) -> None:
    policy = rule(spelling)
    assert RULES[policy.called()] is type(policy)
    assert rule(policy.spelling) == policy and rule(policy) is policy
    name, bracket, rest = policy.spelling.partition("(")
    assert rule(f"  {name.upper()}{bracket}{rest} ") == policy
    assert sum(isinstance(policy, base) for base in (ServerRule, RoundRule, GossipRule)) == 1
    if isinstance(policy, ServerRule):
        assert policy.wake_at(StillView({})) is None
        assert policy.start().fold(StillView({0: 0})) is None, "nothing has been pushed"
    assert "Source:" in (type(policy).__doc__ or "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("word", RULES)
def test_every_rule_brings_examples_and_draws_of_its_own(word: str) -> None:
    kind = RULES[word]
    assert kind.about.examples and {rule(spelling).called() for spelling in kind.about.examples} == {word}
    names = {f.name for f in dataclasses.fields(kind)}
    for workers in (1, 6):
        assert all(draws.keys() <= names and all(len(values) for values in draws.values()) for draws in kind.about.draws(workers))


REFUSED = [case for kind in MODULES for case in getattr(import_module(f"tests.policies.test_{kind}"), "REFUSED", ())]
"""Spellings with what is said of them, from the rules' own tests."""


@pytest.mark.parametrize(("spelling", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(spelling: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rule(spelling)


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_with_rules_has_a_test_of_its_name(kind: str) -> None:
    assert (Path(__file__).parent / f"test_{kind}.py").exists()


def test_promises_are_those_of_the_nearest_class() -> None:
    assert promised(BSP).__name__ == "Barrier" and promised(RULES["dbw"]).__name__ == "FreshOnly"
    assert promised(RULES["solo"]).__name__ == "NobodyWaits" and promised(RULES["full"]) is promised(RoundRule) is BoundedRounds
    assert promised(ServerRule) is Promises


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path.name)
def test_what_is_made_from_the_rules_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated(path), "run `python -m tests.generate`"


def test_a_job_asks_the_rule_whether_it_can_work() -> None:
    with pytest.raises(ConfigurationError, match="b must be at most 1"):
        Coordinator(Backup(b=2), workers=2)


def test_a_rule_without_answers_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"ServerRule is a rule with servers: it must define fold\(\)"):
        ServerRule().fold(StillView({}))
    with pytest.raises(TypeError, match=r"RoundRule .*closes"):
        RoundRule()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"GossipRule .*edges"):
        GossipRule()  # type: ignore[abstract]


def test_nobody_waits_under_a_rule_that_does_not_say_who() -> None:
    assert ServerRule().admit(StillView({}), 0) == Admit("nobody waits")
    blocks = ServerRule().blocks(3)
    assert blocks.needed == 3


def test_a_class_of_no_family_has_no_ledger() -> None:
    with pytest.raises(TypeError, match="Policy must extend ServerRule, RoundRule or GossipRule"):
        Coordinator(Policy(), workers=1)


def test_a_rule_of_another_family_is_refused() -> None:
    assert rule_of(ServerRule, "bsp") == BSP()
    with pytest.raises(
        ConfigurationError, match=r"solo is a rule of the allreduce family, but a ServerRule is required: use one of .*bsp, "
    ):
        rule_of(ServerRule, "solo")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("spp(staleness=3)", r"no synchronization rule 'spp' \(did you mean 'ssp'\?\); the known ones are .*adpsgd, .*ssp"),
        ("ssp(stalenes=3)", r"ssp has no setting 'stalenes' \(did you mean 'staleness'\?\); its settings are staleness"),
        ("bsp(k=2)", "bsp has no setting 'k'; it has no settings"),
        ("ssp", r"ssp needs staleness, for instance ssp\(staleness=1\); its settings are staleness"),
        ("ssp(3)", r"the argument at character 5 has no name; write ssp\(key=value, ...\)"),
        ("ssp(staleness=3", "cannot read it at character"),
        ("ssp(staleness=1+x)", "the value at character 15 is neither a number, a word, nor a quoted string"),
        ("ssp(**{})", "write key=value at character"),
        ("3", r"write name or name\(key=value, ...\)"),
        ("", "cannot read it at character"),
    ],
)
def test_errors_name_the_place_and_what_is_known(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rule(spec)


def test_what_is_no_rule_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sync=3 is not a rule: pass one such as offbeat.SSP\(staleness=3\), or text"):
        rule(3)


def test_values_are_literals_or_words() -> None:
    assert parse_call("f(a=1, b=-2.5, c=word, d='two words', e=inf, g=[1, 2])") == (
        "f",
        {"a": 1, "b": -2.5, "c": "word", "d": "two words", "e": float("inf"), "g": [1, 2]},
    )


class Cycle:
    """Garbage for the collector, which lets another thread go on."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


def test_threads_parse_at_the_same_time() -> None:
    """Python's own parser fails if a collection in the midst of it hands over to another thread that parses."""

    def read() -> None:
        try:
            for _ in range(300):
                Cycle()
                parse_call("psp(c=3, b=0.6, future=drop, max_skew=1)")
        except SystemError as error:
            errors.append(error)

    errors: list[SystemError] = []
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert errors == []


def test_nothing_is_executed() -> None:
    for text in ("ssp(staleness=__import__('os').getpid())", "ssp(staleness=[x for x in (1,)])", "a.b(c=1)", "(lambda: 1)()"):
        with pytest.raises(ConfigurationError):
            parse_call(text)


def test_build_takes_any_kind_of_thing() -> None:
    @dataclasses.dataclass
    class Law:
        mean_s: float
        name: str = "plain"

    assert build("law(mean_s=0.5)", {"law": Law}, "latency law") == Law(0.5)
    with pytest.raises(ConfigurationError, match="there is no latency law 'lw'"):
        build("lw", {"law": Law}, "latency law")
