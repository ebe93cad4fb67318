"""Loaded programs on this machine: results, inputs, methods, state and errors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from executorch.export import ExportRecipe
from executorch.runtime import Runtime
from torch import Tensor, nn

from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, Inputs, RunError, export, load
from arm_recipes.runtime import delegates, host_backends
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import PteTensor
from arm_recipes.runtime.tensor_info import TensorInfo
from tests.runtime.host_programs import (
    MIXED,
    Counting,
    CpuBetween,
    Mixed,
    export_methods,
    export_mixed,
    export_small,
    export_without_recipe,
    remove_checksums,
)
from tests.small_models import Small, images, vectors

#: The tests run in one xdist worker, so that they share worker processes and exported programs.
pytestmark = pytest.mark.xdist_group("host_programs")

FP, INT8, A16W8 = ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8
VGF_FP, VGF_INT8, U55 = ArmRecipeType.VGF_FP, ArmRecipeType.VGF_INT8, ArmRecipeType.ETHOSU_U55_INT8


def _name(recipe: Any) -> str:
    return getattr(recipe, "name", str(recipe))


@pytest.mark.parametrize("recipe", [INT8, A16W8, VGF_INT8], ids=_name)
def test_quantized_results_are_those_of_the_reference_model(recipe: ArmRecipeType) -> None:
    result = export_small(recipe, quantized_io=True)
    program = load(result.buffer)
    (source,), (sink,) = program.inputs, program.outputs
    assert isinstance(source, TensorInfo)
    assert (source.dtype, source.shape) == ("int16" if recipe is A16W8 else "int8", (1, 3, 8, 8))
    for (x,) in images(8):
        integers = source.quantize(x * 2)  # some values saturate
        (loaded,) = program.execute(integers)
        (expected,) = reference_model.run(result.report.delegates[0].tosa, [integers.numpy()])
        assert str(sink) == str(result.outputs[0])
        assert torch.equal(loaded, torch.from_numpy(expected))
    assert loaded.unique().numel() > 1


@pytest.mark.parametrize("recipe", [FP, VGF_FP], ids=_name)
def test_float_results_are_those_of_the_reference_model(recipe: ArmRecipeType) -> None:
    result = export_small(recipe)
    for (x,) in images(4):
        (loaded,) = load(result.buffer).execute(x)
        (expected,) = reference_model.run(result.report.delegates[0].tosa, [x.numpy()])
        if recipe is FP:
            assert torch.equal(loaded, torch.from_numpy(expected))
        else:  # another order of the sums
            torch.testing.assert_close(loaded, torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", [INT8, A16W8, VGF_INT8], ids=_name)
def test_float_inputs_and_outputs_are_quantized_as_in_pytorch(recipe: ArmRecipeType) -> None:
    # With algorithms, the outputs would be dequantized from int16.
    program, inner = (
        load(export_small(recipe, algorithms=False).buffer),
        export_small(recipe, quantized_io=True, algorithms=False),
    )
    (source,), (sink,) = inner.inputs, inner.outputs
    q, dq = torch.ops.quantized_decomposed.quantize_per_tensor, torch.ops.quantized_decomposed.dequantize_per_tensor
    for (x,) in images(8):
        dtype = getattr(torch, source.dtype)
        limits = torch.iinfo(dtype)
        low = -limits.max if dtype is torch.int16 else limits.min
        integers = q(x, source.scale, source.zero_point, low, limits.max, dtype)
        (inside,) = reference_model.run(inner.report.delegates[0].tosa, [integers.numpy()])
        expected = dq(torch.from_numpy(inside), sink.scale, sink.zero_point, limits.min, limits.max, dtype)
        assert torch.equal(program.execute(x)[0], expected)


@pytest.mark.parametrize("recipe", [FP, VGF_FP], ids=_name)
def test_integer_float_boolean_and_scalar_tensors(recipe: ArmRecipeType) -> None:
    result = export_mixed(recipe)
    assert len(result.report.delegates) == 1
    assert result.report.cpu_operators == ()
    program = load(result.buffer)
    assert [str(value) for value in program.inputs] == ["float32[2, 3]", "float32[]", "int32[4]", "bool[2, 3]"]
    assert [value.name for value in program.inputs] == ["x", "scale", "count", "mask"]
    assert [str(value).split("[")[0] for value in program.outputs] == ["int32", "float32", "bool", "float32", "float32"]
    x, scale, count, mask = MIXED
    for inputs in (MIXED, (-x.flip(1), scale - 4, -count, ~mask)):
        for loaded, expected in zip(program.execute(*inputs), Mixed()(*inputs), strict=True):
            assert loaded.dtype == expected.dtype
            assert loaded.shape == expected.shape
            torch.testing.assert_close(loaded, expected)


@pytest.mark.parametrize("recipe", [FP, VGF_INT8], ids=_name)
def test_inputs_of_any_memory_layout_are_accepted(recipe: ArmRecipeType) -> None:
    program = load(export_small(recipe).buffer)
    (x,) = images(1)[0]
    (expected,) = program.execute(x)
    strided = torch.zeros(1, 3, 8, 16)
    strided[..., ::2] = x
    for view in (
        x.to(memory_format=torch.channels_last),
        x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        strided[..., ::2],
        x.clone().requires_grad_(),
    ):
        assert torch.equal(program.execute(view)[0], expected)


@pytest.mark.parametrize("recipe", [FP, VGF_FP], ids=_name)
def test_channels_last_program_accepts_both_layouts(recipe: ArmRecipeType) -> None:
    model = Small().eval()
    (x,) = images(1)[0]
    program = load(export(model, ExportRecipe.get_recipe(recipe), [(x.to(memory_format=torch.channels_last),)]).buffer)
    assert program.content.methods["forward"].inputs == (PteTensor("float32", (1, 3, 8, 8), (0, 2, 3, 1)),)
    for view in (x, x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(program.execute(view)[0], model(x), rtol=1e-4, atol=1e-5)


def test_inputs_are_not_written_and_outputs_are_kept() -> None:
    program = load(export_small(FP).buffer)
    (x,), (y,) = images(2)
    before = x.clone()
    (first,) = program.execute(x)
    kept = first.clone()
    program.execute(y)
    assert torch.equal(x, before)
    assert torch.equal(first, kept)


def test_empty_tensors() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, 0:0], torch.cat([x + 1, more], 1) * 2

    inputs = (torch.ones(2, 3), torch.ones(2, 0))
    for recipe in (FP, VGF_FP):
        cut, sums = load(export(Cut().eval(), ExportRecipe.get_recipe(recipe), [inputs]).buffer).execute(*inputs)
        assert cut.shape == (2, 0)
        assert torch.equal(sums, torch.full((2, 3), 4.0))


# Operators outside the delegates.


def test_operators_between_delegates_run_on_the_cpu() -> None:
    program = load(export_methods())
    assert len(program.content.methods["between"].delegates) == 2
    model = CpuBetween().eval()
    for (x,) in vectors(4):
        torch.testing.assert_close(program.execute(x, method="between")[0], model(x), rtol=1e-5, atol=1e-6)


# State.


def test_every_method_of_every_program_keeps_its_own_state() -> None:
    """In ExecuTorch's runtime, the methods of a loaded program share one memory."""
    (x,) = vectors(1)[0]
    base = Counting().layer(x)
    programs = [load(export_methods()), load(export_methods())]
    counts = {(index, method): 0 for index in range(2) for method in ("first", "second")}
    order = [(0, "first"), (0, "second"), (1, "first"), (0, "first"), (1, "second"), (0, "first"), (0, "second")]
    for index, method in order:
        programs[index].execute(x, method="between")
        counts[index, method] += 1
        torch.testing.assert_close(programs[index].execute(x, method=method)[0], base + counts[index, method])
    assert sorted(counts.values()) == [1, 1, 2, 3]


def test_methods_that_share_a_buffer_see_each_others_writes() -> None:
    class Store(nn.Module):
        value: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("value", torch.zeros(4))

        def add(self, x: Tensor) -> Tensor:
            self.value.add_(x)
            return self.value * 1

        def twice(self, x: Tensor) -> Tensor:
            self.value.mul_(2)
            return self.value + x

    def captured(name: str) -> torch.export.ExportedProgram:
        store = Store()
        store.forward = getattr(store, name)
        return torch.export.export(store, (torch.ones(4),))

    edge = to_edge({name: captured(name) for name in ("add", "twice")})
    planning = MemoryPlanningPass(share_mutable_buffers=True)
    config = ExecutorchBackendConfig(emit_mutable_buffer_names=True, memory_planning_pass=planning)
    program = Program(bytes(edge.to_executorch(config).buffer))
    x = torch.ones(4)
    results = [program.execute(x, method=method)[0] for method in ("add", "twice", "add", "twice")]
    assert [float(result[0]) for result in results] == [1, 3, 3, 7]


# Programs of ExecuTorch's own export, and its own runtime.


@pytest.mark.parametrize("recipe", [INT8, VGF_INT8, U55], ids=_name)
def test_program_of_executorchs_own_export_gives_the_same_results(recipe: ArmRecipeType) -> None:
    program, ours = (
        load(export_without_recipe(recipe)),
        load(export_small(recipe, algorithms=False).buffer),
    )  # the algorithms are a stage of arm_recipes.export
    assert program.content.named_data == {}
    assert [value.name for value in (*program.inputs, *program.outputs)] == ["input0", "output0"]
    assert [str(value) for value in program.inputs] == [str(value) for value in ours.inputs]
    for (x,) in images(2):
        assert torch.equal(program.execute(x)[0], ours.execute(x)[0])


@pytest.mark.parametrize("recipe", [INT8, VGF_INT8, U55], ids=_name)
def test_executorchs_runtime_runs_programs_after_register_backends(recipe: ArmRecipeType) -> None:
    host_backends.register_backends()
    buffer = export_small(recipe).buffer
    (x,) = images(1)[0]
    method = Runtime.get().load_program(buffer).load_method("forward")
    for _ in range(3):
        assert torch.equal(method.execute([x])[0], load(buffer).execute(x)[0])


@pytest.mark.parametrize(("recipe", "trials"), [(INT8, 0), (VGF_INT8, 1), (U55, 0)])
def test_vgf_payload_without_checksum_runs_in_a_sandbox_first(
    recipe: ArmRecipeType, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = remove_checksums(export_small(recipe).buffer)
    tried: list[tuple[str, int]] = []
    trial = delegates._run_in_sandbox

    def recorded(backend: str, payload: bytes) -> None:
        tried.append((backend, len(payload)))
        trial(backend, payload)

    monkeypatch.setattr(delegates, "_run_in_sandbox", recorded)
    loaded = load(program)
    for (x,) in images(2):
        assert torch.equal(loaded.execute(x)[0], load(export_small(recipe).buffer).execute(x)[0])
    (delegate,) = loaded.content.methods["forward"].delegates
    assert tried == [(delegate.backend, len(delegate.data))] * trials


# Sources and inputs.


def test_load_accepts_paths_and_bytes(tmp_path: Path) -> None:
    buffer = export_small(FP).buffer
    path = tmp_path / "small.pte"
    path.write_bytes(buffer)
    (x,) = images(1)[0]
    (expected,) = load(buffer).execute(x)
    for source in (path, str(path), bytearray(buffer), memoryview(buffer)):
        assert torch.equal(load(source).execute(x)[0], expected)  # type: ignore[arg-type]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"small\.pte"):
        load(path)
    with pytest.raises(TypeError, match="source must be a path or bytes, got int"):
        load(3)  # type: ignore[arg-type]
    for argument in ("ptd", "reference"):
        with pytest.raises(TypeError, match=f"^{argument} must be a path or bytes, got int"):
            load(buffer, **{argument: 3})  # type: ignore[arg-type]


def test_loaded_program_does_not_depend_on_its_source_buffer() -> None:
    buffer = bytearray(export_small(FP).buffer)
    program = load(buffer)  # type: ignore[arg-type]
    (x,) = images(1)[0]
    buffer[:] = bytes(len(buffer))
    assert torch.equal(program.execute(x)[0], load(export_small(FP).buffer).execute(x)[0])


def test_run_batch_accepts_samples_of_every_form() -> None:
    program = load(export_small(FP).buffer)
    samples = images(3)
    expected = [program.run(*sample) for sample in samples]
    named = [Inputs(x=x) for (x,) in samples]
    for form in (samples, [list(sample) for sample in samples], [x for (x,) in samples], iter(samples), named):
        outputs = list(program.run_batch(form))
        assert all(map(torch.equal, outputs, expected))
    endless = program.run_batch(itertools.repeat(samples[0]))
    assert torch.equal(next(endless), next(endless))
    assert list(program.run_batch([])) == []
    with pytest.raises(ValueError, match=r"sample 0: .*x"):
        next(program.run_batch([{}]))
    wrong = program.run_batch([samples[0], (torch.ones(1),)])
    next(wrong)
    with pytest.raises(ValueError, match=r"sample 1: input 0 \('x'\) must be float32\[1, 3, 8, 8\]; got float32\[1\]"):
        next(wrong)


def test_inputs_by_name() -> None:
    program = load(export_mixed(FP).buffer)
    x, scale, count, mask = MIXED
    expected = program.execute(*MIXED)
    by_name: list[Any] = [
        program.execute(x, scale, mask=mask, count=count),
        program.execute(x=x, scale=scale, count=count, mask=mask),
        *program.run_batch([{"x": x, "scale": scale, "count": count, "mask": mask}]),
    ]
    for outputs in by_name:
        assert all(torch.equal(output, want) for output, want in zip(outputs, expected, strict=True))
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((), {"y": x}, "'forward': 'y' is not an input; the inputs are: x, scale, count, mask"),
        ((x,), {"x": x}, "'forward': 'x' is given twice"),
        ((x,), {"mask": mask, "count": count}, "'forward': the input 'scale' is missing"),
    ]
    for tensors, named, message in wrong:
        with pytest.raises(ValueError, match=message):
            program.execute(*tensors, **named)


def test_backend_tosa_runs_the_reference_program() -> None:
    (x,) = images(1)[0]
    program = load(export_small(INT8).buffer)
    assert program.has_reference
    assert torch.equal(program.execute(x, backend="tosa")[0], program.execute(x)[0])
    with pytest.raises(ValueError, match="backend='npu': unknown backend; give backend='tosa'"):
        program.execute(x, backend="npu")  # type: ignore[arg-type]
    for run in (program.run, program.execute, export_small(INT8).run):
        with pytest.raises(TypeError, match=r"run\(\) has no argument 'via'; did you mean 'backend'\?"):
            run(x, via="tosa")
    program = load(export_small(VGF_INT8).buffer)
    assert not program.has_reference
    with pytest.raises(
        RunError, match=r"backend='tosa' needs the TOSA graphs of this program.*save\('model.pte', reference="
    ):
        program.execute(x, backend="tosa")


def test_repr_and_signature() -> None:
    program = load(export_mixed(FP).buffer)
    assert repr(program).startswith("<Program (x: float32[2, 3], scale: float32[], count: int32[4], mask: bool[2, 3])")
    assert program.methods == ("forward",)
    assert program.signature("forward").inputs == program.inputs
    with pytest.raises(ValueError, match="no method 'backward'; the program has: forward"):
        program.signature("backward")
    with pytest.raises(ValueError, match="no method 'forward'; the program has: between, first, second"):
        load(export_methods()).execute(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), r"'forward' takes 4 inputs \(x: float32\[2, 3\], scale: float32\[\], .*\), got 0"),
        ((*MIXED, MIXED[0]), "'forward' takes 4 inputs .* got 5"),
        ((MIXED[0].double(), *MIXED[1:]), r"input 0 \('x'\) must be float32\[2, 3\]; got float64\[2, 3\]"),
        ((MIXED[0].T, *MIXED[1:]), r"input 0 \('x'\) must be float32\[2, 3\]; got float32\[3, 2\]"),
        ((MIXED[0], MIXED[1][None], *MIXED[2:]), r"input 1 \('scale'\) must be float32\[\]; got float32\[1\]"),
        ((MIXED[0], 2.5, *MIXED[2:]), r"input 1 \('scale'\) must be a tensor, float32\[\]; got float"),
        ((MIXED[0], None, *MIXED[2:]), r"input 1 \('scale'\) must be a tensor, float32\[\]; got NoneType"),
        ((*MIXED[:2], MIXED[2].long(), MIXED[3]), r"input 2 \('count'\) must be int32\[4\]; got int64\[4\]"),
        ((*MIXED[:3], MIXED[3].byte()), r"input 3 \('mask'\) must be bool\[2, 3\]; got uint8\[2, 3\]"),
        ((*MIXED[:3], np.ones((2, 3), bool)), r"input 3 \('mask'\) must be a tensor, bool\[2, 3\]; got ndarray"),
        ((*MIXED[:2], MIXED[2][:0], MIXED[3]), r"input 2 \('count'\) must be int32\[4\]; got int32\[0\]"),
    ],
)
def test_mismatching_inputs_are_refused(tensors: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(export_mixed(FP).buffer).execute(*tensors)


def test_float_for_a_quantized_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got float32\[1, 3, 8, 8\]; quantize floats with inputs\[0\]\.quantiz"):
        load(export_small(INT8, quantized_io=True).buffer).execute(images(1)[0][0])


def test_failed_delegate_is_created_again_at_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = load(export_small(FP).buffer)
    (x,) = images(1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(delegates, "create_delegate", _refuse)
        patch.setattr(host_backends, "create_delegate", _refuse)
        with pytest.raises(PayloadError, match="'forward' cannot be run: no"):
            program.execute(x)
    assert program.execute(x)[0].shape == (1, 4)


def _refuse(*_: object) -> None:
    raise PayloadError("no")
