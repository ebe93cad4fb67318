"""Shared scratch: plan the NPU's scratch and the tensors outside the delegates in one memory.

Vela places the inputs and outputs of a delegate in its scratch. ExecuTorch's own memory plan has other addresses for
these tensors. With that plan, a runtime copies them, and a board needs memory for both copies. This module's plan
contains the scratch. Where possible, it places the inputs and outputs of delegates at Vela's offsets in the scratch.
The runtime does not copy these tensors. While a delegate does not run, tensors of the CPU use the memory of its
scratch.

The scratch has a fixed distance from each tensor in it. Compile specs of the delegate name one input or output, and the
end of the scratch (``PlannedScratch``). A runtime computes the address of the scratch from the address of this tensor.
Runtimes that do not read these specs, such as ExecuTorch's own backend, allocate another scratch and copy. The plan is
correct for them too: tensors that are live at the same time do not overlap, except an input and an output of one
delegate. Such a runtime writes the output after it has copied the input to its scratch.

The plan is greedy: each scratch or tensor gets the lowest free address (first fit). The smaller of two plans is used.
The first places scratches, then tensors. The second places floating-point tensors, then scratches, then other tensors.
Within each kind, the largest are first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch.fx import GraphModule

from arm_backend_core.backends.payload import PLANNED_SCRATCH_KEYS, PlannedScratch
from arm_backend_core.compilation_log import delegate_record, set_delegate_record
from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes._internal.executorch_programs import arm_delegates_of, set_payload
from arm_recipes.pipeline.banked_memory_planning import forget_earlier_plan
from arm_recipes.runtime.ethosu_payload import (
    CACHE_LINE,
    SCRATCH,
    EthosUTensor,
    read_scratch_size_and_io,
    round_to_cache_lines,
)

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.lowered_backend_module import LoweredBackendModule
    from executorch.exir.memory_planning import MemoryAlgoResult
    from executorch.exir.tensor import TensorSpec
    from torch.export.graph_signature import ExportGraphSignature
    from torch.fx import Node

_MEM_ID: Final = 1  #: ``mem_id`` of the first planned memory. Tensors without a ``mem_id`` are in it.


def allow_shared_scratch(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: allow the memory plan to place the scratch of the Ethos-U delegates.

    Programs with several methods are excluded, because each method has a separate planned memory, but all use one
    scratch. Programs with loops or branches are excluded, because the tensors of a body are not at the addresses that
    the body's plan gives them.
    """
    if len(manager.methods) > 1:
        return []
    (method,) = manager.methods
    graph_module = manager.exported_program(method).graph_module
    if any(isinstance(module, GraphModule) for module in graph_module.children()):
        return []
    for module in arm_delegates_of(manager, method):
        record = delegate_record(module)
        if record is not None and module.backend_id == "EthosUBackend":
            set_delegate_record(module, replace(record, may_share_scratch=True))
    return []


@dataclass(frozen=True)
class _Block:
    """The memory of a tensor or scratch, and the nodes that use it.

    Attributes:
        start: address in the planned memory. Before the block is placed: offset in the scratch of its call, or 0.
        size: bytes.
        first, last: indices of the first and the last node that use the memory.
        spec: the tensor; None for a scratch.
    """

    start: int
    size: int
    first: int
    last: int
    spec: TensorSpec | None = None

    def overlaps(self, other: _Block, distance: int) -> bool:
        """Whether this block, moved by ``distance``, shares bytes with ``other`` while both are in use."""
        return (
            self.first <= other.last
            and other.first <= self.last
            and self.start + distance < other.start + other.size
            and other.start < self.start + distance + self.size
        )


@dataclass(frozen=True)
class _Call:
    """A call of a delegate whose scratch can be planned.

    Attributes:
        index: index of the call's node.
        module: the delegate.
        scratch_bytes: its scratch, in whole cache lines.
        arguments: inputs and outputs that may be in the scratch: ``{position: (tensor, offset in the scratch)}``.
            Positions count the inputs, then the outputs.
    """

    index: int
    module: LoweredBackendModule
    scratch_bytes: int
    arguments: Mapping[int, tuple[TensorSpec, int]]

    @property
    def blocks(self) -> list[_Block]:
        """The scratch, then the arguments. ``start`` is the offset in the scratch that Vela chose."""
        tensors = [
            _Block(offset, spec.allocated_memory, spec.lifetime[0], spec.lifetime[1], spec)
            for spec, offset in self.arguments.values()
        ]
        return [_Block(0, self.scratch_bytes, self.index, self.index), *tensors]


def plan_shared_scratch(
    alignment: int,
    specs: Sequence[TensorSpec],
    graph_module: GraphModule,
    graph_signature: ExportGraphSignature | None = None,
    extra_padding: int = 0,
) -> MemoryAlgoResult:
    """Plan the memory of one method together with the scratches of its delegates.

    The parameters are those of ExecuTorch's memory planning algorithms. The plan is ExecuTorch's own if no scratch may
    be shared, if the method has several planned memories, if sharing does not save memory, if a call has no tensor in
    its scratch, or if calls of one delegate would locate its scratch by different arguments. In all cases, this
    function removes compile specs that an earlier plan recorded in the delegates. A later ``to_executorch`` may plan
    with ExecuTorch's own algorithm instead of this function. The specs do not remain in this case either:
    ``to_executorch`` first traces the program, and each trace removes them (``insert_delegates``).
    """
    from executorch.exir.memory_planning import MemoryAlgoResult, SpecAllocResult, greedy

    forget_earlier_plan(specs)
    separate = greedy(alignment, specs, graph_module, graph_signature, extra_padding)
    calls = list(_plannable_calls(graph_module, specs))
    plan = _smallest_plan(calls, specs, alignment) if calls and _has_one_memory(specs) else None
    separate_bytes = sum(separate.bufsizes) + max((call.scratch_bytes for call in calls), default=0)
    if plan is None or plan.size + extra_padding >= separate_bytes or not _has_one_argument_each(calls, plan.scratches):
        _record_scratches(calls, {})
        return separate
    _record_scratches(calls, plan.scratches)
    results = {spec: SpecAllocResult(_MEM_ID, 0, plan.offset_of(spec)) for spec in specs}
    return MemoryAlgoResult(results, [0, plan.size + extra_padding])


def _has_one_argument_each(calls: Iterable[_Call], scratches: Mapping[int, PlannedScratch]) -> bool:
    """Whether each call has a planned scratch, and all calls of one delegate locate it by the same argument."""
    arguments: dict[int, int] = {}
    return all(
        call.index in scratches
        and arguments.setdefault(id(call.module), scratches[call.index].argument) == scratches[call.index].argument
        for call in calls
    )


def _record_scratches(calls: Iterable[_Call], scratches: Mapping[int, PlannedScratch]) -> None:
    """Write the scratches of the calls into the compile specs of their delegates, and remove specs of an earlier plan.

    For a delegate with several calls, ``end`` is the largest end of their scratches.
    """
    combined: dict[int, PlannedScratch] = {}
    for call in calls:
        scratch = scratches.get(call.index)
        if scratch is not None:
            other = combined.get(id(call.module), scratch)
            combined[id(call.module)] = replace(scratch, end=max(scratch.end, other.end))
    for call in calls:
        module = call.module
        kept = [spec for spec in module.compile_specs if spec.key not in PLANNED_SCRATCH_KEYS]
        planned = combined.get(id(module))
        set_payload(module, module.processed_bytes, [*kept, *(planned.to_compile_specs() if planned else ())])


def _has_one_memory(specs: Iterable[TensorSpec]) -> bool:
    """Whether the method has one planned memory."""
    return all(spec.mem_id in (None, _MEM_ID) for spec in specs)


def _plannable_calls(graph_module: GraphModule, specs: Iterable[TensorSpec]) -> Iterator[_Call]:
    """Yield the calls of delegates whose scratch may be planned, with the arguments that may be in the scratch."""
    planned = {spec for spec in specs if spec.storage_base is None and spec.allocated_memory}
    planned -= {spec.storage_base for spec in specs if spec.storage_base is not None}
    for index, node in enumerate(graph_module.graph.nodes):
        module = _called_delegate(graph_module, node)
        if module is None:
            continue
        scratch, inputs, outputs = read_scratch_size_and_io(module.processed_bytes)
        arguments: dict[int, tuple[TensorSpec, int]] = {}
        for position, (spec, tensor) in enumerate(_match_arguments(node, inputs, outputs)):
            is_input = position < len(inputs)
            starts_or_ends_here = spec.lifetime[1] == index if is_input else spec.lifetime[0] == index
            is_repeated = any(
                spec is other or (not is_input and earlier >= len(inputs) and offset == tensor.offset)
                for earlier, (other, offset) in arguments.items()
            )
            if spec in planned and starts_or_ends_here and not is_repeated and _fits(spec, tensor):
                arguments[position] = (spec, tensor.offset)
        yield _Call(index, module, round_to_cache_lines(scratch), arguments)


def _called_delegate(graph_module: GraphModule, node: Node) -> LoweredBackendModule | None:
    """The delegate that a node calls, if its scratch may be planned."""
    from executorch.exir.delegate import executorch_call_delegate

    if node.target is not executorch_call_delegate:
        return None
    module = getattr(graph_module, str(node.args[0].target))  # type: ignore[union-attr]
    record = delegate_record(module)
    return module if record is not None and record.may_share_scratch else None


def _match_arguments(
    node: Node, inputs: Sequence[EthosUTensor], outputs: Sequence[EthosUTensor]
) -> Iterator[tuple[TensorSpec, EthosUTensor]]:
    """Yield (tensor of the program, tensor of the payload) for each input, then for each output."""
    from executorch.exir.memory_planning import get_node_tensor_specs

    specs = [spec for argument in node.args[1:] for spec in get_node_tensor_specs(argument)]
    specs += get_node_tensor_specs(node)
    return zip(specs, (*inputs, *outputs), strict=True)


def _fits(spec: TensorSpec, tensor: EthosUTensor) -> bool:
    """Whether a tensor of the program can be where Vela placed it: in the scratch, with equal size and alignment."""
    is_placed = tensor.offset >= 0 and tensor.region == SCRATCH
    return is_placed and spec.nbytes() == tensor.nbytes and tensor.offset % spec.alignment == 0


def _smallest_plan(calls: Sequence[_Call], specs: Sequence[TensorSpec], alignment: int) -> _Plan:
    """Plan with two orders of placement, and return the smaller plan.

    The int8 input of a delegate is often quantized from a float tensor, which is not live while the delegate runs. The
    float tensor must not overlap the int8 input, but may overlap the rest of the scratch. With scratches first, there
    may be too little space at addresses below the int8 input. The float tensor is then placed above the int8 input.
    With floating-point tensors first, the scratch moves up only until its int8 input is above the float tensor.
    """
    tensors = sorted((spec for spec in specs if spec.storage_base is None), key=lambda spec: -spec.allocated_memory)
    scratches = sorted(calls, key=lambda call: -call.scratch_bytes)
    float_tensors = [spec for spec in tensors if kind_of(spec.dtype) is ScalarKind.FLOAT]
    orders: list[list[_Call | TensorSpec]] = [
        [*scratches, *tensors],
        [*float_tensors, *scratches, *tensors],
    ]
    plans = []
    for order in orders:
        plan = _Plan(alignment)
        for item in order:
            plan.place(item)
        plans.append(plan)
    return min(plans, key=lambda plan: plan.size)


class _Plan:
    """A memory plan, to which ``place`` adds blocks.

    Attributes:
        scratches: the planned scratch of each call, by the index of the call's node.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._blocks: list[_Block] = []
        self._offsets: dict[TensorSpec, int] = {}
        self.scratches: dict[int, PlannedScratch] = {}

    @property
    def size(self) -> int:
        """Bytes of the planned memory."""
        return max((block.start + block.size for block in self._blocks), default=0)

    def offset_of(self, spec: TensorSpec) -> int:
        """Address of a tensor, or of a part of another tensor's memory."""
        if spec.storage_base is not None:
            return self.offset_of(spec.storage_base) + (spec.storage_base_offset or 0)
        return self._offsets[spec]

    def place(self, item: _Call | TensorSpec) -> None:
        """Place the scratch of a call with its arguments, or a tensor. Skips a tensor that already has an address."""
        if isinstance(item, _Call):
            self._place_call(item)
        elif item not in self._offsets:
            first, last = item.lifetime
            blocks = [_Block(0, item.allocated_memory, first, last, item)]
            self._add(blocks, self._first_fit(blocks, self._blocks, self._alignment))

    def _place_call(self, call: _Call) -> None:
        """Place the scratch of a call, and its arguments that have no address yet.

        If possible, the scratch is placed such that an argument that already has an address is at Vela's offset in it.
        Otherwise, the scratch is placed anywhere, and only arguments without an address are in it. If there is no such
        argument, the scratch is not planned.
        """
        for spec, offset in call.arguments.values():
            start = self._offsets.get(spec, -1) - offset
            if start < 0 or start % CACHE_LINE:
                continue
            in_scratch = {
                other
                for other, offset in call.arguments.values()
                if self._offsets.get(other, start + offset) == start + offset
            }
            others = [block for block in self._blocks if block.spec is None or block.spec not in in_scratch]
            if not any(
                block.overlaps(other, start) for block in self._new_blocks(call, in_scratch) for other in others
            ):
                self._add_call(call, in_scratch, start)
                return
        in_scratch = {spec for spec, _ in call.arguments.values() if spec not in self._offsets}
        if in_scratch:
            start = self._first_fit(self._new_blocks(call, in_scratch), self._blocks, CACHE_LINE)
            self._add_call(call, in_scratch, start)

    def _new_blocks(self, call: _Call, in_scratch: set[TensorSpec]) -> list[_Block]:
        """Blocks that a call adds to the plan: its scratch, and the tensors of ``in_scratch`` without an address."""
        return [
            block
            for block in call.blocks
            if block.spec is None or (block.spec in in_scratch and block.spec not in self._offsets)
        ]

    def _add_call(self, call: _Call, in_scratch: set[TensorSpec], start: int) -> None:
        self._add(self._new_blocks(call, in_scratch), start)
        argument = next(position for position, (spec, _) in call.arguments.items() if spec in in_scratch)
        self.scratches[call.index] = PlannedScratch(argument, start + call.scratch_bytes)

    def _add(self, blocks: Iterable[_Block], distance: int) -> None:
        for block in blocks:
            self._blocks.append(replace(block, start=block.start + distance))
            if block.spec is not None:
                self._offsets[block.spec] = block.start + distance

    @staticmethod
    def _first_fit(blocks: Sequence[_Block], others: Sequence[_Block], alignment: int) -> int:
        """Return the lowest address at which none of ``blocks``, which move together, overlaps one of ``others``.

        If a block overlaps one of ``others``, all blocks move up to the first aligned address without this overlap. All
        skipped addresses have the overlap, so the result is the lowest free address.
        """
        first, last = min(block.first for block in blocks), max(block.last for block in blocks)
        others = [other for other in others if other.first <= last and first <= other.last]
        distance, moved = 0, True
        while moved:
            moved = False
            for block in blocks:
                for other in others:
                    if block.overlaps(other, distance):
                        distance = -(-(other.start + other.size - block.start) // alignment) * alignment
                        moved = True
        return distance
