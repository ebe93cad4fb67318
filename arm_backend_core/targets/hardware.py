"""Hardware capabilities by family: missing parts of the TOSA profile, relative costs of operators, Vela's bugs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from arm_backend_core.dtype import DType
from arm_backend_core.targets.operator_limits import (
    ALL_AXES,
    HEIGHT_WIDTH,
    U55_U65_LIMITS,
    U85_LIMITS,
    FindAxes,
    Limit,
    Operation,
    find_axes_lost_on_split,
)
from arm_backend_core.workers.vela import Release


@dataclass(frozen=True)
class Hardware:
    """Limits and costs beyond the TOSA profile.

    Attributes:
        unsupported: operators that the hardware supports for no element type.
        first_operand_types: {operator: supported element types of its first operand}, for operators of which the
            hardware supports fewer types than the TOSA profile.
        limits: {operator: function that returns the property of an operation that the hardware does not support, or
            None}.
        has_booleans: whether the hardware has boolean tensors.
        bool_as_int8: boolean operators that the hardware lacks; ``tosa/passes/booleans.py`` lowers them to int8.
        is_ethos_u: whether the hardware is an Ethos-U. If it is, lowering emits convolutions and data movement as the
            equivalent operators that take the fewest cycles by Vela's estimates.
        writes_sram_only: the second AXI port is read-only, so activations must be in SRAM.
        max_kernel: maximum height or width of a convolution or pooling kernel.
        max_stride: maximum stride of one operation. Vela splits an operator with a larger stride into one operation per
            window element.
        macs: MACs per cycle of each variant of the family.
        start_cycles: cycles until an operation's first result, from Vela's estimates of small operations.
        macs_per_write: number of MACs that the NPU can execute while it writes one element of a result. Divided by the
            MACs per cycle, it is the number of cycles that this write takes.
        averages_by_convolution: the mean of a whole image takes fewer cycles as convolutions than as AVG_POOL2D: 2,693
            instead of 5,208 for 24x5x64 on U55-128.
        transposes_by_convolution: a transpose from [A, N] to [N, A] takes fewer cycles as a convolution than as
            TRANSPOSE.
        max_depthwise_size: maximum product of input columns and input channels for a DEPTHWISE_CONV2D that computes
            several results for each channel; 0 means no limit. Vela moves these results by a TRANSPOSE of at most 64
            KiB per row.
        slow_weights_max_macs: NPUs with at most this many MACs per cycle decode 12 weights per cycle. On such an NPU, a
            linear layer of one row takes fewer cycles as a MATMUL than as a convolution: 3,181 instead of 4,992 for
            weights of 472x118 on U85-256.
        chains: Vela runs consecutive elementwise operations as one chain, in which an operation that only scales costs
            less than outside of a chain.
        broadcasts_both_operands: an elementwise operation broadcasts both operands. If False, it broadcasts one; Vela
            splits an operator that broadcasts both.
        fuses_shared_rescale: Vela fuses a RESCALE into its producer even if the producer has other readers, and into
            its readers even if the RESCALE has several readers. If False, Vela fuses a RESCALE into its producer only
            if the producer has no other reader, and into its reader only if the RESCALE has no other reader.
        ignores_unit_axes: Vela fuses operations across a RESHAPE that only adds or removes axes of size 1.
        scales_max_pools: a max pooling can scale its result, so that Vela fuses a RESCALE into MAX_POOL2D.
        sums_rescale_operands: ADD and SUB rescale both operands and their result in one operation.
        computes_pixel_pairs: a 1x1 convolution of few channels takes fewer cycles in one of two forms: two pixels
            become the channels of one pixel, or the channels of one pixel become two pixels, which a 1x2 kernel reads.
        copies_by_slow_pool: Vela copies operands of a CONCAT by an average pooling, which takes twice the cycles of a
            MUL by 1.
        estimates_missing_activation: Vela 5.1 adds the cycles of a table lookup to the estimate of an operation that
            has no activation.
        constant_copy_min_rows: {Vela's release: number of rows}; 64 rows for releases without an entry. From this
            number of rows on, Vela's estimate is lower if an int32 constant that all rows read is copied to SRAM. Used
            only if ``estimates_missing_activation`` is true. If the mapping is empty, int8 and int16 constants are not
            copied, because that saves nothing (``alternatives/unconditional.copy_narrow_constant``).
        flattens_odd_images: a 1x1 convolution of an image with an odd number of rows or columns takes fewer cycles if
            all pixels are one row. Vela estimates this for U55 and U65 too, but there the neighbouring layers then take
            more cycles (ds_cnn: 0.4% more in total).
        splits_matmuls: a MATMUL of several heads may take fewer cycles as one MATMUL per head. If False, it may take
            fewer as the product of the transposed operands (``alternatives/attention_matmul.py``).
        packs_weights_by_rows: the order in which Vela encodes the weights of a linear layer depends on the number of
            input rows. Two methods of a program therefore share weights only if their inputs have equally many rows.
        pads_weight_blocks: weights are encoded in blocks of input channels. Padding the channels to full blocks with
            weights of 1 saves cycles. Otherwise, Vela fills the last block with zeros, whose encoding lengthens the
            codes of all weights (``alternatives/pad_channels.py``).
        slow_input_channels: numbers of input channels with which a convolution of a small image takes up to 3.6 times
            the cycles of a convolution with ``slow_input_channels.stop`` input channels.
        transposes_any_rank: Vela itself splits a TRANSPOSE of more than four dimensions.
        max_macs_for_int16_split: with at most this many MACs per cycle, a linear layer of one int16 pixel takes fewer
            cycles as a layer of two int8 pixels. With 512 MACs, a layer from 256 to 256 channels takes 5,284 cycles as
            one int16 pixel, and 6,601 as two int8 pixels.
        bilinear_cycles_per_result: cycles of a bilinear RESIZE for each int8 result, by Vela's estimates. Lowering
            compares them with the cycles of two convolutions. If it is 0, lowering emits a RESIZE wherever the hardware
            supports it.
        vela_bugs: names of Vela's bugs (``docs/contributors/vela.md``) that ``tosa/vela_workarounds`` avoids.
        axes_lost_on_split: function that returns the axes along which Vela splits an operator and then loses the offset
            of a SLICE that it fused into the operator (bug ``lost_slice_offset``).
    """

    unsupported: frozenset[str] = frozenset()
    first_operand_types: Mapping[str, tuple[DType, ...]] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    has_booleans: bool = True
    bool_as_int8: frozenset[str] = frozenset()
    is_ethos_u: bool = False
    writes_sram_only: bool = False
    max_kernel: int = 64
    max_stride: int = 3
    macs: tuple[int, ...] = ()
    start_cycles: int = 500
    macs_per_write: int = 128
    averages_by_convolution: bool = False
    transposes_by_convolution: bool = False
    slow_weights_max_macs: int = 0
    max_depthwise_size: int = 0
    chains: bool = False
    broadcasts_both_operands: bool = False
    fuses_shared_rescale: bool = False
    ignores_unit_axes: bool = False
    scales_max_pools: bool = False
    sums_rescale_operands: bool = False
    computes_pixel_pairs: bool = False
    copies_by_slow_pool: bool = False
    estimates_missing_activation: bool = False
    constant_copy_min_rows: Mapping[Release | None, int] = field(default_factory=dict)
    flattens_odd_images: bool = False
    splits_matmuls: bool = False
    packs_weights_by_rows: bool = False
    pads_weight_blocks: bool = False
    slow_input_channels: range = range(0)
    transposes_any_rank: bool = False
    max_macs_for_int16_split: int = 0
    bilinear_cycles_per_result: float = 0.0
    vela_bugs: tuple[str, ...] = ()
    axes_lost_on_split: FindAxes = lambda op: ()

    def refusal(self, kind: str, inputs: Sequence[DType], output: DType, op: Operation | None = None) -> str | None:
        """Why the hardware cannot run an operator, as the end of "<target> has ..."; None if it can.

        Without ``op``, only the element types are checked.
        """
        if kind in self.unsupported:
            return f"no {kind} in hardware"
        if not self.has_booleans and DType.BOOL in (*inputs, output):
            return "no boolean tensors in hardware"
        if inputs[0] not in self.first_operand_types.get(kind, inputs):
            return f"no {kind} ({', '.join(t.value for t in inputs)} -> {output.value}) in hardware"
        violation = self.limits[kind](op) if op is not None and kind in self.limits else None
        return f"no {kind} with {violation}" if violation else None


_BITWISE = ("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR", "BITWISE_NOT", "LOGICAL_RIGHT_SHIFT")
_LOGICAL = ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_XOR", "LOGICAL_NOT", "REDUCE_ALL", "REDUCE_ANY")
_COMPARISON_SELECT = ("EQUAL", "GREATER", "GREATER_EQUAL", "SELECT")
_U55_TYPES = {
    **dict.fromkeys(("ARITHMETIC_RIGHT_SHIFT", "LOGICAL_LEFT_SHIFT"), (DType.INT32,)),
    **dict.fromkeys(("ARGMAX", "MATMUL", "CONV3D", "TRANSPOSE_CONV2D"), (DType.INT8,)),
    **dict.fromkeys(("REDUCE_MAX", "REDUCE_MIN", "REVERSE"), (DType.INT8, DType.INT16)),
}


_BUGS_OF_ALL_FAMILIES = (
    "lost_slice_offset",
    "slice_rank_mismatch",
    "column_reduction_overflow",
    "lost_concat_offset",
    "padded_zero",
    "padded_images",
    "cancelled_transpose",
    "cancelled_result",
    "returned_view",
    "padding_only_phase",
    "unclipped",
    "unclipped_scaled",
    "unclipped_zero_point",
    "merged_concats",
    "clipped_rescale",
    "duplicated_rescale_reshape",
    "widened_image",
)
_U65 = Hardware(
    unsupported=frozenset((*_BITWISE, *_LOGICAL, *_COMPARISON_SELECT, "GATHER", "SCATTER", "INTDIV")),
    bool_as_int8=frozenset((*_LOGICAL, *_COMPARISON_SELECT)),
    first_operand_types=_U55_TYPES,
    limits=U55_U65_LIMITS,
    has_booleans=False,
    is_ethos_u=True,
    macs=(256, 512),
    averages_by_convolution=True,
    max_depthwise_size=1 << 14,
    sums_rescale_operands=True,
    estimates_missing_activation=True,
    pads_weight_blocks=True,
    vela_bugs=(
        *_BUGS_OF_ALL_FAMILIES,
        "reduce_min",
        "equal_weights",
        "unreached_output",
        "narrowing_cast",
        "clamped_cast",
        "unequal_scales",
        "lost_maximum_scale",
        "lost_channel_scales",
        "scalar_broadcast_high_rank",
        "reshaped_broadcast",
        "unwritten_table_result",
        "batched_activation",
        "lost_rescale_operand_offset",
        "duplicated_rescale_slice",
        "lost_rescale_result_offset",
        "lost_upsampling_offset",
    ),
    axes_lost_on_split=partial(
        find_axes_lost_on_split,
        axes_by_kind=dict.fromkeys(("CONV3D", "TRANSPOSE_CONV2D", "MATMUL"), ALL_AXES),
        unsplit_reductions=(-2,),
    ),
)
_U55 = replace(_U65, macs=(32, 64, 128, 256), writes_sram_only=True, constant_copy_min_rows={(5, 2): 2})
_U85 = Hardware(
    # int8 and int16 are omitted: Vela shifts in copies of the sign bit instead of zeros (bug ``narrow_shift``).
    first_operand_types={"LOGICAL_RIGHT_SHIFT": (DType.INT32,)},
    limits=U85_LIMITS,
    is_ethos_u=True,
    macs=(128, 256, 512, 1024, 2048),
    macs_per_write=64,
    transposes_by_convolution=True,
    slow_weights_max_macs=256,
    chains=True,
    broadcasts_both_operands=True,
    fuses_shared_rescale=True,
    ignores_unit_axes=True,
    scales_max_pools=True,
    computes_pixel_pairs=True,
    copies_by_slow_pool=True,
    flattens_odd_images=True,
    splits_matmuls=True,
    packs_weights_by_rows=True,
    slow_input_channels=range(9, 33),
    transposes_any_rank=True,
    max_macs_for_int16_split=256,
    bilinear_cycles_per_result=0.9,
    vela_bugs=(
        *_BUGS_OF_ALL_FAMILIES,
        "equal_weights",
        "reshaped_select",
        "returned_mask",
        "overwritten_indices",
        "reverse_overflow",
        "transposed_table",
        "two_tables",
        "batched_activation",
        "slice_rank_growth",
        "chained_cast",
        "lost_operand_scale",
        "lost_select_scale",
        "rescaled_cast",
        "shifted_cast",
        "unclipped_operand",
        "truncated_multiplier",
    ),
    axes_lost_on_split=partial(
        find_axes_lost_on_split,
        axes_by_kind={"CONV3D": ALL_AXES, "TRANSPOSE_CONV2D": HEIGHT_WIDTH, "ARGMAX": ALL_AXES},
        unsplit_reductions=HEIGHT_WIDTH,
    ),
)
#: {family: its hardware}; "tosa", "vgf" and "cortex-m" have no limits beyond the TOSA profile.
HARDWARE = {
    "ethos-u55": _U55,
    "ethos-u65": _U65,
    "ethos-u85": _U85,
    "tosa": Hardware(),
    "vgf": Hardware(),
    "cortex-m": Hardware(),
}
#: Families that Vela compiles for.
ETHOS_U_FAMILIES = tuple(family for family, hardware in HARDWARE.items() if hardware.is_ethos_u)
