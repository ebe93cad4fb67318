"""Bisection of a compiler crash: the error names the operator and its source line, which the compiler does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from arm_backend_core import (
    ArmCompileSpec,
    CompileError,
    EthosUCompileSpec,
    EthosUQuantizer,
    get_symmetric_a16w8_quantization_config,
)
from arm_backend_core.delegate import delegate


def _quantized(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], spec: EthosUCompileSpec
) -> torch.export.ExportedProgram:
    quantizer = EthosUQuantizer(spec).set_global(get_symmetric_a16w8_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return torch.export.export(convert_pt2e(prepared), inputs)


def test_a_crash_of_vela_names_the_operator(tmp_path: Path) -> None:
    # Vela 5.1 ends with SIGSEGV on this int16 convolution for Ethos-U85; the int8 one compiles.
    model = nn.Sequential(nn.Conv2d(56, 56, 1), nn.ReLU(), nn.Conv2d(56, 15, 5, stride=3, dilation=2, padding=4))
    spec = EthosUCompileSpec("ethos-u85-256").dump_intermediate_artifacts_to(tmp_path)
    program = _quantized(model, (torch.randn(1, 56, 10, 10),), spec)
    with pytest.raises(CompileError, match="SIGSEGV") as raised:
        delegate(program, spec)
    assert raised.value.operator == "aten.conv2d.default"
    assert raised.value.delegate == "arm_0"
    assert raised.value.artifact is not None
    assert Path(raised.value.artifact).parent == tmp_path


def test_locations_are_written_for_debug_mode_tosa(tmp_path: Path) -> None:
    spec = EthosUCompileSpec("ethos-u55-128").dump_intermediate_artifacts_to(tmp_path)
    program = _quantized(nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),), spec)
    delegate(program, spec)
    assert b"aten.conv2d.default" not in (tmp_path / "arm_0.tosa").read_bytes()
    delegate(program, spec.dump_debug_info(ArmCompileSpec.DebugMode.TOSA))
    assert b"aten.conv2d.default" in (tmp_path / "arm_0.tosa").read_bytes()
