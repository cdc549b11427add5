"""`offbeat.elastic` in one process: what is carried over from a loader, what is refused, and that each sample is used once."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import offbeat
from offbeat.errors import ConfigurationError, OffbeatWarning
from offbeat.orders import Drawn


def optimizer_of() -> offbeat.DistributedOptimizer:
    model = nn.Linear(1, 1)
    return offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)


def indices(loader: Any, optimizer: offbeat.DistributedOptimizer) -> list[int]:
    found = []
    for batch in loader:
        optimizer.step()
        found += batch.tolist()
    return found


class Stream(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 6))


class Every(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_what_a_loader_has_is_carried_over() -> None:
    optimizer = optimizer_of()
    seeded: list[int] = []
    generator = torch.Generator()
    loader: Any = DataLoader(
        range(10),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        num_workers=1,
        collate_fn=torch.tensor,
        timeout=30,
        worker_init_fn=seeded.append,
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    made: Any = offbeat.elastic(loader)
    for name in ("dataset", "num_workers", "collate_fn", "timeout", "worker_init_fn", "generator", "prefetch_factor", "persistent_workers"):
        assert getattr(made, name) == getattr(loader, name)
    assert sorted(indices(made, optimizer)) == list(range(10)) and len(made) == 3
    assert [report["folded"] for report in optimizer.reports] == [10]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SequentialSampler(range(10)), list(range(10))),
        (RandomSampler(range(10)), set(range(10))),
        (RandomSampler(range(10), num_samples=4), 4),
        (RandomSampler(range(10), num_samples=14), 14),
        (RandomSampler(range(10), replacement=True, num_samples=8), 8),
        (SubsetRandomSampler([3, 5, 7]), {3, 5, 7}),
        (WeightedRandomSampler([0, 0, 1, 1, 0, 0, 0, 0, 0, 0], 6), 6),
        (DistributedSampler(range(10), num_replicas=4, rank=1), set(range(10))),  # type: ignore[arg-type]
    ],
)
def test_the_order_of_samplers(sampler: Any, expected: Any) -> None:
    optimizer = optimizer_of()
    loader = offbeat.elastic(DataLoader(range(10), batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    found = [indices(loader, optimizer) for _ in range(2)]
    for one in found:
        if isinstance(expected, int):
            assert len(one) == expected and set(one) <= set(range(10))
        else:
            assert (one if isinstance(expected, list) else set(one)) == expected and len(one) == len(expected)
    assert found[0] != found[1] or isinstance(sampler, SequentialSampler) or len(found[0]) < 4
    if isinstance(sampler, WeightedRandomSampler):
        assert set(found[0]) <= {2, 3}


def test_a_loader_that_is_made_anew_has_another_order_which_its_saved_state_keeps() -> None:
    optimizer = optimizer_of()
    loaders: list[Any] = [offbeat.elastic(DataLoader(range(10), batch_size=4, shuffle=True)) for _ in range(3)]  # type: ignore[arg-type]
    state = loaders[1].batch_sampler.state_dict()
    loaders[2].batch_sampler.load_state_dict(state)
    first, second, loaded = [indices(loader, optimizer) for loader in loaders]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second == loaded


@pytest.mark.parametrize("weighted", [False, True])
def test_a_sampler_without_an_end_takes_no_memory(weighted: bool) -> None:
    """As minGPT's trainer has it: 10 billion draws with replacement, of which the script takes as many as it wants."""
    many: Any = WeightedRandomSampler([1.0] * 10, 10**10) if weighted else RandomSampler(range(10), replacement=True, num_samples=10**10)
    found = []
    for _ in range(2):
        optimizer = optimizer_of()
        loader = offbeat.elastic(DataLoader(range(10), batch_size=40_000, sampler=many))  # type: ignore[arg-type]
        batches = iter(loader)
        found.append(torch.cat([next(batches) for _ in range(3)]))  # the second batch lies in two blocks
        del optimizer
    assert torch.equal(*found), "every worker draws the same"
    assert set(found[0].tolist()) == set(range(10)) and not torch.equal(found[0][:40_000], found[0][80_000:])


def test_orders_of_ones_own_and_whole_batches() -> None:
    optimizer = optimizer_of()
    mine = offbeat.elastic(range(10), batch_size=2, order=lambda epoch: [epoch, 9, epoch])
    assert [indices(mine, optimizer) for _ in range(2)] == [[0, 9, 0], [1, 9, 1]]
    whole = offbeat.elastic(range(10), batch_size=4, drop_last=True)
    sampler = optimizer.batch_sampler(range(10), batch_size=4, drop_last=True)
    assert [len(batch) for batch in whole] == [len(batch) for batch in sampler] == [4, 4]
    plain = offbeat.elastic(DataLoader(range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, True)))  # type: ignore[arg-type]
    assert indices(plain, optimizer) == list(range(8))


def test_a_stream_is_told_its_epoch_and_may_be_made_before_the_optimizer() -> None:
    stream: Any = offbeat.elastic(Stream(), batch_size=4)
    later: Any = offbeat.elastic(range(4), batch_size=4)
    with pytest.raises(ConfigurationError, match=r"make the offbeat\.DistributedOptimizer first"):
        next(iter(stream))
    optimizer = optimizer_of()
    assert [indices(stream, optimizer) for _ in range(2)] == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    assert (stream.pool, later.batch_sampler.pool) == (0, 1)
    assert stream.state_dict()["epoch"] == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_split_by_rank_is_refused(workers: int) -> None:
    """By Hugging Face's ``split_dataset_by_node``. One rank has all of it."""
    stream: Any = Stream()
    stream._distributed = SimpleNamespace(rank=0, world_size=1)
    offbeat.elastic(DataLoader(stream, batch_size=4, num_workers=workers))
    stream._distributed = SimpleNamespace(rank=0, world_size=2)
    with pytest.raises(ConfigurationError, match="leave split_dataset_by_node out"):
        offbeat.elastic(DataLoader(stream, batch_size=4, num_workers=workers))


def test_an_empty_stream_ends() -> None:
    optimizer = optimizer_of()
    assert indices(offbeat.elastic(lambda epoch: iter(()), batch_size=4), optimizer) == []
    assert optimizer.reports[0]["indices"] == 0


def test_a_pass_that_was_left_may_be_gone_on_with() -> None:
    """Its batches count for nobody any more, and do no harm, also where the pass under way is not as far."""
    optimizer = optimizer_of()
    loader = offbeat.elastic(range(16), batch_size=2, shuffle=False, num_workers=1)
    left = iter(loader)
    assert [next(left).tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(indices(loader, optimizer)) == list(range(16))
    under_way = iter(loader)
    with pytest.warns(OffbeatWarning, match="another one over the same loader"):
        assert next(left).tolist() == [8, 9]
    assert next(under_way).tolist() == [0, 1]


def test_a_loader_with_an_iter_of_its_own_is_told_of() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    class Named(DataLoader[Any]):
        name = "training"

    optimizer = optimizer_of()
    data: Any = range(4)
    with pytest.warns(OffbeatWarning, match=r"the __iter__ of its own class is not called. To keep it: Doubled\(data, batch_sampler="):
        assert indices(offbeat.elastic(Doubled(data, batch_size=2)), optimizer) == [0, 1, 2, 3]
    kept = Doubled(data, batch_sampler=optimizer.batch_sampler(range(4), batch_size=2, shuffle=False))
    assert indices(kept, optimizer) == [0, 2, 4, 6]
    offbeat.elastic(Named(data, batch_size=2))


def test_a_pass_in_the_middle_of_another_ends_that_one_with_a_warning() -> None:
    """As an evaluation does. What it has looked at is given once more, in the next pass and in no other."""
    optimizer = optimizer_of()
    loader = offbeat.elastic(range(16), batch_size=2, num_workers=0)

    def steps() -> int:
        for number, _ in enumerate(loader, 1):
            optimizer.step()
            if number == 4:
                assert sorted(index for batch in loader for index in batch.tolist()) == list(range(16))
        return number

    with pytest.warns(OffbeatWarning, match="another one over the same loader") as warned:
        found = [steps(), steps()]
    assert len(warned) == 1 and found == [4, 4]
    optimizer.pull()
    assert [(report["folded"], report["unused"]) for report in optimizer.reports[:2]] == [(8, 8)] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_small_data_set_that_is_fetched_ahead_as_a_whole(workers: int) -> None:
    """The loader has asked for all batches before the first step; their epoch ends with that, and not before."""
    optimizer = optimizer_of()
    loader = offbeat.elastic(range(6), batch_size=2, num_workers=workers)
    for _ in range(2):
        next(iter(loader))
        assert sorted(indices(loader, optimizer)) == list(range(6))
    assert [(report["folded"], report["unused"]) for report in optimizer.reports] == [(6, 0)] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: offbeat.elastic(iter([1, 2]), batch_size=2), "only once"),
        (lambda: offbeat.elastic(range(4)), "needs batch_size="),
        (lambda: offbeat.elastic(7), "got a int"),
        (lambda: offbeat.elastic(range(4), batch_size=0), "batch_size"),
        (lambda: offbeat.elastic(range(4), batch_size=8, drop_last=True), "leaves no batch"),
        (lambda: offbeat.elastic(Stream(), batch_size=2, shuffle=True), "keeps its own order"),
        (lambda: offbeat.elastic(Stream(), batch_size=2, num_workers=2), "num_workers"),
        (lambda: offbeat.elastic(DataLoader(range(4)), batch_size=2), "set it on the DataLoader"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(4), batch_size=None)), "batch_size=None.*pass that as batch_sampler"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(10), batch_size=4, sampler=Every())), "order="),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(4), batch_sampler=[[0, 1]]), batch_size="auto"), "are dealt out whole"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(4), batch_sampler=iter([[0, 1]]))), "has no length"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(4), sampler=OfRank())), "for each of 2 ranks"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(DataLoader(range(4), sampler=Weighted(range(4), 2, 0))), "for each of 2 ranks"),  # type: ignore[arg-type]
        (lambda: offbeat.elastic(range(4), batch_size=2, order=range, shuffle=True), "order= sets the whole order"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    optimizer_of()
    with pytest.raises(ConfigurationError, match=words):
        make()


class Weighted(DistributedSampler[int]):
    """Another order than PyTorch's, of a class of PyTorch."""

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.rank))


class OfRank(Sampler[int]):
    num_replicas = 2

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter((0, 2))


class ByLength:
    """A batch sampler as many scripts have one: batches of about so many elements, of sequences of about one length, in random order."""

    def __init__(self, lengths: list[int], draws: str, elements: int = 24) -> None:
        self.lengths, self.draws, self.elements = lengths, draws, elements
        self.own = random.Random(7)
        if draws == "epoch":
            self.set_epoch = self.own.seed

    def __len__(self) -> int:
        return sum(self.lengths) // self.elements

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = [[]]
        for index in sorted(range(len(self.lengths)), key=self.lengths.__getitem__):
            if len(batches[-1]) * self.lengths[index] >= self.elements:
                batches.append([])
            batches[-1].append(index)
        if self.draws == "torch":
            return iter([batches[at] for at in torch.randperm(len(batches))])
        (random if self.draws == "python" else self.own).shuffle(batches)
        return iter(batches)


@pytest.mark.parametrize("draws", ["python", "torch", "own", "epoch"])
def test_batches_of_a_scripts_own_are_dealt_out_whole(draws: str) -> None:
    """In another order in each epoch, the same on every worker, also on one that begins with a later epoch."""
    lengths = [1 + index % 9 for index in range(60)]
    optimizer = optimizer_of()
    seen: list[list[list[int]]] = []
    state = random.getstate()
    loader: Any = offbeat.elastic(DataLoader(range(60), batch_sampler=ByLength(lengths, draws), num_workers=2 * (draws == "own")))  # type: ignore[arg-type]
    for _ in range(3):
        seen.append([])
        for batch in loader:
            optimizer.step()
            seen[-1].append(batch.tolist())
    assert random.getstate() == state
    whole = {tuple(batch) for batch in ByLength(lengths, draws)}
    assert all(sorted(index for batch in epoch for index in batch) == list(range(60)) for epoch in seen)
    assert all({tuple(batch) for batch in epoch} == whole for epoch in seen) and seen[0] != seen[1] != seen[2]
    sampler = loader.batch_sampler
    later = Drawn(ByLength(lengths, draws))
    assert later.of(sampler._generator(2), 2) == seen[2]
    assert [report["folded"] for report in optimizer.reports] == [len(seen[0])] * 3


def test_a_sampler_of_another_class_keeps_its_order() -> None:
    optimizer = optimizer_of()
    loader = offbeat.elastic(DataLoader(range(10), batch_size=4, sampler=Backwards()))  # type: ignore[arg-type]
    assert indices(loader, optimizer) == list(range(10))[::-1]


class Backwards(Sampler[int]):
    """Without an end."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(9, -1, -1)


def test_the_loaders_sampler_has_the_epoch_set_as_that_of_ddp_has() -> None:
    optimizer = optimizer_of()
    data: Any = range(6)
    loader: Any
    for loader in (offbeat.elastic(DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0))), offbeat.elastic(data, batch_size=2)):
        for epoch in (3, 4):
            loader.sampler.set_epoch(epoch)
            assert loader.batch_sampler.state_dict()["epoch"] == epoch
            for _ in loader:
                optimizer.step()
        loader.sampler.set_epoch(3)  # as a second training with the same loader does
        with pytest.warns(OffbeatWarning, match=r"set_epoch\(3\) names an epoch that is over"):
            assert list(loader) == []


def test_an_evaluation_through_an_elastic_loader_gives_a_warning() -> None:
    optimizer = optimizer_of()
    loader = offbeat.elastic(range(6), batch_size=2)
    with pytest.warns(OffbeatWarning, match=r"To evaluate, use a plain DataLoader"), torch.no_grad():
        assert len(list(loader)) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(indices(loader, optimizer)) == list(range(6)), "they are still dealt to the next steps"
        with torch.no_grad():
            assert sum(len(batch) for batch in loader) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_is_repeated_under_one_iterator_is_refused(workers: int) -> None:
    """YOLO's InfiniteDataLoader: after its first epoch each batch would be counted as another one."""

    class Repeated:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield from self.sampler

    optimizer = optimizer_of()
    repeated: Any = Repeated(optimizer.batch_sampler(range(16), batch_size=2))
    loader = DataLoader[Any](range(16), batch_sampler=repeated, num_workers=workers)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="asks the elastic batch_sampler for a second pass"):
        indices(loader, optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda data, optimizer: optimizer.batch_sampler(data, batch_size=2),
        lambda data, _: offbeat.elastic(data, batch_size=2),
        lambda data, _: offbeat.elastic(DataLoader(data, batch_size=2)),
        lambda data, _: offbeat.elastic(DataLoader(data, batch_size=2, shuffle=True, drop_last=True)),
    ],
)
@pytest.mark.parametrize("size", [3, 8])
def test_data_whose_length_changes_want_a_new_loader(make: Any, size: int) -> None:
    """A curriculum, or a pool of labels that grows: what was added would never be dealt out."""
    data = list(range(6))
    loader = make(data, optimizer := optimizer_of())
    for _ in loader:
        optimizer.step()
    data[:] = range(size)
    with pytest.raises(ConfigurationError, match=f"had 6 samples when the loader was made, and has {size} now: make the loader anew"):
        next(iter(loader))
