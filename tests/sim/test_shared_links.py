"""Jobs whose messages share links, worked out by hand: one server or four, workers beside servers, deaths, delays; and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.clusters import cluster, records, run
from tests.tiers import examples

from offbeat.errors import ConfigurationError
from offbeat.policies import RULES, rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import WorkerId

SECOND = {"compute": "constant(seconds=1)", "link": "8mbit", "model_size": "1MB"}
"""A model takes a link one second."""
OF_JOB = [spec for name in sorted(RULES) for spec in RULES[name].about.examples[:1] if getattr(rule(spec), "scope", "job") == "job"]


def folds(file: Path) -> list[float]:
    return [record["t"] for record in records(file, "fold")]


@pytest.mark.parametrize(("servers", "turn_s"), [(1, 1 + 4 + 4), (2, 1 + 2 + 2), (4, 1 + 1 + 1), (8, 1 + 1 + 1)])
def test_servers_share_the_bytes_until_the_workers_links_are_full(servers: int, turn_s: float, tmp_path: Path) -> None:
    _, file = run(tmp_path, "bsp", cluster(**SECOND, servers=servers), Work(versions=3))
    first = folds(file)[0]
    assert folds(file) == pytest.approx([first, first + turn_s, first + 2 * turn_s])


def test_a_worker_beside_its_server_has_no_link_between(tmp_path: Path) -> None:
    """Agents place server 0 beside worker 0: three of four workers share its link, and with two on a host two of them."""
    for hosts, turn_s in ((4, 1 + 3 + 3), (2, 1 + 2 + 2), (1, 1)):
        _, file = run(tmp_path, "bsp", cluster(**SECOND, hosts=hosts), Work(versions=2))
        assert folds(file)[1] - folds(file)[0] == pytest.approx(turn_s)


def test_delays_come_on_top_and_phases_say_what_travels(tmp_path: Path) -> None:
    over = cluster(**SECOND, workers=2, delay="constant(seconds=0.25)", push_delay="constant(seconds=0.5)", update_s=0.125)
    _, file = run(tmp_path, "bsp", over, Work(versions=3))
    assert folds(file)[2] - folds(file)[1] == pytest.approx(1 + 2 + 0.5 + 0.125 + 2 + 0.25)
    phases = [record["phases"] for record in records(file, "pushed")][-1]
    assert (phases["push"], phases["pull"]) == (pytest.approx(2.5), pytest.approx(0.125 + 2.25))


def test_the_dead_leave_the_link_to_the_others(tmp_path: Path) -> None:
    """Both push from second 3 on. At second 4 worker 1 dies: 0.5 s of each push are through, and worker 0 has the link alone."""
    over = cluster(**SECOND, workers=2, faults="kill worker=1 at=4; restart worker=1 at=20")
    _, file = run(tmp_path, "bsp", over, Work(versions=2))
    assert folds(file)[0] == pytest.approx(4.5) and len(records(file, "fold")[0]["parts"]) == 1


@pytest.mark.few(5)
@pytest.mark.parametrize("sync", OF_JOB)
@examples(100, quick=5, ci=6)  # of each rule
@given(servers=st.integers(1, 3), hosts=st.sampled_from([None, 1, 3]), seed=st.integers(0, 99))
def test_every_rule_of_job_scope_goes_on_and_its_books_add_up(
    sync: str, servers: int, hosts: int | None, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    faults = "kill worker=1 at=5; freeze worker=2 at=3 for=20; stop server=0 at=9 for=3; restart worker=1 at=25; join worker=5 at=7"
    over = cluster(workers=5, link="40mbit", model_size="1MB", servers=servers, hosts=hosts, faults=faults, timeout_s=5.0, seed=seed)
    result, file = run(tmp_path_factory.mktemp("job"), sync, over, Work(time_s=60))
    assert result.ok and result.summary["version"] > 5
    for record in records(file, "pushed"):
        assert hosts == 1 or record["worker"] == 0 or record.get("phases", {}).get("pull", 1.0) > 0.0


def test_a_link_of_no_limit_changes_nothing_but_the_first_record(tmp_path: Path) -> None:
    """The times of an infinitely fast link are those of no link, up to rounding."""
    fast = {"link": 1e30, "model_size": 1.0}
    for sync in ("bsp", "asp", "ssp(staleness=1)"):
        (tmp_path / sync).mkdir()
        plain, _ = run(tmp_path / sync, sync, cluster(), Work(versions=40))
        linked, _ = run(tmp_path / sync, sync, cluster(**fast), Work(versions=40))
        assert linked.seconds == pytest.approx(plain.seconds)


def test_one_seed_gives_one_journal(tmp_path: Path) -> None:
    over = cluster(link="1gbit", model_size="40MB", servers=2)
    files = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        files.append(run(tmp_path / str(number), "asp", over, Work(versions=80))[1].read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link": "10gbit"}, "--link 10gbit: how long a message takes depends on its size; give --model-size 400MB too"),
        ({"model_size": "4MB"}, "--model-size 4MB: without a link messages take no time for their bytes; give --link too"),
        ({"hosts": 2}, "--hosts 2: without a link messages take no time for their bytes; give --link too"),
        ({"link": "0gbit", "model_size": "4MB"}, "--link 0gbit: cannot read it; .*for instance 10gbit"),
        ({"link": "10gb", "model_size": "4MB"}, "--link 10gb: cannot read it; .*for instance 10gbit"),
        ({"link": "10gbit", "model_size": "0"}, "--model-size 0: cannot read it; .*for instance 400MB"),
        ({"link": "10gbit", "model_size": "4MB", "hosts": 5}, "--hosts 5: each has a worker, and there are 4; use at most 4"),
        ({"link": float("inf"), "model_size": "4MB"}, "--link inf: cannot read it"),
    ],
)
def test_what_makes_no_network_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Cluster(workers=4, **options)


def test_psp_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"^psp\(c=3.*how its messages share a link is not modelled; leave --link out"):
        simulate("psp(c=3)", cluster(**SECOND), Work(versions=2))


@pytest.mark.parametrize(
    ("workers", "hosts", "round_s"),
    [(4, None, 2 * 3 / 4), (3, None, 2 * 2 / 3), (4, 2, 2 * 2 / 2), (4, 1, 0.0), (3, 2, 2 * 2 / 3)],
    ids=["halving", "ring", "two ranks a host", "one host", "a ring through two hosts"],
)
def test_a_round_takes_what_the_fullest_link_sends(workers: int, hosts: int | None, round_s: float, tmp_path: Path) -> None:
    over = cluster(**SECOND, workers=workers, hosts=hosts, update_s=0.25)
    _, file = run(tmp_path, "full", over, Work(versions=3))
    assert folds(file)[2] - folds(file)[1] == pytest.approx(1 + round_s + 0.25, abs=1e-4)


@pytest.mark.parametrize(
    ("sync", "hosts", "turn_s"),
    [
        ("dpsgd", None, 2 * 2.0),
        ("dpsgd", 2, 2 * 2.0),
        ("dpsgd", 1, 1.0),
        ("sgp", None, 1 + 2.0),
        ("sgp(overlap=1)", None, 2.0),
        ("sgp(overlap=2)", None, 2.0),
        ("adpsgd", None, 1 + 2 * 2.0),
        ("adpsgd", 1, 1.0),
    ],
)
def test_neighbours_on_other_hosts_send_over_the_link(sync: str, hosts: int | None, turn_s: float, tmp_path: Path) -> None:
    """Under `dpsgd` each of four ranks has two neighbours, of which with two hosts one is on its own; their parameters travel, for longer,
    while a rank computes for a second. Under `sgp` they travel after it, with an overlap during the next steps, each behind that before.

    Under `adpsgd` rank 1 is active: it sends its parameters once it has computed, and gets the mean.
    """
    _, file = run(tmp_path, sync, cluster(**SECOND | {"model_size": "2MB"}, hosts=hosts), Work(versions=30))
    pushed = [record["t"] for record in records(file, "pushed") if record["worker"] == 1]
    assert [after - before for before, after in pairwise(pushed[3:])] == pytest.approx([turn_s] * (len(pushed) - 4))


def test_hosts_have_equal_numbers_of_workers() -> None:
    over = cluster(**SECOND, workers=7, hosts=3, servers=4, faults="join worker=7 at=3")
    assert [over.host_of_worker(WorkerId(worker)) for worker in range(8)] == [0, 0, 0, 1, 1, 2, 2, 1]
    assert [over.host_of_server(server) for server in range(4)] == [0, 1, 2, 0]
