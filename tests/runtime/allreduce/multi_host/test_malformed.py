"""What a rank may send to the others of its job and must not: refused with a sentence, before anything has changed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import malformed
from tests.runtime.allreduce.multi_host.network import Network
from tests.tiers import examples

from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER, RoundKinds, kinds_of
from offbeat.runtime.gossip.messages import kinds_of as gossip_kinds_of

NOTHING = torch.empty(0)
INTRUDER = 2
EVERY = {**malformed.TO_SEAT, **malformed.BETWEEN_RANKS, **malformed.FROM_SEAT}
HOSTS = {"each alone": ["a", "b", "c"], "two together": ["a", "b", "b"], "all together": ["a", "a", "a"]}


@pytest.mark.parametrize(
    ("found", "examples_of"),
    [(kinds_of(3, 4), EVERY), (gossip_kinds_of(3), {**malformed.TO_TABLE, **malformed.FROM_TABLE, **malformed.BETWEEN_GOSSIPS})],
    ids=["rounds", "gossip"],
)
def test_every_kind_lets_its_example_pass_and_names_what_does_not_fit(found: RoundKinds, examples_of: dict[str, dict[str, Any]]) -> None:
    every = {kind: kinds for kinds in found for kind in kinds.kinds}
    assert every.keys() == examples_of.keys()
    for kind, fields in examples_of.items():
        kinds = every[kind]
        assert kinds.check({"k": kind, **fields, "of a newer peer": 1}, "peer 2") == kind
        for field in fields:
            with pytest.raises(ProtocolError, match=rf"peer 2 sent '{kind}' with {field}.* = .* \(expected "):
                kinds.check({"k": kind, **fields, field: {"a": 1}}, "peer 2")


def test_each_process_takes_only_what_is_for_it() -> None:
    network = Network("solo", HOSTS["each alone"], 100, 4)
    for kind in malformed.BETWEEN_RANKS.keys() | malformed.FROM_SEAT.keys():
        with pytest.raises(ProtocolError, match=f"unknown kind '{kind}'"):
            network.hear(SEQUENCER, INTRUDER, {"k": kind, **EVERY[kind]})
    for kind in malformed.TO_SEAT.keys() | malformed.FROM_SEAT.keys():
        with pytest.raises(ProtocolError, match=f"unknown kind '{kind}'"):
            network.hear(0, INTRUDER, {"k": kind, **EVERY[kind]})
    for kind in malformed.TO_SEAT.keys() | malformed.BETWEEN_RANKS.keys():
        with pytest.raises(ProtocolError, match=f"unknown kind '{kind}'"):
            network.hear(0, SEQUENCER, {"k": kind, **EVERY[kind]})


def test_what_fits_and_cannot_be_now_is_refused() -> None:
    network = Network("full", HOSTS["each alone"], 100, 4)
    for node in network.nodes.values():
        node.present = frozenset(range(3))

    def refused(at: int, kind: str, match: str, content: torch.Tensor = NOTHING, **fields: Any) -> None:
        with pytest.raises(ProtocolError, match=match):
            network.hear(at, INTRUDER, {"k": kind, **EVERY[kind], **fields}, content)

    for kind, field in (("read", "n"), ("has", "n"), ("let", "version"), ("report", "upto")):
        refused(SEQUENCER, kind, f"{field} = 1000 .expected at most 0", **dict[str, Any]({field: 1000}))
    for kind in ("resume", "part", "catch"):
        refused(SEQUENCER, kind, "for rank 0 .expected for itself", rank=0)
    for kind in ("done", "what", "memory"):
        refused(0, kind, "shares no memory with rank 0")
    refused(0, "piece", "expected one below 4", n=4)
    refused(0, "handed", "a result of 8 bytes was handed over for round 0 .expected 400", torch.zeros(2))
    for go in ([0, 0, [], 3, [2, 0, 0], 0, 1], [0, 0, [], 3, [0, 2], 0, 1], [0, 0, [], 3, [2, 1], 0, 1], [0, 0, [], 3, [2, 0], 5, 1]):
        refused(0, "on", "with leaders = ", go=go)
    refused(0, "on", "expected one below 4", go=[4, 0, [], 3, [2, 0], 0, 1])
    network.push(0)
    network.push(INTRUDER)
    network.deliver((INTRUDER, SEQUENCER))
    refused(SEQUENCER, "arrive", "but it waits for round 0")
    refused(SEQUENCER, "catch", "but it waits for round 0")
    network.deliver_all()
    network.finish()


@examples(60)
@given(hosts=st.sampled_from(list(HOSTS)), spelled=st.sampled_from(["solo", "majority", "full"]), seed=st.integers(0, 2**30))
def test_what_is_refused_has_changed_nothing(hosts: str, spelled: str, seed: int) -> None:
    """Mutations of every message at any moment of a job: the rounds of all three go on as if none had come."""
    draw, network = random.Random(seed), Network(spelled, HOSTS[hosts], 100, 4)
    refused = 0
    while network.made < 20:
        what, rank = draw.random(), network.ranks[draw.randrange(3)]
        if what < 0.3 and rank.free:
            network.push(rank.number)
        elif what < 0.7 and network.waiting():
            network.deliver(draw.choice(network.waiting()))
        else:
            header, content = _drawn(draw)
            refused += _is_refused(network, draw.choice([SEQUENCER, 0, 1]), header, content)
    assert refused > 5
    network.deliver_all()
    network.finish()


@examples(150)
@given(hosts=st.sampled_from(list(HOSTS)), spelled=st.sampled_from(["solo", "majority", "full"]), seed=st.integers(0, 2**30))
def test_whatever_a_rank_says_the_others_go_on_without_it(hosts: str, spelled: str, seed: int) -> None:
    """Also what could be true is done, and no process comes to an end with it: who says such things is cut off by one who has noticed."""
    draw, network = random.Random(seed), Network(spelled, HOSTS[hosts], 100, 4)
    cut = False
    while not cut:
        what, rank = draw.random(), network.ranks[draw.randrange(3)]
        sender, at = INTRUDER, draw.choice([SEQUENCER, 0, 1])
        try:
            if what < 0.3 and rank.free and network.made < 60:
                network.push(rank.number)
            elif what < 0.6 and network.waiting():
                sender, at = draw.choice(network.waiting())
                network.deliver((sender, at))
            else:
                header, content = _drawn(draw)
                if header.get("k") not in ("cut", "on", "piece", "handed", "done"):  # well-formed lies about another rank, or about a sum
                    network.hear(at, INTRUDER, header, content)
        except ProtocolError as error:
            # Also what the rank itself sends, once it does not fit what has been said in its name.
            assert sender == INTRUDER, f"{at} refuses what rank {sender} has sent"
            cut = True
            network.seat.cut(INTRUDER, str(error)) if at == SEQUENCER else network.nodes[at].on_cut(INTRUDER, str(error))
    network.die(INTRUDER, 0)
    network.deliver_all()
    assert set(network.sequencer.present) <= {0, 1}
    before = network.sequencer.number
    for _ in range(3):
        for number in network.sequencer.present:
            if network.ranks[number].free:
                network.push(number)
        network.deliver_all()
    assert network.sequencer.number > before


def _drawn(draw: random.Random) -> tuple[dict[str, Any], torch.Tensor]:
    kind = draw.choice(list(EVERY))
    header = malformed.mutated({"k": kind, **EVERY[kind]}, draw, times=draw.choice([1, 1, 2]))
    return header, torch.zeros(draw.choice([0, 0, 0, 1, 100, 5000]))


def _is_refused(network: Network, at: int, header: dict[str, Any], content: torch.Tensor) -> bool:
    """Whether it is, at the gate; what is not, is not heard here."""
    process = network.seat if at == SEQUENCER else network.nodes[at]
    kinds = kinds_of(network.seat._ranks, network.seat.slots).requests if at == SEQUENCER else network.nodes[at]._kinds.between
    try:
        process._check_now(INTRUDER, kinds.check(header, "peer 2", content.nbytes), header)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            network.hear(at, INTRUDER, header, content)
        return True
    return False
