"""Every operator on every target: one test for each row of ``cases``. Programs for Ethos-U run in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from arm_backend_core import TosaCompileSpec, compilation_log
from arm_backend_core.delegate import delegate
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from tests.ops import runner
from tests.ops.cases import CASES
from tests.ops.runner import Case, DelegatedProgram
from tests.runtime.ethosu_emulator import Emulator, delegates_with_payloads
from tests.tosa_graphs import assert_valid
from tests.verify_only import is_thorough

#: NPUs whose refusals rows list (``Case.refused``), and their names there.
_NAMED = {"ethos-u55-128": "u55", "ethos-u85-256": "u85"}


def _check_delegation(case: Case, lowered: DelegatedProgram, target: str) -> bool:
    """Check the delegation, or the refusal that the row expects; return whether the operator is delegated."""
    if target in case.refused:
        lowered.check_refused(case.refused[target])
        return False
    lowered.check_delegated()
    return True


def _rows(*profiles: str) -> list[object]:
    return [
        pytest.param(case, *rest, id="-".join([case.name, *rest]))
        for case in CASES
        for profile in profiles
        if profile in case.profiles
        for rest in ([profile] if len(profiles) > 1 else [],)
    ]


@pytest.fixture
def thorough(case: Case, pytestconfig: pytest.Config) -> bool:
    """Whether tosa-opt validates the row's graphs, and all NPUs run them instead of those in ``_NAMED`` only."""
    return is_thorough(pytestconfig, case.name)


@pytest.mark.parametrize("case", _rows("fp"))
def test_float(case: Case, thorough: bool) -> None:
    inputs = case.sample()
    lowered = runner.lower(runner.export(case.module(), inputs), "fp")
    if _check_delegation(case, lowered, "fp"):
        runner.check_close(case, lowered.run(inputs), runner.flatten_tensors(case.module()(*inputs)))
        if thorough:
            assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+FP")


@pytest.mark.parametrize(("case", "profile"), _rows("int8", "a16w8"))
def test_quantized(case: Case, profile: str, accelerators: tuple[str, ...], emulator: Emulator, thorough: bool) -> None:
    inputs = case.sample()
    module = runner.quantize_case(case, int16=profile == "a16w8")
    program = runner.export(module, inputs)
    lowered = runner.lower(program, "int")
    if _check_delegation(case, lowered, profile):
        expected, scales = runner.flatten_tensors(module(*inputs)), runner.output_scales(program)
        error: torch.Tensor | float = 0.0
        if case.tabulated and profile == "a16w8" and scales[0] is not None:
            error = runner.interpolation_error(case, program, inputs[0], scales[0])
        steps = case.int16_steps if profile == "a16w8" else case.steps
        runner.check_steps(lowered.run(inputs), expected, scales, steps, error)
        if thorough:
            assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+INT+int16+int4+doubleround+inexactround")
    for accelerator in accelerators if thorough else _NAMED:
        lowered = runner.lower(program, EthosUCompileSpec(accelerator))
        if profile == "int8" and accelerator in _NAMED:
            _check_delegation(case, lowered, _NAMED[accelerator])
        for made, payload in delegates_with_payloads(lowered):
            assert emulator.matches_reference_model(made, payload), accelerator


def test_bf16_matrix_product() -> None:
    """TOSA sums it in FP32; the result is cast back."""
    inputs = (torch.randn(2, 3).bfloat16(), torch.randn(3, 4).bfloat16())
    program = runner.export(Case("mm", torch.mm, ()).module(), inputs)
    with compilation_log.open_log() as log:
        delegate(program, TosaCompileSpec("TOSA-1.0+FP+bf16"))
    assert not log.refused_operators
    assert_valid(log.delegates[0].tosa, "TOSA-1.0+FP+bf16")


_FP8: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda x, y: torch.cat([x, y.flip(2)], 1)[:, ::2],
    "pad": lambda x, y: F.pad(x, (1, 2), value=2.0).repeat(1, 2, 1, 1),
    "gather": lambda x, y: torch.index_select(x, 3, torch.tensor([1, 1, 0])),
    "scatter_and_fill": lambda x, y: torch.slice_scatter(x, y[..., :2], 3, 1, 3).masked_fill(x.float() > 1, 3.0),
    "matmul": torch.matmul,
    "convolution": lambda x, y: F.conv2d(x, torch.tensor([1.0, -0.5, 0.25]).to(x.dtype).reshape(1, 3, 1, 1)),
    "max_pool": lambda x, y: F.max_pool2d(x, 2, 1, dilation=2),
    "avg_pool": lambda x, y: F.avg_pool2d(x, 2),
    "cast": lambda x, y: (x.to(torch.bfloat16) * 2).to(x.dtype),
}


@pytest.mark.parametrize("name", _FP8)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_operators(name: str, dtype: torch.dtype) -> None:
    """Equal to float32 up to one rounding, as PyTorch has few kernels for fp8."""
    spec = f"TOSA-1.0+FP+bf16+fp8{'e4m3' if dtype is torch.float8_e4m3fn else 'e5m2'}"
    inputs = tuple(torch.linspace(-3, 3, 48).roll(i * 7).reshape(1, 3, 4, 4).to(dtype) for i in (0, 1))
    program = runner.export(Case(name, _FP8[name], ()).module(), inputs)
    with compilation_log.open_log() as log:
        lowered = DelegatedProgram(delegate(program, TosaCompileSpec(spec)), log)
    lowered.check_delegated()
    assert_valid(log.delegates[0].tosa, spec)
    (got,) = lowered.run(inputs)
    expected = _FP8[name](*(x.float() for x in inputs))
    assert got.dtype is dtype
    rounding = 2.0**-4 if dtype is torch.float8_e4m3fn else 2.0**-3
    torch.testing.assert_close(got.float(), expected, rtol=rounding, atol=0.02)


@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("scalar", [True, False])
def test_comparisons_of_mixed_dtypes_use_pytorchs_promoted_type(half_first: bool, scalar: bool) -> None:
    """With the first operand's type, float32 was rounded to float16, and larger values compared as equal."""
    half = torch.tensor([0.1, 0.2, 0.3]).half()
    single = torch.tensor(0.1) if scalar else torch.tensor([0.1, 0.2, 0.3])
    operands = (half, single) if half_first else (single, half)
    module = runner.FunctionModule(lambda x, y: ((x > y).float(), (x == y).float(), (x < y).float()))
    lowered = runner.lower(runner.export(module, operands), "fp")
    lowered.check_delegated()
    for made, expected in zip(lowered.run(operands), module(*operands), strict=True):
        assert torch.equal(made, expected)
