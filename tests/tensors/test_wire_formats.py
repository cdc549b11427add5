"""Encoding for the wire: sizes, bounds of the error, error feedback, and values that are not finite."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.tiers import examples
from torch import Tensor, nn

from offbeat.tensors.absent import ABSENT, is_absent
from offbeat.tensors.layout import DTYPES, Layout, Span, elements, view
from offbeat.tensors.wire_formats import BLOCK, CHUNK_NUMEL, Codec, Encoded, ErrorFeedback

MODELS = {
    "one value": nn.ParameterList([torch.zeros(1)]),
    "whole blocks": nn.ParameterList([torch.zeros(BLOCK), torch.zeros(3 * BLOCK)]),
    "odd sizes": nn.ParameterList([torch.zeros(5, 7), torch.zeros(300), torch.zeros(1)]),
    "two chunks": nn.ParameterList([torch.zeros(CHUNK_NUMEL + 100)]),
    "all dtypes": nn.ParameterList([torch.zeros(300, dtype=dtype) for dtype in DTYPES.values()]),
}


def layout_of(name: str) -> Layout:
    model = MODELS[name]
    return Layout.of(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Line:
    """Both ends of a connection that encodes a whole model."""

    def __init__(self, layout: Layout, wire: Encoded) -> None:
        self.layout = layout
        self.codec = Codec(layout, Span(0, layout.nbytes), wire)
        self.sent, self.came = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
        self.encoded = torch.zeros(self.codec.nbytes, dtype=torch.uint8)

    def fill(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for spec in self.layout.tensors:
            size = torch.rand(spec.numel, generator=generator) * 6 - 3  # neighbours differ by factors of up to a million
            view(self.sent, spec).copy_((scale * torch.randn(spec.numel, generator=generator) * 10**size).reshape(spec.shape))

    def values(self, memory: Tensor) -> list[Tensor]:
        return [view(memory, spec).double() for spec in self.layout.tensors]

    def travel(self) -> None:
        self.codec.encode(self.sent, self.encoded)
        self.codec.decode(self.encoded, self.came)


def blocks_of(layout: Layout, memory: Tensor) -> list[Tensor]:
    """The values that share a scale; all of one dtype."""
    dtype = DTYPES[layout.tensors[0].dtype]
    return list(elements(memory, 0, layout.nbytes // dtype.itemsize, dtype).double().split(BLOCK))


@pytest.mark.parametrize("name", MODELS)
@given(seed=st.integers(0, 1 << 30), power=st.integers(-25, 25))
@examples(40)
def test_bf16_keeps_eight_bits(name: str, seed: int, power: int) -> None:
    line = Line(layout_of(name), "bf16")
    line.fill(seed, 10.0 ** (power if name != "all dtypes" else 0))
    line.travel()
    for spec, sent, came in zip(line.layout.tensors, line.values(line.sent), line.values(line.came), strict=True):
        if spec.itemsize == 2:
            assert torch.equal(sent, came), "16 bits travel as they are"
        assert bool(((sent - came).abs() <= sent.abs() * 2**-8).all()), spec.dtype


@pytest.mark.parametrize("name", [name for name in MODELS if name != "all dtypes"])
@given(seed=st.integers(0, 1 << 30), power=st.integers(-32, 30))
@examples(40)
def test_int8_errs_by_half_a_step_of_its_block(name: str, seed: int, power: int) -> None:
    line = Line(layout_of(name), "int8")
    line.fill(seed, 10.0**power)
    line.travel()
    for sent, came in zip(blocks_of(line.layout, line.sent), blocks_of(line.layout, line.came), strict=True):
        largest = float(sent.abs().max())
        # A quotient of up to 127 in float32 is off by 2**-24 of itself: 1.5e-5 of half a step.
        assert float((sent - came).abs().max()) <= max(largest / 254 * (1 + 4e-5), 1.5e-36)
        assert largest < 1.5e-36 or math.isclose(float(came.abs().max()), largest, rel_tol=1e-6), "the largest value is exact"


def test_int8_of_other_dtypes_errs_by_half_a_step_and_their_own_rounding() -> None:
    line = Line(layout_of("all dtypes"), "int8")
    line.fill(3, 0.1)
    line.travel()
    for sent, came in zip(line.values(line.sent), line.values(line.came), strict=True):
        assert bool(((sent - came).abs() <= sent.abs().max() * (1 / 254 + 2**-8)).all())


@pytest.mark.parametrize("values", [[0.0] * 300, [1e-42, -1e-40] + [0.0] * 298, [1e-37] * 300])
def test_tiny_values_become_zero(values: list[float]) -> None:
    line = Line(layout_of("odd sizes"), "int8")
    elements(line.sent, line.layout.tensors[1].offset, 300, torch.float32).copy_(torch.tensor(values))
    line.came.fill_(7)
    line.travel()
    assert not bool(line.came.any())


@pytest.mark.parametrize("name", MODELS)
def test_the_size_follows_from_the_layout(name: str) -> None:
    layout = layout_of(name)
    assert Codec(layout, Span(0, layout.nbytes), "bf16").nbytes <= layout.nbytes + 64 * len(layout.tensors)
    if name == "whole blocks":
        assert Codec(layout, Span(0, layout.nbytes), "bf16").nbytes == 4 * BLOCK * 2
        assert Codec(layout, Span(0, layout.nbytes), "int8").nbytes == 4 * BLOCK + 64, "four scales are padded to a cache line"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_is_not_finite_is_not_finite_after_decoding(wire: Encoded, bad: float) -> None:
    line = Line(layout_of("whole blocks"), wire)
    line.fill(2)
    elements(line.sent, 0, 4 * BLOCK, torch.float32)[BLOCK + 3] = bad
    line.travel()
    finite = [bool(torch.isfinite(block).all()) for block in blocks_of(line.layout, line.came)]
    assert finite == [True, False, True, True]
    if wire == "bf16":
        came = elements(line.came, 0, 4 * BLOCK, torch.float32)
        assert int(torch.isfinite(came).sum()) == 4 * BLOCK - 1
        assert math.isnan(float(came[BLOCK + 3])) if math.isnan(bad) else float(came[BLOCK + 3]) == bad


@given(seeds=st.lists(st.tuples(st.integers(0, 1 << 20), st.booleans()), min_size=1, max_size=12))
@examples(60)
def test_feedback_makes_the_pushes_that_count_add_up(seeds: list[tuple[int, bool]]) -> None:
    """The pushes that were not dropped add up to their gradients but for the last feedback, which is less than a step of a block."""
    line = Line(layout_of("odd sizes"), "int8")
    feedback, truth, arrived = ErrorFeedback(line.codec), torch.zeros(line.codec.numel).double(), torch.zeros(line.codec.numel).double()
    largest = 0.0
    for seed, dropped in seeds:
        line.fill(seed)
        before, gradient = feedback.feedback.clone(), elements(line.sent, 0, line.codec.numel, torch.float32)
        largest = max(largest, float((gradient + before).abs().max()))
        feedback.encode(line.came, line.encoded)  # a bucket that changes afterwards is encoded again
        feedback.encode(line.sent, line.encoded)
        feedback.pushed()
        line.codec.decode(line.encoded, line.came)
        decoded = elements(line.came, 0, line.codec.numel, torch.float32)
        assert torch.equal(feedback.feedback, gradient + before - decoded)
        if dropped:
            if seed % 2:
                feedback.encode(line.came, torch.zeros_like(line.encoded))  # of the next gradient, before the fate of this push is known
            feedback.give_back()
            assert torch.equal(feedback.feedback, before), "bit by bit what it was"
        else:
            truth += gradient.double()
            arrived += decoded.double()
    assert bool(((arrived + feedback.feedback.double() - truth).abs() <= len(seeds) * largest * 1e-6).all())
    assert float(feedback.feedback.abs().max()) <= largest / 254 * 1.01


@pytest.mark.parametrize("name", ["odd sizes", "two chunks", "all dtypes"])
def test_changes_keep_both_ends_equal_and_near_the_truth(name: str) -> None:
    line, generator = Line(layout_of(name), "int8"), torch.Generator().manual_seed(0)
    ours, theirs = torch.zeros(2, line.codec.numel)
    line.fill(1, 0.001)
    for base in (ours, theirs):
        line.codec.read(line.sent, base)
    for _ in range(20):
        for spec in line.layout.tensors:
            move = torch.randn(spec.shape, generator=generator).clamp_(-5, 5) * 0.01
            view(line.sent, spec).add_(move.to(DTYPES[spec.dtype]))
        before = [value.clone() for value in line.values(line.sent)]
        line.codec.encode(line.sent, line.encoded, base=ours)
        line.codec.decode(line.encoded, line.came, theirs)
        assert torch.equal(ours, theirs), "bit by bit, or the ends would drift apart"
        for spec, sent, came in zip(line.layout.tensors, before, line.values(line.came), strict=True):
            rounding = 2**-8 * float(sent.abs().max()) if spec.itemsize == 2 else 0.0
            assert float((sent - came).abs().max()) <= 0.06 / 254 + 2 * rounding, "the largest change is 0.05, and the error before"


def test_after_exact_values_changes_begin_anew() -> None:
    line = Line(layout_of("odd sizes"), "int8")
    ours, theirs = torch.zeros(2, line.codec.numel)
    theirs.fill_(7.0)
    line.fill(4)
    line.codec.read(line.sent, ours)
    line.codec.read(line.sent, theirs)
    line.codec.encode(line.sent, line.encoded, base=ours)
    line.codec.decode(line.encoded, line.came, theirs)
    assert all(torch.equal(sent, came) for sent, came in zip(line.values(line.sent), line.values(line.came), strict=True))


def test_a_gradient_that_is_not_finite_leaves_no_trace_in_the_feedback() -> None:
    line = Line(layout_of("whole blocks"), "int8")
    line.fill(5)
    elements(line.sent, 0, 4 * BLOCK, torch.float32)[3] = math.nan
    feedback = ErrorFeedback(line.codec)
    feedback.encode(line.sent, line.encoded)
    feedback.pushed()
    assert bool(torch.isfinite(feedback.feedback).all())
    assert bool(feedback.feedback.any()), "the other blocks have errors"


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_without_a_gradient_is_one_after_decoding(name: str, wire: Encoded) -> None:
    """Its feedback waits until it has a gradient again."""
    line = Line(layout_of(name), wire)
    feedback = ErrorFeedback(line.codec)
    for absent in range(len(line.layout.tensors)):
        line.fill(absent)
        view(line.sent, line.layout.tensors[absent]).fill_(ABSENT)
        feedback.feedback.uniform_(-1.0, 1.0)
        before = feedback.feedback.clone()
        line.codec.encode(line.sent, line.encoded) if wire == "bf16" else feedback.encode(line.sent, line.encoded)
        line.codec.decode(line.encoded, line.came)
        feedback.pushed()
        assert [is_absent(view(line.came, spec)) for spec in line.layout.tensors].count(True) == 1
        assert is_absent(view(line.came, line.layout.tensors[absent]))
        same = feedback.feedback == before
        assert wire == "bf16" or line.layout.tensors[absent].numel <= int(same.sum()) < line.codec.numel or len(line.layout.tensors) == 1
