"""Composite operators: those without a record, which are decomposed into operators with one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core import TosaCompileSpec, compilation_log
from arm_backend_core.aten import decompose as decompose_module
from arm_backend_core.delegate import delegate
from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_quantization_config
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_recipes import ArmRecipeType, export
from tests.ops import runner
from tests.ops.runner import Case, FunctionModule, Input
from tests.sqnr import sqnr

aten = torch.ops.aten


def _permute_through_empty(x: Tensor) -> Tensor:
    """Fill uninitialized tensors (torch.empty) completely, by indices and by slices, and read them."""
    order = torch.tensor([2, 0, 3, 1, 4])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(5)
    rows = torch.empty(5, 3)
    rows[:2], rows[2:] = x[3:], x[:3]
    return rows[inverse]


Shapes = Sequence[tuple[int, ...]]
PAIR: Shapes = [(2, 8), (2, 8)]
_GRU = nn.GRU(5, 8, 2, bidirectional=True)
_RNN = nn.RNN(5, 8, nonlinearity="relu", bias=False)
_PROJECTED = nn.LSTM(5, 4, proj_size=3)
_PROJECTED_LAYERS = nn.LSTM(5, 8, 2, proj_size=4, bidirectional=True)
_BAG = nn.EmbeddingBag(6, 4, mode="mean", padding_idx=2)
_ENCODER = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu")


def _encoder_layer(x: Tensor, norm_first: bool, *mask_and_type: Any) -> Tensor:
    """The fused operator that nn.TransformerEncoderLayer calls in inference."""
    layer, attention = _ENCODER, _ENCODER.self_attn
    projections = attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias
    norms = layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias
    linears = layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias
    return torch._transformer_encoder_layer_fwd(
        x, 8, 2, *projections, norm_first, norm_first, layer.norm1.eps, *norms, *linears, *mask_and_type
    )


def _index(x: Tensor, size: int) -> Tensor:
    """Map x in [-2, 2] to indices from 0 to ``size`` - 1."""
    return (x.abs() * (size / 2)).clamp(max=size - 0.5).to(torch.int32).to(torch.int64)


_VOLUME = torch.linspace(-1, 1, 144).reshape(2, 3, 2, 3, 4)


def _transpose_in_place(x: Tensor) -> Tensor:
    """Change the strides of x in place while a view reads the same memory."""
    flat = x.view(-1)
    x.transpose_(0, 2).squeeze_(1)
    return x.reshape(-1) - flat


def _multiply_factors(left: torch.Tensor, sizes: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply the factors, because the signs of their vectors may differ from LAPACK's; append the values."""
    return torch.cat(
        [left * sizes.unsqueeze(-2) @ right, F.pad(sizes, (0, right.shape[-1] - sizes.shape[-1]))[..., None, :]], -2
    )


def _kabsch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Kabsch algorithm: the rotation that best aligns points with others."""
    u, _, vh = torch.linalg.svd(x.mT @ y)
    sign = torch.linalg.det(u @ vh)
    return u @ torch.diag_embed(torch.stack([torch.ones(2), torch.ones(2), sign], -1)) @ vh


#: A matrix whose LU factorization exchanges rows: the largest elements of its columns are off the diagonal.
_NEEDS_PIVOTING = 6 * torch.eye(5).roll(2, 0)


def _lu_factor(x: torch.Tensor) -> torch.Tensor:
    factors, pivots, info = torch.linalg.lu_factor_ex(x)
    return torch.cat([factors, pivots[..., None], info[..., None, None].expand(*pivots.shape, 1)], -1)


def _max_unpool(x: Tensor, spatial: int, *window: int) -> Tensor:
    """Max pooling, then max unpooling with its indices."""
    maxima, indices = getattr(F, f"max_pool{spatial}d")(x, *(window or (2,)), return_indices=True)
    result: Tensor = getattr(F, f"max_unpool{spatial}d")(maxima * 0.5, indices, *(window or (2,)))
    return result


#: Function and the shapes of its inputs, by name.
COMPOSITES: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "absolute": (torch.absolute, [(2, 8)]),
    "add_relu": (lambda x, y: aten._add_relu(aten._add_relu(x, y, alpha=0.5), -0.25), PAIR),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), [(1, 2, 4, 5, 6)]),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)), [(1, 2, 4, 5, 6)]),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 3), [(1, 2, 9)]),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), [(1, 2, 9, 9)]),
    "adaptive_max_pool2d_uneven_indices": (lambda x: F.adaptive_max_pool2d(x, (3, 2), True)[1], [(1, 2, 10, 5)]),
    "adaptive_max_pool3d_indices": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 1), True)[1], [(1, 2, 5, 4, 3)]),
    "adaptive_max_pool2d_indices": (lambda x: F.adaptive_max_pool2d(x, 3, True)[1], [(1, 2, 9, 6)]),
    "all": (lambda x: torch.all(x > -1.5, 1), [(2, 8)]),
    "any": (lambda x: torch.any(x > 1.5, 1, keepdim=True), [(3, 8)]),
    "any_of_all": (lambda x: torch.any(x > 1), [(3, 8)]),
    "argmin": (lambda x: torch.argmin(x.round(), 1), [(2, 8)]),
    "avg_pool2d_divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, divisor_override=4), [(1, 2, 6, 7)]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True), [(2, 2, 4, 5, 6)]),
    "bilinear": (nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)]),
    "conv_transpose1d": (nn.ConvTranspose1d(6, 4, 3, 2, 1, 1), [(1, 6, 5)]),
    "conv_transpose2d_crop": (nn.ConvTranspose2d(6, 4, (3, 2), 4, (4, 1), (3, 0), 2), [(1, 6, 3, 4)]),
    "conv_transpose2d_crop_point": (nn.ConvTranspose2d(2, 3, 1, 2, 1), [(1, 2, 5, 5)]),
    "conv_transpose2d_unbatched": (nn.ConvTranspose2d(2, 3, 3), [(2, 5, 5)]),
    "copysign": (torch.copysign, PAIR),
    "cumprod": (lambda x: torch.cumprod(x, -1), [(2, 9)]),
    "cumsum": (lambda x: torch.cumsum(x, 1), [(2, 37, 3)]),
    "constant_float64": (
        lambda x: x + torch.arange(8, dtype=torch.float64).float() + torch.tensor(2.5).double(),
        [(2, 8)],
    ),
    "convolution_core": (
        lambda x: aten.convolution(x, torch.ones(3, 2, 3), None, [2], [1], [1], False, [0], 1),
        [(1, 2, 5)],
    ),
    "convolution_core_3d": (
        lambda x: aten.convolution(x, torch.ones(3, 2, 2, 2, 2), None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1),
        [(1, 2, 3, 4, 5)],
    ),
    "convolution_of_torchscript": (
        lambda x: aten._convolution(x, torch.ones(3, 2, 3), None, [2], [1], [1], False, [0], 1, *[False] * 4),
        [(1, 2, 5)],
    ),
    "cholesky": (lambda x: torch.linalg.cholesky_ex(x @ x.mT + torch.eye(3)).L, [(2, 3, 3)]),
    "cholesky_upper": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4), upper=True), [(4, 4)]),
    "qr": (lambda x: torch.cat(torch.linalg.qr(x), 1), [(2, 5, 3)]),
    "qr_complete": (lambda x: torch.cat(torch.linalg.qr(x, mode="complete"), 2), [(2, 3, 4)]),
    "qr_triangle": (lambda x: torch.cat(torch.linalg.qr(x.triu(), mode="r")[1:]), [(4, 4)]),
    "cholesky_of_a_triangle": (lambda x: torch.linalg.cholesky(x.triu() + 4 * torch.eye(3), upper=True), [(2, 3, 3)]),
    "cholesky_of_many": (lambda x: torch.linalg.cholesky(x @ x.mT + 8 * torch.eye(8)), [(2, 8, 8)]),
    "lu": (lambda x: torch.cat(torch.linalg.lu(x), -1), [(2, 5, 5)]),
    "lu_of_wide": (lambda x: torch.cat(torch.linalg.lu(x), -1), [(4, 7)]),
    "lu_of_tall": (lambda x: torch.linalg.lu(x)[1], [(2, 7, 4)]),
    "lu_factor": (_lu_factor, [(2, 3, 5, 5)]),
    "lu_factor_without_pivot": (lambda x: _lu_factor(x.triu(1)), [(3, 3)]),
    "lu_solve": (lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(_NEEDS_PIVOTING + x), y), [(5, 5), (5, 3)]),
    "lu_solve_right": (
        lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(_NEEDS_PIVOTING + x), y, left=False, adjoint=True),
        [(2, 5, 5), (2, 3, 5)],
    ),
    "lu_solve_transposed": (
        lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(_NEEDS_PIVOTING + x), y, adjoint=True),
        [(2, 5, 5), (2, 5, 3)],
    ),
    "determinant_of_many": (lambda x: torch.linalg.det(x / 2), [(3, 6, 6)]),
    "determinant_logarithm_of_many": (lambda x: torch.stack(torch.linalg.slogdet(x)), [(3, 6, 6)]),
    "inverse_of_many": (lambda x: torch.linalg.inv(_NEEDS_PIVOTING + x), [(2, 5, 5)]),
    "solve_many": (lambda x, y: torch.linalg.solve(_NEEDS_PIVOTING + x, y), [(2, 5, 5), (5, 2)]),
    "solve_many_right": (lambda x, y: torch.linalg.solve(_NEEDS_PIVOTING + x, y, left=False), [(2, 5, 5), (2, 2, 5)]),
    "singular_values": (torch.linalg.svdvals, [(2, 5, 3)]),
    "singular_vectors": (lambda x: _multiply_factors(*torch.linalg.svd(x, full_matrices=False)), [(2, 5, 3)]),
    "singular_vectors_of_wide": (lambda x: _multiply_factors(*torch.linalg.svd(x, full_matrices=False)), [(3, 4)]),
    "kabsch_rotation": (_kabsch, [(2, 8, 3), (2, 8, 3)]),
    "pseudo_inverse": (lambda x: torch.linalg.pinv(x + 2 * torch.eye(4, 3)), [(2, 4, 3)]),
    "pseudo_inverse_of_rank": (lambda x: torch.linalg.pinv(x @ x.mT, rtol=0.01, hermitian=True), [(3, 2)]),
    "pseudo_inverse_of_tolerance": (lambda x: torch.linalg.pinv(x, atol=1.0), [(2, 3, 4)]),
    "spectral_norm": (lambda x: torch.linalg.matrix_norm(x, 2), [(2, 3, 4)]),
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(x), [(2, 4, 4)]),
    "eigenvalues_of_upper": (lambda x: torch.linalg.eigvalsh(x, UPLO="U"), [(3, 3)]),
    "eigenvectors": (
        lambda x: _multiply_factors((e := torch.linalg.eigh(x))[1], e[0], e[1].mT),
        [(2, 3, 3)],
    ),
    "geqrf": (lambda x: torch.cat([(m := torch.geqrf(x))[0], m[1][..., None, :]], -2), [(2, 5, 3)]),
    "geqrf_of_wide": (lambda x: torch.geqrf(x)[0], [(3, 5)]),
    "ormqr": (lambda x, y: torch.ormqr(*torch.geqrf(x), y), [(2, 5, 3), (2, 5, 4)]),
    "ormqr_transposed": (lambda x, y: torch.ormqr(*torch.geqrf(x), y, transpose=True), [(5, 3), (5, 4)]),
    "ormqr_right": (lambda x, y: torch.ormqr(*torch.geqrf(x), y, left=False), [(5, 3), (4, 5)]),
    "householder_product": (lambda x: torch.linalg.householder_product(*torch.geqrf(x)), [(2, 5, 3)]),
    "nonzero_static": (lambda x: torch.nonzero_static(x.relu(), size=9, fill_value=7), [(2, 3, 4)]),
    "nonzero_static_vector": (lambda x: torch.nonzero_static(x > 0, size=3), [(9,)]),
    "determinant": (torch.linalg.det, [(2, 4, 4)]),
    "determinant_of_one": (torch.linalg.det, [(3, 1, 1)]),
    "determinant_logarithm": (lambda x: torch.stack(torch.linalg.slogdet(x)), [(5, 2, 2)]),
    "inverse": (torch.linalg.inv, [(2, 3, 3)]),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(x.tril() + 3 * torch.eye(3)), [(3, 3)]),
    "cholesky_inverse_upper": (lambda x: torch.cholesky_inverse(x + 3 * torch.eye(3), upper=True), [(2, 3, 3)]),
    "triangular_solve": (lambda x, y: torch.triangular_solve(y, x + 3 * torch.eye(4))[0], [(2, 4, 4), (2, 4, 3)]),
    "triangular_solve_transposed": (
        lambda x, y: torch.cat(torch.triangular_solve(y, x + 3 * torch.eye(3), transpose=True), 1),
        [(3, 3), (3, 2)],
    ),
    "conv_tbc": (lambda x: torch.conv_tbc(x, _VOLUME[0, :, :, 0], _VOLUME[0, 0, 0, 0], 1), [(5, 2, 2)]),
    "max_unpool1d": (lambda x: _max_unpool(x, 1), [(2, 3, 8)]),
    "max_unpool2d": (lambda x: _max_unpool(x, 2), [(1, 3, 6, 4)]),
    "max_unpool3d": (lambda x: _max_unpool(x, 3), [(1, 2, 4, 4, 2)]),
    "max_unpool_overlapping": (lambda x: _max_unpool(x, 2, 3, 2), [(3, 7, 7)]),
    "cholesky_solve": (
        lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.mT + torch.eye(3))),
        [(2, 3, 3), (2, 3, 2)],
    ),
    "cholesky_solve_upper": (
        lambda x, y: torch.cholesky_solve(y, x.triu() + 3 * torch.eye(3), upper=True),
        [(3, 3), (3, 2)],
    ),
    # Products of their elements leave the range of float32.
    "determinant_logarithm_of_extremes": (
        lambda x: torch.stack(torch.linalg.slogdet(x * torch.tensor([1e-15, 1e15, 0.0, 1.0]).reshape(4, 1, 1))),
        [(4, 3, 3)],
    ),
    "inverse_of_large": (lambda x: torch.linalg.inv(x * 1e12) * 1e12, [(2, 4, 4)]),
    "inverse_of_small": (lambda x: torch.linalg.inv(x * 1e-12) * 1e-12, [(2, 4, 4)]),
    "inverse_of_one": (lambda x: torch.linalg.inv_ex(x).inverse, [(2, 1, 1)]),
    "solve": (lambda x, y: torch.linalg.solve(x, y), [(2, 3, 3), (2, 3, 5)]),
    "solve_of_one_matrix": (lambda x, y: torch.linalg.solve(x, y), [(2, 3, 3), (3, 5)]),
    "solve_vectors": (lambda x, y: torch.linalg.solve(x, y), [(2, 3, 3), (2, 3)]),
    "solve_vector": (lambda x, y: torch.linalg.solve(x, y), [(3, 3), (3,)]),
    "solve_right": (lambda x, y: torch.linalg.solve(x, y, left=False), [(2, 3, 3), (2, 4, 3)]),
    "solve_triangular": (
        lambda x, y: torch.linalg.solve_triangular(x.tril() + 3 * torch.eye(5), y, upper=False),
        [(2, 5, 5), (2, 5, 3)],
    ),
    "solve_triangular_right": (
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True, left=False, unitriangular=True),
        [(3, 3), (4, 3)],
    ),
    "histogram": (lambda x: torch.histc(x, 5, -1.5, 2.0), [(3, 20)]),
    "histogram_of_all": (lambda x: torch.histc(x, 4), [(24,)]),
    "histogram_of_equal_elements": (lambda x: torch.histc(x.sign().abs(), 5), [(24,)]),
    "histogram_default_range": (lambda x: torch.cat(torch.histogram(x, 5)), [(3, 20)]),
    "histogram_of_range": (lambda x: torch.histogram(x, 4, range=(-1.0, 1.5), density=True)[0], [(30,)]),
    "histogram_of_edges": (
        lambda x, y: torch.histogram(x, torch.tensor([-1.0, 0, 0.25, 2]), weight=y)[0],
        [(3, 8), (3, 8)],
    ),
    "matrix_exponential": (torch.linalg.matrix_exp, [(2, 3, 3)]),
    "mode_dim": (lambda x: torch.mode(x.round(), 1)[0], [(3, 9, 2)]),
    "mode_keepdim": (lambda x: torch.mode(x.round(), keepdim=True)[0], [(3, 9)]),
    "weight_int8pack_mm": (
        lambda x, s: aten._weight_int8pack_mm(x, torch.arange(-64, 64, dtype=torch.int8).reshape(16, 8), s),
        [(3, 8), (16,)],
    ),
    "fake_quantize_per_tensor": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.037, 3, -20, 31), [(5, 8)]),
    "fake_quantize_tensor_qparams": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.1), torch.tensor(-2), -8, 7),
        [(5, 8)],
    ),
    "fake_quantize_per_channel": (
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.tensor([0.1, 0.02, 0.3]), torch.tensor([0, 3, -5], dtype=torch.int32), 1, -128, 127
        ),
        [(2, 3, 4)],
    ),
    "fake_quantize_cachemask": (
        lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, -8, 7),
        [(5, 8)],
    ),
    "fake_quantize_per_channel_cachemask": (
        lambda x: aten.fake_quantize_per_channel_affine_cachemask(
            x, torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int32), 0, -8, 7
        ),
        [(2, 9)],
    ),
    "fake_quantize_enabled": (
        lambda x, y: torch.stack(
            [
                aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                    z, torch.tensor(0.1), torch.tensor(-2), torch.tensor(enabled, dtype=torch.uint8), -8, 7
                )[0]
                for z, enabled in ((x, 0), (y, 1))
            ]
        ),
        [(5, 8), (5, 8)],
    ),
    "fake_quantize_learnable": (
        lambda x: aten._fake_quantize_learnable_per_tensor_affine(
            x, torch.tensor([0.1]), torch.tensor([2.5]), -8, 7, 0.5
        ),
        [(5, 8)],
    ),
    "fake_quantize_learnable_per_channel": (
        lambda x: aten._fake_quantize_learnable_per_channel_affine(
            x, torch.tensor([0.1, 0.2, 0.03]), torch.tensor([2.5, -0.4, 9.0]), 1, -8, 7
        ),
        [(2, 3, 4)],
    ),
    "diagonal": (torch.diagonal, [(4, 5)]),
    "diagonal_above": (lambda x: torch.diagonal(x, 1, -1, 0), [(4, 3, 5)]),
    "diagonal_below": (lambda x: torch.diagonal(x, -2), [(5, 3)]),
    "fmax": (torch.fmax, PAIR),
    "fmin": (torch.fmin, PAIR),
    "encoder_layer_norm_first": (lambda x: _encoder_layer(x, True), [(2, 3, 8)]),
    "encoder_layer_norm_last": (lambda x: _encoder_layer(x, False), [(2, 3, 8)]),
    "embedding_bag_mean": (lambda x: _BAG(_index(x, 6)), [(3, 5)]),
    "embedding_bag_max": (
        lambda x, w: F.embedding_bag(_index(x, 6), w, torch.tensor([0, 2, 2, 5]), mode="max"),
        [(9,), (6, 4)],
    ),
    "embedding_bag_weighted": (
        lambda x, w, f, o: aten._embedding_bag(
            w, _index(x, 6), torch.cat([torch.zeros(1).long(), _index(o, 9)]), False, 0, False, f, True
        )[0],
        [(9,), (6, 4), (9,), (1,)],
    ),
    "equal_booleans": (lambda x, y: (x > 0) == (y > 0), PAIR),
    "fold": (lambda x: F.fold(x, (8, 10), (2, 3), stride=(2, 3)), [(2, 12, 12)]),
    "gru": (lambda x: _GRU(x)[0], [(3, 2, 5)]),
    "hypot": (torch.hypot, PAIR),
    "index_broadcast": (lambda x: x[:, [[0], [1]], [2, 1]], [(2, 3, 4)]),
    "index_computed": (lambda x: x[:, (x[0, :, 0] * 1.4).to(torch.int32)] * 2, [(2, 4, 3)]),
    "isfinite": (torch.isfinite, [(2, 8)]),
    "logaddexp": (torch.logaddexp, PAIR),
    "lstm_projected": (lambda x: torch.cat([*_PROJECTED(x)[1]], -1), [(1, 2, 5)]),
    "lstm_projected_layers": (lambda x: _PROJECTED_LAYERS(x)[0], [(3, 2, 5)]),
    "max": (torch.max, [(2, 8)]),
    "max_dim": (lambda x: torch.cat(torch.max(x, 1, keepdim=True), 1), [(2, 4)]),
    "avg_pool3d_divisor_ceil": (
        lambda x: F.avg_pool3d(x, (2, 3, 2), (2, 2, 3), (1, 1, 0), True, divisor_override=5),
        [(1, 2, 6, 7, 4)],
    ),
    "conv1d_dynamic_weight": (lambda x, w: F.conv1d(x, w, None, 2, 2, 2), [(2, 3, 9), (4, 3, 3)]),
    "conv2d_dynamic_weight": (lambda x, w, b: F.conv2d(x, w, b, (2, 1), 1, 1, 2), [(1, 4, 6, 5), (6, 2, 3, 3), (6,)]),
    "conv2d_dynamic_weight_depthwise": (
        lambda x, w: F.conv2d(x, w, padding="same", groups=3),
        [(2, 3, 6, 5), (3, 1, 2, 3)],
    ),
    "conv3d_dynamic_weight": (lambda x, w: F.conv3d(x, w, padding=1), [(2, 4, 3, 4), (3, 2, 3, 1, 2)]),
    "conv_transpose2d_dynamic_weight": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
        [(1, 4, 3, 4), (4, 3, 3, 2), (6,)],
    ),
    "conv_transpose3d_core": (
        lambda x: aten.convolution(x, _VOLUME, None, [2] * 3, [1] * 3, [1] * 3, True, [1] * 3, 1),
        [(1, 2, 3, 4, 5)],
    ),
    "cummax_indices": (lambda x: torch.cummax(x.round(), 1)[1], [(2, 9)]),
    "cummin_indices": (lambda x: torch.cummin(x.round(), 0)[1], [(9, 2)]),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y, -1, 0, 2), [(4, 2, 3), (2, 3)]),
    "as_strided_scatter": (lambda x, y: torch.as_strided_scatter(x, y, (2, 3), (7, 2), 1), [(3, 5), (2, 3)]),
    "as_strided_scatter_of_a_view": (lambda x, y: torch.as_strided_scatter(x[1:], y, (2, 2), (1, 2)), [(3, 5), (2, 2)]),
    "fmod": (lambda x, y: torch.fmod(x * 9, y), PAIR),
    "fmod_integers": (lambda x: torch.fmod((x * 50).int(), -7), [(2, 40)]),
    "kthvalue_index": (lambda x: torch.kthvalue(x, 2, 1)[1], [(3, 5)]),
    "masked_index": (
        lambda x, i: aten._unsafe_masked_index(x, i > 0, [_index(i, 6), None], 0.5),
        [(4, 3), (5, 1)],
    ),
    "max_pool2d_dilated_indices": (
        lambda x: F.max_pool2d(x, (3, 2), (1, 2), 1, 2, True, return_indices=True)[1],
        [(1, 2, 7, 6)],
    ),
    "max_pool3d_indices": (lambda x: F.max_pool3d(x, 2, 1, 1, return_indices=True)[1], [(2, 3, 4, 2)]),
    "median_index": (lambda x: torch.median(x, 1, keepdim=True)[1], [(3, 5)]),
    "mode": (lambda x: torch.stack([y.float() for y in torch.mode(x.round(), 1)]), [(4, 9)]),
    "put": (lambda x, i, y: torch.put(x, _index(i, 8), y, accumulate=True), [(2, 4), (3,), (3,)]),
    "max_pool2d_indices": (lambda x: F.max_pool2d(x, (2, 3), 2, 1, return_indices=True)[1], [(1, 2, 7, 6)]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 3, 2, 1, ceil_mode=True), [(2, 2, 4, 5, 6)]),
    "meshgrid": (lambda x, y: torch.cat(torch.meshgrid(x, y, indexing="ij")), [(3,), (4,)]),
    "meshgrid_xy": (lambda x, y: torch.cat(torch.meshgrid(x, y, indexing="xy")), [(3,), (4,)]),
    "min": (torch.min, [(2, 8)]),
    "min_dim": (lambda x: torch.cat(torch.min(x, 1, keepdim=True), 1), [(2, 4)]),
    "one_hot": (lambda x: F.one_hot((x.abs() * 2).int().long(), 5), [(2, 4)]),
    "pdist": (F.pdist, [(5, 3)]),
    "prelu_elementwise": (lambda x: torch.ops.aten._prelu_kernel(x, x), [(2, 2)]),
    "prod": (torch.prod, [(2, 4)]),
    "prod_dim": (lambda x: torch.prod(x, 1), [(2, 4)]),
    "rnn": (lambda x: _RNN(x)[0], [(3, 2, 5)]),
    "rrelu": (lambda x: F.rrelu(x), [(2, 8)]),
    "signbit": (torch.signbit, [(2, 8)]),
    "std_mean": (lambda x: torch.cat(torch.std_mean(x, 1, keepdim=True), 1), [(2, 8)]),
    "var_mean": (lambda x: torch.stack(torch.var_mean(x, (0, 1), correction=0)), [(2, 8)]),
    "sdpa_masked_row": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril(-1)),
        [(1, 2, 6, 8)],
    ),
    "unfold": (lambda x: F.unfold(x, (3, 2), (2, 1), (1, 2), (1, 2)), [(2, 3, 8, 9)]),
    "unfold_patches": (lambda x: F.unfold(x, 2, stride=2), [(3, 8, 9)]),
    "upsample_bicubic": (lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bicubic"), [(1, 2, 5, 6)]),
    "upsample_bicubic_same_size": (
        lambda x: aten.upsample_bicubic2d(x, [5, 6], False, 1.1, None),
        [(1, 2, 5, 6)],
    ),
    "upsample_bilinear_antialias": (
        lambda x: F.interpolate(x, (3, 9), mode="bilinear", antialias=True),
        [(1, 2, 8, 5)],
    ),
    "upsample_bicubic_antialias": (
        lambda x: F.interpolate(x, scale_factor=0.4, mode="bicubic", antialias=True, align_corners=True),
        [(2, 1, 8, 9)],
    ),
    "upsample_lanczos_antialias": (lambda x: aten._upsample_lanczos2d_aa(x, [3, 4], False), [(1, 2, 8, 9)]),
    "upsample_core": (
        lambda x: (
            aten.upsample_linear1d(aten.upsample_nearest1d(x, [4]), [7], False, 1.75)
            + aten._upsample_nearest_exact1d(x, [7])
        ),
        [(1, 2, 5)],
    ),
    "upsample_core_exact": (lambda x: aten._upsample_nearest_exact2d(x, [7, 6], 1.5, 1.5), [(1, 2, 5, 4)]),
    "upsample_core_volume": (
        lambda x: (
            aten.upsample_trilinear3d(aten.upsample_nearest3d(x, [3, 4, 2]), [5, 6, 3], True)
            + aten._upsample_nearest_exact3d(x, [5, 6, 3])
        ),
        [(1, 2, 3, 2, 4)],
    ),
    "upsample_bilinear_any_factor": (lambda x: F.interpolate(x, scale_factor=1.2345, mode="bilinear"), [(1, 2, 5, 6)]),
    "upsample_bilinear_down": (lambda x: F.interpolate(x, (1, 2), mode="bilinear"), [(1, 2, 29, 40)]),
    "upsample_bilinear_one": (lambda x: F.interpolate(x, (2, 2), mode="bilinear", align_corners=True), [(1, 1, 2, 1)]),
    "upsample_nearest1d": (lambda x: F.interpolate(x, 41), [(1, 2, 3)]),
    "upsample_nearest3d": (lambda x: F.interpolate(x, (7, 4, 2), mode="nearest-exact"), [(1, 2, 5, 3, 3)]),
    "upsample_nearest_down": (lambda x: F.interpolate(x, (1, 8)), [(1, 2, 40, 8)]),
    "upsample_linear1d": (lambda x: F.interpolate(x, scale_factor=1.6, mode="linear"), [(1, 2, 5)]),
    "upsample_trilinear": (lambda x: F.interpolate(x, (5, 6, 3), mode="trilinear"), [(1, 2, 3, 4, 3)]),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, False) + F.feature_alpha_dropout(x, 0.5, False), [(2, 8)]),
    "copysign_number": (lambda x: torch.copysign(x, -0.0), [(2, 8)]),
    "copy_operators": (
        lambda x: aten.squeeze_copy(aten._reshape_copy(aten.detach_copy(x), [4, 1, 4])) + aten.lift(+x).reshape(4, 4),
        [(2, 8)],
    ),
    "flash_attention": (
        lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True, scale=0.3)[0],
        [(1, 2, 6, 8)],
    ),
    "fused_rms_norm": (lambda x, w: aten._fused_rms_norm(x, [8], w, 1e-5)[0], [(2, 3, 8), (8,)]),
    "isin_number": (lambda x: torch.isin(x.round(), 1.0, invert=True), [(2, 8)]),
    "left_shift": (lambda x: (x * 9).int() << torch.tensor([1, 3, 31, 0], dtype=torch.int32), [(2, 4)]),
    "native_multi_head_attention": (
        lambda x, w, p: aten._native_multi_head_attention(x, x, x, 4, 2, w, w[:, 0], p, p[0], None, False)[0],
        [(2, 3, 4), (12, 4), (4, 4)],
    ),
    "reflection_pad": (lambda x: aten.reflection_pad2d(x, [1, 2, 0, 3]), [(2, 4, 5)]),
    "replication_pad": (lambda x: aten.replication_pad3d(x, [1, 2, 0, 3, 2, 0]), [(1, 2, 3, 4, 5)]),
    "scatter_multiply": (
        lambda x, i, y: x.scatter(0, _index(i, 4), 2.0, reduce="add").scatter(0, _index(i, 4), y, reduce="multiply"),
        [(4, 3), (2, 3), (2, 3)],
    ),
    "addbmm": (lambda x, y, z: torch.addbmm(x, y, z, beta=0.5), [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "aminmax": (lambda x: torch.stack(torch.aminmax(x, dim=1)), [(2, 8)]),
    "angle": (torch.angle, [(2, 8)]),
    "as_strided": (lambda x: torch.as_strided(x, (3, 4), (5, 2), 1), [(4, 6)]),
    "atan2": (torch.atan2, PAIR),
    "avg_pool3d_divisor": (lambda x: F.avg_pool3d(x, 2, 1, 1, divisor_override=3), [(1, 2, 3, 4, 5)]),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5])), [(2, 8)]),
    "cdist_0": (lambda x, y: torch.cdist(x.round(), y.round(), p=0), [(2, 3, 4), (2, 5, 4)]),
    "cdist": (torch.cdist, [(2, 4, 3), (2, 5, 3)]),
    "conv_transpose2d_dilation": (nn.ConvTranspose2d(4, 6, (3, 2), 2, 1, 1, 2, dilation=2), [(1, 4, 5, 4)]),
    "conv_transpose3d": (nn.ConvTranspose3d(4, 6, 3, (2, 1, 3), 1, (1, 0, 2), 2), [(1, 4, 2, 3, 4)]),
    "conv_transpose3d_crop": (nn.ConvTranspose3d(2, 3, 2, 2, 2, dilation=(1, 2, 1)), [(2, 3, 4, 5)]),
    "copy": (lambda x, y: aten.copy(x, y), [(2, 8), (8,)]),
    "cummax": (lambda x: torch.cummax(x, 1)[0], [(2, 9)]),
    "cummin": (lambda x: torch.cummin(x, 0)[0], [(5, 3)]),
    "cumsum_integers": (lambda x: torch.cumsum(x > 0, 1), [(2, 9)]),
    "div_floor": (lambda x, y: torch.div(x * 9, y, rounding_mode="floor"), PAIR),
    "div_trunc": (lambda x: torch.div(x * 9, 1.5, rounding_mode="trunc"), [(2, 8)]),
    "div_integers": (lambda x: torch.div((x * 50).int(), 7, rounding_mode="trunc"), [(2, 40)]),
    "floor_divide": (lambda x: (x * 50).int() // -7, [(2, 40)]),
    "fold_overlapping": (lambda x: F.fold(x, (5, 6), (3, 2), 2, (1, 0), (2, 1)), [(2, 12, 8)]),
    "fold_unbatched": (lambda x: F.fold(x, (8, 10), (2, 3), stride=(2, 3)), [(12, 12)]),
    "constant_from_shared_constants": (  # 2**40 ways lead through them
        lambda x: F.linear(x, functools.reduce(lambda w, _: (w + w) * 0.5, range(40), torch.eye(8))),
        [(2, 8)],
    ),
    "constant_beyond_int32": (
        lambda x: x + torch.arange(8).double().log().long().clamp(min=0),  # the logarithm of 0
        [(2, 8)],
    ),
    "full_like": (lambda x: torch.full_like(x, 1.5) + torch.ones_like(x) * x + torch.zeros_like(x), [(2, 8)]),
    "gather": (lambda x, i: torch.gather(x, 1, _index(i, 5)), [(2, 5, 4), (2, 7, 3)]),
    "gather_constant": (lambda x: torch.gather(x, 0, torch.tensor([[1, 0, 2]])), [(3, 4)]),
    "gather_scalar": (lambda x: torch.gather(x, 0, torch.tensor([0])) * 2, [()]),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), [(2, 3, 4, 5), (2, 6, 3, 2)]),
    "grid_sample_reflection": (
        lambda x, g: F.grid_sample(x, g, "nearest", "reflection", True),
        [(1, 3, 4, 5), (1, 6, 3, 2)],
    ),
    "grid_sample_border": (lambda x, g: F.grid_sample(x, g, "bilinear", "border"), [(1, 3, 4, 5), (1, 6, 3, 2)]),
    "grid_sample_volume": (lambda x, g: F.grid_sample(x, g, padding_mode="border"), [(2, 3, 4, 5, 3), (2, 6, 3, 2, 3)]),
    "index_reduce_mean": (lambda x, i, y: x.index_reduce(1, _index(i, 4), y, "mean"), [(3, 4), (2,), (3, 2)]),
    "index_reduce_other": (
        lambda x, i, y: x.index_reduce(0, _index(i, 4), y, "amin", include_self=False),
        [(4, 3), (2,), (2, 3)],
    ),
    "index_add": (lambda x, i, y: torch.index_add(x, 1, _index(i, 4), y, alpha=0.5), [(2, 4), (3,), (2, 3)]),
    "index_computed_separated": (lambda x, i: x[_index(i, 2), :, _index(-i / 2, 4)], [(2, 3, 4), (2, 3)]),
    "index_copy": (lambda x, i, y: x.index_copy(0, _index(i, 4), y), [(4, 3), (1,), (1, 3)]),
    "index_copy_scalar": (lambda x, y: x.index_copy(0, torch.tensor(0), y) * 2, [(), ()]),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([0, -1]), 7.0), [(2, 8)]),
    "index_put": (lambda x, i, y: aten.index_put(x, [None, _index(i, 4)], y), [(2, 4, 3), (1,), (3,)]),
    "index_put_accumulate": (
        lambda x, i, y: x.index_put((_index(i, 2), _index(-i, 4)), y, accumulate=True),
        [(2, 4, 3), (5,), (5, 3)],
    ),
    "index_put_separated": (
        lambda x, i, y: aten.index_put(x, [None, _index(i, 4), None, _index(-i, 3)], y),
        [(2, 4, 2, 3), (2,), (2, 2, 2)],
    ),
    "index_put_mask": (lambda x: x.index_put((x > 0.5,), torch.tensor(0.25)), [(2, 8)]),
    "heaviside": (lambda x, y: torch.heaviside(x.round(), y), PAIR),
    "layer_norm_dynamic_affine": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(2, 3, 8), (8,), (8,)]),
    "group_norm_dynamic_affine": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 5), (4,), (4,)]),
    "rms_norm_dynamic_weight": (lambda x, w: F.rms_norm(x, (8,), w), [(2, 3, 8), (8,)]),
    "nanmean": (lambda x: torch.nanmean(x, 1), [(3, 8)]),
    "sort_indices": (lambda x: torch.argsort(x, 1, descending=True), [(3, 5)]),
    "xlogy": (lambda x, y: torch.xlogy(x.round(), y.abs()), PAIR),
    "xlogy_number": (lambda x: torch.xlogy(x, 3.0) + torch.xlogy(2.0, x.abs() + 1), [(2, 8)]),
    "xlog1py": (lambda x, y: torch.special.xlog1py(x, y.abs()), PAIR),
    "in_place_views": (lambda x: _transpose_in_place(x * 2), [(2, 1, 4)]),
    "index_put_values": (lambda x, y: x.index_put((x > -9,), y), [(2, 8), (16,)]),
    "index_select_scalar": (lambda x: torch.index_select(x, 0, torch.tensor([0])) * 2, [()]),
    "isin": (lambda x: torch.isin(x.round(), torch.tensor([1.0, -2.0])), [(2, 8)]),
    "linear_dynamic_weight": (F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x * 20, 1), [(2, 9)]),
    "masked_scatter": (lambda x, y: torch.masked_scatter(x, x > 0, y), PAIR),
    "max_pool2d_dilation": (lambda x: F.max_pool2d(x, (3, 2), 2, 1, (2, 3)), [(1, 2, 11, 12)]),
    "remainder": (lambda x, y: torch.remainder(x * 9, y), PAIR),
    "remainder_integers": (lambda x: torch.remainder((x * 50).int(), -7), [(2, 40)]),
    "scatter": (lambda x, i, y: x.scatter(0, _index(i, 4)[:1], y), [(4, 3), (2, 3), (2, 3)]),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, _index(i, 4), y), [(2, 4), (2, 9), (2, 9)]),
    "scatter_part": (lambda x, i: x.scatter(1, _index(i, 4)[:1, :1], 2.5), [(2, 4), (2, 3)]),
    "scatter_mean": (
        lambda x, i, y: x.scatter_reduce(0, _index(i, 4), y, "mean", include_self=False),
        [(4, 3), (2, 3), (2, 3)],
    ),
    "scatter_reduce": (lambda x, i, y: x.scatter_reduce(0, _index(i, 4), y, "amax"), [(4, 3), (2, 3), (2, 3)]),
    "scatter_reduce_constant_index": (
        lambda x, y: torch.stack(
            [
                x.scatter_reduce(0, torch.tensor([[0, 3, 1], [0, 1, 1]]), y, way, include_self=own)
                for way in ("mean", "amax", "amin")
                for own in (True, False)
            ]
        ),
        [(4, 3), (2, 3)],
    ),
    "scatter_reduce_empty_index": (
        lambda x: x.scatter_reduce(0, torch.zeros(0, 4).long(), x[:0], "amax") * 2,
        [(3, 4)],
    ),
    "quantile": (lambda x: torch.quantile(x, 0.3, 1), [(3, 8)]),
    "empty_then_filled": (lambda x: _permute_through_empty(x), [(5, 3)]),
    "new_ones": (lambda x: x.new_ones((2, 8)) + x, [(2, 8)]),
    "sdpa_grouped": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        [(1, 4, 3, 8), (1, 2, 5, 8)],
    ),
    "searchsorted": (lambda x, y: torch.searchsorted(x.abs().cumsum(1), y, right=True), [(2, 5), (2, 3)]),
    "searchsorted_number": (lambda x: torch.searchsorted(x.abs().cumsum(0), 1.5), [(5,)]),
    "searchsorted_sorter": (
        lambda x: torch.searchsorted(torch.tensor([3.0, -1.0, 0.5]), x, sorter=torch.tensor([1, 2, 0])),
        [(2, 3)],
    ),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 1, -2), [(2, 4, 3), (2, 3)]),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 1, 4), [(2, 6), (2, 3)]),
    "slice_scatter_empty": (lambda x, y: torch.slice_scatter(x, y, 1, 3, 3) * 2, [(2, 6), (2, 0)]),
    "slice_scatter_step": (lambda x, y: torch.slice_scatter(x, y, 1, -5, None, 2), [(2, 6), (2, 3)]),
    "take": (lambda x, i: torch.take(x, _index(i, 8)), [(2, 4), (3,)]),
    "unfold_dimension": (lambda x: x.unfold(1, 3, 2), [(2, 8, 2)]),
    "unfold_dimension_with_remainder": (lambda x: x.unfold(-1, 4, 4), [(3, 9)]),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1), [*PAIR, (2, 8)]),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [*PAIR, (2, 8)]),
    "arcsinh": (torch.arcsinh, [(2, 8)]),
    "arctan": (torch.arctan, [(2, 8)]),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (3, 2, 8)), [(2, 8)]),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), [(1, 4, 3, 4)]),
    "clip": (lambda x: torch.clip(x, -0.5, 0.5), [(2, 8)]),
    "column_stack": (lambda x, y: torch.column_stack((x, y)), PAIR),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, -1), PAIR),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([7, 0])), [(2, 8)]),
    "cross_entropy_of_one": (lambda x: F.cross_entropy(x, torch.tensor(2)), [(8,)]),
    "cross_entropy_of_pixels": (
        lambda x: F.cross_entropy(x, torch.tensor([[0, 1, 2], [3, 1, 0]]), ignore_index=1, reduction="sum"),
        [(2, 4, 3)],
    ),
    "cross_entropy_weighted": (
        lambda x, y: F.cross_entropy(x, torch.tensor([3, 1]), y[0].abs() + 0.1, reduction="none"),
        PAIR,
    ),
    "diff": (torch.diff, [(2, 8)]),
    "divide": (lambda x, y: torch.divide(x, y.abs() + 1), PAIR),
    "dot": (torch.dot, [(8,), (8,)]),
    "dstack": (lambda x, y: torch.dstack((x, y)), PAIR),
    "fix": (torch.fix, [(2, 8)]),
    "glu": (F.glu, [(2, 8)]),
    "hsplit": (lambda x: torch.hsplit(x, 2)[1], [(2, 8)]),
    "hstack": (lambda x, y: torch.hstack((x, y)), PAIR),
    "huber_loss": (F.huber_loss, PAIR),
    "kron": (torch.kron, [(2, 2), (2, 3)]),
    "l1_loss": (F.l1_loss, PAIR),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), [(2, 8)]),
    "moveaxis": (lambda x: torch.moveaxis(x, 0, 1), [(2, 8)]),
    "mse_loss": (F.mse_loss, PAIR),
    "mT": (lambda x: x.mT, [(2, 8)]),
    "multi_margin_loss": (
        lambda x: F.multi_margin_loss(x, torch.tensor([3, 0]), p=2, weight=torch.arange(1.0, 9), reduction="none"),
        [(2, 8)],
    ),
    "multi_margin_loss_of_one": (lambda x: F.multi_margin_loss(x, torch.tensor(7), margin=0.5), [(8,)]),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[3, 0, 3, -1, 2, 1, 0, 0], [-1] * 8]), reduction="none"),
        [(2, 8)],
    ),
    "multilabel_margin_loss_of_one": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([7, 1, 2, 3, 4, 5, 6, 0])),
        [(8,)],
    ),
    "multiply": (torch.multiply, PAIR),
    "mv": (torch.mv, [(4, 8), (8,)]),
    "nansum": (torch.nansum, [(2, 8)]),
    "native_batch_norm_switch": (
        lambda x: aten.native_batch_norm(x, *[torch.arange(1.0, 5)] * 4, False, 0.1, 1e-5)[0],
        [(2, 4, 3)],
    ),
    "native_batch_norm_batch_statistics": (
        lambda x: aten._native_batch_norm_legit(x, *[torch.arange(1.0, 5)] * 2, True, 0.1, 1e-5)[0],
        [(3, 4, 5)],
    ),
    "native_batch_norm": (
        lambda x: aten._native_batch_norm_legit_no_training(x, *[torch.arange(1.0, 5)] * 4, 0.1, 1e-5)[0],
        [(2, 4, 3)],
    ),
    "native_group_norm": (lambda x, w: torch.native_group_norm(x, w, w, 2, 4, 5, 2, 1e-5)[0], [(2, 4, 5), (4,)]),
    "native_layer_norm": (lambda x: torch.native_layer_norm(x, (8,), x[0], x[1], 1e-5)[0], [(2, 8)]),
    "narrow": (lambda x: torch.narrow(x, 1, 2, 3), [(2, 8)]),
    "negative": (torch.negative, [(2, 8)]),
    "normalize_by_another": (lambda x: x / (x * 2).norm(2, -1, True).clamp_min(1e-5), [(3, 4)]),
    "normalize_by_1_norm": (lambda x: x / torch.linalg.vector_norm(x, 1, -1, True).clamp_min(1e-5), [(3, 4)]),
    "normalize_of_type": (
        lambda x: x / torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).clamp_min(1e-5),
        [(3, 4)],
    ),
    "normalize": (lambda x: F.normalize(x, dim=-1), [(2, 8)]),
    "outer": (torch.outer, [(4,), (5,)]),
    "pairwise_distance": (F.pairwise_distance, PAIR),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(1, 8, 3, 4)]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [(1, 2, 4, 6)]),
    "ravel": (torch.ravel, [(2, 8)]),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, 2, 1), [(2, 8)]),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), [(2, 3, 8)]),
    "smooth_l1_loss": (F.smooth_l1_loss, PAIR),
    "softmin": (lambda x: F.softmin(x, -1), [(2, 8)]),
    "subtract": (torch.subtract, PAIR),
    "swapaxes": (lambda x: torch.swapaxes(x, 0, 1), [(2, 8)]),
    "tensor_split": (lambda x: torch.tensor_split(x, 2, 1)[1], [(2, 8)]),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), [(4, 8), (8, 3)]),
    "tile": (lambda x: torch.tile(x, (2, 1)), [(2, 8)]),
    "tril": (torch.tril, [(4, 4)]),
    "triu": (torch.triu, [(4, 4)]),
    "true_divide": (lambda x, y: torch.true_divide(x, y.abs() + 1), PAIR),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2, 1)[0], [(2, 8)]),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 2, -1), [(2, 8)]),
    "vstack": (lambda x, y: torch.vstack((x, y)), PAIR),
}
if hasattr(aten, "cholesky"):  # PyTorch 2.14 no longer has it
    COMPOSITES["cholesky_deprecated"] = (lambda x: torch.cholesky(x @ x.mT + torch.eye(3)), [(2, 3, 3)])


@pytest.mark.parametrize("name", COMPOSITES)
def test_runs_whole_in_float(name: str) -> None:
    function, shapes = COMPOSITES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.rand(shape, generator=generator) * 4 - 2 for shape in shapes)
    program = torch.export.export(FunctionModule(function).eval(), inputs, strict=False)
    with compilation_log.open_log() as log:
        lowered = delegate(program, TosaCompileSpec("TOSA-1.0+FP"))
    assert not log.refused_operators
    assert len(log.delegates) == 1
    with torch.no_grad():
        torch.testing.assert_close(lowered.module()(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)


def _mm_with_out_dtype(x: Tensor, y: Tensor) -> Tensor:
    """torch.mm with ``out_dtype``, for which PyTorch has no CPU kernel."""
    return torch.mm(x, y, out_dtype=torch.float32) if torch.compiler.is_exporting() else torch.mm(x.float(), y.float())


def _addmm_with_out_dtype(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if torch.compiler.is_exporting():
        return torch.addmm(x, a, b, out_dtype=torch.float32, beta=0.5, alpha=2)
    return 0.5 * x.float() + 2 * (a.float() @ b.float())


#: Function, shapes and type of its operands.
_PRODUCTS: dict[str, tuple[Callable[..., Tensor], Shapes, torch.dtype]] = {
    "grouped_mm": (
        lambda x, w: torch._grouped_mm(x, w, torch.tensor([2, 2, 5], dtype=torch.int32)),
        [(5, 8), (3, 8, 16)],
        torch.bfloat16,
    ),
    "grouped_mm_batched": (torch._grouped_mm, [(2, 4, 8), (2, 8, 16)], torch.bfloat16),
    "mm_out_dtype": (_mm_with_out_dtype, [(3, 8), (8, 4)], torch.bfloat16),
    "addmm_out_dtype": (_addmm_with_out_dtype, [(3, 4), (3, 8), (8, 4)], torch.bfloat16),
    "scaled_mm": (
        lambda x, y: torch._scaled_mm(x, y.t(), torch.tensor(0.5), torch.tensor(3.0), out_dtype=torch.float32),
        [(16, 32), (16, 32)],
        torch.float8_e4m3fn,
    ),
    "scaled_mm_per_row": (
        lambda x, y: torch._scaled_mm(
            x,
            y.t(),
            torch.linspace(1, 2, 16)[:, None],
            torch.linspace(3, 5, 16)[None],
            torch.ones(16).bfloat16(),
            out_dtype=torch.bfloat16,
        ),
        [(16, 32), (16, 32)],
        torch.float8_e4m3fn,
    ),
}


_PADDED_KEYS, _FUTURE_KEYS = torch.tensor([[0, 0, 1], [0, 1, 1]]) > 0, torch.ones(3, 3, dtype=torch.bool).triu(1)
#: Masks of fused attention layers (True or a number other than 0: the key is ignored) and their ``mask_type``.
_FUSED_MASKS = {
    "queries_keys": (_FUTURE_KEYS, 0),
    "queries_keys_in_float": (torch.where(_FUTURE_KEYS, -math.inf, 0.0), 0),
    "batch_keys": (_PADDED_KEYS, 1),
    "all_dimensions": ((_PADDED_KEYS[:, None, None] | _FUTURE_KEYS).expand(2, 2, 3, 3), 2),
}


@pytest.mark.parametrize("name", _FUSED_MASKS)
def test_masks_of_fused_attention_layers_mark_the_ignored_keys(name: str) -> None:
    x = torch.linspace(-3, 3, 48).sin().reshape(2, 3, 8)
    program = torch.export.export(
        FunctionModule(lambda x: _encoder_layer(x, False, *_FUSED_MASKS[name])), (x,), strict=False
    )
    lowered = delegate(program, TosaCompileSpec("TOSA-1.0+FP"))
    expected = _encoder_layer(x, False, *_FUSED_MASKS[name])
    torch.testing.assert_close(lowered.module()(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", _PRODUCTS)
def test_matrix_products_of_bfloat16_and_fp8(name: str) -> None:
    function, shapes, dtype = _PRODUCTS[name]
    inputs = tuple(torch.linspace(-1, 1, math.prod(shape)).sin().reshape(shape).to(dtype) for shape in shapes)
    program = torch.export.export(FunctionModule(function), inputs, strict=False)
    lowered = delegate(program, TosaCompileSpec("TOSA-1.0+FP+bf16+fp8e4m3"))
    assert not [node for node in lowered.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    torch.testing.assert_close(lowered.module()(*inputs), function(*inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("function", [torch.matmul, lambda x, y: F.linear(x, y.t(), torch.ones(4))])
def test_matmul_with_empty_inner_dimension_needs_no_kernel(function: Callable[..., Tensor]) -> None:
    """A CPU kernel might leave the memory of the result unwritten."""
    inputs = torch.zeros(2, 3, 0), torch.zeros(0, 4)
    lowered = delegate(torch.export.export(FunctionModule(function), inputs), TosaCompileSpec("TOSA-1.0+FP"))
    names = {node.name for node in lowered.graph.nodes}
    assert not names & {"matmul", "linear"}
    assert torch.equal(lowered.module()(*inputs), function(*inputs))


@pytest.mark.verify
def test_long_recurrent_layers_are_traced_once() -> None:
    """Each of the 200 steps is a copy of one step's nodes."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return trace(*args, **kwargs)

    trace = decompose_module.trace
    layer = nn.LSTM(3, 4, bidirectional=True)
    inputs = (torch.randn(200, 1, 3),)
    program = torch.export.export(layer, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompose_module, "trace", counted)
        lowered = delegate(program, TosaCompileSpec("TOSA-1.0+FP"))
    assert calls < 20
    torch.testing.assert_close(lowered.module()(*inputs), layer(*inputs))


def _dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = F.dropout(y, 0.5, False)
    z.add_(1)
    return y, z


def _type_as(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y.type_as(x)
    z.add_(1)
    return y, z


def _broadcast(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = torch.broadcast_tensors(y, y)[0].sum_to_size(3)
    z.mul_(3)
    return y, z


def _transposed(x: Tensor) -> Tensor:
    """``transpose_`` changes no memory, and its result shares it."""
    y = (x * 2).reshape(1, 3)
    view = y[0]
    y.transpose_(0, 1)
    view.add_(10)
    return y


def _windows(x: Tensor) -> Tensor:
    """The last element is in no window."""
    y = x * 2
    y.unfold(0, 2, 2)[0, 1:].add_(4)
    return y


@pytest.mark.parametrize("function", [_dropout, _type_as, _broadcast, _transposed, _windows])
def test_in_place_writes_are_visible_through_aliases(function: Callable[..., Any]) -> None:
    inputs = (torch.tensor([1.0, 2.0, 3.0]),)
    lowered = delegate(torch.export.export(FunctionModule(function), inputs), TosaCompileSpec("TOSA-1.0+FP"))
    torch.testing.assert_close(lowered.module()(*inputs), function(*inputs))


_ORDER_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: torch.sort(x, 1, descending=True)[0],
    "sort_stable": lambda x: torch.sort(x, stable=True)[0],
    "kthvalue": lambda x: torch.kthvalue(x, 6, 1)[0],
    "median": torch.median,
    "median_dim": lambda x: torch.median(x, 1, keepdim=True)[0],
    "nanmedian": lambda x: torch.nanmedian(x if x.numel() > 8 else x[:, :2]),
    "nanmedian_dim": lambda x: torch.nanmedian(x, 1)[0],
}


@pytest.mark.parametrize("name", _ORDER_STATISTICS)
def test_order_statistics_of_many_elements_use_topk_on_the_cpu(name: str) -> None:
    """topk is ExecuTorch's only kernel for order statistics, and no target accepts so many elements."""
    nan = float("nan")
    x = torch.tensor([[3.0, -1.0, 2.0, 0.5, 9.0, 8.0] * 66, [1.0, nan, -2.0, 7.0, 4.0, 6.0] * 66])
    lowered = delegate(
        torch.export.export(FunctionModule(_ORDER_STATISTICS[name]), (x,), strict=False), TosaCompileSpec("TOSA-1.0+FP")
    )
    on_cpu = {node.target for node in lowered.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert on_cpu == {torch.ops.aten.topk.default}
    torch.testing.assert_close(lowered.module()(x), _ORDER_STATISTICS[name](x), equal_nan=True)


@pytest.mark.parametrize("name", _ORDER_STATISTICS)
def test_order_statistics_of_few_elements_run_on_the_target(name: str) -> None:
    x = torch.tensor([[3.0, -1.0, 2.0, 0.5, 3.0], [1.0, float("nan"), -2.0, 7.0, -float("inf")]])
    function = (lambda x: torch.kthvalue(x, 2, 0)[0]) if name == "kthvalue" else _ORDER_STATISTICS[name]
    with compilation_log.open_log() as log:
        lowered = delegate(
            torch.export.export(FunctionModule(function), (x[:, :4],), strict=False), TosaCompileSpec("TOSA-1.0+FP")
        )
    assert not log.refused_operators
    torch.testing.assert_close(lowered.module()(x[:, :4]), function(x[:, :4]), equal_nan=True)


def test_stable_sort_keeps_the_order_of_equal_elements() -> None:
    """NaN is larger than all numbers, and equal to other NaNs."""
    x = torch.tensor([[3.0, -1.0, 3.0, float("nan"), -1.0, 3.0], [float("nan"), 1, float("nan"), 1, 1, -math.inf]])
    for down in (False, True):
        function = lambda x, down=down: torch.sort(x, dim=1, descending=down, stable=True)  # noqa: E731
        lowered = runner.lower(runner.export(FunctionModule(function), (x,)), "fp")
        lowered.check_delegated()
        for got, expected in zip(lowered.run((x,)), function(x), strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)


def test_linear_algebra_on_an_empty_batch_is_a_constant() -> None:
    """ExecuTorch has no kernel for a determinant, so that none may remain for an empty batch."""
    inputs = (torch.zeros(0, 3, 3), torch.ones(3))
    function = lambda x, y: (torch.linalg.det(x), torch.linalg.inv(x), y * 2)  # noqa: E731
    lowered = runner.lower(runner.export(FunctionModule(function), inputs), "fp")
    assert not [r.operator for r in lowered.log.refused_operators if "linalg" in r.operator]
    for got, expected in zip(lowered.run(inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_casts_of_int32_comparisons_run_on_u55() -> None:
    """As models compute positions from padding tokens. The limits of int32 are among the operands."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        tokens = (x != 1).to(torch.int32)
        counted = torch.cumsum(tokens, 1).type_as(tokens) * tokens + 1
        return counted, (x == 2).int(), (x > -3).int(), (x >= 5).int(), (x < 5).long(), (x <= -3).to(torch.int32)

    x = torch.tensor([[1, 2, -3, 5, 7, 1], [-(2**31), 2**31 - 1, 4, -2, 1, 0]], dtype=torch.int32)
    lowered = runner.lower(runner.export(FunctionModule(function), (x,)), "u55")
    lowered.check_delegated()
    for got, expected in zip(lowered.run((x,)), function(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_maximum_and_minimum_compare_exactly_with_their_operands_in_int8() -> None:
    """With a scale of its own, x would hardly ever equal the quantized maximum."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x == torch.maximum(x, y), torch.minimum(y, x) != x, torch.maximum(y, x) != y, torch.minimum(x, y) == y

    case = Case("extremes", function, [Input((2, 64)), Input((2, 64), -9, 9)])
    inputs = case.sample()
    lowered = runner.lower(runner.export(runner.quantize_case(case, int16=False), inputs), "int")
    lowered.check_delegated()
    for got, expected in zip(lowered.run(inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("span", [0.5, 2.0])
def test_matrix_exponential_is_squared_twice_in_int8(span: float) -> None:
    """With six squarings, SQNR would be 17 dB."""
    case = Case("matrix_exponential", torch.linalg.matrix_exp, [Input((2, 4, 4), -span, span)])
    inputs = case.sample()
    lowered = runner.lower(runner.export(runner.quantize_case(case, int16=False), inputs), "int")
    lowered.check_delegated()
    assert sqnr(torch.linalg.matrix_exp(inputs[0]), lowered.run(inputs)[0]) > 31


#: Composites that also run in INT8, and their largest allowed error in steps of the result.
QUANTIZED = {
    "conv2d_dynamic_weight": 1,
    "conv2d_dynamic_weight_depthwise": 1,
    "conv_transpose2d_dynamic_weight": 1,
    "diagonal_scatter": 1,
    "fmod_integers": 0,
    "max_pool3d_indices": 0,
    "max_unpool1d": 0,
    "max_unpool2d": 0,
    "max_unpool3d": 0,
    "max_unpool_overlapping": 0,
    "conv_tbc": 1,
    "mode": 1,
    "conv_transpose2d_dilation": 1,
    "conv_transpose3d": 1,
    "fold_overlapping": 1,
    "gather_constant": 0,
    "index_fill": 1,
    "max_pool2d_dilation": 0,
    "select_scatter": 1,
    "slice_scatter": 1,
    "slice_scatter_step": 1,
    "unfold_dimension": 0,
    "unfold_dimension_with_remainder": 0,
    "div_trunc": 1,
    "index_put_mask": 1,
    "addbmm": 2,
    "cdist": 3,
    "cdist_0": 0,
    "group_norm_dynamic_affine": 2,
    "heaviside": 1,
    "layer_norm_dynamic_affine": 2,
    "nanmean": 1,
    "rms_norm_dynamic_weight": 2,
    "xlog1py": 2,
    "xlogy": 2,
    "add_relu": 1,
    "convolution_of_torchscript": 1,
    "pdist": 1,
    "searchsorted_number": 0,
    "upsample_bicubic": 1,
    "upsample_bilinear_antialias": 1,
    "upsample_bicubic_antialias": 1,
    "upsample_core": 1,
    "upsample_core_exact": 0,
    "upsample_core_volume": 1,
    "scatter_reduce_constant_index": 1,
    "quantile": 1,
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_runs_whole_in_int8(name: str) -> None:
    function, shapes = COMPOSITES[name]
    case = Case(name, function, [Input(shape) for shape in shapes])
    module, inputs = runner.quantize_case(case, int16=False), case.sample()
    program = runner.export(module, inputs)
    lowered = runner.lower(program, "int")
    lowered.check_delegated()
    expected, scales = runner.flatten_tensors(module(*inputs)), runner.output_scales(program)
    runner.check_steps(lowered.run(inputs), expected, scales, QUANTIZED[name])


#: Functions of small integers. int8 represents these exactly: comparisons, counts and selections equal float32's.
_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "histogram": lambda x: torch.histc(x, 4, -4.5, -0.5),
    "histogram_of_all": lambda x: torch.histc(x, 4),
    "histogram_of_equal_elements": lambda x: torch.histc(x * 0 + 1, 4),
    "histogram_of_one": lambda x: torch.histc(x, 1, -2.5, -0.5),
    "mode": lambda x: torch.mode(x, 1)[0],
    "mode_index": lambda x: torch.mode(x, 1)[1],
    "take": lambda x: torch.take(x, torch.tensor([3, -1, 0])),
    "stable_order": lambda x: torch.argsort(x, dim=-1, stable=True),
    "stable_order_down": lambda x: torch.sort(x, dim=0, descending=True, stable=True)[1],
}


#: Comparisons of rounded values with integers, for x between -3.9 and 3.9. Each is true for some elements only.
_INTEGER_COMPARISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: torch.floor(x) == 3,
    "round": lambda x: torch.round(x) != torch.tensor(-2.0),
    "sign": lambda x: torch.sign(x - 0.5) == 1,
    "sums": lambda x: (torch.floor(x) + 1) % 4 == 3,
    "each": lambda x: torch.floor(x)[..., None] == torch.arange(-2.0, 3.0),
    "order": lambda x: torch.ceil(x) >= 2,
    "argmax": lambda x: x.reshape(4, -1).argmax(0) == torch.tensor(2.0),
}


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
@pytest.mark.parametrize("name", _INTEGER_COMPARISONS)
def test_rounded_values_compare_exactly_with_integers(name: str, kind: ArmRecipeType) -> None:
    """No element is within a step of int8 of a discontinuity."""
    x = (torch.arange(-62, 62) / 16 + 1 / 32).reshape(2, 62)
    result = export(
        FunctionModule(lambda x: _INTEGER_COMPARISONS[name](x).float()),
        ExportRecipe.get_recipe(kind),
        [(x,), (x.flip(1),)],
    )
    assert not result.report.cpu_operators
    assert torch.equal(result.run(x).round(), _INTEGER_COMPARISONS[name](x).float())


@pytest.mark.parametrize("name", _EXACT)
def test_selections_and_counts_of_integers_are_exact_in_int8(name: str) -> None:
    """The minimum is far from the other values, so that a selection without it would have another scale."""
    x = torch.tensor([[-1.0, -2, -1, -5, -2, -1, -2], [-4, -1, -3, -3, -5, -1, -5], [-2, 0, -2, -1, -1, -1, 0]])
    observed = ObservedProgram(
        runner.export(FunctionModule(_EXACT[name]), (x,)),
        TOSAQuantizer(runner.make_compile_spec("int")).set_global(get_symmetric_quantization_config()),
    )
    observed(x)
    lowered = runner.lower(observed.convert(), "int")
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run([x])[0], _EXACT[name](x), rtol=0, atol=0.06)


#: Functions of integers with floating-point results. Where the model has no cast, PyTorch promotes the operands.
_PROMOTING_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded": lambda x: torch.clamp_min(x, 0.5) * torch.tanh(x) + torch.clamp(x, -1.5, 2.25),
    "scaled": lambda x: x * 0.5,
    "rsub": lambda x: 0.25 - x,
    "power": lambda x: torch.pow(1.1, x),
    "cast": lambda x: F.leaky_relu(-x.to(torch.float32), 0.3),
    "cat_with_cast": lambda x: torch.cat([x.to(torch.float32), x * 0.01], 1),
    "cat_promoted": lambda x: torch.cat([x, torch.tanh(x)], 1),
    "maximum": lambda x: torch.maximum(x, torch.tensor([0.5])),
    "beside_real": lambda x: torch.sigmoid(x.to(torch.float32) - 0.5) * x,
    "remainder_number": lambda x: torch.remainder(x, 2.5),
    "sum": lambda x: x.sum(1, dtype=torch.float32),
    "where": lambda x: torch.where(x > 1, x, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("int16", [False, True], ids=["int8", "a16w8"])
def test_integer_operands_are_promoted_to_quantized_values(dtype: torch.dtype, int16: bool) -> None:
    case = Case("all", lambda x: [f(x) for f in _PROMOTING_FUNCTIONS.values()], [Input((2, 24), -9, 9, dtype)])
    inputs = case.sample()
    lowered = runner.lower(runner.export(runner.quantize_case(case, int16=int16), inputs), "int")
    lowered.check_delegated()
    for name, got, expected in zip(_PROMOTING_FUNCTIONS, lowered.run(inputs), case.module()(*inputs), strict=True):
        most = float((got - expected).abs().max() / expected.abs().max())
        assert most < 0.015, f"{name}: {most}"


_SEQUENCE = Input((3, 2, 8))
_ATTENTION = nn.MultiheadAttention(8, 2)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        pytest.param(lambda x, y: _ATTENTION(x, y, y)[0], 2, id="memory"),
        pytest.param(lambda x, y, z: _ATTENTION(x, y, z)[0], 3, id="distinct"),
        pytest.param(nn.TransformerDecoderLayer(8, 2, 16), 2, id="decoder"),
    ],
)
def test_cross_attention_runs_whole_in_int8(model: Callable[..., Tensor], count: int) -> None:
    """The projection weights are slices of one parameter, and are quantized as constants."""
    case = Case("attention", model, [_SEQUENCE] * count)
    module, inputs = runner.quantize_case(case, int16=False), case.sample()
    program = runner.export(module, inputs)
    lowered = runner.lower(program, "int")
    lowered.check_delegated()
    runner.check_steps(lowered.run(inputs), runner.flatten_tensors(module(*inputs)), runner.output_scales(program), 2)
