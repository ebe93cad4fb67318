"""Weight prefetch (U55, U65): copy weights from flash to free SRAM while earlier layers compute.

A layer whose weights Vela leaves in flash takes at least the time to read them. While layers with few weights compute,
flash is idle. This pass fills the idle time: it splits the copy of weights into pieces, and starts each piece together
with an earlier kernel that leaves enough idle flash time to hide it. Bytes that no kernel can hide are copied right
before the kernel that reads the weights (the reader), which waits for them. The copies lie in the scratch where it
holds no live data (``ethosu_liveness``), so that the scratch does not grow.

Convolutions that still wait for flash, because their weights do not fit or no kernels hide the whole copy, are split by
output channels (``ethosu_depth_slices``) if that saves enough cycles.

"Flash" is the memory of the constants, ``VelaConfiguration.const_memory``. On U65, some configurations have them in
DRAM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.ethosu_depth_slices import find_slices, slice_convolutions
from arm_backend_core.backends.ethosu_liveness import Liveness, NpuKernel, analyze_liveness
from arm_backend_core.backends.ethosu_prefetch_plan import (
    MIN_SAVED_CYCLES,
    Costs,
    CyclesPerByte,
    PrefetchPlanner,
    Slot,
    WeightCopy,
)
from arm_backend_core.backends.ethosu_weight_cache import (
    WeightCopies,
    add_tensor_row,
    can_copy_weights,
    dma_register_values,
    redirect_weight_reads,
)
from arm_backend_core.backends.vela_tables import operation_ticks, read_allocations, read_rows

if TYPE_CHECKING:
    from arm_backend_core.workers.vela import VelaConfiguration

#: Minimum saving of all splits together, as a fraction of the program's cycles. Encoding the weights again costs
#: compile time.
_MIN_SLICING_GAIN = 0.01
#: Minimum time that a convolution waits for flash, as a fraction of the minimum saving (``_MIN_SLICING_GAIN``).
#: Convolutions that wait less are not split.
_MIN_GAIN_PART = 0.1


def prefetch_weights(vela_result: dict[str, Any], configuration: VelaConfiguration) -> None:
    """Edit Vela's result: copy weights to free SRAM before their layer reads them, if that saves cycles."""
    const_memory = configuration.const_memory
    if not can_copy_weights(vela_result, configuration) or not _may_save_cycles(const_memory, vela_result):
        return
    planner, kernels = _make_planner(vela_result, const_memory)
    copies = planner.choose_copies()
    if sliced := _slice_const_bound_convolutions(vela_result, const_memory, planner, kernels, copies):
        other, other_kernels = _make_planner({**vela_result, **sliced}, const_memory)
        other_copies = other.choose_copies()
        if other.saved_cycles(other_copies) > planner.saved_cycles(copies):
            vela_result |= sliced
            planner, kernels, copies = other, other_kernels, other_copies
    if copies:
        _insert_copies(vela_result, planner, kernels, copies)
        _update_tables(vela_result, const_memory, planner, copies)


def _may_save_cycles(const_memory: str, vela_result: dict[str, Any]) -> bool:
    """Whether a layer waits for flash for at least ``MIN_SAVED_CYCLES``, and the program has no variables (states)."""
    wait = max(
        (int(row["op_cycles"]) - int(row["npu_cycles"]) for row in _list_const_bound_rows(const_memory, vela_result)),
        default=0,
    )
    return wait >= MIN_SAVED_CYCLES and not vela_result["variables"]


def _list_const_bound_rows(const_memory: str, vela_result: dict[str, Any]) -> list[dict[str, str]]:
    rows = read_rows(vela_result["tables"], "perf")
    return [row for row in rows if int(row[f"{const_memory}_ac"]) >= int(row["op_cycles"])]


def _slice_const_bound_convolutions(
    vela_result: dict[str, Any],
    const_memory: str,
    planner: PrefetchPlanner,
    kernels: Sequence[NpuKernel],
    copies: Sequence[WeightCopy],
) -> dict[str, Any] | None:
    """Split the convolutions that still wait for flash.

    Returns:
        The changed entries of the result. None if the estimated saving is below ``_MIN_SLICING_GAIN``, or if the
        weights cannot be encoded again.
    """
    min_gain = _MIN_SLICING_GAIN * vela_result["report"]["totalCycles"]
    prefetched = {copy.reader for copy in copies if not copy.wait}
    const_bound = {
        kernels[slot.kernels[0]].word_index: index
        for index, slot in enumerate(planner.slots)
        if index not in prefetched
        and slot.weights
        and slot.costs.const_memory - slot.costs.npu > _MIN_GAIN_PART * min_gain
    }
    if (
        sum(planner.slots[index].costs.total - planner.slots[index].costs.npu for index in const_bound.values())
        < min_gain
    ):
        return None
    depths = find_slices(vela_result, const_bound.keys(), vela_result["scratch"][0])
    shares = {const_bound[key]: [depth / sum(parts) for depth in parts] for key, parts in depths.items()}
    estimated = planner.with_slices(shares)
    if estimated.saved_cycles(estimated.choose_copies()) < planner.saved_cycles(copies) + min_gain:
        return None
    return slice_convolutions(vela_result, depths, const_memory)


def _make_planner(vela_result: dict[str, Any], const_memory: str) -> tuple[PrefetchPlanner, list[NpuKernel]]:
    size, scratch_region = vela_result["scratch"]
    tensors = vela_result["outputs"]
    outputs = [
        (address, prod(shape) * element_bytes)
        for shape, element_bytes, address, tensor_region in tensors
        if tensor_region == scratch_region
    ]
    stream, weight_region = vela_result["command_stream"], vela_result["weight_region"]
    liveness = analyze_liveness(stream, weight_region, (size, scratch_region), outputs)
    slots = _make_slots(vela_result, const_memory, liveness.kernels)
    return PrefetchPlanner(
        slots, _slot_liveness(liveness, slots), liveness.granule, _estimate_cycles_per_byte(vela_result, slots)
    ), (liveness.kernels)


def _make_slots(vela_result: dict[str, Any], const_memory: str, kernels: Sequence[NpuKernel]) -> list[Slot]:
    """Group kernels into slots (``Slot``), and distribute Vela's estimate of each layer over its slots."""
    header, rows = vela_result["tables"]["perf"]
    columns = [header.index(name) for name in ("op_cycles", "npu_cycles", f"{const_memory}_ac", "Sram_ac")]
    costs = {row[0]: Costs(*(int(row[column]) for column in columns)) for row in rows}
    layer_of = {int(row[0]) // 4: row[-1] for row in vela_result["tables"]["queue"][1]}
    # Vela's table has only the last kernel of each operation; earlier kernels belong to the same layer.
    layers = [layer_of.get(kernel.word_index) for kernel in kernels]
    for index in range(len(layers) - 2, -1, -1):
        layers[index] = layers[index] or layers[index + 1]
    members = defaultdict[str | None, list[NpuKernel]](list)
    for kernel, layer in zip(kernels, layers, strict=True):
        members[layer].append(kernel)
    uncached_layers = {
        layer for layer, group in members.items() if layer is not None and all(map(_reads_only_const_memory, group))
    }
    slots = list[Slot]()
    for index, (kernel, layer) in enumerate(zip(kernels, layers, strict=True)):
        total = costs[layer] if layer is not None else Costs(0, 0, 0, 0)
        if layer in uncached_layers:
            share = _count_weight_bytes([kernel]) / _count_weight_bytes(members[layer])
            slots.append(Slot((index,), layer, total.scale(share), 0, kernel.weights))
            continue
        part = total.scale(1 / len(members[layer]))
        if slots and slots[-1].layer == layer and not slots[-1].weights:
            last = slots.pop()
            part = Costs(*map(sum, zip(part, last.costs, strict=True)))
            slots.append(Slot((*last.kernels, index), layer, part, last.dma_bytes + kernel.dma_bytes))
        else:
            slots.append(Slot((index,), layer, part, kernel.dma_bytes))
    return slots


def _count_weight_bytes(kernels: Sequence[NpuKernel]) -> int:
    """Bytes of weights that kernels read from flash."""
    return sum(end - start for kernel in kernels for start, end in kernel.weights)


def _reads_only_const_memory(kernel: NpuKernel) -> bool:
    """Whether a kernel reads weights from flash. False if Vela's DMAs copy weights to SRAM for it."""
    return bool(kernel.weights) and not kernel.dma_bytes


def _slot_liveness(liveness: Liveness, slots: Sequence[Slot]) -> Any:
    """The granules that are busy while any kernel of a slot runs: bool array [slots, granules]."""
    import numpy as np

    if not slots:
        return liveness.busy
    return np.logical_or.reduceat(liveness.busy, [slot.kernels[0] for slot in slots])


def _estimate_cycles_per_byte(vela_result: dict[str, Any], slots: Sequence[Slot]) -> CyclesPerByte:
    """Cycles per byte of flash and of SRAM.

    The rate of flash is the minimum over the slots with weights, because a kernel that reads its weights repeatedly has
    a higher ratio of cycles to bytes. The rate of SRAM is the average over all accesses of the program.
    """
    use = vela_result["memories"]["Sram"]
    sram = use["cycles"] / max(use["read"] + use["written"], 1)
    rates = [slot.costs.const_memory / slot.weight_bytes for slot in slots if slot.weights]
    return CyclesPerByte(min((rate for rate in rates if rate), default=1.0), sram or 1.0)


def _insert_copies(
    vela_result: dict[str, Any], planner: PrefetchPlanner, kernels: Sequence[NpuKernel], copies: Sequence[WeightCopy]
) -> None:
    """Insert each DMA after the command of the kernel during which it runs, and redirect the readers to the copies."""
    stream, scratch_region = vela_result["command_stream"], vela_result["scratch"][1]
    changes, dmas = WeightCopies(scratch_region), dict[int, list[list[tuple[int, int]]]]()
    for copy in copies:
        reader = planner.slots[copy.reader]
        word_index, offset = kernels[reader.kernels[0]].word_index, 0
        changes.waits.add(word_index)
        for start, end in reader.weights:
            changes.relocations.setdefault(word_index, []).append((start, end, copy.address + offset - start))
            for piece in copy.pieces:
                first, last = (min(max(at - offset, 0), end - start) for at in (piece.start, piece.end))
                source, target = start + first, copy.address + offset + first
                if first < last:
                    dma = dma_register_values(
                        (vela_result["weight_region"], source), (scratch_region, target), last - first
                    )
                    dmas.setdefault(piece.slot, []).append(dma)
            offset += end - start
    for index, commands in dmas.items():
        members = planner.slots[index].kernels
        # Distribute the DMAs over the slot's kernels, because each DMA waits for the DMA before it.
        for number, dma in enumerate(commands):
            word_index = kernels[members[number * len(members) // len(commands)]].word_index
            changes.dmas.setdefault(word_index, []).append(dma)
    vela_result["command_stream"], positions = redirect_weight_reads(stream, changes)
    for row in vela_result["tables"]["queue"][1]:
        row[0] = str(4 * positions[int(row[0]) // 4])


def _update_tables(
    vela_result: dict[str, Any], const_memory: str, planner: PrefetchPlanner, copies: Sequence[WeightCopy]
) -> None:
    """Update Vela's estimates, and add the copies to its table of tensors."""
    changed: dict[str, Costs] = {}

    def add(layer: str | None, before: Costs, after: Costs) -> None:
        if layer is not None:
            change = Costs(*(new - old for new, old in zip(after, before, strict=True)))
            changed[layer] = Costs(*map(sum, zip(changed.get(layer, Costs(0, 0, 0, 0)), change, strict=True)))

    for copy in copies:
        reader, costs = planner.slots[copy.reader], planner.costs_with_copy(copy.reader)
        add(reader.layer, reader.costs, costs._replace(total=costs.total + copy.wait))
        for piece in copy.pieces:
            slot, length = planner.slots[piece.slot], piece.end - piece.start
            const_cycles, sram_cycles = (length * rate for rate in planner.cycles_per_byte)
            after = slot.costs._replace(
                const_memory=slot.costs.const_memory + const_cycles, sram=slot.costs.sram + sram_cycles
            )
            add(reader.layer if slot.layer is None else slot.layer, slot.costs, after)
    header, rows = vela_result["tables"]["perf"]
    for row in rows:
        change = changed.get(row[0], Costs(0, 0, 0, 0))
        for name, amount in (
            ("op_cycles", change.total),
            (f"{const_memory}_ac", change.const_memory),
            ("Sram_ac", change.sram),
        ):
            column = header.index(name)
            before, row[column] = int(row[column]), str(round(int(row[column]) + amount))
            _add_to_totals(vela_result, name, int(row[column]) - before)
    _add_tensor_rows(vela_result, planner, copies)


def _add_to_totals(vela_result: dict[str, Any], column: str, change: int) -> None:
    """Add a change of a layer's estimate to the estimates of the program."""
    if column == "op_cycles":
        vela_result["report"]["totalCycles"] += change
    else:
        vela_result["memories"][column.removesuffix("_ac")]["cycles"] += change


def _add_tensor_rows(vela_result: dict[str, Any], planner: PrefetchPlanner, copies: Sequence[WeightCopy]) -> None:
    """Add the copies to Vela's table of tensors, live from their first piece to the kernel that reads them."""
    tables, slots = vela_result["tables"], planner.slots
    names = [[row["name"]] for row in read_rows(tables, "perf")]
    found = operation_ticks(names, read_allocations(tables))
    ticks: Mapping[str | None, int] = dict(zip((row[0] for row in tables["perf"][1]), found, strict=True))
    for copy in copies:
        reader = slots[copy.reader]
        assert reader.layer is not None
        last = ticks[reader.layer]
        first = ticks.get(slots[min(piece.slot for piece in copy.pieces)].layer, last)
        add_tensor_row(vela_result, reader.layer, copy.address, reader.weight_bytes, (first, last + 1))
