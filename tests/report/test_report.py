"""Rendering of the report: text, JSON, HTML."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arm_backend_core.backends.vela_estimates import VelaEstimates
from arm_backend_core.compilation_log import BoundaryTensor, DelegateRecord
from arm_recipes._internal.rendering import BAR_CHARACTERS, Renderable, Section, format_bytes
from arm_recipes.report.costs import constants_row
from arm_recipes.report.record import MethodReport, Quantization
from arm_recipes.report.report import Report
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.stages.edge.cpu_operators import CpuOperator

VELA = VelaEstimates(
    npu_cycles=90_000,
    total_cycles=100_000,
    core_clock=1e9,
    inference_seconds=1e-4,
    sram_bytes=20_000,
    dram_bytes=0,
    flash_bytes=300,
    fast_scratch_bytes=5_120,
    sram_limit=10_000,
    macs=1_234_567,
    weight_bytes=100,
    original_weight_bytes=200,
    npu_operators=3,
    memories=(),
    layers=(),
    accelerator="ethos-u85-256",
    system_config="Sys",
    memory_mode="Mode",
)
DELEGATE = DelegateRecord(
    name="arm_0",
    backend="EthosUBackend",
    operators=("aten.conv2d.default", "aten.relu.default"),
    tosa_operators=("CONV2D", "CLAMP", "RESCALE"),
    tosa=b"12345",
    payload_bytes=2048,
    checksum=b"1234",
    vela=VELA,
    inputs=(BoundaryTensor("x", "i8", (1, 3)),),
    outputs=(),
)
METHOD = MethodReport(
    name="forward",
    inputs=(TensorInfo("x", "int8", (1, 3), 0.5, -3),),
    outputs=(TensorInfo("y", "float32", (1,)),),
    delegates=(DELEGATE,),
    other_delegates={"XnnpackBackend": 2},
    boundary={"cortex_m.quantize_per_tensor.default": 1},
    cpu_operators=(CpuOperator("aten.<sort>", 2, "no rule & no way", ("model.py:3", "model.py:9")),),
    quantization=Quantization({"int8": 4}, {"int8 per channel": 2}, 1),
)
REPORT = Report("tosa_<x>", (METHOD,), 12_345, {"quantize": 1.0, "to_executorch": 0.25}, ("mind <this>",))

EXPECTED = """\
Recipe tosa_<x>
  program  12.1 KiB, the .pte file
  export   1.25 s
Inputs and outputs
  in   x  int8[1, 3] scale=0.5 zero_point=-3
  out  y  float32[1]
Quantization
  activations  4 x int8
  weights      2 x int8 per channel
  calibration  1 sample
Delegates: 1, 2 operators
  arm_0   EthosUBackend   2 operators, lowered to 3 TOSA operators  2,048 B
  2 more  XnnpackBackend
Vela's estimates for arm_0
  target        ethos-u85-256, Sys, Mode
  NPU cycles    90,000
  total cycles  100,000
  inference     0.100 ms at 1000 MHz
  SRAM          19.5 KiB of 9.8 KiB (exceeds the limit of the memory mode)
  DRAM          0 B
  flash         300 B, constants inside the program
  fast scratch  5,120 B, part of the SRAM
  MACs          1,234,567
  weights       100 B encoded, 200 B original
Boundary conversions
  cortex_m.quantize_per_tensor.default  1  quantized_io=True: the program takes integers
Operators on the CPU: 2
  2 x aten.<sort>  no rule & no way  model.py:3; model.py:9
Inserted operations: 100.0% of the cycles
  100,000  100.0%  rest  (Vela)  in Vela's total, but of no operation
Seconds per stage
  quantize       1.00
  to_executorch  0.25
Notes
  mind <this>"""


def test_report_as_text() -> None:
    assert str(REPORT) == EXPECTED


@pytest.mark.parametrize(
    ("memory", "row"),
    [
        ("OffChipFlash", ("flash", "300 B, constants inside the program")),
        ("OnChipFlash", ("constants in SRAM", "300 B")),
        ("Dram", ("constants in DRAM", "4,096 B")),
    ],
)
def test_constants_row_names_the_memory_of_the_constants(memory: str, row: tuple[str, str]) -> None:
    estimates = replace(VELA, constant_memory=memory, constant_bytes=4_096, flash_bytes=0 if memory == "Dram" else 300)
    assert constants_row(estimates) == row


def test_report_names_the_data_file_of_external_constants() -> None:
    delegate = replace(DELEGATE, external_blocks={"arm_weights_0123": 300})
    text = str(replace(REPORT, methods=(replace(METHOD, delegates=(delegate,)),)))
    assert re.search(r"\n  flash +300 B, constants in the \.ptd\n", text)
    assert "constants inside the program" not in text


def test_report_as_json() -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    documented = (Path(__file__).parents[2] / "docs/users/running.md").read_text(encoding="utf-8")
    keys = documented.partition("The keys of this dict are ")[2].partition("|")[0]
    assert sorted(re.findall(r"`(\w+)`", keys)) == sorted(data)
    assert data["seconds"] == {"quantize": 1.0, "to_executorch": 0.25, "total": 1.25}
    method = data["methods"][0]
    assert method["delegates"][0]["tosa_bytes"] == 5
    assert method["delegates"][0]["vela"]["npu_cycles"] == 90_000
    assert method["inputs"][0] == {
        "name": "x",
        "dtype": "int8",
        "shape": [1, 3],
        "scale": 0.5,
        "zero_point": -3,
    }
    assert method["cpu_operators"][0]["reason"] == "no rule & no way"


def test_html_is_escaped() -> None:
    page = REPORT._repr_html_()
    assert "aten.&lt;sort&gt;" in page
    assert "mind &lt;this&gt;" in page
    assert "<sort>" not in page
    assert page.count("<table>") == page.count("</table>") == str(REPORT).count("\n") + 1 - EXPECTED.count("\n  ")


def test_report_of_several_methods() -> None:
    report = Report("r", (METHOD, METHOD), 1, {}, ())
    assert len(report.delegates) == len(report.cpu_operators) == 2
    assert "Delegates of 'forward': 1" in str(report)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (9_999, "9,999 B"), (10_240, "10.0 KiB"), (20 * 1024**2, "20.0 MiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_tensor_info_quantizes_and_dequantizes() -> None:
    info = TensorInfo("x", "int8", (4,), 0.5, -3)
    integers = info.quantize(torch.tensor([0.0, 1.26, -1000.0, 1000.0]))
    assert integers.dtype == torch.int8
    assert integers.tolist() == [-3, 0, -128, 127]
    assert info.dequantize(integers).tolist() == [0.0, 1.5, -62.5, 65.0]


def test_tensor_info_of_a_float_tensor_refuses_to_quantize() -> None:
    with pytest.raises(ValueError, match=r"'x' is not quantized \(float32\); export with quantized_io=True"):
        TensorInfo("x", "float32", (4,)).quantize(torch.zeros(4))


class _Chart(Renderable):
    def sections(self) -> Iterator[Section]:
        yield "Größe", [("over time", BAR_CHARACTERS)]


@pytest.mark.parametrize(
    ("encoding", "heading", "bars"),
    [
        ("ascii", r"Gr\xf6\xdfe", "_.-:=+*#"),
        ("latin-1", "Größe", "_.-:=+*#"),
        ("utf-8", "Größe", BAR_CHARACTERS),
    ],
)
def test_print_works_on_terminals_of_any_encoding(
    encoding: str, heading: str, bars: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print(_Chart(), flush=True)
    assert stream.buffer.getvalue().decode(encoding) == f"{heading}\n  over time  {bars}\n"
