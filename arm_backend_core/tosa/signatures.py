"""How each operator of the graph is written: which attributes it has and which of ours become constant operands.

Source: TOSA 1.0, chapter 2 (argument tables).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """One TOSA operator as the flatbuffer has it.

    Attributes:
        attribute: name of the flatbuffer's attribute table, without the suffix "Attribute".
        fields: our attributes that fill that table, in its order.
        operands: our attributes that become constant operands after the data inputs, in order, each with its type:
            "shape" (CONST_SHAPE), "input0", "input1", "output" (the element type of that value), or a DType value.
    """

    attribute: str
    fields: tuple[str, ...] = ()
    operands: tuple[tuple[str, str], ...] = ()


_ZP_IN = ("input_zp", "input0")
_CONV = ("pad", "stride", "dilation", "local_bound", "acc_type")
_CONV_ZP = (_ZP_IN, ("weight_zp", "input1"))

SIGNATURES: dict[str, Signature] = {
    "ARGMAX": Signature("ArgMax", ("axis", "nan_mode")),
    "AVG_POOL2D": Signature("AvgPool2d", ("kernel", "stride", "pad", "acc_type"), (_ZP_IN, ("output_zp", "output"))),
    "CONV2D": Signature("Conv2d", _CONV, _CONV_ZP),
    "CONV3D": Signature("Conv3d", _CONV, _CONV_ZP),
    "DEPTHWISE_CONV2D": Signature("DepthwiseConv2d", _CONV, _CONV_ZP),
    "TRANSPOSE_CONV2D": Signature("TransposeConv2d", ("out_pad", "stride", "local_bound", "acc_type"), _CONV_ZP),
    "MATMUL": Signature("MatMul", (), (("a_zp", "input0"), ("b_zp", "input1"))),
    "MAX_POOL2D": Signature("MaxPool2d", ("kernel", "stride", "pad", "nan_mode")),
    "CLAMP": Signature("Clamp", ("min_val", "max_val", "nan_mode")),
    "ERF": Signature("Erf"),
    "SIGMOID": Signature("Sigmoid"),
    "TANH": Signature("Tanh"),
    "ADD": Signature("Add"),
    "ARITHMETIC_RIGHT_SHIFT": Signature("ArithmeticRightShift", ("round",)),
    "BITWISE_AND": Signature("BitwiseAnd"),
    "BITWISE_OR": Signature("BitwiseOr"),
    "BITWISE_XOR": Signature("BitwiseXor"),
    "INTDIV": Signature("IntDiv"),
    "LOGICAL_AND": Signature("LogicalAnd"),
    "LOGICAL_LEFT_SHIFT": Signature("LogicalLeftShift"),
    "LOGICAL_RIGHT_SHIFT": Signature("LogicalRightShift"),
    "LOGICAL_OR": Signature("LogicalOr"),
    "LOGICAL_XOR": Signature("LogicalXor"),
    "MAXIMUM": Signature("Maximum", ("nan_mode",)),
    "MINIMUM": Signature("Minimum", ("nan_mode",)),
    "MUL": Signature("Mul", (), (("shift", "int8"),)),
    "POW": Signature("Pow"),
    "SUB": Signature("Sub"),
    "TABLE": Signature("Table", (), (("table", "input0"),)),
    "ABS": Signature("Abs"),
    "BITWISE_NOT": Signature("BitwiseNot"),
    "CEIL": Signature("Ceil"),
    "CLZ": Signature("Clz"),
    "COS": Signature("Cos"),
    "EXP": Signature("Exp"),
    "FLOOR": Signature("Floor"),
    "LOG": Signature("Log"),
    "LOGICAL_NOT": Signature("LogicalNot"),
    "NEGATE": Signature("Negate", (), (_ZP_IN, ("output_zp", "output"))),
    "RECIPROCAL": Signature("Reciprocal"),
    "RSQRT": Signature("Rsqrt"),
    "SIN": Signature("Sin"),
    "SELECT": Signature("Select"),
    "EQUAL": Signature("Equal"),
    "GREATER": Signature("Greater"),
    "GREATER_EQUAL": Signature("GreaterEqual"),
    "REDUCE_ALL": Signature("ReduceAll", ("axis",)),
    "REDUCE_ANY": Signature("ReduceAny", ("axis",)),
    "REDUCE_MAX": Signature("ReduceMax", ("axis", "nan_mode")),
    "REDUCE_MIN": Signature("ReduceMin", ("axis", "nan_mode")),
    "REDUCE_PRODUCT": Signature("ReduceProduct", ("axis",)),
    "REDUCE_SUM": Signature("ReduceSum", ("axis",)),
    "CONCAT": Signature("Concat", ("axis",)),
    "PAD": Signature("Pad", (), (("padding", "shape"), ("pad_const", "input0"))),
    "RESHAPE": Signature("Reshape", (), (("shape", "shape"),)),
    "REVERSE": Signature("Reverse", ("axis",)),
    "SLICE": Signature("Slice", (), (("start", "shape"), ("size", "shape"))),
    "TILE": Signature("Tile", (), (("multiples", "shape"),)),
    "TRANSPOSE": Signature("Transpose", ("perms",)),
    "GATHER": Signature("Gather"),
    "SCATTER": Signature("Scatter"),
    "RESIZE": Signature("Resize", ("mode",), (("scale", "shape"), ("offset", "shape"), ("border", "shape"))),
    "CAST": Signature("Cast"),
    "RESCALE": Signature(
        "Rescale",
        ("scale32", "rounding_mode", "per_channel", "input_unsigned", "output_unsigned"),
        (("multiplier", "multiplier"), ("shift", "int8"), _ZP_IN, ("output_zp", "output")),
    ),
    "IDENTITY": Signature("Identity"),
}
