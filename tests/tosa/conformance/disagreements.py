"""Where the project and the conformance generator disagree and the project is to stay as it is, with the reasons.

The whole run fails where one of these is no longer seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tosa.conformance.campaign import Outcome
    from tests.tosa.conformance.judge import Finding


@dataclass(frozen=True)
class Expected:
    """A disagreement.

    Attributes:
        question: of ``Finding``.
        kinds: TOSA operators.
        detail: a regular expression that the finding's text has.
        reason: why it stays.
        example: entry of the generator's configuration and test that show it.
    """

    question: str
    kinds: tuple[str, ...]
    detail: str
    reason: str
    example: tuple[str, str]

    def explains(self, kind: str, outcome: Outcome, finding: Finding) -> bool:
        """Whether a finding is this one."""
        return (
            finding.question == self.question
            and kind in self.kinds
            and re.search(self.detail, finding.detail) is not None
        )


EXPECTED: Sequence[Expected] = (
    Expected(
        "round trip",
        ("COND_IF",),
        "^a constant is returned$",
        "a graph of ours returns results of operators (make_outputs_distinct copies constants): the serializer writes "
        "no other",
        ("cond_if/standard@1.0.1", "cond_if_const_7_b_cond1"),
    ),
    Expected(
        "refuses",
        ("RESCALE",),
        "with unsigned values, which this compiler does not emit$",
        "no tensor of ours is unsigned: uint8 of the model is int8 with another zero point",
        ("rescale/tosa-pro-int@1.0.1", "rescale_14x11x7x14x2_i16_outi16_sc1_rmS_pc1_iu1_ou0"),
    ),
    Expected(
        "refuses",
        ("RESCALE",),
        "whose values leave the range of its shift$",
        "apply_scale_32 has a REQUIRE on the value. The generator chooses data that meet it; the record asks for it of "
        "all values of the type, as a program may be given any",
        ("rescale/tosa-pro-int@1.0.1", "rescale_1x2x65533x1_i8_outi32_sc1_rmS_pc1_iu0_ou0"),
    ),
    Expected(
        "refuses",
        ("WHILE_LOOP",),
        r"^FP with .*: GREATER \(int32, int32 -> bool\) needs TOSA INT",
        "the generator counts the rounds with GREATER of int32 and says that the FP profile has it. It is of INT alone "
        "in the specification's table, and tosa-opt refuses the test too",
        ("while_loop/tosa-pro-fp@1.0.1", "while_loop_15x18x13_f32_iter4"),
    ),
    Expected(
        "Vela",
        ("CONV2D",),
        "a program that writes out of bounds",
        "of several images on U85, where the image is constant or the bias one number that the program computes: Vela "
        "writes beyond a tensor, and compile_ethosu refuses the stream. Lowering writes neither",
        ("conv2d/tosa-pro-int@1.0.1", "conv2d_1x1_3x49x14x28_i8xi8_acci32_st11_pad0000_dilat11_lclbnd0_is_s1"),
    ),
    Expected(
        "unread",
        ("CAST_TO_BLOCK_SCALED",),
        "tensors of type MXINT8 are not supported$",
        "a type that the compiler does not offer",
        ("cast_to_block_scaled/tosa-ext-mxfp@1.1.0", "cast_to_block_scaled_32_f32_outmi8xf8ue8m0_bksz32"),
    ),
)
