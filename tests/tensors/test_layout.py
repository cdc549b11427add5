"""The map of a model's flat memory: places, spans, views, and what a peer may not send."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from tests.tiers import examples
from torch import nn

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors.layout import ALIGNMENT, DTYPES, Layout, TensorSpec, view


def layout_of(sizes: list[int], *, dtypes: list[str] | None = None) -> Layout:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=DTYPES[dtypes[i] if dtypes else "float32"])) for i, n in enumerate(sizes)])
    return Layout.of(model, torch.optim.SGD(model.parameters()))


def to_channels_last(conv: nn.Conv2d) -> None:
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)


class TestOf:
    def test_neighbours_share_dtype_and_group(self) -> None:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).bfloat16(), nn.Linear(2, 2))
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        layout = Layout.of(model, torch.optim.SGD([{"params": biases}, {"params": weights}]))
        assert [t.name for t in layout.tensors] == [name for name, _ in model.named_parameters()]
        kinds = [(layout.tensors[i].dtype, layout.tensors[i].group) for i in layout.in_memory_order]
        assert kinds == sorted(kinds)
        assert [t.slot for t in layout.tensors] == [3, 0, 4, 1, 5, 2]
        assert all(t.offset % ALIGNMENT == 0 for t in layout.tensors)

    def test_frozen_and_unheld_parameters_are_left_out(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()])
        assert [(t.name, t.slot) for t in Layout.of(model, optimizer).tensors] == [("2.weight", 2), ("2.bias", 3)]

    def test_tied_parameters_have_one_place(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        assert len(Layout.of(model, torch.optim.SGD(model.parameters())).tensors) == 3

    def test_channels_last_keeps_its_strides_and_slices_become_dense(self) -> None:
        model = nn.Conv2d(4, 8, 3)
        to_channels_last(model)
        layout = Layout.of(model, torch.optim.SGD(model.parameters()))
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        assert view(memory, layout.tensors[0]).is_contiguous(memory_format=torch.channels_last)
        sliced = nn.ParameterList([nn.Parameter(torch.zeros(6, 4)[:, :2])])
        assert Layout.of(sliced, torch.optim.SGD(sliced.parameters())).tensors[0].stride == (2, 1)

    @pytest.mark.parametrize(
        ("build", "words"),
        [
            (lambda: (nn.Linear(2, 2).requires_grad_(False), None), "no trainable parameter"),
            (lambda: (nn.Linear(2, 2), torch.optim.SGD(nn.Linear(7, 2).parameters())), r"\(2, 7\), is not the model's"),
            (lambda: (nn.Linear(2, 2, dtype=torch.complex64), None), "weight is torch.complex64"),
            (lambda: (nn.Linear(2, 2, device="meta"), None), "weight is on the meta device"),
            (lambda: (nn.LazyLinear(2), None), "weight has no shape yet"),
            (lambda: (nn.ParameterDict({"w": nn.Parameter(torch.eye(2).to_sparse())}), None), "w is a torch.sparse_coo tensor"),
        ],
    )
    def test_refusals(self, build: Any, words: str) -> None:
        model, optimizer = build()
        with pytest.raises(ConfigurationError, match=words):
            Layout.of(model, optimizer or torch.optim.SGD(model.parameters()))

    def test_a_parameter_in_two_groups_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = torch.optim.SGD(groups)
        optimizer.param_groups[1]["params"].append(model.weight)
        with pytest.raises(ConfigurationError, match="holds weight twice"):
            Layout.of(model, optimizer)


class TestSpans:
    @given(
        sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
        count=st.integers(1, 9),
        splittable=st.booleans(),
    )
    @examples(60)
    def test_cover_everything_once(self, sizes: list[int], count: int, splittable: bool) -> None:
        layout = layout_of(sizes)
        spans = layout.spans(count, splittable)
        assert len(spans) == count and spans[0].start == 0 and spans[-1].stop == layout.nbytes
        assert all(a.stop == b.start for a, b in pairwise(spans))
        assert all(s.start <= s.stop and s.start % ALIGNMENT == 0 for s in spans)
        edges = {0, *(t.stop for t in layout.tensors)}
        share = layout.nbytes / count
        if splittable:
            assert all(abs(s.nbytes - share) <= 0.1 * share + ALIGNMENT for s in spans)
        else:
            assert all(s.start in edges for s in spans)

    def test_an_edge_near_the_balanced_place_is_preferred(self) -> None:
        layout = layout_of([1000, 1024])
        assert layout.spans(2, True)[0].stop == layout.tensors[1].offset
        assert layout_of([100, 2000]).spans(2, True)[0].stop == layout_of([100, 2000]).nbytes // 2 // 64 * 64

    def test_nothing_is_left_for_some(self) -> None:
        assert [s.nbytes for s in layout_of([4]).spans(3, False)].count(0) == 2


class TestWire:
    @given(
        sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), kinds=st.lists(st.sampled_from(list(DTYPES)), min_size=8, max_size=8)
    )
    @examples(40)
    def test_round_trip(self, sizes: list[int], kinds: list[str]) -> None:
        layout = layout_of(sizes, dtypes=kinds)
        assert Layout.from_wire(msgpack.unpackb(msgpack.packb(layout.to_wire()))) == layout

    @pytest.mark.parametrize("field", range(len(TensorSpec._fields)))
    @pytest.mark.parametrize("value", [None, -1, True, 1 << 60, 3.5, "x", "", [], [-1], [1 << 60], ["a"], {}, b"x", [2, 3], [9, 9]])
    def test_a_wrong_field_is_refused(self, field: int, value: Any) -> None:
        layout = layout_of([6, 5])
        wire = layout.to_wire()
        wire["tensors"][0][field] = value
        try:
            read = Layout.from_wire(wire)
        except ProtocolError:
            return
        # What is accepted all the same is a proper layout, for instance a tensor of another name.
        assert read.to_wire() == wire and math.prod(read.tensors[0].shape) == 6

    @pytest.mark.parametrize(
        "data", [None, [], {}, {"tensors": 3, "nbytes": 0}, {"tensors": [], "nbytes": 0}, {"tensors": "ab"}, {"tensors": [[1]]}]
    )
    def test_nonsense_is_refused(self, data: Any) -> None:
        with pytest.raises(ProtocolError):
            Layout.from_wire(data)

    def test_another_total_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="63"):
            Layout.from_wire({**layout_of([6]).to_wire(), "nbytes": 63})


class TestDifference:
    def test_names_the_first_tensor_that_differs(self) -> None:
        def model(middle: int = 3, *, dtype: torch.dtype = torch.float32, bias: bool = True) -> Layout:
            net = nn.Sequential(nn.Linear(2, middle, dtype=dtype), nn.Linear(middle, 2, bias=bias))
            return Layout.of(net, torch.optim.SGD(net.parameters()))

        assert model().difference(model()) is None
        assert model().difference(model(4)) == "0.weight has shape (3, 2), in the other model (4, 2)"
        assert model().difference(model(bias=False)) == "1.bias (2,) is missing in the other model"
        assert model(bias=False).difference(model()) == "1.bias (2,) is only in the other model"
        assert model().difference(model(dtype=torch.bfloat16)) == "0.weight is float32, in the other model bfloat16"

    def test_groups_and_memory_formats_matter(self) -> None:
        conv = nn.Conv2d(4, 8, 3)
        plain = Layout.of(conv, torch.optim.SGD(conv.parameters()))
        groups: list[dict[str, Any]] = [{"params": [conv.weight]}, {"params": [conv.bias]}]
        grouped = Layout.of(conv, torch.optim.SGD(groups))
        assert plain.difference(grouped) == "bias is in the optimizer's group 0, in the other's 1"
        to_channels_last(conv)
        assert "memory format" in str(plain.difference(Layout.of(conv, torch.optim.SGD(conv.parameters()))))


def test_views_are_the_memory() -> None:
    layout = layout_of([3, 0, 5])
    memory = bytearray(layout.nbytes)
    for i, spec in enumerate(layout.tensors):
        tensor = view(memoryview(memory), spec)
        tensor.fill_(i + 1.0)
        assert tensor.untyped_storage().nbytes() == spec.nbytes
    assert memoryview(memory).cast("f")[: 16 + 5].tolist() == [1.0] * 3 + [0.0] * 13 + [3.0] * 5
