"""Higher-order operators: ``torch.cond``, loops, contexts and ``flex_attention``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch._higher_order_ops.map import map as rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import ExportedProgram
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from arm_backend_core import compilation_log
from arm_backend_core.errors import ModelError
from arm_backend_core.nodes import is_quantize
from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_quantization_config
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_recipes import ArmRecipeType, export
from tests.ops import runner
from tests.tosa_graphs import assert_valid
from tests.verify_only import combine_pairwise


class _Branches(nn.Module):
    """Weights and a condition inside a branch, several results, and an operand that is returned unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset: Tensor
        self.register_buffer("offset", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def positive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            inner = torch.cond(x[0, 0] > y[0, 0], lambda z: z * 2, lambda z: z + self.offset, [x])
            return self.linear(x), inner + y

        first, second = torch.cond(x.sum() > 0, positive, lambda x, y: (x - y, y * 1.0), [x, y])
        return first, second.tanh()


def _inputs() -> list[tuple[Tensor, ...]]:
    """Inputs that take every path through the branches."""
    x = torch.linspace(-1, 1.5, 8).reshape(2, 4)
    return [(sign * x, torch.full((2, 4), level)) for sign in (1.0, -1.0) for level in (-1.5, 1.5)]


def _quantized(model: nn.Module, samples: Sequence[tuple[Tensor, ...]]) -> ExportedProgram:
    quantizer = TOSAQuantizer(runner.make_compile_spec("int")).set_global(get_symmetric_quantization_config())
    observed = ObservedProgram(runner.export(model, samples[0]), quantizer)
    with torch.no_grad():
        for sample in samples:
            observed(*sample)
        return observed.convert()


@pytest.mark.parametrize("target", ["fp", "int", "u85", "fp+cf", "int+cf"])
def test_either_branch_is_taken(target: str) -> None:
    model, samples = _Branches().eval(), _inputs()
    floating = target.startswith("fp")
    lowered = runner.lower(runner.export(model, samples[0]) if floating else _quantized(model, samples), target)
    lowered.check_delegated()
    operators = lowered.log.delegates[0].tosa_operators
    assert operators.count("COND_IF") == (2 if "cf" in target else 0)  # one for each torch.cond, whatever it returns
    if "cf" in target:
        assert_valid(lowered.log.delegates[0].tosa, runner.make_compile_spec(target).target.name)
    for sample in samples:
        for ours, theirs in zip(lowered.run(sample), runner.flatten_tensors(model(*sample)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if floating else 0.08, rtol=1e-5)


def _chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two conditionals with one condition, the second on the first's result; with captured tensor and constant."""
    outer = y.exp()
    (first,) = torch.cond(x.sum() > 0, lambda x: (x * outer,), lambda x: (x + 0.0,), [x])
    second, third = torch.cond(
        x.sum() > 0, lambda x: (x.sin() + outer, x.clone()), lambda x: (torch.ones(2, 4) * 3, x.cos()), [first]
    )
    return second, third


@pytest.mark.parametrize("target", ["fp+cf", "int+cf"])
def test_a_condition_is_read_twice(target: str) -> None:
    samples, model = _inputs(), runner.Case("chain", _chain, ()).module()
    program = runner.export(model, samples[0]) if target == "fp+cf" else _quantized(model, samples)
    lowered = runner.lower(program, target)
    lowered.check_delegated()
    assert lowered.log.delegates[0].tosa_operators.count("COND_IF") == 2
    assert_valid(lowered.log.delegates[0].tosa, runner.make_compile_spec(target).target.name)
    for sample in samples:
        for ours, theirs in zip(lowered.run(sample), runner.flatten_tensors(model(*sample)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if target == "fp+cf" else 0.08, rtol=1e-5)


def _guarded(x: Tensor) -> Tensor:
    """A logarithm that is finite only in its branch: for positive elements."""
    result: Tensor = torch.cond(x.min() > 0, lambda x: (x.log() + 1,), lambda x: (x.abs() - 3,), [x])[0]
    return result * 2


def _largest_step(program: ExportedProgram) -> float:
    return max(float(node.args[1]) for node in program.graph.nodes if is_quantize(node))


def test_a_branch_is_calibrated_by_the_samples_that_take_it() -> None:
    """The logarithm of a negative number would end calibration."""
    model = runner.Case("guarded", _guarded, ()).module()
    with compilation_log.open_log() as log:
        program = _quantized(model, [(torch.linspace(0.5, 1, 5),), (torch.linspace(-0.5, 1, 5),)])
    assert _largest_step(program) < 0.1
    assert not log.notes
    for low in (0.5, -0.5):
        x = torch.linspace(low, 1, 5)
        torch.testing.assert_close(runner.lower(program, "int").run([x])[0], model(x), atol=0.1, rtol=0)


def test_a_branch_that_no_sample_takes_is_noted() -> None:
    model = runner.Case("guarded", _guarded, ()).module()
    with compilation_log.open_log() as log:
        program = _quantized(model, [(torch.linspace(-0.5, 1, 5) ** 2,)])
    (note,) = log.notes
    assert "no calibration sample takes the second branch of a torch.cond" in note
    x = torch.linspace(0.0, 1, 5)  # the branch has the ranges of all samples
    torch.testing.assert_close(runner.lower(program, "int").run([x])[0], model(x), atol=0.1, rtol=0)


class _ConstantCondition(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cond(torch.tensor([True]), lambda x: (x.sin(),), lambda x: (x.cos(),), [x])
        result: Tensor = chosen[0]
        return result


def test_a_constant_condition_selects_its_branch() -> None:
    x = torch.linspace(-1, 1, 5)
    lowered = runner.lower(runner.export(_ConstantCondition(), (x,)), "fp")
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run([x])[0], x.sin())


def test_conditional_on_u55_selects_by_arithmetic() -> None:
    """Ethos-U55 has no SELECT."""
    lowered = runner.lower(_quantized(_Branches().eval(), _inputs()), "u55")
    lowered.check_delegated()
    assert "SELECT" not in lowered.log.delegates[0].tosa_operators


class _StaticLoops(nn.Module):
    """``map`` over rows, ``scan`` with a state, and a ``while_loop`` with a constant trip count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        mapped = rows(lambda row, h: self.linear(row) + h, x, h)  # type: ignore[arg-type]
        last, states = scan(lambda h, row: (h * 0.5 + row, (h - row).tanh()), h, x)
        _, grown = while_loop(lambda i, y: i < 6, lambda i, y: (i + 2, y * 0.5 + h), (torch.tensor(1), h))
        return mapped, last, states, grown


@pytest.mark.parametrize("target", ["fp", "int", "u55", "u85"])
def test_loops_with_a_constant_trip_count_are_unrolled(target: str) -> None:
    model, sample = _StaticLoops().eval(), (torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 4))
    lowered = runner.lower(runner.export(model, sample) if target == "fp" else _quantized(model, [sample]), target)
    lowered.check_delegated()
    for ours, theirs in zip(lowered.run(sample), runner.flatten_tensors(model(*sample)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 if target == "fp" else 0.08, rtol=1e-5)


class _Nested(nn.Module):
    """A loop in a branch, and a loop in a loop, over integers and over real numbers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def halved(x: Tensor) -> tuple[Tensor]:
            return (while_loop(lambda x: x.abs().max() > 1, lambda x: (x * 0.5,), (x,))[0],)

        def outer(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            _, x = while_loop(lambda j, x: j < i, lambda j, x: (j + 1, x * 0.75), (i - i, x))
            return i - 1, x + 0.125

        first = torch.cond(y.sum() > 0, halved, lambda x: (x * 0.25,), [x])[0]
        result: Tensor = while_loop(lambda i, x: i > 0, outer, (y.sum().to(torch.int32), first))[1]
        return result


def _with_loops(
    model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str, loops: int
) -> runner.DelegatedProgram:
    """Lower a model to one delegate with this number of loops and one conditional."""
    program = runner.export(model, samples[0]) if target == "fp+cf" else _quantized(model, samples)
    lowered = runner.lower(program, target)
    lowered.check_delegated()
    operators = lowered.log.delegates[0].tosa_operators
    assert (operators.count("WHILE_LOOP"), operators.count("COND_IF")) == (loops, 1)
    assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+INT+FP+int16+controlflow")
    return lowered


@pytest.mark.parametrize("target", ["fp+cf", "int+cf"])
def test_nested_loops_and_branches(target: str) -> None:
    model, x = _Nested(), torch.linspace(-5, 4, 7)
    samples = [(x, torch.full((2,), level)) for level in (1.0, 2.0, -1.0, 0.0)]
    lowered = _with_loops(model, samples, target, 3)
    for sample in samples:
        torch.testing.assert_close(
            lowered.run(sample)[0], model(*sample), atol=1e-5 if target == "fp+cf" else 0.1, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("target", "reason"),
    [("fp", "LOOP_IN .* needs TOSA controlflow, which TOSA-1.0.FP lacks"), ("u55", "ethos-u55-128 lacks")],
)
def test_a_loop_raises_on_a_target_without_control_flow(target: str, reason: str) -> None:
    model, sample = _DynamicLoop().eval(), (torch.ones(2, 4), torch.ones(2, 4))
    program = runner.export(model, sample) if target == "fp" else _quantized(model, [sample])
    expected = f"a while_loop cannot be exported for .*, and ExecuTorch has none for the CPU.*{reason}.*extensions="
    with pytest.raises(ModelError, match=expected):
        runner.lower(program, target)


class _Contexts(nn.Module):
    """Operators inside ``no_grad`` and a disabled ``autocast``, as in transformers and timm."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        with torch.autocast("cpu", enabled=False), torch.set_grad_enabled(not torch.is_grad_enabled()):
            z = y @ y.transpose(0, 1)
        return z + 1


@pytest.mark.parametrize("target", ["fp", "int8"])
def test_contexts_are_inlined(target: str) -> None:
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    program = runner.export(_Contexts(), (x,)) if target == "fp" else _quantized(_Contexts().eval(), [(x,)])
    lowered = runner.lower(program, {"int8": "int"}.get(target, target))
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run([x])[0], _Contexts()(x), atol=1e-5 if target == "fp" else 0.08, rtol=1e-5)


class _DynamicLoop(nn.Module):
    """A loop whose trip count depends on values, with a weight and a captured tensor, and a counter without reader."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outer = y.tanh()

        def body(i: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            step = torch.cond(h.sum() > 0, lambda h: (h * 0.5,), lambda h: (h * 0.25,), [h])[0]
            return i + 1, x - 1, self.linear(step) * 0.5 + outer

        _, x, h = while_loop(lambda i, x, h: (x.sum() > 0) & (i < 20), body, (torch.tensor(0), x, y))
        return x, h.relu()


@pytest.mark.parametrize("target", ["fp+cf", "int+cf"])
def test_a_loop_with_a_data_dependent_trip_count(target: str) -> None:
    model = _DynamicLoop().eval()
    samples = [(torch.full((2, 4), high), torch.linspace(-1, 1.5, 8).reshape(2, 4)) for high in (4.0, 2.5, -1.0, 0.5)]
    lowered = _with_loops(model, samples, target, 1)
    for sample in samples:
        for ours, theirs in zip(lowered.run(sample), runner.flatten_tensors(model(*sample)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if target == "fp+cf" else 0.12, rtol=1e-5)


class _Linspace(nn.Module):
    """The context reads no operand: PyTorch's trace then loses the readers of the node in front of it."""

    @torch.autocast("cuda", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(-1, 1, x.shape[-1])


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = _Linspace()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat((x, x + 1), 1)
        return y[:, 1:] * self.places(y[:, 1:]) + y[:, :1]


def test_a_context_without_operands() -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    result = export(_Rotary().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    assert not result.report.cpu_operators
    torch.testing.assert_close(result.run(x), _Rotary()(x))


_SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


class _Flexible(nn.Module):
    """``flex_attention`` of 4 heads; ``shared`` is the number of heads of keys and values."""

    def __init__(self, score: Any = None, mask: Any = None, shared: int = 4, sums: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 4 * 15).sin().reshape(4, 15))
        self.score = (lambda *place: score(self, *place)) if score else None
        self.mask = create_block_mask(mask, None, None, 8, 8, device="cpu") if mask else None
        self.projection = nn.Linear(16, 16 + 8 * shared)
        self.shared, self.sums = shared, sums

    def forward(self, x: Tensor) -> Any:
        heads = self.projection(x).unflatten(-1, (-1, 4)).transpose(1, 2).split((4, self.shared, self.shared), 1)
        attend: Callable[..., Any] = flex_attention
        return attend(*heads, score_mod=self.score, block_mask=self.mask, enable_gqa=True, return_lse=self.sums)


_FLEXIBLE = {
    "plain": _Flexible(),
    "grouped": _Flexible(shared=2),
    "causal": _Flexible(mask=lambda b, h, q, k: q >= k),
    "window_of_a_head": _Flexible(mask=lambda b, h, q, k: (q - k).abs() <= h),
    "alibi": _Flexible(lambda _, x, b, h, q, k: x - _SLOPES[h] * (q - k).abs()),
    "relative": _Flexible(lambda self, x, b, h, q, k: x + self.table[h, q - k + 7], shared=1),
    "capped_and_causal": _Flexible(lambda _, x, b, h, q, k: 2 * torch.tanh(x / 2), lambda b, h, q, k: q >= k),
    "sums": _Flexible(lambda _, x, b, h, q, k: x * 2, sums=True),
}


_KINDS = [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8]


@pytest.mark.parametrize(("name", "kind"), combine_pairwise([*_FLEXIBLE], _KINDS))
@torch.no_grad()
def test_flex_attention(name: str, kind: ArmRecipeType) -> None:
    """Functions of single scores are vectorized over all scores."""
    draw = torch.Generator().manual_seed(0)
    model, samples = _FLEXIBLE[name].eval(), [(torch.randn(1, 8, 16, generator=draw),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(kind), samples)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    for ours, theirs in zip(
        runner.flatten_tensors(result.run(*samples[0])), runner.flatten_tensors(model(*samples[0])), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5 if kind is ArmRecipeType.TOSA_FP else 0.06, rtol=1e-5)
