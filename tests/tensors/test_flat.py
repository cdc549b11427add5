"""A model in flat memory behaves like the model it was, and the push memory always holds its gradients."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.tensors.absent import is_absent
from offbeat.tensors.flat import GATHERED_NBYTES, SAMPLE, FlatModel
from offbeat.tensors.layout import Layout, view


class Tied(nn.Module):
    """Something of everything: tied weights, a frozen layer, channels_last, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.low = nn.Linear(4, 2).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3))
        result: torch.Tensor = self.low(self.second(torch.tanh(self.frozen(self.first(x)))).bfloat16()).float().square().mean()
        return result


class Fixture:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        self.layout = Layout.of(model, self.optimizer)
        self.push, self.pull = bytearray(b"\xff" * self.layout.nbytes), bytearray(self.layout.nbytes)
        self.flat = FlatModel(self.layout, model, memoryview(self.push), memoryview(self.pull))
        self.flat.attach()

    def pushed(self) -> dict[str, torch.Tensor]:
        return {spec.name: view(memoryview(self.push), spec).clone() for spec in self.layout.tensors}

    def in_place(self) -> bool:
        parameters = dict(self.model.named_parameters())
        return all(parameters[s.name].data_ptr() == view(memoryview(self.pull), s).data_ptr() for s in self.layout.tensors)


def tied() -> Fixture:
    torch.manual_seed(0)
    return Fixture(Tied())


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(seed))


def plain_gradients(passes: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tied()
    for seed in range(passes):
        model(batch(seed)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], msg=name)


def test_a_script_may_detach_a_gradient_in_place() -> None:
    """As PyTorch's ``zero_grad`` did before ``set_to_none``, from which scripts have theirs."""
    fixture = tied()
    for _ in range(2):
        for parameter in fixture.model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        fixture.model(batch()).backward()
        assert fixture.flat.collect() is None
        same(fixture.pushed(), plain_gradients())
    assert fixture.in_place()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_pushed_and_accumulate(passes: int, set_to_none: bool) -> None:
    fixture = tied()
    for _ in range(2):
        fixture.model.zero_grad(set_to_none=set_to_none)
        for seed in range(passes):
            fixture.model(batch(seed)).backward()
        assert fixture.flat.collect() is None
        assert fixture.flat.accumulating
        same(fixture.pushed(), plain_gradients(passes))
    assert fixture.in_place()


def test_replaced_and_deleted_gradients() -> None:
    fixture = tied()
    model = fixture.model
    assert isinstance(model, Tied)
    model(batch()).backward()
    model.first.bias.grad = torch.full((4,), 2.0)
    model.conv.weight.grad = None
    fixture.flat.collect()
    assert fixture.pushed()["first.bias"].tolist() == [2.0] * 4
    assert is_absent(fixture.pushed()["conv.weight"])
    fixture.flat.collect()
    model(batch()).backward()
    fixture.flat.collect()
    assert fixture.pushed()["conv.weight"].any()


def test_gradients_from_before_are_kept() -> None:
    torch.manual_seed(0)
    model = Tied()
    model(batch(0)).backward()
    fixture = Fixture(model)
    model(batch(1)).backward()
    fixture.flat.collect()
    same(fixture.pushed(), plain_gradients(2))


def test_a_gradient_with_a_graph_stays_the_users() -> None:
    model = nn.Linear(3, 1, bias=False)
    fixture = Fixture(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    assert model.weight.grad is not None and model.weight.grad.requires_grad
    fixture.flat.collect()
    torch.testing.assert_close(fixture.pushed()["weight"], model.weight.grad.detach())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["conv.bias", "low.weight"])
def test_names_what_is_not_finite(value: float, name: str) -> None:
    fixture = tied()
    fixture.model(batch()).backward()
    grad = dict(fixture.model.named_parameters())[name].grad
    assert grad is not None
    grad.view(-1)[1] = value
    assert fixture.flat.collect() == name


def many(sizes: list[int]) -> tuple[Fixture, nn.ParameterList, list[int]]:
    """A model of tensors of these sizes, and the numbers of those whose gradient has been moved, in this order."""
    tensors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    moved: list[int] = []
    fixture = Fixture(tensors)
    fixture.flat.computed = moved.append
    return fixture, tensors, moved


def test_small_gradients_are_moved_together_and_large_ones_at_once() -> None:
    large = GATHERED_NBYTES // 4
    fixture, tensors, moved = many([16, large, 16, 16])
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()
    assert set(moved) >= {1} and len(moved) < 4, "a backward pass moves what has come until a MiB is full"
    assert fixture.flat.collect() is None
    assert sorted(moved) == [0, 1, 2, 3]
    assert all(view(memoryview(fixture.push), spec).eq(1.0).all() for spec in fixture.layout.tensors)


def test_of_small_gradients_the_one_that_is_not_finite_is_named() -> None:
    fixture, tensors, _ = many([16] * 6)
    wrong = torch.ones(6)
    wrong[2] = wrong[4] = float("nan")
    (torch.stack([tensor.sum() for tensor in tensors]) * wrong).sum().backward()
    assert fixture.flat.collect() == "2"
    for number in (2, 4):
        tensors[number].grad = torch.ones(16)
        assert fixture.flat.collect() == ("4" if number == 2 else None)


def test_a_gradient_that_is_thrown_away_before_it_is_moved_is_not_pushed() -> None:
    fixture, tensors, moved = many([16, 16])
    (tensors[0] + tensors[1]).sum().backward()
    assert not moved
    tensors[1].grad = None
    fixture.flat.collect()
    assert moved == [0] and is_absent(fixture.pushed()["1"])


def test_large_finite_values_are_finite() -> None:
    for dtype, value in ((torch.float32, 3e38), (torch.float16, 6e4), (torch.bfloat16, 3e38)):
        model = nn.Linear(64, 4, bias=False, dtype=dtype)
        fixture = Fixture(model)
        model.weight.grad = torch.full_like(model.weight, value)
        assert fixture.flat.collect() is None


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    fixture = Fixture(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="gradient of weight is sparse"):
        fixture.flat.collect()


def test_parameters_follow_the_pull_memory() -> None:
    fixture = tied()
    model = fixture.model
    assert isinstance(model, Tied)
    bias = model.conv.bias
    assert bias is not None
    identities = [id(p) for p in model.parameters()]
    view(memoryview(fixture.pull), fixture.layout.tensors[1]).fill_(7.0)
    fixture.flat.pulled()
    assert bias.tolist() == [7.0] * 4
    other = bytearray(fixture.pull)
    fixture.flat.repoint(memoryview(other))
    view(memoryview(other), fixture.layout.tensors[1]).fill_(8.0)
    assert bias.tolist() == [8.0] * 4
    assert model.second.weight is model.first.weight and identities == [id(p) for p in model.parameters()]
    bias.data = torch.zeros(4)
    fixture.flat.pulled()
    assert bias.tolist() == [8.0] * 4


def test_offers_the_parameters_without_losing_gradients() -> None:
    fixture = tied()
    fixture.model(batch(0)).backward()
    fixture.flat.offer()
    assert fixture.push == fixture.pull
    fixture.model(batch(1)).backward()
    fixture.flat.collect()
    same(fixture.pushed(), plain_gradients(2))


def test_detach_gives_everything_back() -> None:
    fixture = tied()
    fixture.model(batch()).backward()
    fixture.flat.collect()
    fixture.flat.detach()
    before = copy.deepcopy(fixture.model.state_dict())
    same({n: p.grad for n, p in fixture.model.named_parameters() if p.grad is not None}, fixture.pushed())
    fixture.push[:], fixture.pull[:] = b"\xff" * len(fixture.push), b"\xff" * len(fixture.pull)
    same(dict(fixture.model.state_dict()), dict(before))
    fixture.model.zero_grad()
    fixture.model(batch()).backward()
    same({n: p.grad for n, p in fixture.model.named_parameters() if p.grad is not None}, plain_gradients())


def test_wrong_sizes_are_refused() -> None:
    model = nn.Linear(2, 2)
    layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigurationError, match="was given 4 bytes"):
        FlatModel(layout, model, memoryview(bytearray(4)), memoryview(bytearray(layout.nbytes)))


def test_gradients_go_from_one_memory_to_the_next_and_back() -> None:
    """As a rank's do, which has two buffers: what lies in the one it has left is not touched, and is nobody's gradient."""
    model = nn.Linear(2, 1)
    f = Fixture(model)
    other = torch.full((f.layout.nbytes,), 255, dtype=torch.uint8)
    model(torch.ones(1, 2)).sum().backward()
    assert f.flat.collect() is None
    f.flat.stepped()
    assert not f.flat.accumulating
    first = bytes(f.push)
    f.flat.redirect(other)
    assert model.weight.grad is None and model.bias.grad is None
    model.bias.grad = torch.tensor([5.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the weight has no gradient
        assert f.flat.collect() is None
    assert bytes(f.push) == first and float(other.view(torch.float32).sum()) == 5.0
    f.flat.redirect(memoryview(f.push))
    model(torch.full((1, 2), 3.0)).sum().backward()
    assert f.flat.collect() is None
    assert float(torch.frombuffer(f.push, dtype=torch.float32).sum()) == 7.0
    assert float(other.view(torch.float32).sum()) == 5.0


def test_parameters_that_were_replaced_are_stored() -> None:
    model = nn.Linear(2, 1)
    f = Fixture(model)
    model.weight.data = torch.full((1, 2), 4.0)
    f.flat.store()
    assert torch.frombuffer(f.pull, dtype=torch.float32)[:2].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("width", [4, 600])
def test_a_checksum_tells_gradients_apart_and_knows_zeros(width: int) -> None:
    """Also where it reads only pieces: of 1.4 MB here."""
    model = nn.Linear(width, width)
    f = Fixture(model)
    assert f.flat.digest() is None

    def digest(x: torch.Tensor) -> int | None:
        model.zero_grad()
        model(x).sum().backward()
        f.flat.collect()
        return f.flat.digest()

    ones = torch.ones(1, width)
    assert digest(ones) == digest(ones.clone()) != digest(2 * ones)
    assert digest(0 * ones) is not None, "the bias has a gradient"
    f.flat.detach()


@pytest.mark.parametrize(
    ("how", "touched", "changed"),
    [
        ("nothing", False, False),
        ("in place", True, False),
        ("data", False, True),
        ("replaced", True, False),
        ("replaced by others", True, True),
        ("one element", False, True),
        ("added and subtracted", True, False),
        ("pulled", False, False),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_writes_of_a_script_are_noticed(how: str, touched: bool, changed: bool, whole: bool) -> None:
    fixture = tied()
    flat, weight = fixture.flat, fixture.model.get_parameter("first.weight")
    assert flat.touched() is flat.changed(exact=True) is None, "nothing has been remembered"
    flat.remember(whole=whole)
    fixture.model(batch()).backward()
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.0)
        elif how == "data":
            weight.data.copy_(weight + 1.0)
        elif how == "replaced":
            weight.data = weight.data.clone()
        elif how == "replaced by others":
            weight.data = weight + 1.0
        elif how == "one element":
            weight.data[0, 0] += 1.0
        elif how == "added and subtracted":
            weight.add_(3.0).sub_(3.0)
        elif how == "pulled":
            fixture.pull[:] = bytes(len(fixture.pull))
            flat.pulled()
            flat.remember(whole=whole)
    assert flat.loaded is None, "at the end of the backward pass"
    value, replaced = weight.detach().clone(), weight.data_ptr()
    flat.adopt()
    assert torch.equal(weight, value) and (weight.data_ptr() != replaced) == how.startswith("replaced")
    assert flat.touched() == ("first.weight" if touched else None)
    assert flat.changed(exact=False) == ("first.weight" if changed else None)
    assert (flat.changed(exact=True) is not None) == (changed or how == "added and subtracted")


def test_what_was_written_before_the_first_backward_pass_is_loaded() -> None:
    fixture = tied()
    fixture.flat.remember()
    fixture.model.get_parameter("first.weight").data.add_(1.0)
    for _ in range(2):
        fixture.model(batch()).backward()
        assert fixture.flat.loaded == "first.weight"


@pytest.mark.parametrize("what", ["double", "bfloat16"])
def test_a_model_that_was_converted_after_wrapping(what: str) -> None:
    fixture = tied()
    getattr(fixture.model, what)()
    with pytest.raises(ConfigurationError, match=r"\w+\.weight is torch\.\w+ of shape .*, and was torch\.float32 .*: convert the model"):
        fixture.flat.adopt()


def test_one_word_of_each_tensor_is_compared_at_least() -> None:
    fixture = Fixture(nn.ModuleList(nn.Linear(3, 1) for _ in range(SAMPLE)))
    fixture.flat.remember()
    fixture.model.get_parameter(f"{SAMPLE - 1}.bias").data.add_(1.0)
    assert fixture.flat.changed(exact=False) == f"{SAMPLE - 1}.bias"
