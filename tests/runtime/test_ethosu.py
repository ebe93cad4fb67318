"""Ethos-U programs on the emulator give the results of the TOSA graphs from which Vela compiled them."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_recipes import ArmRecipeType, ExportResult, export, inspect_program, load
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu import EthosUDelegate
from arm_recipes.runtime.ethosu_payload import FAST_SCRATCH, WEIGHTS, EthosUPayload, read_payload_content
from arm_recipes.runtime.program import Program
from tests.backends.tosa_programs import conv2d
from tests.runtime.host_programs import Counting, CpuBetween, export_small, export_striped, remove_checksums
from tests.small_models import Small, images, vectors
from tests.tosa_graphs import build_flatbuffer
from tests.verify_only import combine_pairwise

#: The tests run in one xdist worker, so that they share exported programs.
pytestmark = pytest.mark.xdist_group("host_programs")

RECIPES = tuple(recipe for recipe in ArmRecipeType if recipe.name.startswith("ETHOSU"))
U55, U65, U85 = (ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85"))


def _equal(result: ExportResult, *inputs: Tensor) -> bool:
    """Whether the program and its TOSA graphs return equal tensors."""
    ours, theirs = result.run(*inputs), result.run(*inputs, backend="tosa")
    assert isinstance(ours, Tensor)
    assert ours.unique().numel() > 1
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize(("recipe", "quantized_io"), combine_pairwise(RECIPES, [False, True]))
def test_a_program_gives_the_numbers_of_its_tosa_graph(recipe: ArmRecipeType, quantized_io: bool) -> None:
    result = export_small(recipe, quantized_io=quantized_io)
    assert [delegate.backend for delegate in result.report.delegates] == ["EthosUBackend"]
    (source,) = result.inputs
    assert source.dtype == ("float32" if not quantized_io else "int16" if "A16W8" in recipe.name else "int8")
    for (x,) in images(6):
        assert _equal(result, source.quantize(x * 2) if quantized_io else x * 2)  # some of it saturates


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (U55, {"macs": 32}),
        (U65, {"macs": 512}),
        (U85, {"macs": 2048}),
        (U85, {"memory_mode": "Dedicated_Sram_384KB"}),
        (U85, {"extra_flags": ["--cop-format=COP2"]}),
        (U85, {"direct_drive": True}),
        (U85, {"direct_drive": True, "macs": 1024, "memory_mode": "Dedicated_Sram_384KB"}),
    ],
    ids=["U55-32", "U65-512", "U85-2048", "fast scratch", "U85 COP2", "Direct Drive", "Direct Drive, fast scratch"],
)
def test_npu_configurations_give_the_results_of_the_tosa_graph(recipe: ArmRecipeType, options: dict[str, Any]) -> None:
    result, x = export_striped(recipe, **options)
    ours, theirs = result.run(x), result.run(x, backend="tosa")
    assert [output.shape for output in ours] == [(1, 40, 9, 9), (1, 40)]
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("quantized_io", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("recipe", [U85, ArmRecipeType.ETHOSU_U85_A16W8], ids=lambda recipe: recipe.name)
def test_direct_drive_gives_the_results_of_the_other_stream(recipe: ArmRecipeType, quantized_io: bool) -> None:
    """``verify=True`` checks results and memory accesses. The results are also those of the stream for Cortex-M."""
    chosen = ExportRecipe.get_recipe(recipe, direct_drive=True, quantized_io=quantized_io)
    result, other = (
        export(Small().eval(), chosen, images(), verify=True),
        export_small(recipe, quantized_io=quantized_io),
    )
    assert result.report.notes[-1].endswith("1 delegate, bit-equal with the TOSA reference model")
    for (x,) in images(6):
        sample = result.inputs[0].quantize(x) if quantized_io else x
        assert _equal(result, sample)
        assert torch.equal(result.run(sample), other.run(sample))
        assert torch.equal(load(result.buffer).execute(sample)[0], result.run(sample))
    # On Linux, ExecuTorch's own kernels quantize.
    kernels = {f"quantized_decomposed.{name}_per_tensor.default" for name in ("quantize", "dequantize")}
    assert set(result.report.methods[0].boundary) == (set() if quantized_io else kernels)


def test_inspection_and_report_of_a_direct_drive_program() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(U85, direct_drive=True), images(), verify=True)
    described = inspect_program(result.buffer)
    (delegate,) = described.methods[0].delegates
    payload = delegate.payload
    assert isinstance(payload, EthosUPayload)
    assert payload.stream == "COP2"
    assert [[tensor.region for tensor in side] for side in (payload.inputs, payload.outputs)] == [[3], [4]]
    assert re.search(r"command stream +[\d,]+ B, COP2, for Direct Drive", str(described))
    (figures,) = result.report.measured.values()
    assert figures.peak[3] == payload.inputs[0].nbytes
    assert figures.bytes_written[4] == payload.outputs[0].nbytes
    assert {layer.origin.module for layer in figures.layers} >= {"body.0", "head"}
    assert re.search(r"inputs +192 B in use", str(result.report))


class MixedTypes(nn.Module):
    """Integers and booleans beside quantized tensors."""

    def forward(self, x: Tensor, count: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return results in another order than the inputs."""
        return count + 3, torch.where(mask, x, x * 0.5), x > 0.25


def test_integer_float_and_boolean_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, generator=generator)
    sample = x, torch.tensor([1, -7, 2**30, 0], dtype=torch.int32), x > 0
    result = export(MixedTypes().eval(), ExportRecipe.get_recipe(U85), [sample])
    assert result.report.cpu_operators == ()
    for inputs in (sample, (-x.flip(1), -sample[1], ~sample[2])):
        ours, theirs = result.run(*inputs), result.run(*inputs, backend="tosa")
        assert [output.dtype for output in ours] == [torch.int32, torch.float32, torch.bool]
        assert all(map(torch.equal, ours, theirs))


# Around the delegates.


@pytest.mark.parametrize("recipe", [U55, U85], ids=lambda recipe: recipe.name)
def test_operators_between_delegates_and_state(recipe: ArmRecipeType, tmp_path: Path) -> None:
    """Each method of each loaded program has its own delegates, memory and buffers."""
    models = {"first": Counting().eval(), "between": CpuBetween().eval(), "second": Counting().eval()}
    result = export(models, ExportRecipe.get_recipe(recipe), dict.fromkeys(models, vectors(4)))
    path = result.save(tmp_path / "methods.pte", reference=True)
    assert [len(method.delegates) for method in result.report.methods if method.name == "between"] == [2]
    programs = [load(path), load(path)]
    (x,) = vectors(1)[0]
    seen = []
    for index, method in [(0, "first"), (0, "second"), (1, "first"), (0, "between"), (0, "first"), (0, "first")]:
        outputs = programs[index].execute(x, method=method)
        assert all(map(torch.equal, outputs, programs[index].execute(x, method=method, backend="tosa")))
        seen.append((method, outputs[0]))
    firsts = [output for method, output in seen if method == "first"]
    assert torch.equal(firsts[0], firsts[1])  # of two programs
    assert not torch.equal(firsts[1], firsts[2])


def test_channels_last_program_gives_the_results_of_its_tosa_graph() -> None:
    samples = [(x.to(memory_format=torch.channels_last),) for (x,) in images(3)]
    result = export(Small().eval(), ExportRecipe.get_recipe(U85), samples)
    assert _equal(result, *samples[0])


# Memory.


def _delegates(program: Program) -> list[tuple[bytes, dict[str, bytes]]]:
    methods = program.content.methods.values()
    return [(bytes(d.data), dict(d.compile_specs)) for method in methods for d in method.delegates]


@pytest.mark.parametrize("macs", [256, 512])
def test_fast_scratch_has_velas_size_with_and_without_the_compile_spec(macs: int) -> None:
    """Without the compile spec, as in programs of other exporters, the size is derived from the stream."""
    result, x = export_striped(U65, macs=macs)
    ((payload, specs),) = _delegates(load(result.buffer))
    vela = result.report.delegates[0].vela
    assert vela is not None
    assert specs["fast_scratch_size"] == struct.pack("<I", vela.fast_scratch_bytes)
    sizes = [EthosUDelegate(payload, known)._stream.memory[FAST_SCRATCH].size for known in (specs, {})]
    assert sizes == [vela.fast_scratch_bytes] * 2
    assert sizes[0] > 10_000
    others = remove_checksums(result.buffer).replace(b"fast_scratch_size", b"fast_scratch_what")
    assert all(map(torch.equal, load(others).execute(x), result.run(x)))


def test_too_small_fast_scratch_is_refused() -> None:
    result, _ = export_striped(U65)
    ((payload, _),) = _delegates(load(result.buffer))
    with pytest.raises(
        PayloadError, match=r"for Ethos-U65-256 is damaged.* In its command stream, NPU_OP_\w+ at byte "
    ):
        EthosUDelegate(payload, {"fast_scratch_size": struct.pack("<I", 1024)})
    with pytest.raises(PayloadError, match="the compile spec fast_scratch_size has 2 bytes, not 4"):
        EthosUDelegate(payload, {"fast_scratch_size": bytes(2)})


def test_results_do_not_depend_on_earlier_runs() -> None:
    """The delegate's memory is not cleared between runs."""
    result = export_small(U55)
    samples = [x for (x,) in images(4)]
    first_runs = [load(result.buffer).execute(x)[0] for x in samples]
    program = load(result.buffer)
    for x, expected in zip(samples * 2, first_runs * 2, strict=True):
        assert torch.equal(program.execute(x)[0], expected)


def test_unused_inputs_of_a_delegate_are_accepted() -> None:
    """Vela removes unused inputs; ExecuTorch's runtime still passes them."""

    def body(b: Builder, _: Value, x: Value) -> Value:
        return b.rescale(x, DType.INT8, 0.5)

    flatbuffer = build_flatbuffer(body, ((2, 3), DType.INT32), ((4,), DType.INT8))
    spec = EthosUCompileSpec("ethos-u55-128")
    payload = compile_payload(
        spec, flatbuffer, delegate="d", find_operator=lambda text: None, unused_inputs={0: (6, 4)}
    ).data
    delegate = EthosUDelegate(payload, {})
    assert [(tensor.nbytes, tensor.offset) for tensor in delegate.inputs] == [(24, 16), (4, 0)]
    (result,) = delegate.run([np.ones(24, np.uint8), np.array([2, 4, 6, 8], np.uint8)])
    assert result.tolist() == [1, 2, 3, 4]


# Streams that Vela does not emit.


def _with_register(accelerator: str, register: int, value: int) -> bytes:
    """The payload of a convolution in which a 16-bit register has another value."""
    flatbuffer = conv2d(channels=32, out_channels=32)
    spec = EthosUCompileSpec(accelerator)
    payload = compile_payload(spec, flatbuffer, delegate="delegate", find_operator=lambda text: None).data
    commands = bytes(read_payload_content(payload).commands)
    words = list(struct.unpack(f"<{len(commands) // 4}I", commands))
    places = [index for index in range(8, len(words)) if words[index] & 0xFFFF == register]
    assert places
    for index in places:
        words[index] = register | value << 16
    return payload.replace(commands, struct.pack(f"<{len(words)}I", *words))


def _refusal_message(accelerator: str, register: int, value: int) -> str:
    """The error message for the payload of ``_with_register``."""
    with pytest.raises(PayloadError) as caught:
        EthosUDelegate(_with_register(accelerator, register, value), {})
    return str(caught.value)


def test_stream_that_writes_to_its_weights_changes_only_the_delegates_copy() -> None:
    payload = _with_register("ethos-u55-128", 287, 0)  # NPU_SET_OFM_REGION
    kept = bytes(bytearray(payload))
    delegate = EthosUDelegate(payload, {})
    before = delegate._stream.memory[WEIGHTS].copy()
    delegate.run([np.ones(delegate.inputs[0].nbytes, np.uint8)])
    assert not np.array_equal(delegate._stream.memory[WEIGHTS], before)
    assert payload == kept


def test_ofm_blocks_of_fewer_channels_than_cores_are_refused() -> None:
    assert "NPU_OP_CONV at byte" in (message := _refusal_message("ethos-u65-512", 279, 0))
    assert "blocks of 1 channels for 2 cores" in message


def test_convolution_of_a_32_bit_ifm_is_refused() -> None:
    message = _refusal_message("ethos-u55-128", 261, 1 | 2 << 2)  # NPU_SET_IFM_PRECISION: signed, 32 bits
    assert message.endswith("a convolution of numbers of more than 16 bits")


def test_ofm_beyond_the_end_of_its_region_is_refused() -> None:
    message = _refusal_message("ethos-u85-256", 275, 0xFFFF)  # NPU_SET_OFM_DEPTH_M1
    assert re.search(r"NPU_OP_CONV at byte \d+: OFM takes bytes \d+ to \d+ of a region of", message)
