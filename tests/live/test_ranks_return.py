"""Workers and ranks that die, freeze, leave or come late: the others go on, and who comes has what the job has, bit by bit."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import APART, DEADLINE_S, HALVES, TOGETHER, Job, Worker, barrier, wait
from tests.live.samples import Training, audited, of_kind
from tests.support.rule_examples import spelled
from tests.support.same_state import same
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.errors import JobEnded, JobError, RefusedError
from offbeat.policies import rule_of
from offbeat.runtime.allreduce.multi_host_member import MultiHostMember
from offbeat.runtime.allreduce.round_member import RoundMember
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.worker_side import RankSession
from offbeat.runtime.worker import siblings
from offbeat.types import WorkerId

PACE_S = 0.005
"""Between two steps of workers that only keep a job going: at full speed they fill the journal with records, all of which are audited."""


def together(results: list[tuple[int, list[Tensor]]]) -> None:
    """All replicas of a version are one."""
    known: dict[int, list[Tensor]] = {}
    for version, mine in results:
        assert same(known.setdefault(version, mine), mine), f"version {version}"


def history(training: Training, steps: int) -> list[tuple[int, list[Tensor]]]:
    found = []
    for _ in range(steps):
        training.step()
        found.append(training.everything())
    return found


HOSTS = {"together": TOGETHER, "apart": APART, "halves": HALVES}
PLACES = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
"""Where each rank is."""
GOSSIP = spelled(GossipRule)


def everywhere(*rules: str, served: Sequence[str], in_all: Sequence[str] = ()) -> pytest.MarkDecorator:
    """These rules, and all of gossip, in all places; and rules with servers, by shared memory and with one worker elsewhere.

    CI has what is set of `sgp` where all of it travels: it changes to whom a rank sends and when. With ``in_all`` also all other rules.
    """

    def marks(rule: str, place: str) -> list[pytest.MarkDecorator]:
        alike = rule not in in_all if in_all else rule.startswith("sgp(")
        return [pytest.mark.night] if alike and place not in ("apart", "tcp") else []

    cases = [
        pytest.param(rule, {"hosts": hosts}, id=f"{rule}-{name}", marks=marks(rule, name))
        for rule in (*rules, *GOSSIP)
        for name, hosts in HOSTS.items()
    ]
    places: dict[str, dict[int, str]] = {"shm": {}, "tcp": {1: "other"}}
    cases += [
        pytest.param(rule, {"servers": 2, "hosts": hosts}, id=f"{rule}-{name}", marks=marks(rule, name))
        for rule in served
        for name, hosts in places.items()
    ]
    return pytest.mark.parametrize(("rule", "job"), cases)


@everywhere("full", "majority", "solo", "solo(delivery=latest, model_sync_every=8)", served=["psp(c=3)"])
def test_one_that_dies_comes_back_with_what_the_others_have(tmp_path: Path, rule: str, job: dict[str, Any]) -> None:
    back = threading.Event()
    results: list[tuple[int, list[Tensor]]] = []
    states: list[float] = []

    def stay(worker: Worker) -> None:
        training = Training(worker, rule)
        mine = history(training, 4)
        if worker.number == 1:
            worker.die()
        while not back.wait(PACE_S):
            mine += history(training, 1)
        results.extend(mine)

    def come(worker: Worker) -> None:
        training = Training(worker, rule)
        assert training.optimizer.version >= 4
        states.extend(float(entry["step"]) for entry in training.optimizer.state_dict()["state"].values())
        results.extend(history(training, 6))
        back.set()

    with Job(3, journal=str(tmp_path / "journal"), **job) as running:
        running.start_all(stay)
        running.await_state(1, "dead")
        running.start(1, come)
        running.join()
    assert states and min(states) >= 4, "its optimizer goes on from where another's was"
    records = audited(tmp_path / "journal")
    assert {part["incarnation"] for r in records if r["kind"] == "fold" for part in r["parts"] if part["worker"] == 1} == {1, 2}
    if rule in GOSSIP:
        # Between hosts a living rank may find first what it cannot get from the dead one.
        written_off = {(r["worker"], r["incarnation"]) for r in records if r["kind"] == "written_off"}
        assert (1, 1) in written_off if rule_of(GossipRule, rule).exchange == "push" else not written_off  # type: ignore[type-abstract]
        return
    if "latest" not in rule:
        together(results)
    if "psp" in rule:
        return
    divisors = [record["divisor"] for record in records if record["kind"] == "fold"]
    assert divisors[0] == 3 and 2 in divisors, "a result is divided by the living"


@everywhere("full", "solo", served=["bsp", "asp", "psp(c=3, b=0.5)"], in_all=("full", "dpsgd", "bsp"))
def test_one_that_was_thought_dead_comes_back_by_itself(tmp_path: Path, rule: str, job: dict[str, Any]) -> None:
    thought_dead, back = threading.Event(), threading.Event()
    results: list[tuple[int, list[Tensor]]] = []

    def script(worker: Worker) -> None:
        training = Training(worker, rule)
        mine = history(training, 2)
        if worker.number == 1:
            worker.freeze()
            wait(thought_dead)
            worker.thaw()
            mine += history(training, 5)
            back.set()
        while not back.wait(PACE_S):
            mine += history(training, 1)
        results.extend(mine)

    with Job(3, timeout_s=1.0, journal=str(tmp_path / "journal"), **job) as running:
        running.run_past_death(script, 1, thought_dead)
    if rule in ("full", "solo", "bsp"):
        together(results)
    records = audited(tmp_path / "journal")
    states = [record["state"] for record in of_kind(records, "state_changed", 1)]
    assert states[:4] == ["alive", "dead", "recovered", "alive"] and states[-1] == "finished"
    fates = of_kind(records, "settle", 1)
    assert any(fate["fate"] == "folded" and fate["incarnation"] > 1 for fate in fates)
    if "servers" in job:
        late = {fate.get("shard"): fate["reason"] for fate in reversed(fates) if fate["fate"] == "rejected"}  # the first of each shard
        assert late == dict.fromkeys((0, 1) if "psp" in rule else (None,), "sent by incarnation 1, which was declared dead")


@pytest.mark.parametrize("hosts", [TOGETHER, APART], ids=["together", "apart"])
def test_who_waits_to_be_let_in_takes_no_results(monkeypatch: pytest.MonkeyPatch, hosts: dict[int, str]) -> None:
    """There are some for it as soon as somebody has let it in; they are for the replica that it is about to get."""
    thought_dead, back, both = threading.Event(), threading.Event(), barrier(2)
    calls, threads, frozen = list[str](), list[threading.Thread](), list[Worker]()

    def spied(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if threading.current_thread() in threads[1:]:
                calls.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((RankSession, "_rejoin"), (RankMember, "begin"), (RoundMember, "catch_up")):
        spied(owner, name)
    monkeypatch.setattr(siblings, "IDLE_S", 0.001)

    def script(worker: Worker) -> None:
        training = Training(worker, "solo")
        sampler = training.optimizer.batch_sampler(TensorDataset(torch.zeros(8)), batch_size=4)
        for epoch in itertools.count():
            for _ in sampler:
                if epoch == 0:
                    both.wait()
                    if worker.number == 0:
                        wait(thought_dead)
                    else:
                        frozen.append(worker)
                training.step()
            if worker.number == 1:
                back.set()
            if back.is_set():
                break

    with Job(2, hosts=hosts, timeout_s=1.0) as job:
        threads += job.start_all(script)
        job.until(lambda: calls.count("catch_up") > 20, "rank 1 to wait for the end of the epoch")
        frozen[0].freeze()
        job.await_state(1, "dead")
        frozen[0].thaw()
        thought_dead.set()
        job.join()
    rejoined = calls.index("_rejoin")
    assert "catch_up" not in calls[rejoined : calls.index("begin", rejoined)]


def test_who_is_asked_for_its_replica_while_it_waits_to_leave_waits_for_the_newcomer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer may need results that are gone with those who have left."""
    leaving, threads, calls = threading.Event(), list[threading.Thread](), list[str]()
    part, on_donate, give_to = MultiHostMember.part, RankSession._on_donate, MultiHostMember.give_to

    def called(what: str) -> None:
        if threading.current_thread() is threads[0]:
            calls.append(what)

    def spied_part(self: MultiHostMember) -> None:
        called("part")
        if calls == ["part"]:
            leaving.set()
            deadline = time.monotonic() + DEADLINE_S
            while "asked" not in calls:
                self._hear()
                assert time.monotonic() < deadline, "nobody has asked for the replica"
        part(self)
        called("parted")

    def spied_on_donate(self: RankSession, message: Any) -> None:
        called("asked")
        on_donate(self, message)

    def spied_give_to(self: MultiHostMember, rank: WorkerId | None, ticket: Any) -> Any:
        called("gave")
        return give_to(self, rank, ticket)

    monkeypatch.setattr(MultiHostMember, "part", spied_part)
    monkeypatch.setattr(RankSession, "_on_donate", spied_on_donate)
    monkeypatch.setattr(MultiHostMember, "give_to", spied_give_to)

    def stay(worker: Worker) -> tuple[int, list[Tensor]]:
        training = Training(worker, "full")
        training.step()
        if worker.number == 1:
            worker.die()
        return training.everything()

    def come(worker: Worker) -> int:
        training = Training(worker, "full")
        began = training.optimizer.version
        with suppress(JobEnded):  # rank 0 may have left by now
            training.step()
        return began

    with Job(2, hosts=APART) as job:
        threads += job.start_all(stay)
        job.await_state(1, "dead")
        wait(leaving)
        threads[1] = job.start(1, come)
        job.join(*threads)
        assert job.results(1) == [1]
    assert calls == ["part", "asked", "parted", "asked", "gave", "part", "parted"]


@pytest.mark.parametrize(("sync", "hosts"), [("asp", TOGETHER), *(("solo", hosts) for hosts in HOSTS.values())])
def test_stale_samples_of_a_returned_worker_are_rejected(tmp_path: Path, sync: str, hosts: dict[int, str]) -> None:
    """A loader has fetched batches ahead when its worker is declared dead: they are somebody else's by the time it uses them."""
    thought_dead, size = threading.Event(), 60

    def script(worker: Worker) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, sync)
        sampler = optimizer.batch_sampler(range(size), batch_size=4)
        fetched = iter(sampler)
        ahead = [next(fetched) for _ in range(3)]
        if worker.number == 1:
            worker.freeze()
            wait(thought_dead)
            worker.thaw()
        else:
            wait(thought_dead)
        for indices in itertools.chain(ahead, fetched):
            optimizer.zero_grad()
            model(torch.full((len(indices), 1), 6.0)).mean().backward()
            optimizer.step()
        return model.weight.item()

    with Job(2, hosts=hosts, timeout_s=1.0, journal=str(tmp_path / "journal")) as job:
        weights = job.run_past_death(script, 1, thought_dead)
    records = audited(tmp_path / "journal")
    reasons = [record["reason"] for record in of_kind(records, "settle", 1) if record["fate"] == "rejected"]
    assert reasons[0].startswith("sent by incarnation 1")
    assert reasons[1:] == ["its samples have gone to another worker"] * 2
    (ended,) = of_kind(records, "epoch_ended")
    assert ended["report"]["folded"] == size and ended["report"]["returned"] == 12
    expected = -sum(6.0 * part["weight"] for fold in of_kind(records, "fold") for part in fold["parts"])
    assert max(weights, key=abs) == pytest.approx(expected), "what was rejected is in no result"
    assert sync == "asp" or weights[0] == weights[1]


@pytest.mark.parametrize(
    ("rule", "version", "hosts"),
    [("full", 2, TOGETHER), ("full", 2, APART), ("sgp", 3, TOGETHER), ("dpsgd", 3, TOGETHER), ("adpsgd", 3, TOGETHER)],
)
def test_the_last_rank_leaves_its_replica_to_those_who_may_come_back(rule: str, version: int, hosts: dict[int, str]) -> None:
    died = threading.Event()

    def stay(worker: Worker) -> tuple[int, list[Tensor]]:
        training = Training(worker, rule)
        training.step()
        if worker.number == 1:
            worker.die()
        wait(died)
        training.step()
        return training.everything()

    with Job(2, hosts=hosts) as job:
        job.run_past_death(stay, 1, died)
        job.await_state(0, "finished")

        def come(worker: Worker) -> tuple[int, list[Tensor]]:
            training = Training(worker, rule)
            kept = training.everything()
            with pytest.raises(JobEnded):
                training.step()
            return kept

        job.join(job.start(1, come))
        first, second = job.results(0, 1)
    assert first[0] == second[0] == version
    together([first, second])


@pytest.mark.parametrize(("rule", "hosts"), [("majority", TOGETHER), ("majority", APART), ("sgp", TOGETHER)])
def test_where_all_die_at_once_the_parameters_are_gone(rule: str, hosts: dict[int, str]) -> None:
    def die(worker: Worker) -> None:
        Training(worker, rule).step()
        worker.die()

    def come(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError)):
            Training(worker, rule)

    with Job(1, hosts=hosts) as job:
        job.start(0, die)
        job.await_state(0, "dead")
        job.join(job.start(0, come))
        assert "nobody is left to copy the parameters from" in job.await_failure()


def test_who_comes_from_another_host_to_a_job_of_one_is_refused() -> None:
    refused = threading.Event()

    def stay(worker: Worker) -> None:
        training = Training(worker, "solo")
        training.step()
        if worker.number == 1:
            worker.die()
        wait(refused)
        training.step()

    def come(worker: Worker) -> None:
        with pytest.raises(RefusedError, match="worker 1 is on another host than server 0, and the job has begun with all workers there"):
            Training(worker, "solo")
        refused.set()

    with Job(2, hosts=(hosts := {})) as job:
        threads = job.start_all(stay)
        job.await_state(1, "dead")
        hosts[1] = "other"
        threads[1] = job.start(1, come)
        job.join(*threads)


@PLACES
def test_a_donor_that_dies_is_replaced(tmp_path: Path, hosts: dict[int, str]) -> None:
    """Whoever is asked for its replica may freeze over it: somebody else is asked then."""
    frozen, end = threading.Event(), threading.Event()
    quick: Any = {}

    def stay(worker: Worker) -> None:
        training = Training(worker, "solo")
        training.step()
        if worker.number == 2:
            worker.die()
        quick[worker.number] = training
        if worker.number == 0:
            worker.freeze()
            frozen.set()
            wait(end)
            worker.thaw()
            worker.die()
        while not end.is_set():
            training.step()
            threading.Event().wait(0.05)

    def come(worker: Worker) -> None:
        training = Training(worker, "solo")
        together(history(training, 3))
        end.set()

    with Job(3, hosts=hosts, timeout_s=1.5, journal=str(tmp_path / "journal")) as job:
        job.start_all(stay)
        job.await_state(2, "dead")
        wait(frozen)
        job.start(2, come)
        job.join()
    audited(tmp_path / "journal")
