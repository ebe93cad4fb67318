"""Determinant, inverse, solve, matrix exponential, and LU, Cholesky and QR factorization of small matrices.

Determinants and inverses of matrices with up to 4 rows use cofactor formulas. These need no pivoting and have finer
quantization steps than Gaussian elimination.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.composites import replace_zero_by_one
from arm_backend_core.ops.registry import decomposition, decomposition_by_name

aten = torch.ops.aten
_MAX_COFACTOR_ROWS = 4  #: Largest number of rows for cofactor formulas, whose operator count grows like n!.
#: Largest number of elimination steps (the smaller of rows and columns). Each step takes ten operators.
_MAX_ELIMINATION_STEPS = 16
Rows = Sequence[Sequence[Tensor]]


def _unstack_matrix(a: Tensor) -> list[list[Tensor]]:
    return [[a[..., i, j] for j in range(a.shape[-1])] for i in range(a.shape[-2])]


def _elimination_steps(rows: int, columns: int, operation: str) -> range:
    count = min(rows, columns)
    if count > _MAX_ELIMINATION_STEPS:
        raise Unsupported(
            f"{operation} of {rows} x {columns} matrices ({_MAX_ELIMINATION_STEPS} rows or columns at most)"
        )
    return range(count)


def _stack_matrix(rows: Rows) -> Tensor:
    return torch.stack([torch.stack(list(row), -1) for row in rows], -2)


def _minor(rows: Rows, i: int, j: int) -> list[list[Tensor]]:
    return [[x for column, x in enumerate(row) if column != j] for row_index, row in enumerate(rows) if row_index != i]


def _determinant(rows: Rows) -> Tensor:
    """Determinant by Laplace expansion along the first row."""
    terms = [x * _determinant(_minor(rows, 0, j)) if len(rows) > 1 else x for j, x in enumerate(rows[0])]
    total = terms[0]
    for j, term in enumerate(terms[1:]):
        total = total + term if j % 2 else total - term
    return total


def _swap_rows(a: Tensor, k: int, row_index: Tensor) -> Tensor:
    """Swap row k of the matrices a [.., M, N] with row ``row_index`` [..], one index for each matrix."""
    rows = torch.arange(a.shape[-2])[:, None]
    is_swapped_row = rows == row_index[..., None, None]
    other = torch.where(is_swapped_row, a, 0.0).sum(-2, keepdim=True)
    return torch.where(rows == k, other, torch.where(is_swapped_row, a[..., k : k + 1, :], a))


def _lu_with_pivoting(a: Tensor, columns: int, operation: str) -> tuple[Tensor, Tensor]:
    """LU factorization of the first ``columns`` columns with partial pivoting.

    The pivot is the element with the largest magnitude in its column, as in LAPACK.

    Returns:
        The factors and the pivots. The first ``columns`` columns of the factors hold L (without its unit diagonal) and
        U, with L @ U = P @ (the first ``columns`` columns of a) and the row permutation P. The other columns are
        L^-1 @ P times the other columns of a. Pivot k is the row that step k swapped with row k.
    """
    rows, column_indices, pivots = torch.arange(a.shape[-2])[:, None], torch.arange(a.shape[-1]), []
    for k in _elimination_steps(a.shape[-2], columns, operation):
        pivot = a[..., k:, k].abs().argmax(-1) + k
        a = _swap_rows(a, k, pivot)
        pivot_element = a[..., k : k + 1, k : k + 1]
        factor = torch.where(rows > k, a[..., k : k + 1] / replace_zero_by_one(pivot_element), 0.0)
        eliminated = a - factor * torch.where(column_indices > k, a[..., k : k + 1, :], 0.0)
        a = torch.where((rows > k) & (column_indices == k), factor, eliminated)
        pivots.append(pivot)
    return a, torch.stack(pivots, -1)


def _permutation_sign_and_diagonal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign of the row permutation and the diagonal of U.

    The determinant is the product of the sign and all diagonal elements.
    """
    factors, pivots = _lu_with_pivoting(a, a.shape[-1], "the determinant")
    return torch.where(pivots == torch.arange(a.shape[-1]), 1.0, -1.0).prod(-1), factors.diagonal(0, -2, -1)


@decomposition(aten._linalg_det.default)
def det(a: Tensor) -> tuple[Tensor, None, None]:
    """Determinant. Returns None for the LU factors."""
    if a.shape[-1] <= _MAX_COFACTOR_ROWS:
        return _determinant(_unstack_matrix(a)), None, None
    sign, diagonal = _permutation_sign_and_diagonal(a)
    return sign * diagonal.prod(-1), None, None


def max_magnitude(a: Tensor) -> Tensor:
    """Largest magnitude of a matrix's elements; 1 for a zero matrix. Dividing by it prevents overflow of products."""
    size = a.abs().amax((-2, -1), keepdim=True)
    return replace_zero_by_one(size)


@decomposition(aten._linalg_slogdet.default, takes_quantized=True)
def slogdet(a: Tensor, *, quantized: bool) -> tuple[Tensor, Tensor, None, None]:
    """Sign of the determinant, and logarithm of its magnitude. Returns None for the LU factors."""
    if a.shape[-1] > _MAX_COFACTOR_ROWS:
        sign, diagonal = _permutation_sign_and_diagonal(a)
        return sign * torch.sign(diagonal).prod(-1), torch.log(diagonal.abs()).sum(-1), None, None
    scale = None if quantized else max_magnitude(a)
    value = _determinant(_unstack_matrix(a if scale is None else a / scale))
    logarithm = torch.log(value.abs())
    if scale is not None:
        logarithm = logarithm + a.shape[-1] * torch.log(scale[..., 0, 0])
    return torch.sign(value), logarithm, None, None


@decomposition(aten.linalg_inv_ex.default, takes_quantized=True)
def inverse(a: Tensor, *, check_errors: bool = False, quantized: bool) -> tuple[Tensor, Tensor]:
    """Inverse: cofactors divided by the determinant, or elimination for more than 4 rows.

    A singular matrix gives infinities or NaN, and never an error.
    """
    no_info = torch.zeros(a.shape[:-2], dtype=torch.int32)
    if a.shape[-1] == 1:
        return 1 / a, no_info
    if a.shape[-1] > _MAX_COFACTOR_ROWS:
        return _solve_by_elimination(a, torch.eye(a.shape[-1], dtype=a.dtype)), no_info
    scale = None if quantized else max_magnitude(a)
    rows = _unstack_matrix(a if scale is None else a / scale)
    row_range = range(len(rows))
    cofactors = [[_determinant(_minor(rows, j, i)) * (-1) ** (i + j) for j in row_range] for i in row_range]
    result = _stack_matrix(cofactors) / _determinant(rows)[..., None, None]
    return result if scale is None else result / scale, no_info


@decomposition(aten._linalg_solve_ex.default, takes_quantized=True)
def solve(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False, quantized: bool
) -> tuple[Tensor, None, None, Tensor]:
    """Solve a @ x = b, or x @ a = b if not ``left``; b may be one vector for each matrix."""
    is_vector = b.dim() == 1 or b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if is_vector else b
    if a.shape[-1] > _MAX_COFACTOR_ROWS:
        result = _solve_by_elimination(a, right) if left else _solve_by_elimination(a.mT, right.mT).mT
    else:
        inverted, _ = inverse(a, quantized=quantized)
        result = inverted @ right if left else right @ inverted
    no_info = torch.zeros(a.shape[:-2], dtype=torch.int32)
    return result.squeeze(-1) if is_vector else result, None, None, no_info


def _solve_by_elimination(a: Tensor, b: Tensor) -> Tensor:
    """Compute a^-1 @ b by Gaussian elimination."""
    n, batch = a.shape[-1], torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    both = torch.cat([a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])], -1)
    factors, _ = _lu_with_pivoting(both, n, "the inverse")
    return solve_triangular(factors[..., :n], factors[..., n:], upper=True)


@decomposition(aten.linalg_lu_factor_ex.default)
def lu_factor(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return L and U in one matrix, the 1-based pivots, and the 1-based index of the first zero pivot (0: none)."""
    if not pivot:
        raise Unsupported("LU factorization without pivoting; call it with pivot=True")
    factors, pivots = _lu_with_pivoting(a, a.shape[-1], "LU factorization")
    is_zero = (factors.diagonal(0, -2, -1) == 0).int()
    info = torch.where(is_zero.amax(-1) == 1, is_zero.argmax(-1).int() + 1, 0)
    return factors, pivots.int() + 1, info


@decomposition(aten.lu_unpack.default)
def lu_unpack(
    factors: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and U with P @ L @ U = a."""
    rows, columns = factors.shape[-2:]
    count, p = min(rows, columns), torch.eye(rows, dtype=factors.dtype).expand(*factors.shape[:-2], rows, rows)
    for k in range(count if unpack_pivots else 0):
        p = _swap_rows(p, k, pivots[..., k] - 1)
    lower = factors[..., :count].tril(-1) + torch.eye(rows, count, dtype=factors.dtype)
    empty = torch.zeros(0, dtype=factors.dtype)
    data = (lower, factors[..., :count, :].triu()) if unpack_data else (empty, empty)
    return p.mT if unpack_pivots else empty, *data


@decomposition(aten.linalg_lu.default)
def lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and U with P @ L @ U = a."""
    return lu_unpack(*lu_factor(a, pivot=pivot)[:2])


@decomposition(aten.linalg_lu_solve.default)
def lu_solve(factors: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """Solve a @ x = b, or x @ a = b if not ``left``, from the LU factors of a.

    ``adjoint`` replaces a by its transpose.
    """
    p, _, _ = lu_unpack(factors, pivots, unpack_data=False)
    right = b if left else b.mT
    if left == adjoint:
        intermediate = solve_triangular(factors.mT, right, upper=False)
        result = p @ solve_triangular(factors.mT, intermediate, upper=True, unitriangular=True)
    else:
        intermediate = solve_triangular(factors, p.mT @ right, upper=False, unitriangular=True)
        result = solve_triangular(factors, intermediate, upper=True)
    return result if left else result.mT


@decomposition(aten.linalg_cholesky_ex.default)
def cholesky(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Cholesky factorization L @ L^T = a, column by column. ``upper`` reads the upper triangle and returns U = L^T."""
    rows, columns, a = torch.arange(a.shape[-1])[:, None], [], a.mT if upper else a
    for k in _elimination_steps(a.shape[-2], a.shape[-1], "Cholesky factorization"):
        column = torch.where(rows < k, 0.0, a[..., k : k + 1] / torch.sqrt(a[..., k : k + 1, k : k + 1]))
        a = a - column * column.mT
        columns.append(column)
    result = torch.cat(columns, -1)
    return result.mT if upper else result, torch.zeros(a.shape[:-2], dtype=torch.int32)


@decomposition_by_name("aten::cholesky")  # removed in PyTorch 2.14
def cholesky_without_info(a: Tensor, upper: bool = False) -> Tensor:
    """The older Cholesky operator, which returns no error information."""
    return cholesky(a, upper=upper)[0]


def _householder_qr(a: Tensor, quantized: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """QR factorization: return R, the Householder reflectors [.., rows, 1] and their factors tau [.., 1, 1].

    Scale and sign of the reflectors are those of LAPACK. A column that is 0 below the diagonal has tau = 0. The last
    row has no elements below the diagonal, so it has no reflector.
    """
    rows = torch.arange(a.shape[-2])[:, None]
    steps = _elimination_steps(a.shape[-2], a.shape[-1], "QR factorization")[: a.shape[-2] - 1]
    scale = torch.ones(()) if quantized or not steps else max_magnitude(a)
    r, reflectors, taus = a / scale, list[Tensor](), list[Tensor]()
    for k in steps:
        head, tail = r[..., k : k + 1, k : k + 1], torch.where(rows > k, r[..., k : k + 1], 0.0)
        tail_square_sum = tail.square().sum(-2, keepdim=True)
        norm = torch.sqrt(head.square() + tail_square_sum)
        new_head = torch.where(head < 0, norm, -norm)  # the new diagonal element
        taus.append(
            torch.where(tail_square_sum == 0, 0.0, (new_head - head) / torch.where(tail_square_sum == 0, 1.0, new_head))
        )
        reflectors.append(torch.where(rows == k, 1.0, tail / torch.where(tail_square_sum == 0, 1.0, head - new_head)))
        r = _apply_reflector(r, reflectors[-1], taus[-1])
    return r.triu() * scale, reflectors, taus


def _apply_reflector(x: Tensor, reflector: Tensor, tau: Tensor) -> Tensor:
    """(I - tau * v @ v^T) @ x, where v is the reflector."""
    return x - tau * reflector @ (reflector.mT @ x)


@decomposition(aten.linalg_qr.default, takes_quantized=True)
def qr(a: Tensor, mode: str = "reduced", *, quantized: bool) -> tuple[Tensor, Tensor]:
    """QR factorization by Householder reflections."""
    rows, columns = a.shape[-2:]
    r, reflectors, taus = _householder_qr(a, quantized)
    q = torch.eye(rows, dtype=a.dtype).expand(*a.shape[:-2], rows, rows)
    for reflector, tau in zip(reflectors, taus, strict=True):
        q = q - q @ reflector @ (tau * reflector.mT)
    count = rows if mode == "complete" else min(rows, columns)
    return (torch.zeros(0, dtype=a.dtype) if mode == "r" else q[..., :count]), r[..., :count, :]


@decomposition(aten.geqrf.default, takes_quantized=True)
def geqrf(a: Tensor, *, quantized: bool) -> tuple[Tensor, Tensor]:
    """QR factorization in LAPACK's form: R with the reflectors below its diagonal, and their factors tau."""
    r, reflectors, taus = _householder_qr(a, quantized)
    rows, columns = a.shape[-2:]
    if not reflectors:
        return r, torch.zeros(*a.shape[:-2], min(rows, columns), dtype=a.dtype)
    below = F.pad(torch.cat(reflectors, -1).tril(-1), (0, columns - len(reflectors)))
    return r + below, F.pad(torch.cat(taus, -1)[..., 0, :], (0, min(rows, columns) - len(taus)))


@decomposition(aten.ormqr.default)
def ormqr(a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """Q @ other, or other @ Q if not ``left``. ``transpose`` replaces Q by Q^T.

    The reflectors below the diagonal of a and their factors tau represent Q.
    """
    if not left:
        return ormqr(a, tau, other.mT, transpose=not transpose).mT
    rows = torch.arange(a.shape[-2])[:, None]
    for k in _elimination_steps(a.shape[-2], tau.shape[-1], "products of reflectors")[:: 1 if transpose else -1]:
        reflector = torch.where(rows > k, a[..., k : k + 1], (rows == k).to(a.dtype))
        other = _apply_reflector(other, reflector, tau[..., k, None, None])
    return other


@decomposition(aten.linalg_householder_product.default)
def householder_product(a: Tensor, tau: Tensor) -> Tensor:
    """Compute the first columns of Q from its reflectors."""
    return ormqr(a, tau, torch.eye(*a.shape[-2:], dtype=a.dtype))


@decomposition(aten.linalg_solve_triangular.default)
def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solve the triangular system a @ x = b by substitution. For x @ a = b, the transposed system is solved."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    n = a.shape[-1]
    b = b.expand(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    solved_rows: dict[int, Tensor] = {}
    for i in range(n)[:: -1 if upper else 1]:
        remaining = b[..., i, :]
        for k, x in solved_rows.items():
            remaining = remaining - a[..., i, k, None] * x
        solved_rows[i] = remaining if unitriangular else remaining / a[..., i, i, None]
    return torch.stack([solved_rows[i] for i in range(n)], -2)


@decomposition(aten.cholesky_solve.default)
def cholesky_solve(b: Tensor, a: Tensor, upper: bool = False) -> Tensor:
    """Solve L @ L^T @ x = b, or U^T @ U @ x = b."""
    lower = a.mT if upper else a
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


@decomposition(aten.cholesky_inverse.default)
def cholesky_inverse(a: Tensor, upper: bool = False) -> Tensor:
    """Inverse of L @ L^T, or of U^T @ U, from the Cholesky factor.

    The inverse is M^T @ M for M = L^-1. As in LAPACK, the zeros above the diagonal of L and M are not multiplied, so
    that an infinite element of L does not make the other results NaN.
    """
    n, lower = a.shape[-1], a.mT if upper else a
    one = torch.ones((*a.shape[:-2], 1), dtype=a.dtype)
    rows: list[Tensor] = []  # row i of M up to the diagonal, i + 1 elements
    inverse = torch.zeros(a.shape, dtype=a.dtype)
    for i in range(n):
        products = [F.pad(lower[..., i, k, None] * row, (0, i - 1 - k)) for k, row in enumerate(rows)]
        row = torch.cat([-functools.reduce(torch.add, products), one], -1) if products else one
        rows.append(row / lower[..., i, i, None])
        inverse = inverse + F.pad(rows[i].unsqueeze(-1) * rows[i].unsqueeze(-2), (0, n - 1 - i) * 2)
    return inverse


@decomposition(aten.triangular_solve.default)
def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """The older operator for triangular systems, which also returns a copy of the matrices."""
    matrix = a.mT if transpose else a
    solved = solve_triangular(matrix, b, upper=upper != transpose, unitriangular=unitriangular)
    return solved, a.expand(*solved.shape[:-2], *a.shape[-2:]).clone()


@decomposition(aten.linalg_matrix_exp.default, takes_quantized=True)
def matrix_exp(a: Tensor, *, quantized: bool) -> Tensor:
    """Matrix exponential by scaling and squaring: the Taylor polynomial of degree 8 of exp(a / 64), squared six times.

    If the norm of a is below 20, the error is 1e-8 plus rounding errors. Each squaring doubles the rounding errors.
    Therefore, a quantized program uses degree 12 and squares only twice. At a norm of 20, its error is 0.5 %.
    """
    squares, terms = (2, 12) if quantized else (6, 8)
    step, identity = a / 2**squares, torch.eye(a.shape[-1], dtype=a.dtype)
    result = identity + step / terms
    for k in range(terms - 1, 0, -1):
        result = identity + torch.matmul(step / k, result)
    for _ in range(squares):
        result = torch.matmul(result, result)
    return result
