"""The records of TOSA operators: their checks at import, refusals, and the evaluation of operators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tosa_serializer

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import builder, reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.legality import op_refusal, type_refusal
from arm_backend_core.tosa.operators import INJECTIVE_MOVEMENT, OPERATORS, evaluate
from arm_backend_core.tosa.operators.record import ANY_RANK, broadcast_shape, define_operator
from arm_backend_core.tosa.serialize import serialize
from arm_recipes.runtime.tosa_deserialize import deserialize
from arm_recipes.runtime.tosa_flatbuffer import read_tosa_payload
from tests.tosa_graphs import Body, build_and_validate, build_graph, validate_by_tosa_opt

FP = Target.from_tosa_spec("TOSA-1.0+FP")


@pytest.mark.parametrize(
    ("kind", "rows", "facts", "message"),
    [
        ("ADD", "i8>i8:INT", {}, "has a record already"),
        ("NEW", "i8>i9:INT", {}, "unknown i9"),
        ("NEW", "i8>i8:INTEGER", {}, "unknown INTEGER"),
        ("NEW", "i8>i8:INT i8>i8:INT", {}, "twice"),
        ("NEW", "i8>i8:INT i8,i8>i8:INT", {}, "number of operands"),
        (
            "NEW",
            "i8>i8:INT",
            {"fields": ("axis",), "constant_operands": (("axis", "shape"),)},
            "both a field and a constant",
        ),
        ("NEW", "i8>i8:INT", {"constant_operands": (("zp", "input1"),)}, "unknown type 'input1'"),
    ],
)
def test_invalid_record_is_an_error(kind: str, rows: str, facts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        define_operator(kind, rows, [ANY_RANK], broadcast_shape, **facts)
    assert "NEW" not in OPERATORS


@pytest.mark.parametrize("kind", [kind for kind, record in OPERATORS.items() if not record.is_placeholder])
def test_every_record_has_an_operator_and_attribute_of_the_flatbuffer(kind: str) -> None:
    record = OPERATORS[kind]
    assert hasattr(tosa_serializer.Op, kind)
    getattr(tosa_serializer.TosaSerializerAttribute(), record.attribute_table + "Attribute")


def test_refusal_for_a_missing_extension_names_the_recipe_argument() -> None:
    """If the profile is missing, no extension helps."""
    assert type_refusal(FP, "ABS", [DType.BF16], DType.BF16) == (
        'ABS (bf16 -> bf16) needs TOSA bf16, which TOSA-1.0+FP lacks; add extensions=["bf16"] to the recipe'
    )
    assert (type_refusal(FP, "ABS", [DType.INT32], DType.INT32) or "").endswith("which TOSA-1.0+FP lacks")


def test_gather_of_tosa_1_1_has_more_types() -> None:
    later = replace(FP, version=(1, 1))
    assert type_refusal(FP, "GATHER", [DType.INT8, DType.INT32], DType.INT8) == (
        "GATHER (int8, int32 -> int8) needs TOSA INT, which TOSA-1.0+FP lacks"
    )
    assert type_refusal(FP, "GATHER", [DType.BOOL, DType.INT32], DType.BOOL) == (
        "TOSA 1.0 has no GATHER (bool, int32 -> bool)"
    )
    assert type_refusal(later, "GATHER", [DType.INT8, DType.INT32], DType.INT8) is None
    assert type_refusal(later, "GATHER", [DType.BOOL, DType.INT32], DType.BOOL) is None


def test_wrong_shape_is_an_assertion_error_and_not_a_refusal() -> None:
    graph = Graph()
    x = graph.add_input((2, 3), DType.FP32, "x")
    with pytest.raises(AssertionError, match=r"its shape must be \[2, 3\]"):
        op_refusal(FP, Op("EXP", [x], Value((3, 2), DType.FP32)))
    with pytest.raises(AssertionError, match="attributes must be"):
        Builder(graph, FP).emit("EXP", (x,), DType.FP32, axis=0)
    assert not graph.ops


def test_seven_dimensions_are_refused() -> None:
    graph = Graph()
    x = graph.add_input((1,) * 6 + (2,), DType.FP32, "x")
    with pytest.raises(Unsupported, match=r"7 dimensions in x:fp32\[1, 1, 1, 1, 1, 1, 2\] \(0 to 6\); reshape it"):
        Builder(graph, FP).unary("EXP", x)


def test_npu_target_needs_its_number_of_macs() -> None:
    with pytest.raises(ValueError, match="macs: ethos-u55 needs"):
        Target("ethos-u55", frozenset({"INT"}), frozenset(), "ethos-u55")


@pytest.mark.parametrize(
    ("body", "dtype", "x", "expected"),
    [
        (lambda b, x: b.negate(x), DType.FP32, 1.5, -1.5),
        (lambda b, x: b.reduce("REDUCE_SUM", x, 0), DType.FP32, 1.5, None),
        (lambda b, x: b.binary("INTDIV", b.const([7], DType.INT32), x), DType.INT32, 0, None),
        (lambda b, x: b.rescale(x, DType.INT32, 2.0**10), DType.INT32, 1 << 25, None),
        (lambda b, x: rescale_by(1 << 30, 31, rounding_mode="INEXACT_ROUND")(b, x), DType.INT32, 6, None),
    ],
)
def test_evaluation_of_undefined_results_returns_none(
    body: Body, dtype: DType, x: float, expected: float | None
) -> None:
    target = Target.from_tosa_spec("TOSA-1.0+INT+FP+inexactround")
    (op,) = build_graph(body, ((1,), dtype), target=target).ops
    arrays = [np.array([x], dtype.numpy) if value.data is None else value.data for value in op.inputs]
    assert evaluate(op, arrays) == expected


@pytest.mark.parametrize("nan_mode", ["PROPAGATE", "IGNORE"])
@pytest.mark.parametrize("kind", ["CLAMP", "MAXIMUM", "MINIMUM", "REDUCE_MAX", "REDUCE_MIN"])
def test_evaluation_follows_the_nan_mode(kind: str, nan_mode: str) -> None:
    def body(b: Builder, *values: Value) -> Value:
        attrs: dict[str, object] = {"nan_mode": nan_mode}
        attrs |= {"axis": 1} if kind.startswith("REDUCE") else {}
        attrs |= {"min_val": -1.0, "max_val": 0.5} if kind == "CLAMP" else {}
        return b.emit(kind, values, DType.FP32, **attrs)

    x, y = np.array([[np.nan, 1], [2, np.nan], [np.nan, np.nan]], np.float32), np.full((3, 2), 0.75, np.float32)
    arrays = [x, y] if kind in ("MAXIMUM", "MINIMUM") else [x]
    written = build_graph(body, *[(array.shape, DType.FP32) for array in arrays], target=FP)
    (expected,) = reference_model.run(serialize(written), arrays)
    result = evaluate(written.ops[0], arrays)
    assert result is not None
    np.testing.assert_array_equal(result, expected)


def test_types_of_two_extensions_need_both() -> None:
    types = [DType.BF16], DType.FP8E4M3
    both = Target.from_tosa_spec("TOSA-1.0+FP+bf16+fp8e4m3")
    assert type_refusal(both, "CAST", *types) is None
    for extension, missing in (("bf16", "fp8e4m3"), ("fp8e4m3", "bf16")):
        target = Target.from_tosa_spec(f"TOSA-1.0+FP+{extension}")
        remedy = f'add extensions=["{missing}"] to the recipe'
        needs = f"CAST (bf16 -> fp8e4m3) needs TOSA bf16 and fp8e4m3, which {target.name} lacks; {remedy}"
        assert type_refusal(target, "CAST", *types) == needs


@pytest.mark.parametrize("spec", ["INT+bf16", "FP+int16", "INT+mxfp", "FP+doubleround"])
def test_an_extension_needs_its_profile(spec: str) -> None:
    extension = spec.split("+")[1]
    with pytest.raises(ValueError, match=f"lacks the profile that '{extension}' extends"):
        Target.from_tosa_spec(f"TOSA-1.0+{spec}")
    assert extension in Target.from_tosa_spec(f"TOSA-1.0+INT+FP+{extension}").extensions


def test_the_written_version_has_the_operators_in_the_profiles_of_the_target() -> None:
    """TOSA 1.0 has GATHER of int8 in the INT profile only."""
    for spec, version in (("TOSA-1.0+INT", "1.0.0"), ("TOSA-1.1+FP+mxfp", "1.1.0")):
        target, inputs = Target.from_tosa_spec(spec), (((1, 4, 2), DType.INT8), ((1, 3), DType.INT32))
        graph = build_graph(lambda b, x, indices: b.gather(x, indices), *inputs, target=target)
        assert read_tosa_payload(memoryview(serialize(graph, target=target))).version == version


def test_block_size_other_than_32_is_refused() -> None:
    target = Target.from_tosa_spec("TOSA-1.1+FP+mxfp")
    (cast,) = build_graph(
        lambda b, x: b.emit("CAST_TO_BLOCK_SCALED", (x,), DType.FP8E4M3, block_size=32),
        ((1, 64), DType.FP32),
        target=target,
    ).ops
    assert op_refusal(target, cast) is None
    cast.attrs["block_size"] = 16
    assert op_refusal(target, cast) == r"TOSA 1.1 has no CAST_TO_BLOCK_SCALED with block size 16 (must be 32)"


def test_an_evaluated_rescale_of_a_scalar_keeps_its_shape() -> None:
    (rescale,) = build_graph(lambda b, x: b.rescale(x, DType.INT32, 1.3), ((), DType.INT8)).ops
    result = evaluate(rescale, [np.array(7, np.int8)])
    assert result is not None
    assert (result.shape, int(result)) == ((), 9)


# -- operators that a Builder emits ---------------------------------------------------------------------------


def test_bf16_convolutions_and_products_accumulate_in_fp32() -> None:
    target = Target.from_tosa_spec("TOSA-1.0+FP+bf16")

    def body(b: Builder, x: Value) -> Value:
        weight, bias = b.const(np.ones((2, 3, 3, 1)), DType.BF16), b.const(np.zeros(2), DType.BF16)
        y = b.conv2d(x, weight, bias, pad=(1,) * 4)
        y = b.avg_pool2d(y, (2, 2), (2, 2), (0,) * 4)
        y = b.reshape(y, (1, 4, 2))
        return b.matmul(y, b.transpose(y, (0, 2, 1)))

    assert "MATMUL" in build_and_validate(body, ((1, 4, 4, 1), DType.BF16), target=target)


def resize_by(size: tuple[int, int], n: int, d: int, offset: int, border: int) -> Body:
    def body(b: Builder, x: Value) -> Value:
        y = b.resize(x, (n, d, n, d), (offset,) * 2, (border,) * 2, "NEAREST")
        assert y.shape[1:3] == size
        return y

    return body


def transpose_conv_by(kernel: int, out_pad: tuple[int, int]) -> Body:
    def body(b: Builder, x: Value) -> Value:
        weight, bias = b.const(np.ones((1, kernel, 1, 1)), DType.INT8), b.const(np.zeros(1), DType.INT32)
        return b.transpose_conv2d(x, weight, bias, out_pad=(*out_pad, 0, 0), stride=(1, 1))

    return body


def rescale_by(multiplier: int, shift: int, **others: object) -> Body:
    """A RESCALE with a multiplier and a shift that the builder does not choose."""

    def body(b: Builder, x: Value) -> Value:
        factor = {"multiplier": np.array([multiplier], np.int32), "shift": np.array([shift], np.int8)}
        facts = {"scale32": True, "rounding_mode": "SINGLE_ROUND", "per_channel": False}
        signs = {"input_unsigned": False, "output_unsigned": False, "input_zp": 0, "output_zp": 0}
        return b.emit("RESCALE", (x,), DType.INT32, **{**factor, **facts, **signs, **others})

    return body


def test_rescale_of_a_constant_is_limited_by_its_values_only() -> None:
    def body(b: Builder, x: Value) -> Value:
        mask = b.const(np.full((2, 300), -100), DType.INT16)
        return b.add(x, b.rescale(mask, DType.INT32, 2.0**15))

    target = Target.from_tosa_spec("TOSA-1.0+INT+int16")
    assert "RESCALE" in build_and_validate(body, ((2, 300), DType.INT32), target=target)


@pytest.mark.parametrize(("scale", "zero_point", "output_zp"), [(1.0, 128, 0), (0.625, 0, -128), (2.0, 255, 5)])
def test_rescale_of_an_unsigned_input_is_exact(scale: float, zero_point: int, output_zp: int) -> None:
    graph = build_graph(
        lambda b, x: b.rescale(x, DType.INT8, scale, zero_point, output_zp, input_unsigned=True), ((256,), DType.INT8)
    )
    flatbuffer = serialize(graph)
    assert validate_by_tosa_opt(flatbuffer, Target.from_tosa_spec("TOSA-1.0+INT")) is None
    x = np.arange(256, dtype=np.uint8)
    expected = np.clip(np.floor((x.astype(np.float64) - zero_point) * scale + 0.5) + output_zp, -128, 127)
    (op,) = graph.ops
    folded = evaluate(op, [x.view(np.int8)])
    assert folded is not None
    for result in (folded, reference_model.run(flatbuffer, [x.view(np.int8)])[0]):
        np.testing.assert_array_equal(result, expected)
    (same,) = deserialize(flatbuffer).ops
    assert same.attrs["input_zp"] == zero_point
    assert same.attrs["input_unsigned"]


@pytest.mark.parametrize("zero_point", [-1, 256])
def test_zero_point_of_an_unsigned_input_outside_0_to_255_is_refused(zero_point: int) -> None:
    with pytest.raises(Unsupported, match=rf"input_zp {zero_point} \(0 to 255\)"):
        build_graph(lambda b, x: b.rescale(x, DType.INT8, 1.0, zero_point, input_unsigned=True), ((2, 3), DType.INT8))


#: Words of refusals by a REQUIRE on element values, which tosa-opt does not check.
_ELEMENT_REQUIREMENTS = ("a base", "exponent", "input_zp exceeds", "32767 apart", "shifts from")


@pytest.mark.parametrize(
    ("body", "shape", "dtype", "reason"),
    [
        (resize_by((300, 300), 300, 1, 0, 299), (1, 1, 1, 1), DType.INT8, r"scale 300/1 in height \(256 at most\)"),
        (resize_by((2, 2), 1, 15, 7, 1), (1, 23, 23, 1), DType.INT8, r"border 1 in height \(-16 to 0\)"),
        (lambda b, x: b.pow(b.const([[-2.0]], DType.FP32), x), (2, 3), DType.FP32, "a base that is negative"),
        (lambda b, x: b.rescale(x, DType.INT32, 2.0**23), (2, 3), DType.INT8, "input_zp exceeds"),
        (lambda b, x: b.rescale(x, DType.INT16, 1.0, 0, 5), (2, 3), DType.INT16, "output_zp 5 for int16"),
        (lambda b, x: b.rescale(x, DType.INT8, 1.0, 5, 0), (2, 3), DType.INT16, "input_zp 5 for int16"),
        (lambda b, x: b.table(x, np.tile([-32768, 32767], 257)[:513]), (2, 3), DType.INT16, "32767 apart"),
        (lambda b, x: b.avg_pool2d(x, (2, 2), (1, 1), (2, 0, 0, 0)), (1, 4, 4, 1), DType.INT8, "less than the kernel"),
        (lambda b, x: b.clamp(x, 3, -3), (2, 3), DType.INT8, "bounds 3 to -3"),
        (lambda b, x: b.pow(x, b.const([[np.inf]], DType.FP32)), (2, 3), DType.FP32, "exponent that is not finite"),
        (rescale_by(1 << 30, 63), (2, 3), DType.INT32, r"shifts from 63 to 63 \(2 to 62\)"),
        (rescale_by(1 << 30, 31, input_unsigned=True), (2, 3), DType.INT32, "an unsigned output"),
        (rescale_by(1 << 30, 31, input_unsigned=True), (2, 3), DType.INT8, "unsigned input and a result of int32"),
        (lambda b, x: b.rescale(x, DType.INT8, 2.0**24, input_unsigned=True), (2, 3), DType.INT8, "input_zp exceeds"),
        (lambda b, x: b.tile(x, (1 << 16, 1 << 15)), (1, 1), DType.INT8, "less than 2 GiB"),
        (transpose_conv_by(8193, (0, 0)), (1, 1, 1, 1), DType.INT8, r"kernel \[8193, 1\] \(8192 at most\)"),
        (transpose_conv_by(3, (-2, -2)), (1, 1, 1, 1), DType.INT8, r"out_pad \[-2, -2, 0, 0\], which leaves nothing"),
        (
            resize_by((16384, 16384), 1, 1, 0, 0),
            (1, 16384, 16384, 1),
            DType.INT8,
            r"16384 to 16384 \(less than 16384\)",
        ),
    ],
)
def test_operator_that_the_specification_forbids_is_refused_with_the_limit(
    body: Body, shape: tuple[int, ...], dtype: DType, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.from_tosa_spec("TOSA-1.0+INT+FP+int16")
    with pytest.raises(Unsupported, match=reason):
        build_graph(body, (shape, dtype), target=target)
    monkeypatch.setattr(builder, "op_refusal_before_bool_lowering", lambda target, op: None)
    complaint = validate_by_tosa_opt(serialize(build_graph(body, (shape, dtype), target=target)), target)
    assert (complaint is None) == any(words in reason for words in _ELEMENT_REQUIREMENTS), complaint


_INJECTIVE_ATTRIBUTES: dict[str, dict[str, object]] = {
    "IDENTITY": {},
    "RESHAPE": {"shape": (3, 2)},
    "REVERSE": {"axis": 1},
    "SLICE": {"start": (0, 1), "size": (2, 2)},
    "TRANSPOSE": {"perms": (1, 0)},
}


def test_injective_movements_repeat_no_element_and_add_none() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert _INJECTIVE_ATTRIBUTES.keys() == INJECTIVE_MOVEMENT
    for kind, attributes in _INJECTIVE_ATTRIBUTES.items():
        op = Op(kind, [Value((2, 3), DType.INT32)], Value((), DType.INT32), dict(attributes))
        op = replace(op, output=Value(OPERATORS[kind].shape(op), DType.INT32))
        result = evaluate(op, [x])
        assert result is not None
        assert len(set(result.ravel())) == result.size, kind
        assert set(result.ravel()) <= set(x.ravel()), kind
    assert {kind for kind in INJECTIVE_MOVEMENT if not OPERATORS[kind].is_data_movement} == set()
