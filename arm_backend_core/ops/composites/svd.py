"""SVD, symmetric eigenvalues and pseudo-inverse of small matrices by one-sided Jacobi rotations (Hestenes 1958).

Pairs of columns are rotated until all columns are orthogonal. After _SWEEPS sweeps the error is a few roundings of the
largest singular value.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.composites import replace_zero_by_one
from arm_backend_core.ops.composites.linear_algebra import max_magnitude
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten
_MAX_COLUMNS, _SWEEPS = 4, 6  #: Columns (four have six pairs) and sweeps; a rotation takes twenty operators.


def _one_sided_jacobi(a: Tensor, *, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    """U * S [.., m, n], sorted S [.., n], and V [.., n, n] of a = U @ S @ V^T, m >= n."""
    m, n = a.shape[-2:]
    if n > _MAX_COLUMNS:
        raise Unsupported(
            f"singular values or eigenvalues of {m} x {n} matrices; the smaller side may be {_MAX_COLUMNS} at most"
        )
    most = max_magnitude(a)  # avoids overflow of squares
    both = torch.cat([a / most, torch.eye(n, dtype=a.dtype).expand(*a.shape[:-2], n, n)], -2)
    columns = [both[..., i : i + 1] for i in range(n)]
    for p, q in list(combinations(range(n), 2)) * _SWEEPS:
        x, y = columns[p], columns[q]
        first, second, product = (
            (u[..., :m, :] * v[..., :m, :]).sum(-2, keepdim=True) for u, v in ((x, x), (y, y), (x, y))
        )
        cotangent = (second - first) / replace_zero_by_one(2 * product)  # of twice the rotation angle
        size = 1 / (cotangent.abs() + torch.sqrt(cotangent.square() + 1))
        tangent = torch.where(product == 0, 0.0, torch.where(cotangent < 0, -size, size))
        cosine = torch.rsqrt(tangent.square() + 1)
        columns[p], columns[q] = cosine * (x - tangent * y), cosine * (tangent * x + y)
    both = torch.cat(columns, -1)
    sizes, order = torch.sqrt(both[..., :m, :].square().sum(-2)).sort(-1, descending=descending)
    both = both @ (order.unsqueeze(-2) == torch.arange(n)[:, None]).to(a.dtype)
    return both[..., :m, :] * most, sizes * most[..., 0], both[..., m:, :]


@decomposition(aten._linalg_svd.default)
def svd(
    a: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^T. Columns of U are 0 where S is 0; signs may differ from LAPACK's."""
    m, n = a.shape[-2:]
    if full_matrices and compute_uv and m != n:
        raise Unsupported(f"all singular vectors of {m} x {n} matrices; call it with full_matrices=False")
    scaled, sizes, right = _one_sided_jacobi(a if m >= n else a.mT, descending=True)
    if not compute_uv:
        return (nothing := torch.zeros(0, dtype=a.dtype)), sizes, nothing
    left = scaled / replace_zero_by_one(sizes).unsqueeze(-2)
    return (left, sizes, right.mT) if m >= n else (right, sizes, left.mT)


@decomposition(aten._linalg_eigh.default)
def eigh(a: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix in ascending order, and their vectors, whose signs may differ from LAPACK's.

    A shift by the largest absolute row sum makes all eigenvalues non-negative, so that they are singular values.
    """
    symmetric = _mirror_triangle(a, uplo)
    shift = symmetric.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    _, sizes, vectors = _one_sided_jacobi(symmetric + shift * torch.eye(a.shape[-1], dtype=a.dtype), descending=False)
    return sizes - shift[..., 0], vectors if compute_v else torch.zeros(0, dtype=a.dtype)


def _mirror_triangle(a: Tensor, uplo: str = "L") -> Tensor:
    """The symmetric matrix of one triangle."""
    half = a.tril() if uplo == "L" else a.triu().mT
    return half + half.tril(-1).mT


@decomposition(aten.linalg_pinv.atol_rtol_tensor)
def pseudo_inverse(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """Pseudo-inverse; singular values at or below ``atol`` and ``rtol`` times the largest count as 0."""
    left, sizes, right = svd(_mirror_triangle(a) if hermitian else a)
    least = torch.zeros(()) if atol is None else atol.to(a.dtype)
    most = max(a.shape[-2:]) * torch.finfo(a.dtype).eps
    known = torch.where(least > 0, 0.0, most) if rtol is None else rtol.to(a.dtype)
    counts = sizes > torch.maximum(least[..., None], known[..., None] * sizes[..., :1])
    inverse = torch.where(counts, 1 / torch.where(counts, sizes, 1.0), 0.0)
    return (right.mT * inverse.unsqueeze(-2)) @ left.mT
