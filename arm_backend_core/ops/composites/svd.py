"""SVD, symmetric eigendecomposition and pseudo-inverse of small matrices by one-sided Jacobi rotations (Hestenes 1958).

A sweep rotates each pair of columns so that they become orthogonal. After _SWEEPS sweeps, the error is a few ulps of
the largest singular value.
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
#: Largest number of columns, and number of sweeps. A sweep over four columns has six rotations, one for each pair. A
#: rotation takes twenty operators, so six sweeps add 720 operators to the program.
_MAX_COLUMNS, _SWEEPS = 4, 6


def _one_sided_jacobi(a: Tensor, *, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    """SVD a = U @ diag(S) @ V^T of a [.., m, n], m >= n.

    Returns:
        U * S [.., m, n], the sorted singular values S [.., n], and V [.., n, n].
    """
    m, n = a.shape[-2:]
    if n > _MAX_COLUMNS:
        raise Unsupported(
            f"singular values or eigenvalues of {m} x {n} matrices; the smaller side may be {_MAX_COLUMNS} at most"
        )
    scale = max_magnitude(a)  # avoids overflow of squares
    stacked = torch.cat([a / scale, torch.eye(n, dtype=a.dtype).expand(*a.shape[:-2], n, n)], -2)
    columns = [stacked[..., i : i + 1] for i in range(n)]
    for p, q in list(combinations(range(n), 2)) * _SWEEPS:
        x, y = columns[p], columns[q]
        first, second, product = (
            (u[..., :m, :] * v[..., :m, :]).sum(-2, keepdim=True) for u, v in ((x, x), (y, y), (x, y))
        )
        cotangent = (second - first) / replace_zero_by_one(2 * product)  # cotangent of twice the rotation angle
        magnitude = 1 / (cotangent.abs() + torch.sqrt(cotangent.square() + 1))
        tangent = torch.where(product == 0, 0.0, torch.where(cotangent < 0, -magnitude, magnitude))
        cosine = torch.rsqrt(tangent.square() + 1)
        columns[p], columns[q] = cosine * (x - tangent * y), cosine * (tangent * x + y)
    stacked = torch.cat(columns, -1)
    singular_values, order = torch.sqrt(stacked[..., :m, :].square().sum(-2)).sort(-1, descending=descending)
    stacked = stacked @ (order.unsqueeze(-2) == torch.arange(n)[:, None]).to(a.dtype)
    return stacked[..., :m, :] * scale, singular_values * scale[..., 0], stacked[..., m:, :]


@decomposition(aten._linalg_svd.default)
def svd(
    a: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """SVD: return U, S and V^T. Singular vectors may differ from LAPACK's in sign.

    If a singular value is 0, LAPACK completes U and V to orthogonal matrices. Here, the singular vector in U is 0; if
    ``a`` has fewer rows than columns, the singular vector in V^T is 0 instead.
    """
    m, n = a.shape[-2:]
    if full_matrices and compute_uv and m != n:
        raise Unsupported(f"all singular vectors of {m} x {n} matrices; call it with full_matrices=False")
    scaled, singular_values, right = _one_sided_jacobi(a if m >= n else a.mT, descending=True)
    if not compute_uv:
        return (empty := torch.zeros(0, dtype=a.dtype)), singular_values, empty
    left = scaled / replace_zero_by_one(singular_values).unsqueeze(-2)
    return (left, singular_values, right.mT) if m >= n else (right, singular_values, left.mT)


@decomposition(aten._linalg_eigh.default)
def eigh(a: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix in ascending order, and eigenvectors, which may differ from LAPACK's in sign.

    The largest absolute row sum is added to the diagonal, which makes all eigenvalues non-negative. They then equal the
    singular values.
    """
    symmetric = _mirror_triangle(a, uplo)
    shift = symmetric.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    _, singular_values, vectors = _one_sided_jacobi(
        symmetric + shift * torch.eye(a.shape[-1], dtype=a.dtype), descending=False
    )
    return singular_values - shift[..., 0], vectors if compute_v else torch.zeros(0, dtype=a.dtype)


def _mirror_triangle(a: Tensor, uplo: str = "L") -> Tensor:
    """Build the symmetric matrix from the lower (``uplo`` = "L") or upper triangle of ``a``."""
    triangle = a.tril() if uplo == "L" else a.triu().mT
    return triangle + triangle.tril(-1).mT


@decomposition(aten.linalg_pinv.atol_rtol_tensor)
def pseudo_inverse(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """Pseudo-inverse. Singular values of at most max(``atol``, ``rtol`` * largest singular value) are treated as 0.

    ``atol`` defaults to 0. ``rtol`` defaults to 0 if ``atol`` is positive, else to max(rows, columns) * machine
    epsilon.
    """
    left, singular_values, right = svd(_mirror_triangle(a) if hermitian else a)
    absolute_limit = torch.zeros(()) if atol is None else atol.to(a.dtype)
    default_limit = max(a.shape[-2:]) * torch.finfo(a.dtype).eps
    relative_limit = torch.where(absolute_limit > 0, 0.0, default_limit) if rtol is None else rtol.to(a.dtype)
    is_nonzero = singular_values > torch.maximum(
        absolute_limit[..., None], relative_limit[..., None] * singular_values[..., :1]
    )
    inverse_values = torch.where(is_nonzero, 1 / torch.where(is_nonzero, singular_values, 1.0), 0.0)
    return (right.mT * inverse_values.unsqueeze(-2)) @ left.mT
