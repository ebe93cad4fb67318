"""Memory of a method: the bytes that ExecuTorch's runtime allocates to load it, and its planned tensors.

The runtime allocates one object after the other, each at the alignment of its type. This module adds the sizes in the
same order, with the same alignments, for 32-bit or 64-bit pointers. ``firmware.memory_pools.measure_pools`` compares
the result for 64-bit pointers with a run on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.payload import COMMANDS_CHECKSUM_KEY, PlannedScratch
from arm_recipes._internal.messages import import_quietly
from arm_recipes.runtime.ethosu_payload import round_to_cache_lines

if TYPE_CHECKING:
    from executorch.exir import schema
else:
    schema = import_quietly("executorch.exir.schema")

#: Size and alignment of a type, in bytes.
SizeAndAlignment = tuple[int, int]
#: Size and alignment of an int32 (the size of a dimension), of a byte (an entry of ``dim_order``, or a flag) and of an
#: int64 (an integer value).
_INT32, _BYTE, _INT64 = (4, 4), (1, 1), (8, 8)
#: Maximum rank of a tensor in ExecuTorch's runtime: executorch::runtime::kTensorDimensionLimit.
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class TypeLayout:
    """Sizes and alignments of the runtime's types, for one width of pointers.

    Attributes:
        bits: width of pointers.
        named: {C++ type: (size, alignment)}. A build of the firmware asserts these sizes.
        delegate: (size, alignment) of ``BackendDelegate``. No public header defines this type. It consists of a
            ``FreeableBuffer`` and two pointers.
        chain: (size, alignment) of ``Chain``. No public header defines this type. It consists of a pointer, a span and
            a pointer.
    """

    bits: int
    named: Mapping[str, SizeAndAlignment]
    delegate: SizeAndAlignment
    chain: SizeAndAlignment

    @property
    def pointer(self) -> SizeAndAlignment:
        """Size and alignment of a pointer."""
        return self.bits // 8, self.bits // 8


TYPE_LAYOUTS = {
    32: TypeLayout(
        32,
        {
            "executorch::runtime::EValue": (16, 8),
            "executorch::aten::TensorImpl": (32, 4),
            "executorch::aten::Tensor": (4, 4),
            "std::optional<executorch::aten::Tensor>": (8, 4),
            "executorch::runtime::BoxedEvalueList<int64_t>": (12, 4),
            "executorch::aten::ArrayRef<double>": (8, 4),
            "executorch::runtime::FreeableBuffer": (32, 8),
            "executorch::runtime::CompileSpec": (12, 4),
            "executorch::runtime::Span<uint8_t>": (8, 4),
            "executorch::runtime::TensorMeta": (12, 4),
        },
        delegate=(40, 8),
        chain=(16, 4),
    ),
    64: TypeLayout(
        64,
        {
            "executorch::runtime::EValue": (16, 8),
            "executorch::aten::TensorImpl": (64, 8),
            "executorch::aten::Tensor": (8, 8),
            "std::optional<executorch::aten::Tensor>": (16, 8),
            "executorch::runtime::BoxedEvalueList<int64_t>": (24, 8),
            "executorch::aten::ArrayRef<double>": (16, 8),
            "executorch::runtime::FreeableBuffer": (40, 8),
            "executorch::runtime::CompileSpec": (24, 8),
            "executorch::runtime::Span<uint8_t>": (16, 8),
            "executorch::runtime::TensorMeta": (24, 8),
        },
        delegate=(56, 8),
        chain=(32, 8),
    ),
}
#: Number of pointers in ``MergedDataMap``: one to the table of virtual functions, and one to each of two maps.
_MERGED_DATA_POINTERS = 3
#: {width of pointers: bytes that the Ethos-U backend allocates when it loads a delegate}. In C++:
#: arm_runtime::EthosUBackend::kMethodAllocatorBytes.
LOADED_DELEGATE_BYTES = {32: 128, 64: 168}


def method_allocator_bytes(plan: schema.ExecutionPlan, bits: int, has_data_file: bool = False) -> int:
    """Bytes that the method allocator needs to load a method, if its pool is aligned to 16 bytes.

    Args:
        plan: the method.
        bits: width of pointers.
        has_data_file: whether the program is loaded with a data file (``.ptd``).
    """
    layout = TYPE_LAYOUTS[bits]
    # The runtime merges the named data of the program and of the data file: MergedDataMap.
    used = _MERGED_DATA_POINTERS * layout.pointer[0] if has_data_file else 0
    for size, alignment in _allocations(plan, bits):
        used = -(-used // alignment) * alignment + size
    return used


def kernel_lookup_bytes(plan: schema.ExecutionPlan, bits: int) -> int:
    """Bytes that the runtime takes from the temp allocator to look up kernels.

    If the temp allocator is smaller than that, the runtime takes them from the method allocator, and never frees them.
    """
    size, _ = TYPE_LAYOUTS[bits].named["executorch::runtime::TensorMeta"]
    counts = [len(call.args) for call in _list_calls(plan) if isinstance(call, schema.KernelCall)]
    return max(counts, default=0) * (size + _MAX_DIMENSIONS)


def planned_bytes(plans: Sequence[schema.ExecutionPlan]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Bytes of the memory-planned buffers, which hold the tensors outside delegates, and planned scratch of delegates.

    Returns:
        ({name of a method: bytes of its first buffer}, (bytes of the second buffer, ...)). All methods share the second
        and later buffers.
    """
    used = {plan.name: _used_planned_bytes(plan) for plan in plans}
    buffer_count = max(map(len, used.values()))
    shared = (max(sizes[index] for sizes in used.values() if index < len(sizes)) for index in range(1, buffer_count))
    return {name: sizes[0] for name, sizes in used.items()}, tuple(shared)


def _used_planned_bytes(plan: schema.ExecutionPlan) -> list[int]:
    """Bytes of each memory-planned buffer, including the scratch of delegates if the memory plan places it."""
    return [*plan.non_const_buffer_sizes[1:]] or [0]


def application_bytes(plan: schema.ExecutionPlan) -> tuple[int, int]:
    """Compute (input bytes, output bytes) of the tensors that the application must allocate.

    These are the inputs and outputs that the memory plan does not place. Each tensor occupies whole cache lines.
    """
    inputs, outputs = (
        sum(
            round_to_cache_lines(_tensor_bytes(value))
            for value in (plan.values[index].val for index in indices)
            if isinstance(value, schema.Tensor) and value.allocation_info is None and not value.data_buffer_idx
        )
        for indices in (plan.inputs, plan.outputs)
    )
    return inputs, outputs


def planned_scratches(plan: schema.ExecutionPlan) -> Iterator[PlannedScratch]:
    """Yield the scratch of each delegate whose scratch is in the method's first planned buffer."""
    for delegate in plan.delegates:
        scratch = PlannedScratch.from_compile_specs({spec.key: bytes(spec.value) for spec in delegate.compile_specs})
        if scratch is not None:
            yield scratch


def _tensor_bytes(tensor: schema.Tensor) -> int:
    return math.prod(tensor.sizes) * _element_size(tensor.scalar_type)


def _element_size(scalar_type: Any) -> int:
    size: int = import_quietly("executorch.exir.tensor").get_scalar_type(scalar_type).itemsize
    return size


def _list_calls(plan: schema.ExecutionPlan) -> Iterator[Any]:
    for chain in plan.chains:
        yield from (instruction.instr_args for instruction in chain.instructions)


def _allocations(plan: schema.ExecutionPlan, bits: int) -> Iterator[SizeAndAlignment]:
    """Yield size and alignment of each allocation, in the order of the runtime."""
    layout = TYPE_LAYOUTS[bits]
    yield _array_of(len(plan.values), layout.named["executorch::runtime::EValue"])
    if plan.inputs:
        yield _array_of(len(plan.inputs), _BYTE)  # flags: which inputs are set
    for value in plan.values:
        yield from _value_allocations(value.val, layout)
    yield _array_of(len(plan.delegates), layout.delegate)
    for delegate in plan.delegates:
        yield _array_of(len(delegate.compile_specs), layout.named["executorch::runtime::CompileSpec"])
        if delegate.id == "EthosUBackend":
            yield LOADED_DELEGATE_BYTES[bits], 8
            if any(spec.key == COMMANDS_CHECKSUM_KEY for spec in delegate.compile_specs):  # external commands
                yield layout.named["executorch::runtime::FreeableBuffer"]
    yield _array_of(len(plan.chains), layout.chain)
    for chain in plan.chains:
        count = len(chain.instructions)
        yield _array_of(count, layout.pointer)  # kernels
        yield _array_of(count, layout.named["executorch::runtime::Span<uint8_t>"])  # argument lists
        for instruction in chain.instructions:
            call = instruction.instr_args
            if isinstance(call, (schema.KernelCall, schema.DelegateCall)):
                yield _array_of(len(call.args), layout.pointer)


def _value_allocations(value: Any, layout: TypeLayout) -> Iterable[SizeAndAlignment]:
    boxed = layout.named["executorch::runtime::BoxedEvalueList<int64_t>"]
    match value:
        case schema.Tensor():
            return _tensor_allocations(value, layout)
        case schema.IntList():
            return [_array_of(len(value.items), layout.pointer), _array_of(len(value.items), _INT64), boxed]
        case schema.TensorList():
            tensors = _array_of(len(value.items), layout.named["executorch::aten::Tensor"])
            return [tensors, _array_of(len(value.items), layout.pointer), boxed]
        case schema.OptionalTensorList():
            tensors = _array_of(len(value.items), layout.named["std::optional<executorch::aten::Tensor>"])
            return [_array_of(len(value.items), layout.pointer), tensors, boxed]
        case schema.BoolList() | schema.DoubleList() | schema.String():
            return [layout.named["executorch::aten::ArrayRef<double>"]]
    return []


def _tensor_allocations(tensor: schema.Tensor, layout: TypeLayout) -> Iterator[SizeAndAlignment]:
    rank = len(tensor.sizes)
    if tensor.shape_dynamism != schema.TensorShapeDynamism.STATIC:
        yield _array_of(rank, _INT32)
        yield _array_of(rank, _BYTE)
    yield _array_of(rank, _INT32)  # strides
    yield layout.named["executorch::aten::TensorImpl"]


def _array_of(count: int, element: SizeAndAlignment) -> SizeAndAlignment:
    return count * element[0], element[1]
