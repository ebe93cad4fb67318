"""What is refused says why, in words that a user can act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arm_backend_core import events
from arm_backend_core.delegate import delegate
from arm_backend_core.errors import FullDelegationError
from tests.ops import runner
from tests.ops.runner import Case, Input

X = Input((1, 4, 8, 8))


def _reasons(program: torch.export.ExportedProgram, target: str) -> str:
    return "\n".join(f"{r.operator}: {r.reason}" for r in runner.lower(program, target).log.rejected)


_FLOAT: dict[str, tuple[Callable[..., Any], Sequence[Input], str]] = {
    "conv_computed_weight": (
        lambda x, w: F.conv2d(x, w * 2),
        [X, Input((2, 4, 3, 3))],
        "its weight is computed while the program runs",
    ),
    "index_add_integers": (
        lambda x, i: torch.index_add(x, 0, i, x),
        [Input((3,), 0, 9, torch.int32), Input((3,), 0, 3, torch.int64)],
        "index_add on integers or a scalar; convert with .to(torch.float32)",
    ),
    "grid_sample_bicubic": (
        lambda x, g: F.grid_sample(x, g, "bicubic", align_corners=False),
        [X, Input((1, 2, 2, 2))],
        "grid_sample with bicubic interpolation; use bilinear",
    ),
    "scatter_reduce_mean": (
        lambda x, i: x.scatter_reduce(0, i, x, "mean"),
        [Input((3,)), Input((3,), 0, 3, torch.int64)],
        "scatter_reduce 'mean'",
    ),
    "dropout_training": (
        lambda x: torch.ops.aten.dropout(x, 0.5, True),
        [X],
        "dropout in training mode; call model.eval() before exporting",
    ),
    "batch_norm_training": (
        lambda x: torch.ops.aten.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        [X],
        "batch_norm with statistics of the batch; call model.eval() before exporting",
    ),
    "float64": (lambda x: x * 2, [Input((3,), dtype=torch.float64)], "TOSA has no element type for torch.float64"),
    "complex": (lambda x: torch.fft.fft(x).real, [Input((8,))], "no lowering for "),
    "gamma": (torch.lgamma, [Input((8,), 1, 2)], "TOSA has no floating-point formula for aten.lgamma.default"),
    "variance_of_one": (lambda x: x.var(1), [Input((3, 1))], "variance of 1 element(s) with a correction of 1"),
}


@pytest.mark.parametrize("name", _FLOAT)
def test_float(name: str) -> None:
    function, inputs, reason = _FLOAT[name]
    case = Case(name, function, inputs)
    assert reason in _reasons(runner.export(case.module(), case.sample()), "fp")


#: Quantized, for targets that run integers only.
_INTEGER: dict[str, tuple[Callable[..., Any], Sequence[Input], str, str]] = {
    "gather": (nn.Embedding(8, 4), [Input((3,), 0, 8, torch.int32)], "u55", "ethos-u55-128 has no GATHER in hardware"),
    "select": (
        torch.where,
        [Input((3, 4), dtype=torch.bool), Input((3, 4)), Input((3, 4))],
        "u55",
        "ethos-u55-128 has no boolean tensors in hardware",
    ),
    "compare": (torch.gt, [Input((3, 4)), Input((3, 4))], "u55", "ethos-u55-128 has no GREATER in hardware"),
    "logic": (torch.logical_and, [Input((3,), dtype=torch.bool)] * 2, "u55", "has no boolean tensors in hardware"),
    "resize": (nn.Upsample(size=(131, 9), mode="bilinear"), [X], "u55", "no RESIZE with bilinear interpolation"),
    "shift": (
        lambda x, y: torch.bitwise_and(x, y),
        [Input((3,), 0, 9, torch.int32)] * 2,
        "u55",
        "has no BITWISE_AND in hardware",
    ),
    "nan": (
        lambda x, y: torch.where(x < y, x, math.nan),
        [Input((3, 4), -2, -1), Input((3, 4), 1, 2)],
        "int",
        "is not a number (nan)",
    ),
    "alpha_zero": (lambda x, y: torch.add(x, y, alpha=0), [Input((3, 4))] * 2, "int", "alpha=0"),
    "two_tensors": (torch.pow, [Input((3, 4), 0.5, 2)] * 2, "int", "runs integers only"),
}


@pytest.mark.parametrize("name", _INTEGER)
def test_integer(name: str) -> None:
    function, inputs, target, reason = _INTEGER[name]
    case = Case(name, function, inputs)
    assert reason in _reasons(runner.export(runner.quantized(case, wide=False), case.sample()), target)


@pytest.mark.parametrize("target", ["int", "u55", "u85"])
def test_not_quantized(target: str) -> None:
    case = Case("relu", F.relu, [Input((2, 3))])
    reasons = _reasons(runner.export(case.module(), case.sample()), target)
    assert "it is not quantized" in reasons
    assert f"{runner.spec(target).target.name} runs integers only" in reasons


def test_dynamic_shape() -> None:
    batch = {0: torch.export.Dim("batch", min=2, max=8)}
    program = torch.export.export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), dynamic_shapes=(batch,))
    reasons = _reasons(program, "fp")
    assert "which is not known before the program runs" in reasons
    assert "export without dynamic_shapes" in reasons


def test_kept_on_cpu() -> None:
    program = runner.export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))
    with events.record() as log:
        delegate(program, runner.spec("fp"), keep_on_cpu=[lambda node: "linear" in node.name])
    assert [r.reason for r in log.rejected] == ["kept on the CPU as asked"]


def test_full_delegation() -> None:
    program = runner.export(Case("gamma", torch.lgamma, ()).module(), (torch.rand(3),))
    with pytest.raises(FullDelegationError, match=r"1 operator\(s\) cannot run on TOSA-1.0\+FP:\n.*no floating-point"):
        delegate(program, runner.spec("fp"), require_full_delegation=True)
