"""Limits of ExecuTorch's own Ethos-U backend: those that it checks, and those of fields that it reads unchecked.

From pytorch/executorch at cff6f4dd32 (22 August 2026), backends/arm/runtime; each limit names file and function.
Payloads are read here as that backend reads them, not by this project's readers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir.scalar_type import ScalarType
from executorch.exir.schema import DelegateCall, ExecutionPlan
from executorch.exir.schema import Tensor as EmittedTensor
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.backends.ethosu_commands import DMA_REGISTERS, FEATURE_MAP_REGISTERS, decode_commands
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_recipes import ArmRecipeType, ExportResult, export
from arm_recipes.runtime import pte
from tests.accelerators import ACCELERATORS
from tests.runtime.host_programs import CpuBetween, export_mixed, export_small, export_striped
from tests.tosa_graphs import build_flatbuffer as flatbuffer_of

pytestmark = pytest.mark.xdist_group("host_programs")

_BLOCK = struct.Struct("<16sIB11s")
_NAMES = ("vela_bin_stream", "cmd_data", "weight_data", "scratch_size", "inputs", "outputs", "vela_end_stream")
#: Registers with the number of a region: of feature maps, weights and scales, source and target of a DMA.
_REGION_REGISTERS = {*(registers[3] for registers in FEATURE_MAP_REGISTERS), 296, 297, *DMA_REGISTERS[:2]}
#: Type of an argument -> bytes of an element.
_ELEMENTS = {
    ScalarType.INT: 4,
    ScalarType.CHAR: 1,
    ScalarType.BYTE: 1,
    ScalarType.SHORT: 2,
    ScalarType.BOOL: 1,
}
#: Compile spec that the backend reads on Linux -> bytes of its value.
_LINUX_SPECS = {"ethosu.timeout_ns": 8, "ethosu.enable_cycle_counter": 1, "ethosu.pmu_event": 4}


@dataclass(frozen=True)
class Block:
    """A block of a payload. ``start`` is its offset in the payload."""

    name: str
    start: int
    size: int
    external: bool
    data: bytes


@dataclass(frozen=True)
class Io:
    """An input or output: six dimensions, bytes of an element, offset and region."""

    shape: tuple[int, ...]
    element_size: int
    offset: int
    region: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.element_size


@dataclass(frozen=True)
class Call:
    """A delegate call and its payload. ``start`` and the values of ``named`` are offsets in the program."""

    start: int
    size: int
    blocks: tuple[Block, ...]
    inputs: tuple[Io, ...]
    outputs: tuple[Io, ...]
    arguments: tuple[tuple[ScalarType, tuple[int, ...]], ...]
    specs: dict[str, bytes]
    named: dict[str, int]

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    @property
    def scratch(self) -> int:
        return int.from_bytes(self.block("scratch_size").data, "little")

    @property
    def pairs(self) -> list[tuple[Io, tuple[ScalarType, tuple[int, ...]]]]:
        return list(zip((*self.inputs, *self.outputs), self.arguments, strict=True))

    @property
    def regions(self) -> set[int]:
        """Regions that commands address, without the NPU's internal memory, which may be the target of a DMA."""
        values = [
            value >> 32
            for _, number, value in decode_commands(self.block("cmd_data").data)
            if number in _REGION_REGISTERS
        ]
        return {value & 7 for value in values if not value & 0x100}

    def with_block(self, of: str, /, **changes: Any) -> Call:
        return replace(self, blocks=tuple(replace(b, **changes) if b.name == of else b for b in self.blocks))

    def with_input(self, **changes: Any) -> Call:
        return replace(self, inputs=(replace(self.inputs[0], **changes), *self.inputs[1:]))

    def with_output(self, **changes: Any) -> Call:
        return replace(self, outputs=(replace(self.outputs[0], **changes), *self.outputs[1:]))


@dataclass(frozen=True)
class Limit:
    """A limit of the backend. ``breaks`` changes a call within the limit to one beyond it."""

    rule: str
    source: str
    holds: Callable[[Call], bool]
    breaks: Callable[[Call], Call]


LIMITS = (
    Limit(
        "a payload is aligned to 16 bytes",
        "VelaBinStream.cpp, vela_bin_validate",
        lambda call: call.start % 16 == 0,
        lambda call: replace(call, start=call.start + 8),
    ),
    Limit(
        "a payload is below 2 GiB, as its size is an int, and its last block is aligned to 16 bytes",
        "VelaBinStream.cpp, vela_bin_validate",
        lambda call: call.size < 2**31 and call.blocks[-1].start % 16 == 0,
        lambda call: call.with_block("vela_end_stream", start=call.blocks[-1].start - 4),
    ),
    Limit(
        "blocks have the seven names, and the first and the last block are in their places",
        "VelaBinStream.cpp, vela_bin_validate and vela_bin_read",
        lambda call: (
            (call.blocks[0].name, call.blocks[-1].name) == (_NAMES[0], _NAMES[-1])
            and sorted(block.name for block in call.blocks) == sorted(_NAMES)
        ),
        lambda call: call.with_block("weight_data", name="weights"),
    ),
    Limit(
        "the last block ends where the payload does",
        "VelaBinStream.cpp, vela_bin_read",
        lambda call: call.blocks[-1].start + _BLOCK.size == call.size,
        lambda call: replace(call, size=call.size + 16),
    ),
    Limit(
        "commands begin with COP1 or COP2",
        "VelaBinStream.cpp, vela_bin_read",
        lambda call: call.block("cmd_data").data[:4] in (b"COP1", b"COP2"),
        lambda call: call.with_block("cmd_data", data=b"COP3"),
    ),
    Limit(
        "the size of the scratch is read as 4 bytes",
        "VelaBinStream.cpp, vela_bin_read",
        lambda call: call.block("scratch_size").size == 4,
        lambda call: call.with_block("scratch_size", size=8),
    ),
    Limit(
        "the key of external data has 64 characters, and the program has the data",
        "VelaBinStream.cpp, kVelaExternalBlockKeySize and resolve_external_block",
        lambda call: all(b.size == 64 and b.data.decode() in call.named for b in call.blocks if b.external),
        lambda call: call.with_block("weight_data", external=True, data=b"arm_weights_" + b"0" * 64, size=76),
    ),
    Limit(
        "external data is aligned to 16 bytes",
        "VelaBinStream.cpp, resolve_external_block",
        lambda call: all(call.named[b.data.decode()] % 16 == 0 for b in call.blocks if b.external),
        lambda call: replace(
            call.with_block("weight_data", external=True, data=b"w" * 64, size=64), named={"w" * 64: 24}
        ),
    ),
    Limit(
        "a call has an argument for each input and output",
        "EthosUBackend.cpp, execute, and EthosUBackend_Cortex_M.cpp, platform_execute: args are not counted",
        lambda call: len(call.arguments) == len(call.inputs) + len(call.outputs),
        lambda call: replace(call, arguments=call.arguments[1:]),
    ),
    Limit(
        "arguments have supported types, with the element sizes of the payload",
        "EthosUBackend.cpp, execute: supported",
        lambda call: all(_ELEMENTS.get(kind) == io.element_size for io, (kind, _) in call.pairs),
        lambda call: replace(call, arguments=((ScalarType.LONG, call.arguments[0][1]), *call.arguments[1:])),
    ),
    Limit(
        "arguments have the payload's number of elements; outputs with fewer would be unpacked as int4",
        "EthosUBackend.cpp, calculate_dimensions and copy_with_layout_adjustment",
        lambda call: all(prod(io.shape) == prod(sizes) for io, (_, sizes) in call.pairs),
        lambda call: call.with_input(shape=(*call.inputs[0].shape[:-1], call.inputs[0].shape[-1] + 1)),
    ),
    Limit(
        "inputs and outputs are in the scratch",
        "EthosUBackend.cpp, execute, and EthosUBackend_Cortex_M.cpp, platform_execute: offsets are not checked",
        lambda call: all(
            io.region == 1 and io.offset >= 0 and io.offset + io.nbytes <= call.scratch
            for io in (*call.inputs, *call.outputs)
        ),
        lambda call: call.with_input(offset=-1),
    ),
    Limit(
        "no two inputs overlap, as all are written before the NPU runs",
        "EthosUBackend.cpp, execute",
        lambda call: all(
            a.offset + a.nbytes <= b.offset
            for a, b in zip(_by_offset(call.inputs), _by_offset(call.inputs)[1:], strict=False)
        ),
        lambda call: replace(call, inputs=call.inputs * 2),
    ),
    Limit(
        "commands address only constants, scratch and fast scratch",
        "EthosUBackend_Internal.h, ETHOSU_NUM_BASE_ADDRS",
        lambda call: call.regions <= {0, 1, 2},
        lambda call: call.with_block("cmd_data", data=_reading_region_3(call.block("cmd_data").data)),
    ),
    Limit(
        "compile specs that the backend reads on Linux have its sizes",
        "EthosUBackend_Cortex_A.cpp, parse_linux_options: specs of other sizes are ignored",
        lambda call: all(
            len(value) == size
            for key, value in call.specs.items()
            for known, size in _LINUX_SPECS.items()
            if key.startswith(known)
        ),
        lambda call: replace(call, specs={"ethosu.timeout_ns": bytes(4)}),
    ),
)


def _by_offset(tensors: tuple[Io, ...]) -> list[Io]:
    return sorted(tensors, key=lambda io: io.offset)


def _reading_region_3(stream: bytes) -> bytes:
    return stream + struct.pack("<I", FEATURE_MAP_REGISTERS[0][3] | 3 << 16)


def _blocks(payload: bytes) -> Iterator[Block]:
    at = 0
    while at < len(payload):
        name, size, external, _ = _BLOCK.unpack_from(payload, at)
        first = at + _BLOCK.size
        yield Block(name.rstrip(b"\0").decode(), at, size, external == 1, payload[first : first + size])
        at = first + (size + 15) // 16 * 16


def _ios(block: Block) -> tuple[Io, ...]:
    (count,) = struct.unpack_from("<i", block.data)
    rows = [struct.unpack_from("<9i", block.data, 4 + 36 * i) for i in range(count)]
    return tuple(Io(row[:6], *row[6:]) for row in rows)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _calls(result: ExportResult) -> Iterator[Call]:
    """Every call of an Ethos-U's delegate in a program."""
    buffer = memoryview(result.buffer)
    content, start = pte.read_program(buffer), _address(buffer)
    named = {name: _address(data) - start for name, data in content.named_data.items() if len(data)}
    for plan in result.executorch_program.executorch_program.execution_plan:
        delegates = content.methods[plan.name].delegates
        for call in _instructions(plan):
            delegate = delegates[call.delegate_index]
            assert delegate.backend == "EthosUBackend"
            values = [plan.values[i].val for i in call.args]
            tensors = [value for value in values if isinstance(value, EmittedTensor)]
            assert len(tensors) == len(values)  # EthosUBackend.cpp, execute: toTensor
            yield _call(
                bytes(delegate.data),
                _address(delegate.data) - start,
                tuple((tensor.scalar_type, tuple(tensor.sizes)) for tensor in tensors),
                dict(delegate.compile_specs),
                named,
            )


def _call(
    payload: bytes,
    start: int,
    arguments: tuple[tuple[ScalarType, tuple[int, ...]], ...],
    specs: dict[str, bytes],
    named: dict[str, int],
) -> Call:
    blocks = tuple(_blocks(payload))
    inputs, outputs = (_ios(next(b for b in blocks if b.name == name)) for name in ("inputs", "outputs"))
    return Call(start, len(payload), blocks, inputs, outputs, arguments, specs, named)


def _instructions(plan: ExecutionPlan) -> Iterator[DelegateCall]:
    for chain in plan.chains:
        for instruction in chain.instructions:
            if isinstance(instruction.instr_args, DelegateCall):
                yield instruction.instr_args


class Layouts(nn.Module):
    """Permuted inputs and outputs, masks, a value that is returned twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 5, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = torch.where(mask, x, x * 0.3)
        return self.body(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), y.transpose(1, 2), ~mask, mask, y


class SharedLayers(nn.Module):
    """Layers that two methods share, with state between their calls."""

    last: Tensor

    def __init__(self, body: nn.Module, last: Tensor, sign: float) -> None:
        super().__init__()
        self.body, self.sign = body, sign
        self.register_buffer("last", last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x * self.sign) + self.last
        self.last.copy_(y * 0.5)
        return y


def _recipe(name: str, **options: Any) -> ExportRecipe:
    return ExportRecipe.get_recipe(ArmRecipeType[f"ETHOSU_{name}"], **options)


def _layouts() -> ExportResult:
    generator = torch.Generator().manual_seed(0)
    samples = [
        (torch.randn(1, 6, 7, 3, generator=generator), torch.rand(1, 6, 7, 3, generator=generator) > 0.5)
        for _ in range(2)
    ]
    return export(Layouts().eval(), _recipe("U55_INT8"), samples)


def _shared() -> ExportResult:
    torch.manual_seed(0)
    body, last = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).eval(), torch.zeros(1, 16)
    methods = {"one": SharedLayers(body, last, 1.0).eval(), "other": SharedLayers(body, last, -1.0).eval()}
    return export(methods, _recipe("U85_INT8"), {name: [(torch.randn(1, 16),)] * 2 for name in methods})


def _loop() -> ExportResult:
    torch.manual_seed(0)
    return export(nn.GRU(5, 6).eval(), _recipe("U65_INT8", steps_per_call=3), [(torch.randn(6, 2, 5),)] * 2)


def _between() -> ExportResult:
    torch.manual_seed(0)
    return export(CpuBetween().eval(), _recipe("U55_INT8"), [(torch.randn(1, 8),)] * 2)


PROGRAMS: dict[str, Callable[[], ExportResult]] = {
    "U55, float": lambda: export_small(ArmRecipeType.ETHOSU_U55_INT8),
    "U85, int8": lambda: export_small(ArmRecipeType.ETHOSU_U85_INT8, quantized_io=True),
    "U65, int16": lambda: export_small(ArmRecipeType.ETHOSU_U65_A16W8, quantized_io=True),
    "several tensors": lambda: export_mixed(ArmRecipeType.ETHOSU_U85_INT8),
    "layouts and masks": _layouts,
    "fast scratch": lambda: export_striped(ArmRecipeType.ETHOSU_U65_INT8)[0],
    "state, shared weights": _shared,
    "loop": _loop,
    "CPU between": _between,
}


@cache
def calls(name: str) -> tuple[Call, ...]:
    return tuple(_calls(PROGRAMS[name]()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_within_the_limits(name: str) -> None:
    found = calls(name)
    assert found
    for call in found:
        assert [limit.rule for limit in LIMITS if not limit.holds(call)] == []


def test_programs_have_external_data_fast_scratch_and_all_types() -> None:
    every = {name: calls(name) for name in PROGRAMS}
    assert [len(every[name]) for name in ("CPU between", "several tensors")] == [2, 1]
    assert any(block.external for call in every["state, shared weights"] for block in call.blocks)
    assert 2 in every["fast scratch"][0].regions
    kinds = {kind for found in every.values() for call in found for kind, _ in call.arguments}
    assert kinds == _ELEMENTS.keys() - {ScalarType.BYTE}  # the backend supports it; no recipe emits it


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.rule)
def test_violation_of_each_limit_is_detected(limit: Limit) -> None:
    (call,) = calls("U55, float")
    assert not limit.holds(limit.breaks(call))


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_unused_input_has_a_place_in_the_scratch(accelerator: str) -> None:
    """The backend writes it at the payload's offset. At -1 it would overwrite bytes before the scratch, and inputs."""

    def body(b: Builder, first: Value, _: Value, last: Value) -> Value:
        return b.rescale(b.concat([first, last], 0), DType.INT8, 0.5)

    inputs = (((4,), DType.INT8), ((40, 3), DType.INT32), ((6,), DType.INT8))
    spec = EthosUCompileSpec(accelerator)
    flatbuffer = flatbuffer_of(body, *inputs)
    payload = compile_payload(
        spec, flatbuffer, delegate="d", find_operator=lambda text: None, unused_inputs={1: (120, 4)}
    ).data
    kinds = (ScalarType.CHAR, (4,)), (ScalarType.INT, (40, 3)), (ScalarType.CHAR, (6,)), (ScalarType.CHAR, (10,))
    call = _call(payload, 0, kinds, {}, {})
    assert [limit.rule for limit in LIMITS if not limit.holds(call)] == []
