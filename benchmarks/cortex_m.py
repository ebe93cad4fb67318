"""Measures ExecuTorch's own Cortex-M flow ("the peer") and ``CORTEX_M_INT8`` on the same models, inputs and machine.

    .venv/bin/python benchmarks/cortex_m.py --out rows.jsonl --table benchmarks/cortex_m.md
    .venv/bin/python benchmarks/cortex_m.py --models --processors --out rows.jsonl --table benchmarks/cortex_m.md

The second command adds rows of ``CORTEX_M_INT8`` for several processors, in one process.
Every other measurement runs in a fresh process. Seconds are processor time on one thread, without imports. Both
programs run in ExecuTorch's runtime with this project's host kernels, which compute what CMSIS-NN computes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arm_recipes.recipe.options import ALGORITHMS  # noqa: E402
from benchmarks.compare import compute_accuracy, first_output, processor_seconds  # noqa: E402
from benchmarks.rows import Row, add_row, index_rows, parse_printed_row  # noqa: E402
from tests.models import tiny, zoo  # noqa: E402

MODELS = (*zoo.NAMES, *tiny.NAMES)
#: "peer" is the flow that its README and examples describe. "peer, explicit layout" is the experimental order of
#: passes that writes layout changes as operators.
FLOWS = ("peer", "peer, explicit layout", "ours")
CALIBRATION = 4  # samples that both calibrate with
TEST_SAMPLES = 4  # further samples, on which the results are compared with floating point
PROCESSOR_TEST_SAMPLES = 32  # the same for the table of processors, where differences below 1 dB matter
QUANTIZE_KERNELS = ("cortex_m::quantize_per_tensor", "cortex_m::dequantize_per_tensor")
#: Operators that change the order of elements in memory.
LAYOUT_CHANGES = (
    "cortex_m::transpose",
    "aten::permute_copy",
    "aten::transpose_copy",
    "dim_order_ops::_clone_dim_order",
    "dim_order_ops::_to_dim_order_copy",
)
#: The default algorithms of ``TOSA_INT8`` except ``int16_outputs``.
ALGORITHMS_WITH_INT8_OUTPUTS = [name for name in ALGORITHMS if name != "int16_outputs"]
#: Processors of the table of whole programs: with SIMD instructions, and with MVE.
PROCESSORS = ("cortex-m4", "cortex-m33", "cortex-m55")
PROCESSOR_MODELS = (
    *("ds_cnn", "deep_autoencoder", "resnet8", "mobilenet_v1_025", "mobilenet_v2", "squeezenet1_1"),
    *("transformer_encoder", "gru_spotter", "unet"),
)
Inputs = tuple[Any, ...]
Export = Callable[[Any, list[Inputs]], tuple[bytes, Callable[[Inputs], Inputs]]]


# --- one measurement, in a process of its own


def measure(model: str, flow: str) -> Row:
    """Export one model once, run the program, and return the figures. Raises what the export raises."""
    import torch

    torch.set_num_threads(1)
    entry = _build(model)
    calibration, test_samples = entry.samples[:CALIBRATION], entry.samples[CALIBRATION:]
    with torch.no_grad():
        expected = [first_output(entry.model(*sample)) for sample in test_samples]
    export = prepare_ours() if flow == "ours" else prepare_peer(use_explicit_layout=flow != "peer")
    started = time.perf_counter()
    program, convert = export(entry.model, calibration)
    row: Row = {"seconds": time.perf_counter() - started, "pte_bytes": len(program), **count_operators(program)}
    try:
        row |= compute_accuracy(expected, _run(program, [convert(sample) for sample in test_samples]))
    except Exception as error:  # an export whose program does not run is a result too
        row["run_error"] = _describe(error)
        traceback.print_exc()
    return row


def measure_processors(model: str) -> Iterator[Row]:
    """Export one model for each processor and for TOSA_INT8, and yield a row for each processor.

    A program with the same bytes as an earlier one is not run again: it has the same SQNR.
    """
    import torch

    from arm_recipes import ArmRecipeType, ExportRecipe, export

    entry = _build(model, PROCESSOR_TEST_SAMPLES)
    calibration, test_samples = entry.samples[:CALIBRATION], entry.samples[CALIBRATION:]
    with torch.no_grad():
        expected = [first_output(entry.model(*sample)) for sample in test_samples]
    references = {}
    for key, algorithms in (("tosa_sqnr_db", True), ("tosa_int8_outputs_sqnr_db", ALGORITHMS_WITH_INT8_OUTPUTS)):
        tosa = export(entry.model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=algorithms), calibration)
        references[key] = compute_accuracy(expected, [first_output(tosa.run(*s)) for s in test_samples])["sqnr_db"]
    programs: dict[bytes, float] = {}
    for cpu in PROCESSORS:
        recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu=cpu)
        result = export(entry.model, recipe, calibration)
        program = result.buffer
        if program not in programs:
            programs[program] = compute_accuracy(expected, _run(program, test_samples))["sqnr_db"]
        cycles = sum(call.cycles or 0 for method in result.report.methods for call in method.kernels)
        yield {
            "model": model,
            "flow": f"ours, {cpu}",
            "cpu": cpu,
            "pte_bytes": len(program),
            "cycles": cycles,
            "sqnr_db": programs[program],
            **references,
            **count_operators(program),
        }


def _build(model: str, test_samples: int = TEST_SAMPLES) -> Any:
    return (tiny if model in tiny.NAMES else zoo).build(model, CALIBRATION + test_samples)


def prepare_ours() -> Export:
    """Import this project. The returned function exports with default options."""
    from executorch.export import ExportRecipe

    from arm_recipes import ArmRecipeType, export

    def compile_model(model: Any, calibration: list[Inputs]) -> tuple[bytes, Callable[[Inputs], Inputs]]:
        recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8)
        return export(model, recipe, calibration).buffer, lambda sample: sample

    return compile_model


def prepare_peer(*, use_explicit_layout: bool) -> Export:
    """Import the peer. The returned function exports as the peer's notebook and tests do, for a Cortex-M55."""
    import torch
    from executorch.backends.cortex_m.edge_compile_config import cortex_m_edge_compile_config
    from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
    from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer
    from executorch.exir import to_edge
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    def to_channels_last(sample: Inputs) -> Inputs:
        return tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in sample)

    def compile_model(model: Any, calibration: list[Inputs]) -> tuple[bytes, Callable[[Inputs], Inputs]]:
        # The documentation asks for channels_last inputs. The explicit layout adds the conversions itself.
        convert = (lambda sample: sample) if use_explicit_layout else to_channels_last
        samples = [convert(sample) for sample in calibration]
        exported = torch.export.export(model, samples[0], strict=True)
        quantizer = CortexMQuantizer(use_explicit_layout=use_explicit_layout)
        prepared = prepare_pt2e(exported.module(check_guards=False), quantizer)
        for sample in samples:
            prepared(*sample)
        quantized = torch.export.export(convert_pt2e(prepared), samples[0], strict=True)
        edge = to_edge(quantized, compile_config=cortex_m_edge_compile_config())
        passes = CortexMPassManager(edge.exported_program(), use_explicit_layout=use_explicit_layout)
        edge._edge_programs["forward"] = passes.transform()
        return edge.to_executorch().buffer, convert

    return compile_model


def _run(program: bytes, samples: list[Inputs]) -> list[Any]:
    from arm_recipes import load

    loaded = load(program)
    return [first_output(loaded.run(*sample)) for sample in samples]


def count_operators(program: bytes) -> Row:
    """Count the operators of a program, its layout changes and its memory."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    from arm_recipes.runtime.method_memory import planned_bytes

    plan = next(plan for plan in deserialize_pte_binary(program).program.execution_plan if plan.name == "forward")
    first, further = planned_bytes([plan])
    kernels: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    moving: Counter[str] = Counter()
    layout: Counter[str] = Counter()
    casts = layout_bytes = scratch = 0
    for name, values in _list_calls(plan):
        if name in QUANTIZE_KERNELS:
            casts += 1
        elif name.startswith("cortex_m::"):
            kernels[name.partition("::")[2]] += 1
            scratch = max(scratch, _count_scratch_bytes(name, values))
        else:
            (floating if any(_is_float(value) for value in values) else moving)[name] += 1
        if name in LAYOUT_CHANGES:
            layout[name] += 1
            layout_bytes += _count_bytes(values[-1])
    return {
        "kernels": dict(kernels),
        "float_operators": dict(floating),
        "integer_operators": dict(moving),
        "casts": casts,
        "layout_changes": dict(layout),
        "layout_bytes": layout_bytes,
        "planned_bytes": sum(first.values()) + sum(further),
        "largest_scratch_bytes": scratch,
    }


def _list_calls(plan: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each operator call: its name without overload, and its arguments. The result tensor is the last one."""
    for chain in plan.chains:
        for instruction in chain.instructions:
            call = instruction.instr_args
            if type(call).__name__ != "KernelCall":
                continue
            values = [plan.values[index].val for index in dict.fromkeys(call.args)]  # the result occurs twice
            yield plan.operators[call.op_index].name, values


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "scalar_type")


def _is_float(value: Any) -> bool:
    return _is_tensor(value) and value.scalar_type.name in ("FLOAT", "DOUBLE", "HALF", "BFLOAT16")


def _count_bytes(tensor: Any) -> int:
    width = {"BYTE": 1, "CHAR": 1, "BOOL": 1, "SHORT": 2, "INT": 4, "FLOAT": 4, "LONG": 8}[tensor.scalar_type.name]
    return math.prod(tensor.sizes) * width


def _count_scratch_bytes(name: str, values: list[Any]) -> int:
    """Bytes of a kernel's scratch tensors: the uint8 tensors among its arguments."""
    return sum(_count_bytes(value) for value in values if _is_tensor(value) and value.scalar_type.name == "BYTE")


def _describe(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


def run_child(model: str, flow: str) -> None:
    """Run one measurement and print its row as the last line of standard output."""
    warnings.simplefilter("ignore")
    time.perf_counter = processor_seconds
    row: Row = {"model": model, "flow": flow}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            row |= measure(model, flow)
    except Exception as error:  # a failed export is a result too
        row["error"] = _describe(error)
        traceback.print_exc()
    print(json.dumps(row))


# --- the parent: one child after the other, then the tables


def collect(model: str, flow: str, timeout: float) -> Row:
    """Run one measurement in a child and return its row, also for a failure or after ``timeout`` seconds."""
    command = [sys.executable, __file__, "--child", model, flow]
    failed: Row = {"model": model, "flow": flow}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"took more than {timeout:g} s"}
    error = f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"
    return parse_printed_row(done.stdout) or {**failed, "error": error}


def format_table(rows: Iterable[Row]) -> str:
    """The rows as Markdown: a table of figures, then the kernels and the float operators of each program."""
    rows = list(rows)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [
        *_HEAD,
        f"Written {datetime.now(UTC):%Y-%m-%d} at commit {commit.strip()}; rows may be of earlier commits of that day.",
        "",
        *_summary(rows),
        "",
        *_processor_table(rows),
        "",
        "## Figures of each program",
        "",
    ]
    rows = [row for row in rows if "cpu" not in row]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *map(_line, rows)]
    lines += ["", "## Operators of each program", ""]
    for row in rows:
        if "error" not in row:
            lines.append(f"- **{row['model']}**, {row['flow']}: {_describe_operators(row)}")
    return "\n".join(lines) + "\n"


def _summary(rows: list[Row]) -> Iterator[str]:
    yield "| flow | models | exported | run | no float operator | float operators | layout changes |"
    yield "|---|---|---|---|---|---|---|"
    for flow in FLOWS:
        own = [row for row in rows if row["flow"] == flow]
        good = [row for row in own if "error" not in row]
        cells = [
            len(own),
            len(good),
            sum("sqnr_db" in row for row in good),
            sum(not row["float_operators"] for row in good),
            sum(sum(row["float_operators"].values()) for row in good),
            sum(sum(row["layout_changes"].values()) for row in good),
        ]
        if own:
            yield f"| {flow} | {' | '.join(map(str, cells))} |"


def _processor_table(rows: list[Row]) -> Iterator[str]:
    """Whether programs are whole, by model and processor."""
    yield "## Processors"
    yield ""
    yield "`CORTEX_M_INT8` for three processors. A whole program has `cortex_m` kernels only, beside the casts of its"
    yield "inputs and outputs; otherwise the next column names its other operators. Cycles are estimates. SQNR is that"
    yield (
        f"of {PROCESSOR_TEST_SAMPLES} samples that were not calibrated with. `TOSA_INT8` has int16 outputs and states,"
    )
    yield 'and the kernels have no int16 tensors; "int8 outputs" is `TOSA_INT8` without the algorithm `int16_outputs`.'
    yield ""
    columns = (
        *("model", "processor", "kernel calls", "whole", "other operators", "SQNR, dB", "int8 outputs", "TOSA_INT8"),
        "cycles",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in (row for row in rows if "cpu" in row):
        others = [_describe_counts(row[key]) for key in ("float_operators", "integer_operators") if row[key]]
        labels = [f"{kind}: {text}" for kind, text in zip(_kinds(row), others, strict=True)]
        cells = [row["model"], row["cpu"], f"{sum(row['kernels'].values())}", "no" if others else "yes"]
        figures = (row[key] for key in ("sqnr_db", "tosa_int8_outputs_sqnr_db", "tosa_sqnr_db"))
        cells += ["; ".join(labels), *(f"{figure:.1f}" for figure in figures), f"{row['cycles']:,}"]
        yield f"| {' | '.join(cells)} |"


def _kinds(row: Row) -> list[str]:
    return [kind for kind in ("float", "integer") if row[f"{kind}_operators"]]


def _line(row: Row) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['flow']} | {_escape(row['error'])} " + "| " * (len(_COLUMNS) - 3) + "|"
    counts = [sum(row[key].values()) for key in ("kernels", "float_operators", "integer_operators", "layout_changes")]
    sqnr = f"{row['sqnr_db']:.1f}" if "sqnr_db" in row else f"does not run: {_escape(row['run_error'])}"
    memory = [row[key] for key in ("layout_bytes", "pte_bytes", "planned_bytes", "largest_scratch_bytes")]
    numbers = [counts[0], counts[1], row["casts"], counts[2], counts[3], *memory]
    cells = [row["model"], row["flow"], *(f"{number:,}" for number in numbers), sqnr, f"{row['seconds']:.1f}"]
    return f"| {' | '.join(cells)} |"


def _describe_operators(row: Row) -> str:
    parts = [_describe_counts(row["kernels"])]
    for key, label in (("float_operators", "float"), ("integer_operators", "integer")):
        if row[key]:
            parts.append(f"{label}: {_describe_counts(row[key])}")
    return "; ".join(parts)


def _describe_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _escape(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


_COLUMNS = (
    *("model", "flow", "kernel calls", "float operators", "casts", "other integer operators", "layout changes"),
    *("bytes moved by them", ".pte bytes", "planned bytes", "largest scratch", "SQNR, dB", "seconds"),
)
_HEAD = (
    "# Cortex-M programs beside ExecuTorch's Cortex-M flow",
    "",
    "Written by `cortex_m.py` in this folder. Both flows quantize to int8 with the same four calibration samples and",
    "call operators of the same `cortex_m` kernel library. Weights are random from a fixed seed. Inputs are float32.",
    "",
    "- **peer**: `CortexMQuantizer` and `CortexMPassManager` for a Cortex-M55 as its documentation shows them, with",
    "  channels_last images: the caller changes the layout of the input, which is not counted.",
    "- **peer, explicit layout**: its experimental passes that write layout changes as operators, with contiguous",
    "  images.",
    "- **ours**: `CORTEX_M_INT8` with default options, with contiguous images.",
    "",
    "- Casts are `quantize_per_tensor` and `dequantize_per_tensor`; two of them are the program's input and output.",
    "  Kernel calls are those of all other `cortex_m` operators. A float operator is one of the rest that has",
    "  a floating-point tensor.",
    "- Layout changes are transpose kernels, permutations, and copies that can change the memory format",
    "  (`_clone_dim_order`, `_to_dim_order_copy`). Their bytes are those of their results.",
    "- Planned bytes are those of the memory plan: tensors, scratch memory, inputs and outputs.",
    "- SQNR is that of four samples that were not calibrated with, against PyTorch in float32. All programs run in",
    "  ExecuTorch's runtime with this project's host kernels and ExecuTorch's portable kernels.",
    "- Seconds are processor time of the whole export on one thread, without imports, on a machine with other load.",
    "",
)


def main() -> None:
    """Run the measurements that the arguments select, and write the table of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS, help="empty: only write the table")
    parser.add_argument("--processors", action="store_true", help="add rows for several processors")
    parser.add_argument("--flows", nargs="+", default=FLOWS, choices=FLOWS)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, help="rows, one line of JSON each; added to. The last row of a case counts")
    parser.add_argument("--table", type=Path, help="file for the table of all rows of --out")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "FLOW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(*arguments.child)
        return
    for model in arguments.models:
        for flow in arguments.flows:
            row = collect(model, flow, arguments.timeout)
            print(json.dumps(row), flush=True)
            add_row(arguments.out, row)
    for model in PROCESSOR_MODELS if arguments.processors else ():
        for row in measure_processors(model):
            print(json.dumps(row), flush=True)
            add_row(arguments.out, row)
    if arguments.table is not None:
        rows = index_rows(("model", "flow"), arguments.out)
        arguments.table.write_text(format_table(rows[key] for key in _order() if key in rows))


def _order() -> Iterator[tuple[str, str]]:
    processors = [f"ours, {cpu}" for cpu in PROCESSORS]
    return ((model, flow) for model in MODELS for flow in (*FLOWS, *processors))


if __name__ == "__main__":
    main()
