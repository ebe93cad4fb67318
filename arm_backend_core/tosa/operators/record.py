"""Records of TOSA operators: types, attributes, limits, shape rule, conditions and evaluation of each operator.

The records follow the TOSA specification 1.0 at level 8K, with data types of the 1.1 draft. If a record accepts an
operator, ``tosa-opt`` in strict mode accepts it too, and the reference model runs it (except for placeholders).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import EXTENSIONS, PROFILES, Target
from arm_backend_core.tosa.graph import Op

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


class Level(NamedTuple):
    """Limits of a TOSA level: the maximum sizes that an implementation must support (TOSA 1.0, section 1.7)."""

    max_rank: int = 6
    max_kernel: int = 8192
    max_stride: int = 8192
    max_scale: int = 256
    max_log2_size: int = 31
    max_tensor_list_size: int = 64


LEVEL_8K = Level()

_TYPE_NAMES = "b i4 i8 i16 i32 i48 f16 bf16 f32 e4m3 e5m2 e2m3 e3m2 e2m1 ue8m0"
_TYPES_BY_NAME = dict(zip(_TYPE_NAMES.split(), DType, strict=True))


@dataclass(frozen=True)
class TypeRow:
    """A row of an operator's table "supported data types" in the specification.

    Attributes:
        inputs: element types of the operands.
        output: element type of the result.
        accumulator: element type of the accumulator, for operators with the attribute ``acc_type``.
        requirements: alternatives, of which the target must support at least one. An alternative is a profile, an
            extension, or several of them joined by "&": {"INT", "bf16&fp8e4m3"}.
        version: the first TOSA version with this row.
    """

    inputs: tuple[DType, ...]
    output: DType
    accumulator: DType | None
    requirements: frozenset[str]
    version: tuple[int, int] = (1, 0)

    @staticmethod
    def parse(text: str) -> TypeRow:
        """Parse ``inputs>output/accumulator:requirements@version``.

        Examples: ``f16,f16,f16>f16/f32:FP``, ``b>f32:FP@1.1``. "|" separates alternative requirements.

        Raises:
            ValueError: a type, profile or extension is unknown.
        """
        types, _, rest = text.partition(":")
        needs, _, version = rest.partition("@")
        inputs, _, result = types.partition(">")
        output, _, accumulator = result.partition("/")
        unknown = {*inputs.split(","), output, accumulator or output} - _TYPES_BY_NAME.keys()
        unknown |= set(needs.replace("&", "|").split("|")) - {*PROFILES, *EXTENSIONS}
        if unknown:
            raise ValueError(f"TOSA operator row {text!r}: unknown {', '.join(sorted(unknown))}")
        major, minor = (version or "1.0").split(".")
        return TypeRow(
            tuple(_TYPES_BY_NAME[name] for name in inputs.split(",")),
            _TYPES_BY_NAME[output],
            _TYPES_BY_NAME[accumulator] if accumulator else None,
            frozenset(needs.split("|")),
            (int(major), int(minor)),
        )

    def is_supported_by(self, target: Target) -> bool:
        """Whether the profiles and extensions of ``target`` include this row."""
        return any(
            target.profiles_and_extensions.issuperset(requirement.split("&")) for requirement in self.requirements
        )


#: Function that yields an operator's violations of the specification, as in "TOSA has no <kind> with <violation>".
Violations = Callable[[Op], Iterator[str]]


@dataclass(frozen=True)
class Operator:
    """The record of a TOSA operator.

    Attributes:
        kind: the name of the operator in TOSA.
        attribute_table: name of the flatbuffer's attribute table, without the suffix "Attribute".
        rows: the supported combinations of element types.
        ranks: (minimum, maximum) rank of each operand. The last entry applies to all further operands.
        shape: computes the shape of the result. For an operator with violations, the shape may be wrong.
        fields: names of the ``Op.attrs`` that the attribute table stores, in the table's order.
        constant_operands: (name in ``Op.attrs``, type) of each attribute that is a constant operand in the flatbuffer.
            These operands follow the data operands, in this order. The type is one of: "shape" (CONST_SHAPE); "input0",
            "input1" or "output", the element type of that value; "multiplier", INT32 if ``scale32``, else INT16; or the
            value of a DType, such as "int8".
        find_violations: yields the violated ERROR_IF and REQUIRE statements of the specification. It does not check
            statements on values that are known only at run time.
        compute: function that evaluates the operator in numpy, bit-exact for integers; it returns None if the result is
            undefined or depends on the target. The field is None if there is no such function.
        is_elementwise: whether each result element depends on one element of each operand, and no attribute names a
            dimension.
        is_data_movement: whether the operator only copies elements.
        is_injective: whether the operator is data movement of one operand that neither repeats elements nor adds new
            ones; it may drop elements (SLICE).
        per_dimension: names of the ``Op.attrs`` with one entry, or a pair of entries, for each dimension. Operand and
            result have the same number of dimensions.
        is_variadic: whether the operator accepts any number of operands of one type.
        is_placeholder: whether this is not a TOSA operator but a placeholder that a late pass replaces: loop markers
            and MX_CONV2D. If it is variadic, its operands after the first may have any type.
    """

    kind: str
    attribute_table: str
    rows: tuple[TypeRow, ...]
    ranks: tuple[tuple[int, int], ...]
    shape: Callable[[Op], Shape]
    fields: tuple[str, ...] = ()
    constant_operands: tuple[tuple[str, str], ...] = ()
    find_violations: Violations = lambda op: iter(())
    compute: Callable[..., Array | None] | None = None
    is_elementwise: bool = False
    is_data_movement: bool = False
    is_injective: bool = False
    per_dimension: tuple[str, ...] = ()
    is_variadic: bool = False
    is_placeholder: bool = False

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Names of all ``Op.attrs`` of this operator kind."""
        return frozenset((*self.fields, *(name for name, _ in self.constant_operands)))

    @cached_property
    def _rows_by_types(self) -> dict[tuple[tuple[DType, ...], DType], tuple[TypeRow, ...]]:
        keys = dict.fromkeys((row.inputs, row.output) for row in self.rows)
        return {key: tuple(row for row in self.rows if (row.inputs, row.output) == key) for key in keys}

    def result_type(self, *inputs: DType) -> DType:
        """Element type of the result in the first row whose operands begin with the types ``inputs``.

        If there is no such row, the type of the first operand.
        """
        return next((row.output for row in self.rows if row.inputs[: len(inputs)] == inputs), inputs[0])

    def accumulator_type(self, *inputs: DType) -> DType:
        """The most precise accumulator type of the rows whose operands begin with the types ``inputs``.

        Rows are listed in ascending precision of their accumulators. If there is no such row, the type of the first
        operand.
        """
        rows = [row for row in self.rows if row.inputs[: len(inputs)] == inputs]
        return rows[-1].accumulator or rows[-1].output if rows else inputs[0]

    def min_version(self, inputs: Sequence[DType], output: DType, target: Target | None = None) -> tuple[int, int]:
        """The first TOSA version in which ``target`` supports the operator on these element types.

        This depends on the target's profiles and extensions, because a later version may add an operator to a profile.
        If ``target`` is None, the first version in which any profile or extension has the operator.
        """
        rows = self._rows_by_types[tuple(inputs[:1] if self.is_variadic else inputs), output]
        return min(row.version for row in rows if target is None or row.is_supported_by(target))

    def type_refusal(self, inputs: Sequence[DType], output: DType, target: Target) -> str | None:
        """Why ``target`` does not support the operator on these element types; None if it does."""
        rows = self._rows_by_types.get((tuple(inputs[:1] if self.is_variadic else inputs), output), ())
        available = [row for row in rows if row.version <= target.version]
        is_mixed = self.is_variadic and not self.is_placeholder and any(dtype is not inputs[0] for dtype in inputs)
        if not is_mixed and any(row.is_supported_by(target) for row in available):
            return None
        signature = f"{self.kind} ({', '.join(t.value for t in inputs[:4])} -> {output.value})"
        if not available or is_mixed:
            return f"TOSA {target.version_text} has no {signature}"
        needs = sorted(set().union(*(row.requirements for row in available)))
        extensions = next(filter(None, (target.missing_extensions(frozenset(x.split("&"))) for x in needs)), None)
        remedy = f"; add extensions={extensions} to the recipe".replace("'", '"') if extensions else ""
        return f"{signature} needs TOSA {' or '.join(needs).replace('&', ' and ')}, which {target.name} lacks{remedy}"

    def refusal(self, op: Op, target: Target) -> str | None:
        """Why ``op`` is not legal TOSA on ``target``; None if it is.

        Raises:
            AssertionError: the attributes or the shape do not fit the operator kind, because the code that emitted it
                has a bug.
        """
        assert self.attributes == op.attrs.keys(), f"{op!r}: attributes must be {sorted(self.attributes)}"
        reason = self.type_refusal([value.dtype for value in op.inputs], op.output.dtype, target)
        violation = reason or next(self._violations(op, target), None)
        if violation is None:
            expected = self.shape(op)
            assert op.output.shape == expected, f"{op!r}: its shape must be {list(expected)}"
            violation = next(_size_violations(op), None)
        if violation is None or reason:
            return violation
        return f"TOSA {target.version_text} has no {self.kind} with {violation}"

    def _violations(self, op: Op, target: Target) -> Iterator[str]:
        for i, value in enumerate(op.inputs):
            min_rank, max_rank = self.ranks[min(i, len(self.ranks) - 1)]
            if not min_rank <= len(value.shape) <= max_rank:
                yield f"{len(value.shape)} dimensions in {value!r} ({min_rank} to {max_rank}); reshape it"
            if 0 in value.shape:
                yield f"a tensor without elements: {value!r}"
        for name, type_source in self.constant_operands:
            if name.endswith("_zp"):
                yield from _zero_point_violations(op, name, type_source)
        if "acc_type" in self.fields:
            rows = self._rows_by_types[tuple(value.dtype for value in op.inputs), op.output.dtype]
            if not any(row.is_supported_by(target) for row in rows if row.accumulator is op.attrs["acc_type"]):
                yield f"an accumulator of {op.attrs['acc_type'].value} for {op.inputs[0].dtype.value}"
        extension = _ROUNDING_EXTENSIONS.get(op.attrs.get("rounding_mode", ""))
        if extension is not None and extension not in target.extensions:
            yield f"{op.attrs['rounding_mode']}: {target.name} lacks {extension}"
        yield from self.find_violations(op)


_ROUNDING_EXTENSIONS = {"DOUBLE_ROUND": "doubleround", "INEXACT_ROUND": "inexactround"}


def _zero_point_violations(op: Op, name: str, type_source: str) -> Iterator[str]:
    dtype = (op.output if type_source == "output" else op.inputs[int(type_source[-1])]).dtype
    zero_point = op.attrs[name]
    if zero_point and dtype is not DType.INT8:
        yield f"{name} {zero_point} for {dtype.value} (0; only int8 has zero points)"
    low, high = (0, 255) if name == "input_zp" and op.attrs.get("input_unsigned") else (-128, 127)
    if not low <= zero_point <= high:
        yield f"{name} {zero_point} ({low} to {high})"


def _size_violations(op: Op) -> Iterator[str]:
    """Yield tensors that exceed a limit of the level, and a result without elements."""
    if 0 in op.output.shape:
        yield f"a result without elements: {op.output!r}"
    for value in (*op.inputs, op.output):
        if len(value.shape) > LEVEL_8K.max_rank:
            yield f"{len(value.shape)} dimensions in {value!r} ({LEVEL_8K.max_rank} at most); merge some by a reshape"
        if value.size * value.dtype.bytes >= 1 << LEVEL_8K.max_log2_size:
            yield f"{value!r} (less than 2 GiB)"


OPERATORS: dict[str, Operator] = {}
#: (minimum, maximum) rank of an operand.
ANY_RANK, RANK_AT_LEAST_1 = (0, LEVEL_8K.max_rank), (1, LEVEL_8K.max_rank)


def define_operator(
    kind: str, rows: str, ranks: Sequence[tuple[int, int]], shape: Callable[[Op], Shape], **facts: Any
) -> Operator:
    """Add an operator to ``OPERATORS``.

    Args:
        rows: the supported element types, separated by blanks; ``TypeRow.parse`` documents their syntax.
        facts: the other fields of ``Operator``, by name.

    Raises:
        ValueError: the operator or one of its rows is defined twice, rows differ in their number of operands, a row is
            malformed, a constant operand has an unknown type, or an attribute is both a field and an operand.
    """
    if kind in OPERATORS:
        raise ValueError(f"TOSA operator {kind} has a record already")
    parsed = tuple(TypeRow.parse(row) for row in rows.split())
    facts.setdefault("attribute_table", "".join(word.capitalize() for word in kind.split("_")))
    operator = Operator(kind, facts.pop("attribute_table"), parsed, tuple(ranks), shape, **facts)
    if len({(row.inputs, row.output, row.accumulator, row.requirements) for row in parsed}) != len(parsed):
        raise ValueError(f"TOSA operator {kind}: a row is defined twice")
    if len({len(row.inputs) for row in parsed}) != 1:
        raise ValueError(f"TOSA operator {kind}: its rows differ in their number of operands")
    if len(operator.attributes) != len(operator.fields) + len(operator.constant_operands):
        raise ValueError(f"TOSA operator {kind}: an attribute is both a field and a constant operand")
    known_types = {"shape", "multiplier", "output", *(f"input{i}" for i in range(len(parsed[0].inputs)))}
    for name, type_source in operator.constant_operands:
        if type_source not in known_types and type_source not in {dtype.value for dtype in DType}:
            raise ValueError(f"TOSA operator {kind}: operand {name} has the unknown type {type_source!r}")
    OPERATORS[kind] = operator
    return operator


def broadcast_shape(op: Op) -> Shape:
    """The common shape that all operands broadcast to."""
    first, *others = (value.shape for value in op.inputs)
    return first if all(shape == first for shape in others) else np.broadcast_shapes(first, *others)


def min_max_ufunc(op: Op, name: str) -> np.ufunc:
    """The ufunc maximum or minimum with the NaN mode of ``op``; ``name`` is "max" or "min"."""
    return getattr(np, f"f{name}" if op.attrs["nan_mode"] == "IGNORE" else f"{name}imum")


def axis_violations(op: Op) -> Iterator[str]:
    """Yield a violation if ``axis`` is not a dimension of the operand."""
    if not 0 <= op.attrs["axis"] < op.inputs[0].rank:
        yield f"axis {op.attrs['axis']} of {op.inputs[0]!r}"
