"""One factor of an online natural gradient: a low-rank-plus-identity estimate of the second moment of the rows of a stream of matrices.

This file owns the estimate ``F = R' diag(d) R + rho I``, how it follows the data, how it preconditions, and its place in an optimizer's
state. natural_gradient.py decides which tensors and axes have one, and when it is updated. After Povey, Zhang and Khudanpur,
"Parallel training of DNNs with natural gradient and parameter averaging" (2014, arXiv 1410.7455), in the form that Kaldi's
``nnet3/natural-gradient-online`` gives it.

Two departures from Kaldi, in how and not in what is computed:

- Kaldi stores ``W = diag(sqrt e) R``. Here ``R`` itself is stored: the terms in ``E^-1/2`` cancel out of the update, what is left does not
  depend on ``alpha``, and ``e`` costs r numbers to make.
- Kaldi's floor of 1e-10 is in units of its data, which are about one. Mean gradients may be 1e-6, and their squares would drown in it; so
  the initial ``F`` is 1e-10 of the first data's mean square, and scaling all data by a constant scales all results by it.

Letters: N rows of data, D columns, r rank (r < D); X (N, D) data, R (r, D), d (r,). All of a factor is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import ConfigurationError

__all__ = ["Fisher", "along_axes", "check_sizes", "first", "gains", "orthonormal", "precondition", "read", "start", "update", "write"]

EPSILON = 1e-10
"""The first ``F``, in units of the mean square of the first data: small against later data, and not zero."""
DELTA = 5e-4
"""Smallest eigenvalue of ``F`` as a share of the largest, so that one minibatch without some direction does not remove it for ever."""
TINY = 1e-100
"""Replaces values that would become 0; its square is still a float64."""
CONDITION = 1e6
"""With a larger ratio of squared singular values, ``R`` must be checked for being orthonormal."""
UNORTHOGONAL = 1e-3
"""Largest entry of ``R R' - I`` that is accepted."""
BLOWN_UP = 100.0
"""An entry of ``C^-1`` this large multiplies rounding errors rather than directions."""
FIRST_ITERATIONS = 3
"""Updates with the first data before it is used: power iterations from an arbitrary basis, cheaper than an eigendecomposition."""


class Fisher(NamedTuple):
    """``F = R' diag(d) R + rho I``, the rows of ``R`` orthonormal."""

    R: Tensor
    """(r, D): the directions of the r largest eigenvalues."""
    d: Tensor
    """(r,): by how much these eigenvalues exceed ``rho``."""
    rho: Tensor
    """(): the eigenvalue of all other directions."""

    def trace(self) -> Tensor:
        return self.R.shape[1] * self.rho + self.d.sum()


def first(columns: int, rank: int, scale: float, device: torch.device | None = None) -> Fisher:
    """Return the initial factor: ``d = rho = scale``, and every column in exactly one row of ``R``.

    Row i has entries in columns i, i + r, i + 2r ...: orthonormal by construction. The first of them is a tenth larger than the others:
    with equal entries a row would not respond to data whose entries sum to zero, such as the gradients behind a softmax.

    >>> first(4, 2, 1.0).R.count_nonzero(dim=1)
    tensor([2, 2])
    """
    assert 0 < rank < columns, (rank, columns)
    column = torch.arange(columns, device=device)
    R = torch.zeros(rank, columns, dtype=torch.float64, device=device)
    R[column % rank, column] = 1.0
    R[column[:rank], column[:rank]] = 1.1
    R /= torch.linalg.vector_norm(R, dim=1, keepdim=True)
    d = R.new_full((rank,), scale)
    return Fisher(R, d, R.new_tensor(scale))


def start(X: Tensor, rank: int, eta: float) -> Fisher:
    """A factor for a stream of which ``X`` (N, D), not all zero, is the first: three iterations of `update`, or one where N <= r.

    With no more rows than rank the first iteration already finds all that the rows span.
    """
    rows, columns = X.shape
    fisher = first(columns, rank, max(EPSILON * float(X.double().square().mean()), TINY), X.device)
    for _ in range(FIRST_ITERATIONS if rows > rank else 1):
        fisher = update(X, fisher, eta)
    return fisher


def gains(fisher: Fisher, alpha: float) -> Tensor:
    """How much of each direction of ``R`` preconditioning takes away: ``e_i = 1 / (beta / d_i + 1)``.

    With the smoothed ``G = F + (alpha / D) tr(F) I`` this is ``X - X R' diag(e) R = beta X G^-1``, where
    ``beta = rho (1 + alpha) + alpha sum(d) / D``, the smallest eigenvalue of ``G``.
    """
    beta = fisher.rho * (1 + alpha) + alpha * fisher.d.sum() / fisher.R.shape[1]
    return 1 / (beta / fisher.d + 1)


def precondition(X: Tensor, fisher: Fisher, alpha: float) -> Tensor:
    """``gamma beta X G^-1`` with the ``gamma`` that keeps the Frobenius norm; see `gains`.

    In the dtype of ``X``, float32 or float64, and with its memory order. That dtype must have room for the squared norm.

    >>> fisher = Fisher(torch.tensor([[1.0, 0.0]]), torch.tensor([3.0]), torch.tensor(1.0))  # the first column is four times as large
    >>> precondition(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), fisher, alpha=0.0)
    tensor([[2.9155, 0.0000],
            [0.0000, 2.9155]])
    """
    R = fisher.R.to(X.dtype)
    taken = (X @ R.T) * gains(fisher, alpha).to(X.dtype)
    # A first axis comes as a transposed view; a sum of matrices of two memory orders would take as long as their product.
    out = torch.addmm(X, taken, R, alpha=-1) if X.stride(1) == 1 else torch.addmm(X.T, R.T, taken.T, alpha=-1).T
    before, after = torch.linalg.vector_norm(X), torch.linalg.vector_norm(out)
    return out.mul_(torch.where(after > 0, before / after, 1.0))


def update(X: Tensor, fisher: Fisher, eta: float) -> Fisher:
    """The next ``F``, of the same trace as ``T = eta X'X / N + (1 - eta) F`` and its best directions that one power iteration finds.

    ``Y = R T``, ``Y Y' = U diag(c) U'``, then ``R <- diag(c)^-1/2 U' Y``, ``d <- sqrt(c) - rho``, and ``rho`` shares out what ``T`` has
    outside ``R``. No D by D matrix is formed: the cost is two matrix products of N D r.

    Args:
        X: (N, D) data.
        fisher: the present factor.
        eta: the share of the new data, over 0 and below 1.
    """
    X, (R, d, rho) = X.double(), fisher
    rows, columns = X.shape
    share, kept = eta / rows, (1 - eta) * (d + rho)
    H = X @ R.T
    J = H.T @ X
    L = J @ R.T if rows > columns else H.T @ H
    cross = share * L * kept
    Z = share**2 * (J @ J.T) + cross + cross.T + torch.diag(kept**2)
    c, U = _eigen(Z)
    floor = ((1 - eta) * rho).square()
    suspect = bool((c[-1] < floor) | (c[0] > CONDITION * c[-1]))
    c = torch.maximum(c, floor)
    root = c.sqrt()
    R = (U.T @ torch.addcmul(share * J, kept[:, None], R)) / root[:, None]
    rho = (share * torch.linalg.vector_norm(X).square() + (1 - eta) * fisher.trace() - root.sum()) / (columns - len(d))
    lowest = (DELTA * root[0]).clamp(min=TINY)
    # d with the rho from before its floor: only then is the trace the one of T.
    return Fisher(orthonormal(R) if suspect else R, torch.maximum(root - rho, lowest), torch.maximum(rho, lowest))


def _eigen(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of a symmetric matrix, the largest first, and eigenvectors as columns.

    Computed on the CPU, where a matrix of some tens of rows is faster than on an accelerator; scaled to a trace of one, since ``Z`` grows
    with the fourth power of the data.
    """
    scale = Z.diagonal().sum().clamp(min=TINY**2)
    c, U = torch.linalg.eigh((Z / scale).cpu())
    return c.flip(0).to(Z.device) * scale, U.flip(1).to(Z.device)


def orthonormal(R: Tensor) -> Tensor:
    """Return ``R`` if its rows are orthonormal within 1e-3, otherwise an orthonormal basis near it that spans at least the same.

    By Cholesky (``R R' = C C'``, ``R <- C^-1 R``), or by Householder's QR if rows have nearly or wholly vanished, which replaces them by
    orthogonal ones.
    """
    products = R @ R.T
    identity = torch.eye(len(R), dtype=R.dtype, device=R.device)
    if float((products - identity).abs().max()) <= UNORTHOGONAL:
        return R
    C, failed = torch.linalg.cholesky_ex(products)
    if not int(failed):
        inverse: Tensor = torch.linalg.solve_triangular(C, identity, upper=False)
        if float(inverse.abs().max()) < BLOWN_UP:
            return inverse @ R
    basis: Tensor = torch.linalg.qr(R.T)[0].T
    return basis.contiguous()


def along_axes(X: Tensor, state: MutableMapping[str, Tensor], *, alpha: float, rank: int, eta: float, updating: bool) -> Tensor:
    """Return a tensor preconditioned along each axis of size over 1, from the last to the first: contiguous, of the same shape.

    The factors are taken from ``state``, or started from ``X``; afterwards they are in ``state``.

    Args:
        X: not all zero.
        state: of the parameter; see `read`.
        alpha: see `gains`.
        rank: greatest rank of each factor; at most half of the axis, rounded up, is used.
        eta: see `update`.
        updating: update the factors with ``X`` after they were used.
    """
    for axis in reversed(range(X.ndim)):
        if X.shape[axis] > 1:
            rows = X.movedim(axis, -1)
            matrix = rows.reshape(-1, X.shape[axis])
            factor = read(state, axis) or start(matrix, min(rank, (X.shape[axis] + 1) // 2), eta)
            out = precondition(matrix, factor, alpha)
            write(state, axis, update(matrix, factor, eta) if updating else factor)
            X = out.reshape(rows.shape).movedim(-1, axis)
    return X.contiguous()


def read(state: Mapping[str, Tensor], axis: int) -> Fisher | None:
    """Return the factor of an axis, which a parameter's state has as three tensors: ``R0``, ``d0`` and ``rho0`` for axis 0; None if it has
    none."""
    return Fisher(*(state[f"{key}{axis}"] for key in Fisher._fields)) if f"R{axis}" in state else None


def write(state: MutableMapping[str, Tensor], axis: int, factor: Fisher) -> None:
    """Write a factor to the state, for `read`."""
    state.update((f"{key}{axis}", value) for key, value in factor._asdict().items())


def check_sizes(state: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Check that the factors in a parameter's state fit a tensor of this shape.

    Raises:
        ConfigurationError: a factor does not fit; the message names the axis.
    """
    for axis, size in enumerate(shape):
        factor = read(state, axis)
        if factor is not None and factor.R.shape[1] != size:
            raise ConfigurationError(
                f"the saved factor of axis {axis} is for size {factor.R.shape[1]}, and the parameter has shape {tuple(shape)}: "
                "load the state into the optimizer of the model that it was saved from"
            )
