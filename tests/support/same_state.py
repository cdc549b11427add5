"""Compare states of models and optimizers: tensors in dicts, lists and tuples."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.tensors import fisher


def same(a: Any, b: Any) -> bool:
    """Return True if two states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, as a share of what was expected."""
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))


def alike(state: Any, expected: Any, *, within: float) -> bool:
    """Return True if two states have the same form, and their tensors differ by this share of their norm at most."""
    if isinstance(expected, torch.Tensor):
        same_form = isinstance(state, torch.Tensor) and state.dtype == expected.dtype and state.shape == expected.shape
        return same_form and error(state, expected) <= within
    if isinstance(expected, dict):
        state, expected = _with_estimates(state), _with_estimates(expected)
        return bool(state.keys() == expected.keys() and all(alike(state[key], expected[key], within=within) for key in expected))
    if isinstance(expected, list | tuple):
        return len(state) == len(expected) and all(alike(a, b, within=within) for a, b in zip(state, expected, strict=True))
    return bool(state == expected)


def _with_estimates(state: dict[Any, Any]) -> dict[Any, Any]:
    """With each factor of a natural gradient as the F that it stands for: the last bit of a gradient decides the signs of R's rows."""
    made = dict(state)
    for axis in range(2):
        if (factor := fisher.read(state, axis)) is not None:
            R, d, rho = (made.pop(f"{key}{axis}") for key in factor._fields)
            made[f"F{axis}"] = R.T @ (d[:, None] * R) + rho * torch.eye(R.shape[1], device=R.device)
    return made
