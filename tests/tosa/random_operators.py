"""Random TOSA operators: single operators with types, shapes and attributes around each limit of the specification.

If the record accepts an operator, ``tosa-opt`` must accept it too (strict validation), and the reference model must
compute the same integers as the record. If the record refuses it, ``tosa-opt`` or the reference model must refuse it
too. ``python -m tests.tosa.random_operators 20000`` draws 20,000 operators.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.operators import OPERATORS, UNARY, evaluate
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import validate_by_tosa_opt

Array = np.ndarray[Any, Any]
OperandsAndAttributes = tuple[list[Value], dict[str, Any]]
#: Most operators are drawn for a target with all types. The other targets check that records name the extensions they
#: need.
_FULL_TARGET = Target.from_tosa_spec("TOSA-1.0+INT+FP+int16+int4+bf16+doubleround")
_SMALLER_TARGETS = tuple(Target.from_tosa_spec(f"TOSA-1.0+{spec}") for spec in ("INT", "FP", "INT+int16", "FP+bf16"))
#: Operators of TOSA 1.0 and their types; tests/ops/test_block_scaled.py has the operators of the draft of 1.1.
_KINDS = sorted(
    kind for kind, x in OPERATORS.items() if not x.is_placeholder and any(row.version == (1, 0) for row in x.rows)
)
_TYPES = [dtype for dtype in DType if any(dtype in row.inputs for kind in _KINDS for row in OPERATORS[kind].rows)]
#: Number of operators in one graph: starting tosa-opt takes longer than checking a thousand operators.
_BATCH_SIZE = 100


class _OperatorDraw:
    """Draws one operator. Limits are drawn more often than in a uniform distribution."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kind: str = self.one(*_KINDS)
        self.record = OPERATORS[self.kind]
        row = self.one(*self.record.rows)
        self.types, self.output, self.accumulator = list(row.inputs), row.output, row.accumulator
        if self.rarely(15):
            self.types[self.integer(0, len(self.types) - 1)] = self.one(*_TYPES)
        if self.rarely(30):
            self.output = self.one(*_TYPES)

    def one(self, *choices: Any) -> Any:
        """Choose one of the arguments."""
        return self.rng.choice(choices)

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        return self.rng.randint(low, high)

    def rarely(self, times: int) -> bool:
        """Return True with probability 1 / ``times``."""
        return self.rng.random() * times < 1

    def near(self, low: int, high: int, *limits: int) -> int:
        """Draw an integer from ``low`` to ``high``, or sometimes one of ``limits``."""
        return int(self.one(*limits)) if self.rarely(25) else self.integer(low, high)

    def shape(self, least: int = 0) -> list[int]:
        """Draw a shape, mostly of rank 4 or less, rarely above 6, and rarely with a dimension of 0."""
        rank = self.near(least, 4, 0, 5, 6, 7)
        return [self.near(1, 4, 0) if self.rarely(40) else self.integer(1, 4) for _ in range(rank)]

    def value(self, i: int, shape: Sequence[int]) -> Value:
        """Make operand ``i``: an input of the graph, or a constant for INT4 and INT48, which inputs cannot have."""
        dtype = self.types[min(i, len(self.types) - 1)]
        if dtype in (DType.INT4, DType.INT48):
            limit = 7 if dtype is DType.INT4 else 4096
            return constant(np.full(shape, self.integer(-limit, limit)), dtype)
        return Value(tuple(shape), dtype, f"x{i}")

    def axis(self, shape: Sequence[int]) -> int:
        """Draw an axis, usually of ``shape``, sometimes out of range."""
        return self.near(0, max(len(shape) - 1, 0), -1, len(shape))

    def zero_points(self) -> dict[str, int]:
        """Draw the zero points; those that must be 0 are mostly 0."""
        result = {}
        for name, how in self.record.constant_operands:
            if name.endswith("_zp"):
                dtype = self.output if how == "output" else self.types[min(int(how[-1]), len(self.types) - 1)]
                free = dtype is DType.INT8 or (self.rarely(10) and not dtype.is_float and dtype is not DType.BOOL)
                result[name] = self.integer(-128, 127) if free else 0
        return result

    def input_zero_point(self, attrs: dict[str, Any]) -> dict[str, int]:
        """Draw the zero point of an unsigned input; nothing for a signed one, whose bits ``zero_points`` draws."""
        return {"input_zp": self.integer(0, 255)} if attrs.get("input_unsigned") else {}

    def operator(self) -> Op:
        """Draw the operator. Its result has the shape of the record's rule, or any shape if the rule fails."""
        family = getattr(self, f"_{self.kind.lower()}", self._elementwise)
        if self.kind.startswith("REDUCE"):
            family = self._reverse
        inputs, attrs = family()
        if "nan_mode" in self.record.fields:
            attrs["nan_mode"] = self.one("PROPAGATE", "IGNORE")
        if "acc_type" in self.record.fields:
            attrs["acc_type"] = self.one(DType.INT32, DType.INT48, DType.FP32, DType.FP16, self.accumulator)
            attrs["acc_type"] = attrs["acc_type"] if self.rarely(10) else self.accumulator
        attrs |= self.zero_points()
        attrs |= self.input_zero_point(attrs)
        out = attrs.pop("out", None)
        op = Op(self.kind, inputs, Value(tuple(out or inputs[0].shape), self.output, "y"), attrs)
        with contextlib.suppress(
            IndexError, ValueError, ZeroDivisionError
        ):  # operands of mismatching shapes have no result shape
            op.output.shape = tuple(self.record.shape(op))
        op.output.producer = op
        return op

    # -- families --------------------------------------------------------------------------------------------

    def _elementwise(self) -> OperandsAndAttributes:
        shape, inputs = self.shape(), []
        for i in range(len(self.types)):
            sizes = [1 if self.rarely(6) else self.near(size, size, 2) if self.rarely(8) else size for size in shape]
            sizes = sizes[1:] if self.rarely(40) else sizes
            inputs.append(self.value(i, shape if self.kind in UNARY else sizes))
        return inputs, {}

    def _clamp(self) -> OperandsAndAttributes:
        inputs, _ = self._elementwise()
        low, high = self.integer(-3, 3), self.near(0, 9, -9, 127, 128, 32767, 32768)
        return inputs, {"min_val": low, "max_val": high}

    def _table(self) -> OperandsAndAttributes:
        inputs, _ = self._elementwise()
        is_int16 = self.types[0] is not DType.INT8
        table = np.arange(513 if is_int16 else 256) - 128
        if is_int16 and self.rarely(4):
            table[self.integer(0, 512)] = self.one(-32768, 32767, 32639, -32640)
        size = len(table) - self.near(0, 0, 1)
        return inputs, {"table": table[:size].astype(np.int16 if is_int16 else np.int8)}

    def _mul(self) -> OperandsAndAttributes:
        shift = self.near(0, 0, 1, 31, 62, 63, 64, -1) if self.types[0] is not DType.INT32 else self.near(0, 63, 64, -1)
        return self._elementwise()[0], {"shift": shift}

    def _arithmetic_right_shift(self) -> OperandsAndAttributes:
        inputs, _ = self._elementwise()
        return self._constant_amounts(inputs), {"round": self.one(False, True)}

    def _logical_left_shift(self) -> OperandsAndAttributes:
        return self._constant_amounts(self._elementwise()[0]), {}

    _logical_right_shift = _intdiv = _logical_left_shift

    def _constant_amounts(self, inputs: list[Value]) -> list[Value]:
        """Replace the second operand sometimes by a constant, in range or not."""
        if self.rarely(2) and inputs[1].dtype in (DType.INT8, DType.INT16, DType.INT32) and inputs[1].size:
            limit = 8 * inputs[1].dtype.bytes
            fill = self.near(1, limit - 1, 0, limit, -1)
            inputs[1] = constant(np.full(inputs[1].shape, fill), inputs[1].dtype)
        return inputs

    def _rescale(self) -> OperandsAndAttributes:
        inputs, _ = self._elementwise()
        shape = inputs[0].shape
        scale32 = (self.types[0] is not DType.INT48) != self.rarely(12)
        per_channel = self.rarely(3) and bool(shape)
        count = shape[-1] if per_channel else 1
        count += self.near(0, 0, 1) if self.rarely(6) else 0
        top = (1 << (31 if scale32 else 15)) - 1
        attrs = {
            "scale32": scale32,
            "rounding_mode": self.one("SINGLE_ROUND", "DOUBLE_ROUND"),
            "per_channel": per_channel,
            "input_unsigned": self.rarely(4),
            "output_unsigned": False,
            "multiplier": np.array(
                [self.near(0, top, top, -1) for _ in range(count)], np.int32 if scale32 else np.int16
            ),
            "shift": np.array([self.near(20, 62, 1, 2, 8, 9, 15, 16, 17, 62, 63) for _ in range(count)], np.int8),
        }
        return inputs, attrs

    def _concat(self) -> OperandsAndAttributes:
        shape, count = self.shape(1), self.near(1, 4, 63, 64, 65)
        axis = self.axis(shape)
        inputs = []
        for i in range(count):
            sizes = list(shape)
            if 0 <= axis < len(shape):
                sizes[axis] = self.integer(1, 3)
            if self.rarely(50) and sizes:
                sizes[-1] += 1
            inputs.append(Value(tuple(sizes), self.types[0], f"x{i}"))
        return inputs, {"axis": axis}

    def _pad(self) -> OperandsAndAttributes:
        shape = self.shape(1)
        padding = [self.near(0, 3, -1) for _ in range(2 * len(shape))]
        return [self.value(0, shape)], {"padding": padding, "pad_const": self.integer(0, 1)}

    def _reshape(self) -> OperandsAndAttributes:
        shape = self.shape()
        size = int(np.prod(shape))
        factor = self.one(1, *(n for n in range(1, size + 1) if size % n == 0))
        new = [1] * self.near(0, 3, 4, 5) + [factor, size // factor]
        new[-1] += self.near(0, 0, 1)
        return [self.value(0, shape)], {"shape": [] if size == 1 and self.rarely(2) else new}

    def _reverse(self) -> OperandsAndAttributes:
        shape = self.shape(1)
        return [self.value(0, shape)], {"axis": self.axis(shape)}

    _argmax = _reverse

    def _slice(self) -> OperandsAndAttributes:
        shape = self.shape(1)
        start = [self.near(0, max(n - 1, 0), -1) for n in shape]
        size = [self.near(1, max(n - a, 1), 0, n - a + 1) for n, a in zip(shape, start, strict=True)]
        return [self.value(0, shape)], {"start": start, "size": size}

    def _tile(self) -> OperandsAndAttributes:
        shape = self.shape(1)
        return [self.value(0, shape)], {"multiples": [self.near(1, 3, 0) for _ in shape]}

    def _transpose(self) -> OperandsAndAttributes:
        shape = self.shape(1)
        perms = self.rng.sample(range(len(shape)), len(shape))
        if self.rarely(20) and perms:
            perms[0] = self.one(-1, len(shape), perms[-1])
        return [self.value(0, shape)], {"perms": perms}

    def _gather(self) -> OperandsAndAttributes:
        n, k, w, c = (self.integer(1, 4) for _ in range(4))
        inputs = [self.value(0, self._maybe_mismatch([n, k, c])), self.value(1, self._maybe_mismatch([n, w]))]
        if self.rarely(3) and self.types[1] is DType.INT32:
            inputs[1] = constant(np.full(inputs[1].shape, self.near(0, k - 1, -1, k)), DType.INT32)
        return inputs, {}

    def _scatter(self) -> OperandsAndAttributes:
        n, k, c = (self.integer(1, 4) for _ in range(3))
        w = self.near(1, k, k + 1)
        shapes = ([n, k, c], [n, w], [n, w, c])
        return [self.value(i, self._maybe_mismatch(shape)) for i, shape in enumerate(shapes)], {}

    def _maybe_mismatch(self, shape: list[int]) -> list[int]:
        """Return the shape, rarely with a mismatching dimension or another rank."""
        if not self.rarely(40):
            return shape
        i = self.integer(0, len(shape) - 1)
        return shape[:i] + self.one([], [shape[i] + 1], [1, shape[i]]) + shape[i + 1 :]

    def _matmul(self) -> OperandsAndAttributes:
        n, h, c, w = (self.integer(1, 4) for _ in range(4))
        return [self.value(0, self._maybe_mismatch([n, h, c])), self.value(1, self._maybe_mismatch([n, c, w]))], {}

    def _conv2d(self) -> OperandsAndAttributes:
        dims = 3 if self.kind == "CONV3D" else 2
        n, ic, oc = (self.integer(1, 3) for _ in range(3))
        sizes, kernel = [self.integer(1, 6) for _ in range(dims)], [self.integer(1, 4) for _ in range(dims)]
        attrs: dict[str, Any] = {
            "pad": [self.near(0, 2, -1, 3) for _ in range(2 * dims)],
            "stride": [self.near(1, 3, 0, 4) for _ in range(dims)],
            "dilation": [self.near(1, 2, 0, 3) for _ in range(dims)],
            "local_bound": False,
        }
        self._limits(attrs, sizes, kernel)
        weight = [*kernel, ic, oc] if self.kind == "DEPTHWISE_CONV2D" else [oc, *kernel, ic]
        channels = ic * oc if self.kind == "DEPTHWISE_CONV2D" else oc
        if self.kind == "TRANSPOSE_CONV2D":
            low, high = -max(kernel), max(kernel)
            attrs = {"out_pad": [self.integer(low, high) for _ in range(4)], **attrs}
            del attrs["pad"], attrs["dilation"]
        shapes = ([n, *sizes, ic], weight, [self.near(channels, channels, 1, channels + 1)])
        return [self.value(i, self._maybe_mismatch(shape)) for i, shape in enumerate(shapes)], attrs

    _conv3d = _depthwise_conv2d = _transpose_conv2d = _conv2d

    def _limits(self, attrs: dict[str, Any], sizes: list[int], kernel: list[int]) -> None:
        """Pad so that windows end at the end of the image; rarely draw large strides, dilations and windows."""
        if self.rarely(12):
            attrs["stride"][-1] = self.one(8192, 8193)
        if self.rarely(12) and "dilation" in attrs and kernel[-1] > 1:
            attrs["dilation"][-1] = 8192 // kernel[-1] + self.one(0, 1)
            attrs["pad"][-1] = self.one(8192, 8193)
        for i, size in enumerate(sizes):
            span = attrs.get("dilation", [1] * len(sizes))[i] * (kernel[i] - 1) + 1
            slack = size + attrs["pad"][2 * i] + attrs["pad"][2 * i + 1] - span
            step = max(attrs["stride"][i], 1)
            if not self.rarely(10):
                sizes[i] += -slack if slack < 0 else -slack % step if step < 100 else 0

    def _avg_pool2d(self) -> OperandsAndAttributes:
        n, c = self.integer(1, 3), self.integer(1, 3)
        sizes, kernel = [self.integer(1, 6) for _ in range(2)], [self.near(1, 4, 0) for _ in range(2)]
        attrs: dict[str, Any] = {
            "kernel": kernel,
            "stride": [self.near(1, 3, 0) for _ in range(2)],
            "pad": [self.near(0, max(kernel[i // 2] - 1, 0), -1, kernel[i // 2]) for i in range(4)],
        }
        self._limits(attrs, sizes, kernel)
        return [self.value(0, self._maybe_mismatch([n, *sizes, c]))], attrs

    _max_pool2d = _avg_pool2d

    def _resize(self) -> OperandsAndAttributes:
        n, c = self.integer(1, 2), self.integer(1, 3)
        sizes: list[int] = []
        out: list[int] = []
        scale: list[int] = []
        offset: list[int] = []
        border: list[int] = []
        for _ in range(2):
            size = self.near(1, 8, 16383, 16384) if self.rarely(30) else self.integer(1, 8)
            numerator = self.near(1, 8, 0, 256, 257, 2048, 2049)
            denominator = self.near(1, 8, 0, 16 * numerator - 1, 16 * numerator)
            shift = self.near(-numerator, numerator, 16 * numerator, 16 * numerator - 1, -numerator - 1)
            length = (size - 1) * numerator - shift
            last = max(-(-length // max(denominator, 1)), 0)
            edge = last * denominator - length if self.rarely(2) else (last - 1) * denominator - length
            edge += self.near(0, 0, 1)
            count = (length + edge) // max(denominator, 1) + 1
            for store, amount in zip((sizes, out, offset, border), (size, count, shift, edge), strict=True):
                store.append(amount)
            scale += [numerator, denominator]
        mode = self.one("NEAREST", "BILINEAR")
        if self.output in (DType.INT32, DType.INT48) and not self.rarely(10):
            mode = "BILINEAR"
        elif not self.output.is_float and not self.rarely(10):
            mode = "NEAREST"
        attrs = {"scale": scale, "offset": offset, "border": border, "mode": mode}
        return [self.value(0, self._maybe_mismatch([n, *sizes, c]))], {**attrs, "out": (n, *out, c)}


def draw_operators(count: int, seed: int = 0) -> list[tuple[Target, Op]]:
    """Draw ``count`` operators, each with its target; a seed determines them."""
    rng = random.Random(seed)
    targets = (rng.choice(_SMALLER_TARGETS) if rng.random() < 0.05 else _FULL_TARGET for _ in range(count))
    return [(target, _OperatorDraw(rng).operator()) for target in targets]


# -- tosa-opt and the reference model -----------------------------------------------------------------------


def _graph(ops: Sequence[Op]) -> bytes:
    graph = Graph()
    for i, op in enumerate(ops):
        for j, value in enumerate(op.inputs):
            value.name = f"op{i}_{j}"
            if value.data is None:
                graph.inputs.append(value)
        graph.ops.append(op)
        graph.outputs.append(op.output)
    return serialize(graph)


def _draw_values(op: Op, i: int, value: Value, rng: np.random.Generator) -> Array:
    """Draw values for which the specification defines the operator's result."""
    if value.dtype is DType.BOOL:
        return rng.integers(0, 2, value.shape).astype(np.bool_)
    if value.dtype.is_float:
        return rng.uniform(0.1, 2, value.shape).astype(value.dtype.numpy)
    if op.kind == "SCATTER" and i == 1 and value.rank == 2:
        rows = [rng.permutation(op.inputs[0].shape[1])[: value.shape[1]] for _ in range(value.shape[0])]
        return np.stack(rows).astype(value.dtype.numpy)
    low, high = _bounds(op, i, value)
    data = rng.integers(low, high, value.shape, endpoint=True)
    if data.size and op.kind == "RESCALE":  # the value farthest from the zero point
        zero_point, is_unsigned = op.attrs["input_zp"], op.attrs["input_unsigned"]
        data.flat[0] = (0 if zero_point > 127 else -1) if is_unsigned else low if zero_point > 0 else high
    if data.size and op.kind == "TABLE" and value.dtype is DType.INT16:  # the steepest segment
        slopes = np.abs(np.diff(op.attrs["table"].astype(np.int32)))
        data.flat[0] = int(slopes.argmax()) * 128 - 32768 + 1
    return data.astype(value.dtype.numpy)


def _bounds(op: Op, i: int, value: Value) -> tuple[int, int]:
    """Return the smallest and largest integer of an operand."""
    if op.kind.endswith("SHIFT") and i == 1:
        return 0, 8 * value.dtype.bytes - 1
    if op.kind == "GATHER" and i == 1:
        return 0, max(op.inputs[0].shape[1:2], default=1) - 1
    if value.dtype.bytes <= 2:
        return value.dtype.range
    if op.kind == "RESCALE" and value.dtype is DType.INT32:
        limit = min(1 << 31, 1 << (max(int(np.min(op.attrs["shift"])), 1) - 1))
        return -limit, limit - 1
    sums = ("ADD", "SUB", "REDUCE_SUM", "NEGATE", "ABS", "EQUAL", "GREATER", "GREATER_EQUAL", "CLZ")
    limit = 1 << 29 if op.kind in sums else 1 << 14  # products of larger values would overflow
    return (1 if op.kind == "INTDIV" and i == 1 else -limit), limit


def _draw_operands(op: Op) -> list[Array]:
    """Return the values of all operands, constants included."""
    rng = np.random.default_rng(0)
    return [
        value.data if value.data is not None else _draw_values(op, i, value, rng) for i, value in enumerate(op.inputs)
    ]


def _select_inputs(op: Op, arrays: Sequence[Array]) -> list[Array]:
    """Select the arrays of operands that are inputs of the graph."""
    return [array for value, array in zip(op.inputs, arrays, strict=True) if value.data is None]


def _run_reference(ops: Sequence[Op]) -> str | None:
    """Run the reference model; return its error or a difference to the records' evaluation, else None."""
    arrays = [_draw_operands(op) for op in ops]
    try:
        results = reference_model.run(
            _graph(ops), [x for op, row in zip(ops, arrays, strict=True) for x in _select_inputs(op, row)]
        )
    except ArmBackendError as error:
        return str(error)
    for op, row, result in zip(ops, arrays, results, strict=True):
        numbers = (
            op.output.dtype.is_float or op.output.dtype is DType.INT48
        )  # the reference model returns types that numpy lacks as bytes
        expected = None if numbers else evaluate(op, row)
        if expected is not None and not np.array_equal(expected, result):
            return f"{op!r} is evaluated to other values"
    return None


def _find_refused(ops: list[tuple[Target, Op]], check: Callable[[list[tuple[Target, Op]]], str | None]) -> list[str]:
    """Find the operators that ``check`` refuses, by bisection, each with the reason."""
    reason = check(ops) if ops else None
    if reason is None:
        return []
    if len(ops) == 1:
        return [f"{ops[0][0].name}: accepted {ops[0][1]!r}, but: {reason}"]
    half = len(ops) // 2
    return _find_refused(ops[:half], check) + _find_refused(ops[half:], check)


def _has_bf16(op: Op) -> bool:
    """Whether the operator has BF16 tensors, which numpy does not support."""
    return DType.BF16 in {value.dtype for value in (*op.inputs, op.output)}


def _validate_strictly(ops: list[tuple[Target, Op]]) -> str | None:
    return validate_by_tosa_opt(_graph([op for _, op in ops]), ops[0][0])


def _accepted_by_both(refused: Sequence[tuple[Target, Op]]) -> list[int]:
    """Find the operators that tosa-opt and the reference model accept. Those that cannot be serialized are refused."""
    graphs: dict[int, tuple[bytes, list[Array]]] = {}
    for i, (_, op) in enumerate(refused):
        with contextlib.suppress(Exception):
            graphs[i] = _graph([op]), _select_inputs(op, _draw_operands(op))
    command = [sys.executable, str(Path(__file__).with_name("forked_model.py"))]
    done = subprocess.run(command, input=pickle.dumps(list(graphs.values())), capture_output=True, check=True)
    verdicts = zip(graphs.items(), pickle.loads(done.stdout), strict=True)
    ran = [(i, flatbuffer) for (i, (flatbuffer, _)), no in verdicts if not no]
    return [i for i, flatbuffer in ran if validate_by_tosa_opt(flatbuffer, refused[i][0]) is None]


def disagreements(drawn: Sequence[tuple[Target, Op]]) -> tuple[list[str], Counter[str]]:
    """Compare the records with tosa-opt and the reference model.

    Returns:
        The disagreements, and the number of accepted and refused operators by kind.
    """
    accepted: dict[str, list[tuple[Target, Op]]] = {}
    refused: list[tuple[Target, Op]] = []
    reasons: list[str] = []
    counts: Counter[str] = Counter()
    for target, op in drawn:
        try:
            reason = op_refusal(target, op)
        except AssertionError as fault:
            reason = str(fault)
        counts[f"{op.kind} {'refused' if reason else 'accepted'}"] += 1
        if reason is None:
            accepted.setdefault(target.name, []).append((target, op))
        else:
            refused.append((target, op))
            reasons.append(reason)
    wrong = [f"refused {refused[i][1]!r}: {reasons[i]}" for i in _accepted_by_both(refused)]
    for ops in accepted.values():
        for start in range(0, len(ops), _BATCH_SIZE):
            batch = ops[start : start + _BATCH_SIZE]
            wrong += _find_refused(batch, _validate_strictly)
            runnable = [pair for pair in batch if not _has_bf16(pair[1])]
            wrong += _find_refused(runnable, lambda some: _run_reference([op for _, op in some]))
    return wrong, counts


def main(count: int) -> int:
    """Draw ``count`` operators; print their numbers by kind and the disagreements. Returns 1 if there are any."""
    drawn = draw_operators(count)
    wrong, counts = disagreements(drawn)
    kinds = sorted({name.split()[0] for name in counts})
    for kind in kinds:
        print(f"{kind:24}{counts[f'{kind} accepted']:8}{counts[f'{kind} refused']:8}")
    refused = sum(count for name, count in counts.items() if name.endswith("refused"))
    print(f"{len(drawn)} operators: {len(drawn) - refused} accepted, {refused} refused, {len(wrong)} disagreements")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20000))
