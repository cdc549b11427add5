"""One factor of the natural gradient: against its definition, against Kaldi's form of it, and under hostile data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from offbeat.tensors.fisher import DELTA, EPSILON, FIRST_ITERATIONS, Fisher, first, gains, orthonormal, precondition, start, update

pytestmark = pytest.mark.usefixtures("a_single_thread")
Array = NDArray[np.float64]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(rows: int, columns: int, seed: int) -> Tensor:
    made: Tensor = torch.linalg.qr(normal(columns, rows, seed=seed))[0]
    return made.T


def some_factor(columns: int, rank: int, seed: int) -> Fisher:
    """Eigenvalues that differ by up to a thousand, well over the floors."""
    d = 10 ** (3 * torch.rand(rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).sort(descending=True).values
    return Fisher(basis(rank, columns, seed), d, torch.tensor(0.5, dtype=torch.float64))


def dense(fisher: Fisher) -> Tensor:
    return fisher.R.T @ torch.diag(fisher.d) @ fisher.R + fisher.rho * torch.eye(fisher.R.shape[1], dtype=torch.float64)


def unorthogonal(R: Tensor) -> float:
    return float((R @ R.T - torch.eye(len(R), dtype=R.dtype)).abs().max())


sizes = st.integers(2, 12).flatmap(lambda columns: st.tuples(st.just(columns), st.integers(1, columns - 1)))


@given(sizes)
def test_the_first_basis_is_orthonormal_and_leaves_no_column_out(size: tuple[int, int]) -> None:
    columns, rank = size
    R = first(columns, rank, 1.0).R
    assert unorthogonal(R) < 1e-12
    assert bool((R.count_nonzero(dim=0) == 1).all())
    if columns >= 2 * rank:
        assert (R.sum(dim=1) > R.amax(dim=1)).all() and (
            R.amax(dim=1) > R[:, rank : 2 * rank].amax(dim=1)
        ).all()  # not all entries are equal


@given(sizes, st.integers(1, 30), st.integers(0, 99), st.sampled_from([0.01, 1.0, 4.0, 100.0]))
def test_preconditioning_is_the_inverse_of_the_smoothed_factor(size: tuple[int, int], rows: int, seed: int, alpha: float) -> None:
    columns, rank = size
    fisher, X = some_factor(columns, rank, seed), normal(rows, columns, seed=seed + 1)
    G = dense(fisher) + alpha / columns * fisher.trace() * torch.eye(columns, dtype=torch.float64)
    beta = torch.linalg.eigvalsh(G)[0]
    expected = beta * X @ torch.linalg.inv(G)
    torch.testing.assert_close(X - X @ fisher.R.T @ torch.diag(gains(fisher, alpha)) @ fisher.R, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(precondition(X, fisher, alpha), expected * (X.norm() / expected.norm()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_kept_in_either_memory_order_which_is_kept_too(dtype: torch.dtype) -> None:
    fisher, X = some_factor(20, 8, seed=1), normal(30, 20, seed=2).to(dtype)
    out, turned = precondition(X, fisher, 4.0), precondition(X.T.contiguous().T, fisher, 4.0)
    assert out.dtype == dtype and out.is_contiguous() and turned.T.is_contiguous()
    torch.testing.assert_close(turned, out)
    torch.testing.assert_close(out.norm(), X.norm())
    assert bool((precondition(torch.zeros_like(X), fisher, 4.0) == 0).all())


@given(sizes, st.integers(1, 30), st.integers(0, 99), st.sampled_from([0.1, 0.25, 0.9]))
def test_an_update_is_one_power_iteration_and_keeps_the_trace(size: tuple[int, int], rows: int, seed: int, eta: float) -> None:
    columns, rank = size
    fisher, X = some_factor(columns, rank, seed), normal(rows, columns, seed=seed + 1)
    T = eta * X.T @ X / rows + (1 - eta) * dense(fisher)
    U, s, V = torch.linalg.svd(fisher.R @ T, full_matrices=False)
    rho = (T.trace() - s.sum()) / (columns - rank)
    new = update(X, fisher, eta)
    if rho > DELTA * s[0] and s[-1] - rho > DELTA * s[0]:  # no floor is reached
        torch.testing.assert_close(new.trace(), T.trace())
        torch.testing.assert_close(new.rho, rho)
        torch.testing.assert_close(new.d, s - rho)
    assert unorthogonal(new.R) < 1e-8
    torch.testing.assert_close(new.R.T @ new.R, V.T @ V, rtol=1e-6, atol=1e-6)
    assert float(new.d.min()) >= DELTA * float(s[0]) * (1 - 1e-9) and float(new.rho) >= DELTA * float(s[0]) * (1 - 1e-9)
    assert U.shape == (rank, rank)


def kaldi_gains(rho: float, d: Array, columns: int, alpha: float) -> Array:
    return np.asarray(1 / ((rho * (1 + alpha) + alpha * d.sum() / columns) / d + 1))


def kaldi_step(X: Array, W: Array, rho: float, d: Array, eta: float, alpha: float) -> tuple[Array, Array, float, Array]:
    """A step as Kaldi's source has it, which stores ``W = diag(sqrt e) R``: the preconditioned data and the next factor."""
    rows, columns = X.shape
    e = kaldi_gains(rho, d, columns, alpha)
    H = X @ W.T
    out, J = X - H @ W, H.T @ X
    K, L = J @ J.T, H.T @ H
    s, dr, a = e**-0.5, d + rho, eta / rows
    M = s[:, None] * L * s
    Z = a * a * (s[:, None] * K * s) + a * (1 - eta) * (M * dr + dr[:, None] * M) + (1 - eta) ** 2 * np.diag(dr**2)
    c, U = np.linalg.eigh(Z)
    root, U = np.sqrt(np.maximum(c[::-1], (rho * (1 - eta)) ** 2)), U[:, ::-1]
    rho1 = (a * (X * X).sum() + (1 - eta) * (columns * rho + d.sum()) - root.sum()) / (columns - len(d))
    lowest = max(EPSILON, DELTA * root.max())
    d1, rho1 = np.maximum(root - rho1, lowest), max(rho1, lowest)
    A = a * np.sqrt(kaldi_gains(rho1, d1, columns, alpha))[:, None] / root[:, None] * U.T * s
    return out * np.sqrt((X * X).sum() / (out * out).sum()), A @ (J + (1 - eta) / a * dr[:, None] * W), rho1, d1


@pytest.mark.parametrize(("rows", "columns", "rank"), [(40, 12, 5), (8, 30, 6)])
def test_a_stream_gives_what_kaldis_form_gives(rows: int, columns: int, rank: int) -> None:
    alpha, eta, spread = 4.0, 0.25, torch.logspace(0, -1, columns, dtype=torch.float64)
    fisher = first(columns, rank, 0.1)
    W, rho, d = (gains(fisher, alpha).sqrt()[:, None] * fisher.R).numpy(), float(fisher.rho), fisher.d.numpy()
    for step in range(30):
        X = normal(rows, columns, seed=step) * spread
        out, W, rho, d = kaldi_step(X.numpy(), W, rho, d, eta, alpha)
        np.testing.assert_allclose(precondition(X, fisher, alpha).numpy(), out, rtol=1e-6, atol=1e-8)
        fisher = update(X, fisher, eta)
        np.testing.assert_allclose(float(fisher.rho), rho, rtol=1e-7)
        np.testing.assert_allclose(fisher.d.numpy(), d, rtol=1e-7)
    ours = np.sqrt(gains(fisher, alpha).numpy()[:, None]) * fisher.R.numpy()
    np.testing.assert_allclose(ours.T @ ours, W.T @ W, rtol=1e-5, atol=1e-7)  # rows may differ in sign


def test_the_basis_stays_orthonormal_over_hundreds_of_hostile_updates() -> None:
    fisher = start(normal(3, 30, seed=0), 12, 0.25)
    for step in range(400):
        X = normal(1 + step % 40, 30, seed=step) * torch.logspace(0, -5, 30, dtype=torch.float64)
        if step % 7 == 0:
            X = X[:1].expand_as(X) * 10.0 ** (step % 9 - 4)  # a single direction, and jumps in size
        if step % 50 == 49:
            X = torch.zeros_like(X)
        fisher = update(X, fisher, (0.1, 0.9)[step % 2])
        assert unorthogonal(fisher.R) < 1e-3, step
        assert bool((fisher.d > 0).all()) and float(fisher.rho) > 0
        out = precondition(X, fisher, 4.0)
        assert math.isclose(float(out.norm()), float(X.norm()), rel_tol=1e-9)


def test_scaled_data_give_equally_scaled_results_to_the_last_bit() -> None:
    scale = 2.0**-40
    one, two = start(normal(9, 8, seed=0), 4, 0.25), start(scale * normal(9, 8, seed=0), 4, 0.25)
    for step in range(20):
        X = normal(9, 8, seed=step)
        assert torch.equal(scale * precondition(X, one, 4.0), precondition(scale * X, two, 4.0))
        one, two = update(X, one, 0.25), update(scale * X, two, 0.25)
        assert torch.equal(one.R, two.R) and torch.equal(one.d * scale**2, two.d)


def test_with_a_long_memory_the_basis_spans_the_largest_eigenvectors() -> None:
    columns, rank = 16, 4
    Q = basis(columns, columns, seed=5)
    C = Q.T @ torch.diag(torch.tensor([16.0, 12.0, 9.0, 7.0] + [1.0] * 12, dtype=torch.float64)) @ Q
    half = torch.linalg.cholesky(C)
    fisher = start(normal(64, columns, seed=0) @ half.T, rank, 0.02)
    for step in range(400):
        fisher = update(normal(64, columns, seed=step) @ half.T, fisher, 0.02)
    cosines = torch.linalg.svdvals(fisher.R @ Q[:rank].T)
    assert float(cosines.min()) > 0.995
    torch.testing.assert_close(fisher.d + fisher.rho, torch.tensor([16.0, 12.0, 9.0, 7.0], dtype=torch.float64), rtol=0.1, atol=0)
    assert float(fisher.rho) == pytest.approx(1.0, rel=0.1)


def test_at_full_rank_rotated_data_give_rotated_results_once_the_first_basis_is_forgotten() -> None:
    columns = 6
    Q, spread = basis(columns, columns, seed=9), torch.tensor([32.0, 16.0, 8.0, 4.0, 2.0, 0.5], dtype=torch.float64)
    one, two = (start(X, columns - 1, 0.1) for X in (normal(50, columns, seed=0) * spread, (normal(50, columns, seed=0) * spread) @ Q))
    for step in range(150):
        X = normal(50, columns, seed=step) * spread
        one, two = update(X, one, 0.1), update(X @ Q, two, 0.1)
    torch.testing.assert_close(precondition(X, one, 4.0) @ Q, precondition(X @ Q, two, 4.0), rtol=1e-6, atol=1e-6)


def test_a_start_from_few_rows_spans_them_after_one_iteration() -> None:
    X = normal(3, 10, seed=1)
    assert len(X) < 5 and FIRST_ITERATIONS > 1
    fisher = start(X, 5, 0.25)
    torch.testing.assert_close(X @ fisher.R.T @ fisher.R, X, rtol=0, atol=1e-6)
    once = update(X, first(10, 5, EPSILON * float(X.square().mean())), 0.25)
    assert torch.equal(fisher.R, once.R)


@pytest.mark.parametrize("damage", ["none", "slight", "skewed", "vanished", "equal"])
def test_an_orthonormal_basis_is_restored_from_anything(damage: str) -> None:
    R = basis(5, 9, seed=3)
    damaged = R.clone()
    if damage == "slight":
        damaged[1] += 1e-5 * R[0]
    elif damage == "skewed":
        damaged[1:] = 0.5 * R[1:] + 0.3 * R[:1]
    elif damage == "vanished":
        damaged[3:] = 0
    elif damage == "equal":
        damaged[4] = R[0] + 1e-9 * R[4]
    mended = orthonormal(damaged)
    if damage in {"none", "slight"}:
        assert mended is damaged
    else:
        assert unorthogonal(mended) < 1e-10
        torch.testing.assert_close(damaged @ mended.T @ mended, damaged)  # nothing of what was there is lost
