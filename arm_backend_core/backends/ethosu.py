"""Ethos-U backend: compile a TOSA flatbuffer to a command stream with Vela, and collect Vela's estimates."""

from __future__ import annotations

import bisect
import csv
import io
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.artifacts import FindOperator, make_compile_error
from arm_backend_core.backends.ethosu_bounds import find_out_of_bounds_write
from arm_backend_core.backends.ethosu_prefetch import prefetch_weights
from arm_backend_core.backends.ethosu_waits import insert_waits
from arm_backend_core.backends.ethosu_weight_cache import cache_weights_in_sram
from arm_backend_core.backends.payload import Payload, pack_block_stream, pack_io_block
from arm_backend_core.backends.vela_estimates import MemoryUse, OperationEstimate, VelaEstimates
from arm_backend_core.backends.vela_tables import Tables, read_allocations, read_rows
from arm_backend_core.errors import CompileError
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

_logger = logging.getLogger(__name__)
#: Memories inside the NPU. The report omits them, as Vela's summary does.
_NPU_MEMORIES = ("shram", "lutram")
_ACCESS_CYCLES_SUFFIX = "_ac"


def compile_ethosu(
    flatbuffer: bytes,
    spec: EthosUCompileSpec,
    *,
    delegate: str,
    find_operator: FindOperator,
    unused_inputs: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    input_bytes: Sequence[int] | None = None,
    output_bytes: Sequence[int] | None = None,
    timeout: float | None = 1800.0,
    run_vela: Callable[[bytes, vela.VelaConfiguration, float | None], tuple[Any, str]] | None = None,
) -> Payload:
    """Compile a TOSA 1.0 flatbuffer for ``spec``'s NPU.

    Args:
        flatbuffer: the TOSA graph.
        spec: the NPU and compiler options.
        delegate: name of the delegate, for errors and files.
        find_operator: finds the ATen operator and source line that Vela's message is about.
        unused_inputs: inputs that no operator reads, see ``CompileRequest``. Vela omits them. This function adds them
            to the payload, because ExecuTorch's runtime copies them like the other inputs. In the scratch, they follow
            the other inputs. In Direct Drive programs, they have no address.
        input_bytes, output_bytes: expected bytes of each input and output, see ``CompileRequest``.
        timeout: seconds after which Vela is stopped; None disables it.
        run_vela: is called instead of ``vela.compile_tosa``, for example to return a cached result. Takes flatbuffer,
            configuration and timeout; returns Vela's result and its printed text.

    Raises:
        CompileError: Vela refused the flatbuffer, crashed on it or timed out; or the sizes of the program's inputs or
            results differ from ``input_bytes`` or ``output_bytes``; or the program writes out of bounds.
    """
    directory = spec.get_intermediate_path()

    def make_error(reason: str, log: str) -> CompileError:
        return make_compile_error(
            reason, flatbuffer, delegate=delegate, directory=directory, find_operator=find_operator, log=log
        )

    try:
        vela_result, log = (run_vela or vela.compile_tosa)(flatbuffer, spec.configuration, timeout)
    except WorkerError as error:
        raise make_error(f"Vela refused it: {error.message.removeprefix('Compilation failed: ')}", error.log) from None
    except WorkerDied as error:
        raise make_error(f"Vela {error.description} while compiling for {spec.accelerator}", error.log) from None
    if log:
        _logger.info("Vela on delegate '%s':\n%s", delegate, log)
    _allocate_unused_inputs(vela_result, unused_inputs)
    if mismatch := _describe_size_mismatch(vela_result, input_bytes, output_bytes):
        raise make_error(f"Vela wrote a program with {mismatch}; report the flatbuffer", log)
    cache_weights_in_sram(vela_result, spec.configuration)
    prefetch_weights(vela_result, spec.configuration)
    vela_result["command_stream"], waits = insert_waits(vela_result["command_stream"])
    estimates = _make_estimates(vela_result, spec, _make_layers(vela_result["tables"], waits))
    # If the program has fast scratch, tensors in SRAM are in region 2. All other tensors are in region 1 (scratch). In
    # Direct Drive programs, inputs and results have separate regions.
    has_fast_scratch = vela_result["scratch_fast"][0] > 0
    allocations = [(1 + (has_fast_scratch and x.memory == "Sram"), x.address, x.bytes) for x in estimates.placed]
    allocations += [(region, first, prod(shape) * size) for shape, size, first, region in vela_result["outputs"]]
    if violation := find_out_of_bounds_write(vela_result["command_stream"], allocations, estimates.layers):
        raise make_error(f"Vela wrote a program that writes out of bounds: {violation}; report the flatbuffer", log)
    artifacts = {}
    if directory is not None:
        artifacts = {"_vela.npz": _pack_npz(vela_result), "_per-layer.csv": _format_per_layer_csv(estimates)}
        if log:
            artifacts["_vela.log"] = log.encode()
    return Payload(_pack_payload(vela_result), estimates, artifacts)


def _describe_size_mismatch(
    vela_result: dict[str, Any], input_bytes: Sequence[int] | None, output_bytes: Sequence[int] | None
) -> str | None:
    """Describe the difference between the sizes of inputs or results and the expected sizes; None if they are equal."""
    for name, tensors, expected in (
        ("inputs", vela_result["inputs"], input_bytes),
        ("results", vela_result["outputs"], output_bytes),
    ):
        sizes = [prod(shape) * size for shape, size, *_ in tensors]
        if expected is not None and sizes != list(expected):
            return f"{name} of {sizes} bytes, not {list(expected)}"
    return None


def _allocate_unused_inputs(vela_result: dict[str, Any], unused_inputs: Mapping[int, tuple[int, int]]) -> None:
    """Insert unused inputs into Vela's list of inputs, and allocate them in scratch after the other inputs.

    Addresses are multiples of 16 bytes. Direct Drive programs have separate regions for inputs. Their unused inputs are
    not allocated (address -1).
    """
    has_io_regions = any(region > 2 for *_, region in (*vela_result["inputs"], *vela_result["outputs"]))
    for index, (count, size) in sorted(unused_inputs.items()):
        end_addresses = [address + prod(shape) * width for shape, width, address, _ in vela_result["inputs"]]
        address = -1 if has_io_regions else -(-max(end_addresses, default=0) // 16) * 16
        vela_result["inputs"].insert(index, ((1, 1, 1, 1, 1, count), size, address, 1))
        if not has_io_regions:
            vela_result["scratch"] = (
                max(vela_result["scratch"][0], address + count * size),
                *vela_result["scratch"][1:],
            )


def _pack_payload(vela_result: dict[str, Any]) -> bytes:
    return pack_block_stream(
        [
            ("vela_bin_stream", b""),
            ("cmd_data", vela_result["command_stream"]),
            # A program without constants has one zero byte here, as in the stream that ExecuTorch's Arm backend writes.
            ("weight_data", vela_result["weights"] or bytes(1)),
            ("scratch_size", struct.pack("<I", vela_result["scratch"][0])),
            ("inputs", pack_io_block(vela_result["inputs"])),
            ("outputs", pack_io_block(vela_result["outputs"])),
            ("vela_end_stream", b""),
        ]
    )


def _make_estimates(
    vela_result: dict[str, Any], spec: EthosUCompileSpec, layers: tuple[OperationEstimate, ...]
) -> VelaEstimates:
    report, configuration = vela_result["report"], spec.configuration
    memories = tuple(
        MemoryUse(name, use["peak"], use["cycles"], use["read"], use["written"])
        for name, use in vela_result["memories"].items()
        if name.lower() not in _NPU_MEMORIES
    )
    peak = {memory.name: memory.peak_bytes for memory in memories}
    # In a memory mode with everything in SRAM, the peak of SRAM includes the constants. Vela's summary reports them as
    # flash, and so do we.
    if configuration.const_memory == "OnChipFlash" and "OnChipFlash" not in peak:
        peak["OnChipFlash"] = report["readOnlyPeakUsage"]
        peak["Sram"] = peak.get("Sram", 0) - report["readOnlyPeakUsage"]
    is_limited = configuration.arena_cache_size < configuration.address_space
    return VelaEstimates(
        npu_cycles=report["npuCycles"],
        total_cycles=report["totalCycles"],
        core_clock=configuration.core_clock,
        inference_seconds=report["totalCycles"] / configuration.core_clock,
        sram_bytes=peak.get("Sram", 0),
        dram_bytes=peak.get("Dram", 0),
        flash_bytes=peak.get("OnChipFlash", 0) + peak.get("OffChipFlash", 0),
        fast_scratch_bytes=vela_result["scratch_fast"][0],
        sram_limit=configuration.arena_cache_size if is_limited else None,
        macs=report["macCount"],
        weight_bytes=report["encodedWeights"],
        original_weight_bytes=report["originalWeights"],
        npu_operators=report["npuOps"],
        memories=memories,
        layers=layers,
        accelerator=spec.accelerator,
        system_config=spec.system_config,
        memory_mode=spec.memory_mode,
        placed=read_allocations(vela_result["tables"]),
        scratch_bytes=vela_result["scratch"][0],
        scratch_memory=configuration.const_memory if configuration.arena_on_second_port else "Sram",
        constant_bytes=report["readOnlyPeakUsage"],
        constant_memory=configuration.const_memory,
    )


def _make_layers(tables: Tables, waits: Sequence[int]) -> tuple[OperationEstimate, ...]:
    """Build the per-operation estimates from Vela's tables.

    Args:
        tables: Vela's tables, see ``vela_tables``.
        waits: ascending byte offsets in Vela's stream, one for each 4-byte word that ``insert_waits`` inserted there.
    """
    sources = {row["id"]: row for row in read_rows(tables, "source")}
    commands: dict[str, list[int]] = {}
    for row in read_rows(tables, "queue"):
        offset = int(row["offset"])
        commands.setdefault(row["scheduled_id"], []).append(offset + 4 * bisect.bisect_right(waits, offset))
    layers, rows = [], read_rows(tables, "perf")
    row_numbers = {row["id"]: number for number, row in enumerate(rows)}
    group_of = {row["id"]: row_numbers[row["group_id"]] for row in read_rows(tables, "group")}
    for row in rows:
        source = sources.get(row["source_id"], {})
        index = int(source.get("ext_key", -1))
        layers.append(
            OperationEstimate(
                operator=source.get("operator", row["operator"]),
                npu_operator=row["operator"],
                tensor=row["name"],
                index=index if index >= 0 else None,
                cycles=int(row["op_cycles"]),
                npu_cycles=int(row["npu_cycles"]),
                macs=int(row["mac_count"]),
                staging_bytes=int(row["staging_usage"]),
                memory_cycles=tuple(
                    (column.removesuffix(_ACCESS_CYCLES_SUFFIX), int(value))
                    for column, value in row.items()
                    if column.endswith(_ACCESS_CYCLES_SUFFIX)
                    and column.removesuffix(_ACCESS_CYCLES_SUFFIX) not in _NPU_MEMORIES
                ),
                commands=tuple(commands.get(row["id"], ())),
                part_of=group_of.get(row["id"]),
            )
        )
    return tuple(layers)


def _format_per_layer_csv(estimates: VelaEstimates) -> bytes:
    memories = [memory.name for memory in estimates.memories]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(
        ["tensor", "operator", "npu_operator", "tosa_index", "cycles", "npu_cycles", "macs", "staging_bytes"]
        + [f"{name}_cycles" for name in memories]
    )
    for layer in estimates.layers:
        cycles = dict(layer.memory_cycles)
        index = "" if layer.index is None else layer.index
        writer.writerow(
            [layer.tensor, layer.operator, layer.npu_operator, index]
            + [layer.cycles, layer.npu_cycles, layer.macs, layer.staging_bytes]
            + [cycles.get(name, 0) for name in memories]
        )
    return text.getvalue().encode()


def _pack_npz(vela_result: dict[str, Any]) -> bytes:
    """Serialize the compiled program in Vela's raw output format, a NumPy archive."""
    import numpy as np

    arrays: dict[str, Any] = {
        "cmd_data": np.frombuffer(vela_result["command_stream"], np.uint8),
        "weight_data": np.frombuffer(vela_result["weights"], np.uint8),
        "weight_region": vela_result["weight_region"],
    }
    for name in ("scratch", "scratch_fast"):
        size, region = vela_result[name]
        arrays |= {f"{name}_shape": [size], f"{name}_size": size, f"{name}_region": region}
    for prefix in ("input", "output", "variable"):
        for column, key in enumerate(("shape", "elem_size", "offset", "region")):
            arrays[f"{prefix}_{key}"] = [tensor[column] for tensor in vela_result[f"{prefix}s"]]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()
