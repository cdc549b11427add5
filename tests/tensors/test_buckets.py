"""Buckets cover a span, and a fingerprint notices changes that no version counter counts."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from offbeat.tensors import buckets as buckets_module
from offbeat.tensors.buckets import Fingerprint, buckets_of
from offbeat.tensors.layout import ALIGNMENT, Layout, aligned


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    servers=st.integers(1, 4),
    nbytes=st.integers(1, 4000),
    splittable=st.booleans(),
)
def test_buckets_cover_each_span_once_and_name_all_tensors_in_it(sizes: list[int], servers: int, nbytes: int, splittable: bool) -> None:
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    for span in layout.spans(servers, splittable):
        with patch.object(buckets_module, "BUCKET_NBYTES", nbytes):
            buckets, at = buckets_of(layout, span), span.start
        for bucket in buckets:
            assert bucket.span.start == at
            at = bucket.span.stop
            inside = {i for i, t in enumerate(layout.tensors) if t.offset < bucket.span.stop and bucket.span.start < t.stop}
            assert set(bucket.tensors) == inside
            assert bucket.span.start % ALIGNMENT == 0
        assert at == span.stop
        assert all(nbytes <= bucket.span.nbytes for bucket in buckets[:-1])
        assert all(bucket.span.nbytes < 2 * aligned(nbytes) for bucket in buckets), "a large tensor is cut"
        assert bool(buckets) == (span.nbytes > 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.data.neg_(),
        lambda grad: grad.data.mul_(0.999),
        lambda grad: grad.data.clamp_(-1.0, 1.0),
        lambda grad: grad.numpy().__setitem__(1234, 7.0),
        lambda grad: grad.data.copy_(grad.flip(0)),
        lambda grad: grad.data[-1:].add_(1e-3),
    ],
)
@pytest.mark.parametrize("numel", [2_000, 100_000])
def test_a_change_that_no_counter_counts_is_noticed(change: Callable[[Tensor], object], numel: int) -> None:
    """As many values are positive as negative, and the sum of all is zero: a plain sum would not notice the change of all signs."""
    half = torch.rand(numel // 2, generator=torch.Generator().manual_seed(0)) + 0.5
    grad = torch.stack([half, -half], 1).flatten()
    memory = grad.view(torch.uint8)
    before, version = Fingerprint(memory), grad._version
    assert Fingerprint(memory) == before
    change(grad)
    assert grad._version == version, "this change is counted: the test shows nothing"
    assert Fingerprint(memory) != before
