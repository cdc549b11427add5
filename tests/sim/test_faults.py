"""Fault scripts: every fault, where what does not parse is, and what cannot happen in a job of a given size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigurationError
from offbeat.sim.fault_kinds import FAULTS, SETTINGS
from offbeat.sim.faults import Fault, Freeze, Join, Kill, KillServer, Restart, Script, Slow, Stop, Vanish, script, spelled
from offbeat.sim.latency.base import stretched
from offbeat.types import WorkerId

TEXT = """\
# a bad day
join worker=7 at=40      # late
kill worker=2 at=12.5; restart worker=2 at=30

  slow factor=4 worker=0 at=3 for=10
FREEZE worker=1 at=5 for=20
stop server=1 at=8 for=3 ; vanish worker=3 at=5
kill server=0 at=9 for=0.3
"""
FAULTY = [
    Slow(at_s=3.0, worker=WorkerId(0), for_s=10.0, factor=4.0),
    Freeze(at_s=5.0, worker=WorkerId(1), for_s=20.0),
    Vanish(at_s=5.0, worker=WorkerId(3)),
    Stop(at_s=8.0, server=1, for_s=3.0),
    KillServer(at_s=9.0, server=0, for_s=0.3),
    Kill(at_s=12.5, worker=WorkerId(2)),
    Restart(at_s=30.0, worker=WorkerId(2)),
    Join(at_s=40.0, worker=WorkerId(7)),
]


def kinds(read: Script) -> list[tuple[type[Fault], Fault]]:
    """Named tuples of different kinds can be equal; these pairs cannot."""
    return [(type(fault), fault) for fault in read.faults]


def test_every_fault_is_read_and_sorted_by_time(tmp_path: Path) -> None:
    assert kinds(script(TEXT)) == [(type(fault), fault) for fault in FAULTY]
    assert {type(fault) for fault in FAULTY} == set(FAULTS.values())
    path = tmp_path / "kill worker=2.txt"
    path.write_text(TEXT)
    assert script(path) == script(str(path)) == script(TEXT)
    assert script(script(TEXT)) == script(TEXT)


def test_a_script_of_nothing() -> None:
    for text in ("", "  ", ";;", "# nothing", "\n\n"):
        assert script(text).faults == ()
        script(text).check(workers=1, servers=1)


seconds = st.floats(0, 1e9, exclude_min=True)
values = {"worker": st.integers(0, 99), "server": st.integers(0, 99), "at_s": st.just(0.0) | seconds, "for_s": seconds, "factor": seconds}
a_fault = st.sampled_from(sorted(FAULTS)).flatmap(
    lambda verb: st.builds(FAULTS[verb], **{field: values[field] for field in FAULTS[verb]._fields})
)


@given(st.lists(a_fault))
def test_a_spelling_is_read_back(faults: list[Fault]) -> None:
    given_script = Script(tuple(sorted(faults, key=lambda fault: fault.at_s)))
    assert kinds(script(given_script.spelling)) == kinds(given_script)
    assert kinds(script("\n".join(map(spelled, faults)))) == kinds(given_script)


def test_every_setting_is_known() -> None:
    assert {field for kind in FAULTS.values() for field in kind._fields} == {field for field, _ in SETTINGS.values()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crash", "neither a file nor a fault; write for instance 'kill worker=2 at=12.5'"),
        ("no/such/file.txt", "neither a file nor a fault"),
        (
            "kil worker=2 at=1",
            r"line 1, character 1: there is no fault 'kil' \(did you mean 'kill'\?\); expected one of kill, vanish, restart,",
        ),
        (
            "kill worker=2 at=1\n# remark\n  stopp server=1 at=1 for=2",
            r"line 3, character 3: there is no fault 'stopp' \(did you mean 'stop'",
        ),
        ("kill worker=2 at=1; slow worker=1", "line 1, character 34: slow needs at=... for=... factor=... too"),
        ("kill", "line 1, character 5: kill needs worker=... at=... too"),
        ("kill server=1 at=1", "line 1, character 19: kill needs for=... too"),
        ("kill server=1 worker=1 at=1 for=1", "line 1, character 15: cannot use 'worker=1'"),
        ("restart server=1 at=1", "line 1, character 9: cannot use 'server=1'"),
        ("kill 2 at=1", r"line 1, character 6: cannot use '2'; expected kill worker=\.\.\. at=\.\.\."),
        ("kill worker = 2 at=1", "line 1, character 6: cannot use 'worker'; expected"),
        ("kill wroker=2 at=1", r"line 1, character 6: cannot use 'wroker=2' \(did you mean 'worker'\?\)"),
        ("kill worker=2 at=1 for=3", "line 1, character 20: cannot use 'for=3'"),
        ("stop worker=2 at=1 for=3", "line 1, character 6: cannot use 'worker=2'"),
        ("kill worker=2 at=1 at=2", "line 1, character 20: at is given a second time"),
        ("kill worker=two at=1", "line 1, character 13: worker=two is not a whole number"),
        ("kill worker=-1 at=1", "line 1, character 13: worker=-1 is not a whole number"),
        ("kill worker=1.5 at=1", "worker=1.5 is not a whole number"),
        ("kill worker=2 at=", "line 1, character 18: at= is not seconds of at least 0"),
        ("kill worker=2 at=-1", "at=-1 is not seconds of at least 0"),
        ("kill worker=2 at=inf", "at=inf is not seconds"),
        ("kill worker=2 at=nan", "at=nan is not seconds"),
        ("freeze worker=2 at=1 for=0", "for=0 is not seconds, more than 0"),
        ("slow worker=2 at=1 for=1 factor=0", "factor=0 is not a number greater than 0"),
        ("slow worker=2 at=1 for=1 factor=4x", "line 1, character 33: factor=4x is not a number"),
    ],
)
def test_what_does_not_parse_says_where_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        script(text)


def test_in_a_file_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text("# remark\nkill worker=2\n")
    with pytest.raises(ConfigurationError, match=r"faults\.txt, line 2, character 14: kill needs at=\.\.\. too"):
        script(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the faults in"):
        script(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot read the faults in"):
        script(tmp_path / "bytes.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill worker=8 at=1", r"kill worker=8 at=1\.0: there is no worker 8; the job's workers are numbered 0 to 7"),
        ("stop server=2 at=1 for=1", r"stop server=2 .*: there is no server 2; the job's servers are numbered 0 to 1"),
        ("join worker=9 at=1", "join worker=9: additional workers must be numbered from 8 without a gap, and no fault joins worker 8"),
        ("join worker=8 at=1; kill worker=9 at=2", "there is no worker 9; the job's workers are numbered 0 to 8"),
        ("join worker=999999999999 at=1", "without a gap"),
        ("restart worker=1 at=1", "worker 1 is present then, and must be dead for this"),
        ("kill worker=1 at=1; kill worker=1 at=2", "worker 1 is dead then, and must be present for this"),
        ("vanish worker=1 at=1; freeze worker=1 at=2 for=1", "worker 1 is dead then"),
        ("kill worker=1 at=1; restart worker=1 at=2; restart worker=1 at=3", "worker 1 is present then"),
        ("join worker=1 at=5; slow worker=1 at=2 for=1 factor=2", "worker 1 is absent then, and must be present"),
        ("join worker=1 at=5; join worker=1 at=6", "worker 1 is present then, and must be absent"),
        ("kill worker=1 at=1; join worker=1 at=6", "worker 1 is absent then"),
        (
            "slow worker=1 at=1 for=5 factor=2; freeze worker=1 at=4 for=1",
            r"worker 1 is still in slow worker=1 at=1\.0 for=5\.0 factor=2\.0",
        ),
        ("stop server=1 at=1 for=5; stop server=1 at=4 for=1", "server 1 is still in stop"),
    ],
)
def test_what_cannot_happen_in_this_job_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        script(text).check(workers=8, servers=2)


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "join worker=9 at=1; join worker=8 at=2; kill worker=9 at=3",
        "kill worker=1 at=1; restart worker=1 at=2; kill worker=1 at=3; restart worker=1 at=3",
        "slow worker=1 at=1 for=5 factor=2; freeze worker=1 at=6 for=1; stop server=1 at=1 for=5; stop server=0 at=1 for=5",
        "freeze worker=1 at=1 for=50; kill worker=1 at=5; restart worker=1 at=6; slow worker=1 at=7 for=1 factor=3",
    ],
)
def test_what_can_happen_is_accepted(text: str) -> None:
    script(text).check(workers=8, servers=2)


def test_how_many_workers_there_are_in_all() -> None:
    late = script("join worker=3 at=1; join worker=8 at=2")
    assert late.absent == {3, 8}
    assert late.total(workers=8) == 9 and late.total(workers=16) == 16
    assert script("").total(workers=4) == 4 and not script("").absent


def test_windows_of_one_worker() -> None:
    read = script("slow worker=1 at=2 for=4 factor=4; freeze worker=1 at=10 for=5; slow worker=0 at=0 for=1 factor=2")
    assert read.windows(WorkerId(1)) == [(2.0, 6.0, 4.0), (10.0, 15.0, math.inf)]
    assert read.windows(WorkerId(7)) == []
    assert stretched(3.0, 1.0, read.windows(WorkerId(1))) == 1.0 + 4.0 + 1.0
    assert stretched(3.0, 9.0, read.windows(WorkerId(1))) == 1.0 + 5.0 + 2.0


def test_a_process_that_dies_takes_the_ice_with_it() -> None:
    assert script("freeze worker=1 at=1 for=50; kill worker=1 at=5").windows(WorkerId(1)) == [(1.0, 5.0, math.inf)]
    assert script("freeze worker=1 at=1 for=3; kill worker=1 at=5").windows(WorkerId(1)) == [(1.0, 4.0, math.inf)]
    assert script("slow worker=1 at=1 for=50 factor=2; kill worker=1 at=5").windows(WorkerId(1)) == [(1.0, 51.0, 2.0)]
