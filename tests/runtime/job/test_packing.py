"""Values taken apart and put together again."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.job.packing import DTYPES, pack, unpack

LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def through(value: Any) -> Any:
    """To another process and back."""
    plain, payload = pack(value)
    return unpack(msgpack.unpackb(msgpack.packb(plain)), memoryview(b"".join(payload)))


@given(VALUES)
def test_plain_values_survive(value: Any) -> None:
    found = through(value)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_kind_and_shape_survive(name: str) -> None:
    dtype = DTYPES[name]
    values = [torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 3, dtype=dtype)]
    if dtype.is_complex:
        values.append((values[0] * 1j).conj())
    for before, after in zip(values, through(values), strict=True):
        assert after.dtype is dtype and after.shape == before.shape
        assert torch.equal(before.to(torch.complex128), after.to(torch.complex128))


def test_a_tensor_is_its_own_afterwards() -> None:
    before = torch.zeros(3)
    after = through({"a": before.t()})["a"]
    after += 1
    assert not before.any()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"state": {0: {"hook": print}}}, r"the state\['state'\]\[0\]\['hook'\] is a builtin_function"),
        ([torch.zeros(1).to_sparse()], "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_taken_apart_is_named(value: Any, where: str) -> None:
    with pytest.raises(ConfigurationError, match=where):
        pack(value, "the state")


@pytest.mark.parametrize(
    "plain", [{"tensor": ["float32", [4], 0]}, {"tensor": ["object", [1], 0]}, {"set": [1]}, {"tensor": ["int8", [1], -1]}]
)
def test_what_a_peer_makes_up_is_refused(plain: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack(plain, memoryview(b"12345678"))
