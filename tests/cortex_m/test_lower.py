"""Whole graphs become kernels: random chains of operators in ExecuTorch's runtime; operators that stay in float."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.export import ExportedProgram

from arm_backend_core import delegate
from arm_recipes import ArmRecipesWarning, ArmRecipeType, export
from tests.cortex_m.lowering import Case, check, lower, quantize
from tests.ops.runner import check_steps, flatten_tensors, output_scales

_F = nn.functional
#: Operators in a random graph.
_LENGTH = 5
_MAX_ELEMENTS = 2000

Step = Callable[[random.Random, Tensor], nn.Module | Callable[[Tensor], Tensor] | None]


def _conv(draw: random.Random, x: Tensor) -> nn.Module | None:
    if x.dim() not in (3, 4):
        return None
    channels, kernel = x.shape[1], draw.randint(1, 3)
    groups = draw.choice([1, channels])
    layer: Any = nn.Conv1d if x.dim() == 3 else nn.Conv2d
    options = {"stride": draw.randint(1, 2), "padding": draw.randint(0, kernel - 1), "groups": groups}
    return layer(channels, groups * draw.randint(1, 3), kernel, **options)


def _transposed_conv(draw: random.Random, x: Tensor) -> nn.Module | None:
    if x.dim() not in (3, 4):
        return None
    layer: Any = nn.ConvTranspose1d if x.dim() == 3 else nn.ConvTranspose2d
    kernel = draw.randint(1, 3)
    return layer(x.shape[1], draw.randint(1, 4), kernel, stride=draw.randint(1, 3), padding=draw.randint(0, kernel - 1))


def _linear(draw: random.Random, x: Tensor) -> nn.Module:
    return nn.Linear(x.shape[-1], draw.randint(1, 6))


def _pool(draw: random.Random, x: Tensor) -> nn.Module | None:
    if x.dim() not in (3, 4):
        return None
    names = ["MaxPool", "AvgPool"]
    layer = getattr(nn, f"{draw.choice(names)}{x.dim() - 2}d")
    return layer(draw.randint(1, 3), draw.randint(1, 2))


def _permute(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    order = draw.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(order)


def _view(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    start = draw.randrange(x.dim())
    return draw.choice([lambda x: x.unsqueeze(start), lambda x: x.flatten(start), lambda x: x.squeeze(start)])


def _slice(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(x.dim())
    index = draw.randrange(x.shape[dim])
    return draw.choice(
        [
            lambda x: x.narrow(dim, index, 1),
            lambda x: x.select(dim, index),
            lambda x: x.chunk(2, dim)[0],
            lambda x: x.flip(dim),
            lambda x: x.roll(1, dim),
        ]
    )


def _concatenate(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(x.dim())
    return draw.choice(
        [
            lambda x: torch.cat([x, x.tanh()], dim),
            lambda x: torch.stack([x, x.relu()], dim),
            lambda x: _F.pad(x, (1, 2)),
            lambda x: x.repeat_interleave(2, dim),
        ]
    )


def _reduce(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    dims, keepdim = draw.sample(range(x.dim()), draw.randint(1, min(2, x.dim()))), draw.random() < 0.6
    return draw.choice([lambda x: x.mean(dims, keepdim=keepdim), lambda x: x.amax(dims, keepdim=keepdim)])


def _combine(draw: random.Random, x: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(x.dim())
    return draw.choice(
        [
            lambda x: x + x.mean(dim, keepdim=True),
            lambda x: x * x.amax(dim, keepdim=True),
            lambda x: torch.maximum(x, -x.flip(dim)),
            lambda x: torch.sub(x, x.flip(dim), alpha=0.5),
            lambda x: torch.relu(x + 0.5 * x.tanh()),
            lambda x: (x @ x.mT).softmax(-1) if x.dim() > 1 else x,
        ]
    )


def _function(draw: random.Random, x: Tensor) -> Any:
    dim = draw.randrange(x.dim())
    return draw.choice([torch.sigmoid, _F.relu6, _F.gelu, lambda x: x * 1.7, lambda x: x.softmax(dim), torch.abs])


_STEPS: list[Step] = [
    *(
        _conv,
        _conv,
        _transposed_conv,
        _linear,
        _pool,
        _permute,
        _view,
        _slice,
        _concatenate,
        _reduce,
        _combine,
        _function,
    )
]


class _Chain(nn.Module):
    """Operators one after another, as modules and functions. Returns the last and the middle result."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x
        for index, step in enumerate(self.steps):
            x = step(x)
            middle = x if index == len(self.steps) // 2 else middle
        return x, middle


def _draw_case(number: int) -> Case:
    """Draw a graph; its number determines it."""
    draw = random.Random(number)
    torch.manual_seed(number)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.choice([1, 2, 3, 4, 4, 4, 5])))
    x, steps = torch.rand(shape) * 4 - 2, list[Any]()
    while len(steps) < _LENGTH:
        try:
            step = draw.choice(_STEPS)(draw, x)
            result = x if step is None else step(x)
        except (RuntimeError, IndexError, ValueError):
            continue  # the operator does not take this shape
        if step is not None and 0 < result.numel() <= _MAX_ELEMENTS and 0 < result.dim() <= 6:
            x = result.detach()
            steps.append(step)
    isa = draw.choice(["mve", "dsp", "scalar"])
    return Case(str(number), _Chain(steps), [shape], isa=isa, channels_last=draw.random() < 0.2)


#: Graphs of ``make test``; with ``--verify`` ten times as many.
_GRAPHS = 30


@pytest.mark.parametrize("number", range(_GRAPHS))
def test_random_graphs(number: int, pytestconfig: pytest.Config) -> None:
    """The runtime equals the kernels in Python bit by bit, and the quantized graph to a few steps."""
    numbers = range(number, 10 * _GRAPHS, _GRAPHS) if pytestconfig.getoption("verify") else [number]
    for case in map(_draw_case, numbers):
        lowered = lower(quantize(case), case.isa)
        assert not lowered.log.refused_operators, lowered.reasons
        assert not lowered.float_operators()
        lowered.check_executorch_run(case.sample())


def test_a_refused_operator_between_kernels() -> None:
    """The operator computes in float between casts and has a reason; its neighbors are kernels."""
    pool = nn.MaxPool2d(2, dilation=2)
    case = Case("", nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Conv2d(4, 2, 1)), [(1, 3, 8, 8)])
    lowered = lower(quantize(case))
    lowered.check_refused("aten.max_pool2d.default: the pooling kernels have no dilation")
    lowered.check_calls("2 quantized_conv2d_nhwc")
    lowered.check_close(case.sample())


def test_an_operator_without_a_kernel_has_a_reason() -> None:
    case = Case("", lambda x: torch.nn.functional.layer_norm(x, (3,)) * 2, [(2, 3)])
    lower(quantize(case)).check_refused("there is no int8 kernel for aten.layer_norm.default")


class _Hashed(nn.Module):
    """An embedding of hashed int64 numbers, which ExecuTorch's operators compute, beside int8 kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x + self.table(numbers * 3 % 4)), numbers.bool()


def test_integer_operators_have_a_reason_and_no_note_about_tosa() -> None:
    torch.manual_seed(0)
    model, numbers = _Hashed().eval(), torch.randint(-50, 50, (8, 1, 5))
    samples = [(torch.randn(1, 5, 6), row) for row in numbers]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArmRecipesWarning)
        result = export(model, recipe, samples)
    reasons = {operator.reason for operator in result.report.cpu_operators}
    assert reasons == {"the kernels compute int8, and its result is int64"}
    assert not any("TOSA" in note for note in result.report.notes)
    expected, found = model(*samples[0]), result.run(*samples[0])
    torch.testing.assert_close(found[0], expected[0], atol=0.05, rtol=0)
    assert torch.equal(found[1], expected[1])


def test_log_softmax_says_what_to_return_instead() -> None:
    """The logarithm of the softmax kernel's int8 result would be wrong by any amount below -5.5."""
    case = Case("", nn.Sequential(nn.Linear(8, 10), nn.LogSoftmax(-1)), [(4, 8)])
    lower(quantize(case)).check_refused(
        "there is no int8 kernel for aten.log_softmax.int: results of the softmax kernel are multiples of 1/256, so "
        r"logarithms below ln\(1/256\) = -5.5 are lost. Return the result of softmax, or the input of log_softmax, "
        "which has the same order"
    )


class _Streaming(nn.Module):
    """A convolution over a window of the input's stream, which is state."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.zeros(1, 4, 6))
        self.layer = nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.window.copy_(torch.cat([self.window[..., 2:], x], -1))
        return self.layer(self.window)


class _Recurrent(nn.Module):
    """A floating-point state that each call updates."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 8))
        self.input, self.hidden = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(torch.tanh(self.input(x) + self.hidden(self.state)))
        return self.state.clone()


class _Outputs(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class _Attention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class _Embedded(nn.Module):
    """Embeddings of integer tokens, and rows of another input that the tokens select."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(self.embedding(tokens)).relu(), x.gather(1, tokens), x.index_select(1, tokens[0])


_TOKENS = torch.tensor([[3, 0, 2], [1, 1, 4]])
#: Constructor of a module, shapes of its inputs, and the allowed steps: each time step rounds the state.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...], int]] = {
    "GRU": (lambda: _Outputs(nn.GRU(4, 6, batch_first=True)), ((1, 5, 4),), 2),
    "LSTM": (lambda: _Outputs(nn.LSTM(4, 6)), ((3, 2, 4),), 2),
    "attention": (_Attention, ((1, 5, 8),), 2),
    "streaming": (_Streaming, ((1, 4, 2),), 1),
    "state": (_Recurrent, ((1, 4),), 2),
    "integers": (_Embedded, ((2, 5),), 1),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of an exported program equal its kernels in Python, and the quantized graph to a few steps."""
    make, shapes, steps = MODULES[name]
    integers = (_TOKENS,) if make is _Embedded else ()
    programs: list[ExportedProgram] = []
    lower_to_kernels = delegate._lower_to_kernels

    def keep_programs(program: ExportedProgram, *rest: Any) -> Any:
        programs.append(copy.deepcopy(program))
        result = lower_to_kernels(program, *rest)
        programs.append(copy.deepcopy(program))
        return result

    monkeypatch.setattr(delegate, "_lower_to_kernels", keep_programs)
    samples = [(*integers, *map(torch.randn, shapes)) for _ in range(3)]
    result = export(make().eval(), ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples)
    quantized, lowered = (program.module(check_guards=False) for program in programs)
    for sample in samples:
        with torch.no_grad():
            expected, kernels = flatten_tensors(quantized(*sample)), flatten_tensors(lowered(*sample))
        check_steps(kernels, expected, output_scales(programs[0])[-len(expected) :], steps)  # after new states
        for ours, theirs in zip(flatten_tensors(result.run(*sample)), kernels, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda x: torch.relu(x + x.flip(0)), "0 quantized_activation"),
        (lambda x: torch.tanh(x) * 3 + 1, "1 quantized_activation"),
        (lambda x: x.permute(1, 0), "transpose"),
    ],
)
def test_fusion(function: Callable[[Tensor], Tensor], calls: str) -> None:
    check(Case("", function, [(3, 4)], kernels=calls))
