"""What Vela and the emulator make of one test of the conformance generator, beside the TOSA reference model.

A test is compiled twice: as it is written, which says what Vela gets wrong, and as the compiler's last passes leave it,
which is what a user's program has. Only the second has to be right.
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
from tests.graphs import family
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa.conformance import model
from tests.tosa.conformance.generation import Generated
from tests.tosa.conformance.judge import differing, is_small

Array = np.ndarray[Any, Any]
#: That Vela may take.
SECONDS = 60
#: Of the largest test that is compiled, see ``judge.MOST_WORK``.
MOST_WORK, MOST_ELEMENTS = 2_000_000, 140_000
#: Of an NPU in one test: for 65,537 of them Vela takes minutes.
MOST_OPERATIONS = 2000
#: What may become of a test; the last three only of what the compiler would write.
HARDWARE, LARGE, VELA, EQUAL, WRONG = "the hardware lacks it", "too large", "Vela refuses it", "equal", "wrong"


@dataclass(frozen=True)
class NpuVerdict:
    """What became of a test on one NPU.

    Attributes:
        written: of what the last passes leave: HARDWARE, LARGE, VELA, EQUAL or WRONG.
        raw: of the operator alone; empty where it is not compiled or the passes change nothing.
        detail: why it is refused, or what is wrong.
    """

    accelerator: str
    written: str
    raw: str = ""
    detail: str = ""


def attempt(test: Generated, accelerator: str, emulator: Emulator) -> NpuVerdict:
    """As ``judge``; an exception is something wrong."""
    try:
        return judge(test, accelerator, emulator)
    except Exception as error:
        return NpuVerdict(accelerator, WRONG, detail=f"{type(error).__name__}: {error}")


def judge(test: Generated, accelerator: str, emulator: Emulator) -> NpuVerdict:
    """Compile and execute a test that is to work, of integers."""
    target = family(accelerator)
    graph, inputs = runnable(test)
    reason = next((reason for op in graph.ops if (reason := op_refusal(target, op))), None)
    if reason is not None:
        return NpuVerdict(accelerator, HARDWARE, detail=reason)
    if any(value.dtype in (DType.INT48, DType.INT4) for value in graph.inputs):
        return NpuVerdict(accelerator, HARDWARE, detail="no delegate takes elements of 48 or 4 bits")
    if not is_small(graph, MOST_WORK, MOST_ELEMENTS) or any(_operations(op) > MOST_OPERATIONS for op in graph.ops):
        return NpuVerdict(accelerator, LARGE)
    raw = serialize(graph)
    expected = model.run(raw, deserialize(raw), inputs)
    written, problem = _finished(deserialize(raw), target)
    if problem:
        return NpuVerdict(accelerator, WRONG, detail=f"the last passes: {problem}")
    result, detail = outcome(written, inputs, expected, accelerator, emulator)
    if written == raw:
        return NpuVerdict(accelerator, result, detail=detail)
    alone, of_raw = outcome(raw, inputs, expected, accelerator, emulator)
    return NpuVerdict(accelerator, result, alone, detail or of_raw)


def _operations(op: Op) -> int:
    """Into how many Vela takes arithmetic of five dimensions and more apart that is broadcast: one for each image."""
    broadcast = len({value.shape for value in op.inputs}) > 1 and op.kind in ELEMENTWISE
    return prod(op.output.shape[:-3]) if broadcast and op.output.rank > 4 else 1


def runnable(test: Generated) -> tuple[Graph, list[Array]]:
    """The test with an input, of what was all constant, and with a result that an NPU can return."""
    graph, inputs = deserialize(test.flatbuffer), list(test.inputs)
    if not graph.inputs:
        constant = graph.ops[0].inputs[0]
        assert constant.data is not None
        given = graph.add_input(constant.shape, constant.dtype, "given")
        graph.ops[0].inputs[0] = given
        inputs.append(constant.data)
    for i, value in enumerate(graph.outputs):
        if value.dtype is DType.INT48:
            before = [*graph.outputs[:i], value]
            wide = _results(graph, before, inputs)[-1]
            graph.outputs[i] = _narrowed(graph, value, int(np.abs(wide).max(initial=0)))
    return graph, inputs


def _results(graph: Graph, outputs: Sequence[Value], inputs: Sequence[Array]) -> list[Array]:
    part = deserialize(serialize(graph))
    part.outputs = part.outputs[: len(outputs)]
    return model.run(serialize(part), deserialize(serialize(part)), inputs)


def _narrowed(graph: Graph, value: Value, largest: int) -> Value:
    """INT48 by the power of two that brings it into INT16, as lowering writes it behind every sum of products."""
    less = max(largest.bit_length() - 15, 0)
    attrs: dict[str, Any] = {"scale32": False, "rounding_mode": "SINGLE_ROUND", "per_channel": False}
    attrs |= {"input_unsigned": False, "output_unsigned": False, "input_zp": 0, "output_zp": 0}
    attrs |= {"multiplier": np.array([1 << 14], np.int16), "shift": np.array([14 + less], np.int8)}
    result = Value(value.shape, DType.INT16, "narrowed")
    result.producer = Op("RESCALE", [value], result, attrs)
    graph.ops.append(result.producer)
    return result


def _finished(graph: Graph, target: Target) -> tuple[bytes, str]:
    """The flatbuffer behind the last passes; or what is wrong with it."""
    try:
        pipeline.finish(graph, target)
        pipeline.check(graph, target)
    except AssertionError as error:
        return b"", str(error) or "an assertion"
    return serialize(graph), ""


def outcome(
    flatbuffer: bytes, inputs: Sequence[Array], expected: Sequence[Array], accelerator: str, emulator: Emulator
) -> tuple[str, str]:
    """VELA, EQUAL or WRONG, and why."""
    sizes = [prod(array.shape) * array.itemsize for array in expected]
    try:
        spec = EthosUCompileSpec(accelerator)
        compiled = compile_ethosu(flatbuffer, spec, delegate="", locate=lambda _: None, results=sizes, timeout=SECONDS)
    except CompileError as error:
        return VELA, str(error).partition("\n")[0]
    shapes = [(array.dtype.name, array.shape) for array in expected]
    try:
        results = emulator.run(read_payload(compiled.data), inputs, shapes)
    except (StreamError, ArmBackendError) as error:
        return WRONG, str(error)
    details = [differing(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]
    return (WRONG, "; ".join(filter(None, details))) if any(details) else (EQUAL, "")
