"""Known disagreements between the compiler and the conformance generator, with the reasons why the compiler is right.

A full run fails if one of them no longer occurs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tosa.conformance.campaign import Outcome
    from tests.tosa.conformance.checks import Finding


@dataclass(frozen=True)
class KnownDisagreement:
    """A known disagreement.

    Attributes:
        check: ``check`` of its findings.
        kinds: TOSA operators.
        detail: regular expression that matches the detail of its findings.
        reason: why the compiler is not changed.
        example: configuration entry and name of a test that shows it.
    """

    check: str
    kinds: tuple[str, ...]
    detail: str
    reason: str
    example: tuple[str, str]

    def explains(self, kind: str, outcome: Outcome, finding: Finding) -> bool:
        """Whether a finding is this known disagreement."""
        return finding.check == self.check and kind in self.kinds and re.search(self.detail, finding.detail) is not None


KNOWN_DISAGREEMENTS: Sequence[KnownDisagreement] = (
    KnownDisagreement(
        "round trip",
        ("COND_IF",),
        "^a constant is returned$",
        "outputs of the compiler's graphs are results of operators, because make_outputs_distinct copies constants. "
        "The serializer supports no other outputs",
        ("cond_if/standard@1.0.1", "cond_if_const_7_b_cond1"),
    ),
    KnownDisagreement(
        "refuses",
        ("RESCALE",),
        "with an unsigned output, or an unsigned input that is not INT8; this compiler emits neither$",
        "uint8 inputs of the model become int8 at the start of a delegate. The compiler emits no other unsigned tensor",
        ("rescale/tosa-pro-int@1.0.1", "rescale_14x11x7x14x2_i16_outi16_sc1_rmS_pc1_iu1_ou0"),
    ),
    KnownDisagreement(
        "refuses",
        ("RESCALE",),
        r"a value minus input_zp exceeds 2\*\*\(shift - 1\)\)$",
        "apply_scale_32 has a REQUIRE on the value. The generator chooses data that meet it. The record requires it "
        "for all values of the type, because the inputs of a program are not known",
        ("rescale/tosa-pro-int@1.0.1", "rescale_1x2x65533x1_i8_outi32_sc1_rmS_pc1_iu0_ou0"),
    ),
    KnownDisagreement(
        "refuses",
        ("WHILE_LOOP",),
        r"^FP with .*: GREATER \(int32, int32 -> bool\) needs TOSA INT",
        "the generator counts the iterations with GREATER of int32, for the FP profile too. The specification's table "
        "has it for INT only, and tosa-opt also refuses the test",
        ("while_loop/tosa-pro-fp@1.0.1", "while_loop_15x18x13_f32_iter4"),
    ),
    KnownDisagreement(
        "Vela",
        ("CONV2D",),
        "a program that writes out of bounds",
        "for several images on U85, if the images are constant or the bias is a single computed number: Vela writes "
        "beyond a tensor, and compile_ethosu refuses the stream. Lowering emits neither",
        ("conv2d/tosa-pro-int@1.0.1", "conv2d_1x1_3x49x14x28_i8xi8_acci32_st11_pad0000_dilat11_lclbnd0_is_s1"),
    ),
    KnownDisagreement(
        "unread",
        ("CAST_TO_BLOCK_SCALED",),
        "tensors of type MXINT8 are not supported$",
        "the compiler does not support this type",
        ("cast_to_block_scaled/tosa-ext-mxfp@1.1.0", "cast_to_block_scaled_32_f32_outmi8xf8ue8m0_bksz32"),
    ),
)
