"""NPU programs of conformance tests: compiled by Vela, run on the emulator, compared with the TOSA reference model.

A test is compiled twice. The original graph shows what Vela miscompiles. The graph after the compiler's last passes is
what a user's program has; only its results must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError, CompileError
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.ethosu_stream import StreamError
from arm_recipes.runtime.tosa_deserialize import deserialize
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa.conformance import reference_model
from tests.tosa.conformance.checks import describe_difference, is_small
from tests.tosa.conformance.generation import GeneratedTest
from tests.tosa_graphs import make_target

Array = np.ndarray[Any, Any]
#: Time limit of Vela.
VELA_TIMEOUT_SECONDS = 60
#: Limits of compiled tests, as in ``checks``.
MAX_MACS, MAX_ELEMENTS = 2_000_000, 140_000
#: Limit of NPU operations of a compiled test: for 65,537 Vela takes minutes.
MAX_OPERATIONS = 2000
#: Outcomes of a test. The first two are detected before compilation.
UNSUPPORTED, TOO_LARGE, VELA_REFUSED, EQUAL, WRONG = (
    "the hardware lacks it",
    "too large",
    "Vela refuses it",
    "equal",
    "wrong",
)


@dataclass(frozen=True)
class NpuVerdict:
    """Outcome of a test on one NPU.

    Attributes:
        accelerator: the NPU, for example ``ethos-u55-128``.
        written: outcome of the graph after the last passes: UNSUPPORTED, TOO_LARGE, VELA_REFUSED, EQUAL or WRONG.
        raw: outcome of the original graph; empty if it is not compiled or the passes change nothing.
        detail: reason of the refusal, or the wrong values.
    """

    accelerator: str
    written: str
    raw: str = ""
    detail: str = ""


def try_on_npu(test: GeneratedTest, accelerator: str, emulator: Emulator) -> NpuVerdict:
    """Check a test as ``check_on_npu``; an exception counts as WRONG."""
    try:
        return check_on_npu(test, accelerator, emulator)
    except Exception as error:
        return NpuVerdict(accelerator, WRONG, detail=f"{type(error).__name__}: {error}")


def check_on_npu(test: GeneratedTest, accelerator: str, emulator: Emulator) -> NpuVerdict:
    """Compile and execute an integer test that expects success."""
    target = make_target(accelerator)
    graph, inputs = make_runnable(test)
    reason = next((reason for op in graph.ops if (reason := op_refusal(target, op))), None)
    if reason is not None:
        return NpuVerdict(accelerator, UNSUPPORTED, detail=reason)
    if any(value.dtype in (DType.INT48, DType.INT4) for value in graph.inputs):
        return NpuVerdict(accelerator, UNSUPPORTED, detail="no delegate takes elements of 48 or 4 bits")
    if not is_small(graph, MAX_MACS, MAX_ELEMENTS) or any(_count_operations(op) > MAX_OPERATIONS for op in graph.ops):
        return NpuVerdict(accelerator, TOO_LARGE)
    raw = serialize(graph)
    expected = reference_model.run(raw, deserialize(raw), inputs)
    written, problem = _apply_last_passes(deserialize(raw), target)
    if problem:
        return NpuVerdict(accelerator, WRONG, detail=f"the last passes: {problem}")
    result, detail = compile_and_compare(written, inputs, expected, accelerator, emulator)
    if written == raw:
        return NpuVerdict(accelerator, result, detail=detail)
    raw_result, raw_detail = compile_and_compare(raw, inputs, expected, accelerator, emulator)
    return NpuVerdict(accelerator, result, raw_result, detail or raw_detail)


def _count_operations(op: Op) -> int:
    """Estimate the NPU operations: Vela splits broadcast arithmetic of rank five and more, one operation per image."""
    broadcast = len({value.shape for value in op.inputs}) > 1 and op.kind in ELEMENTWISE
    return prod(op.output.shape[:-3]) if broadcast and op.output.rank > 4 else 1


def make_runnable(test: GeneratedTest) -> tuple[Graph, list[Array]]:
    """Deserialize the test. A graph of constants gets an input, and int48 results are rescaled to int16."""
    graph, inputs = deserialize(test.flatbuffer), list(test.inputs)
    if not graph.inputs:
        constant = graph.ops[0].inputs[0]
        assert constant.data is not None
        source = graph.add_input(constant.shape, constant.dtype, "source")
        graph.ops[0].inputs[0] = source
        inputs.append(constant.data)
    for i, value in enumerate(graph.outputs):
        if value.dtype is DType.INT48:
            before = [*graph.outputs[:i], value]
            wide_result = _compute_outputs(graph, before, inputs)[-1]
            graph.outputs[i] = _rescale_to_int16(graph, value, int(np.abs(wide_result).max(initial=0)))
    return graph, inputs


def _compute_outputs(graph: Graph, outputs: Sequence[Value], inputs: Sequence[Array]) -> list[Array]:
    part = deserialize(serialize(graph))
    part.outputs = part.outputs[: len(outputs)]
    return reference_model.run(serialize(part), deserialize(serialize(part)), inputs)


def _rescale_to_int16(graph: Graph, value: Value, largest: int) -> Value:
    """Rescale an int48 value by a power of two to int16, as lowering does after every sum of products."""
    shift = max(largest.bit_length() - 15, 0)
    attrs: dict[str, Any] = {"scale32": False, "rounding_mode": "SINGLE_ROUND", "per_channel": False}
    attrs |= {"input_unsigned": False, "output_unsigned": False, "input_zp": 0, "output_zp": 0}
    attrs |= {"multiplier": np.array([1 << 14], np.int16), "shift": np.array([14 + shift], np.int8)}
    result = Value(value.shape, DType.INT16, "narrowed")
    result.producer = Op("RESCALE", [value], result, attrs)
    graph.ops.append(result.producer)
    return result


def _apply_last_passes(graph: Graph, target: Target) -> tuple[bytes, str]:
    """Run the last passes; return the flatbuffer, and the failed assertion or an empty string."""
    try:
        pipeline.run_last_passes(graph, target)
        pipeline.assert_serializable(graph, target)
    except AssertionError as error:
        return b"", str(error) or "an assertion"
    return serialize(graph), ""


def compile_and_compare(
    flatbuffer: bytes, inputs: Sequence[Array], expected: Sequence[Array], accelerator: str, emulator: Emulator
) -> tuple[str, str]:
    """Compile and run a flatbuffer; return VELA_REFUSED, EQUAL or WRONG, and the reason."""
    sizes = [prod(array.shape) * array.itemsize for array in expected]
    try:
        spec = EthosUCompileSpec(accelerator)
        compiled = compile_ethosu(
            flatbuffer,
            spec,
            delegate="",
            find_operator=lambda _: None,
            output_bytes=sizes,
            timeout=VELA_TIMEOUT_SECONDS,
        )
    except CompileError as error:
        return VELA_REFUSED, str(error).partition("\n")[0]
    shapes = [(array.dtype.name, array.shape) for array in expected]
    try:
        results = emulator.run(read_payload(compiled.data), inputs, shapes)
    except (StreamError, ArmBackendError) as error:
        return WRONG, str(error)
    details = [describe_difference(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]
    return (WRONG, "; ".join(filter(None, details))) if any(details) else (EQUAL, "")
