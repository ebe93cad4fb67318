"""State in buffers: integer programs store it as integers, and it evolves from call to call as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

import arm_recipes
from arm_recipes import ArmRecipeType
from tests.sqnr import sqnr
from tests.verify_only import mark_verify

FRAMES = 200


class Mean(nn.Module):
    """A running mean that begins at 0.5. In one frame it changes by much less than a step of int8."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.full((1, 8), 0.5))
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(0.98 * self.state + 0.02 * self.linear(x[..., 0]))
        return torch.tanh(self.state)


class Streamed(nn.Module):
    """Two causal dilated convolutions, whose buffers hold the previous frames."""

    old0: Tensor
    old1: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("old0", torch.zeros(1, 4, 2))
        self.register_buffer("old1", torch.zeros(1, 8, 8))
        self.first, self.second = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3, dilation=4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """One frame; [1, 4, 1] -> [1, 5]."""
        window = torch.cat([self.old0, x], -1)
        self.old0.copy_(window[..., 1:])
        y = torch.relu(self.first(window))
        window = torch.cat([self.old1, y], -1)
        self.old1.copy_(window[..., 1:])
        return torch.as_tensor(self.head(torch.relu(self.second(window))[..., -1]))


class Detector(nn.Module):
    """A voice detector: convolution, LSTM cell, linear layer; the cell's state is in buffers."""

    h: Tensor
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(1, 16))
        self.register_buffer("c", torch.zeros(1, 16))
        self.conv, self.cell, self.head = nn.Conv1d(4, 8, 1), nn.LSTMCell(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(torch.relu(self.conv(x))[..., 0], (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return torch.sigmoid(self.head(h))


class Cache(nn.Module):
    """Attention over the last eight frames in a ring buffer."""

    keys: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 8, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int32))
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        key = self.linear(x[..., 0])
        self.keys[:, self.place] = key
        self.place.copy_(torch.where(self.place == 7, 0, self.place + 1))
        scores = torch.softmax(key @ self.keys.transpose(1, 2), -1)
        return torch.as_tensor(scores @ self.keys)


class Counted(nn.Module):
    """Writes each frame into a ring buffer. An int64 buffer counts the frames from ``start``."""

    keys: Tensor
    place: Tensor

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 7, 4))
        self.register_buffer("place", torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(1, self.place % 7, x[None, ..., 0])
        self.place.add_(1)
        return self.keys[:, 3:].clone()


class Delayed(nn.Module):
    """Returns the input of two calls before: one buffer receives the other's value, which receives the input."""

    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.full((1, 4, 1), 0.25))
        self.register_buffer("second", torch.full((1, 4, 1), -0.5))

    def forward(self, x: Tensor) -> Tensor:
        old = self.first.clone()
        self.first.copy_(self.second)
        self.second.copy_(x)
        return old


class Unread(nn.Module):
    """Writes a buffer that nothing reads."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        self.last.copy_(y)
        return y + x


@pytest.mark.parametrize("recipe", ["TOSA_FP", "TOSA_INT8", "TOSA_A16W8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8"])
@pytest.mark.parametrize(("network", "least"), [(Mean, 40), (Streamed, 33), (Detector, 30), (Cache, 30)])
def test_streams(network: Callable[[], nn.Module], least: float, recipe: str) -> None:
    torch.manual_seed(0)
    model = network().eval()
    expected = copy.deepcopy(model)
    frames = [(torch.randn(1, 4, 1),) for _ in range(FRAMES)]
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), frames)
    program = arm_recipes.load(result.buffer)
    found = [program.execute(*frame)[0] for frame in frames]
    assert sqnr([expected(*frame) for frame in frames], found) > (100 if recipe == "TOSA_FP" else least)
    if not (network is Cache and "U55" in recipe):  # which has no SCATTER
        (method,) = result.report.methods
        assert not method.cpu_operators
        assert len(method.delegates) == 1


@pytest.mark.parametrize("recipe", ["TOSA_FP", "TOSA_INT8"])
@pytest.mark.parametrize("network", [Delayed, Unread])
def test_buffers_that_copy_another_tensor(network: Callable[[], nn.Module], recipe: str) -> None:
    model = network().eval()
    expected = copy.deepcopy(model)
    frames = [(torch.randn(1, 4, 1),) for _ in range(10)]
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), frames)
    program = arm_recipes.load(result.buffer)
    found = [program.execute(*frame)[0] for frame in frames]
    assert sqnr([expected(*frame) for frame in frames], found) > 35


@dataclass
class _Scaled:
    x: Tensor
    scale: object


class _Counted(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(3))

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        self.n.add_(x)
        return self.n * (scale if isinstance(scale, float) else 1)


class _CountedDataclass(_Counted):
    def forward(self, scaled: _Scaled) -> Tensor:  # type: ignore[override]
        return super().forward(scaled.x, scaled.scale)


class _WritesView(nn.Module):
    def forward(self, x: Tensor, scale: Any) -> Tensor:
        y = torch.zeros(3)
        y[1:] = x[1:]
        return y * scale


class _WritesInput(nn.Module):
    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return x.add_(1) * scale


@pytest.mark.parametrize("recipe", ["TOSA_FP", "ETHOSU_U85_INT8"])
@pytest.mark.parametrize(
    ("network", "sample"),
    [
        *[(_Counted, (torch.ones(3), value)) for value in (2.0, True, 3, "text", None)],
        (_Counted, {"scale": 2.0, "x": torch.ones(3)}),
        (_CountedDataclass, (_Scaled(torch.ones(3), 2.0),)),
        (_WritesView, (torch.ones(3), 2.0)),
        (_WritesInput, (torch.ones(3), 2.0)),
    ],
    ids=["float", "bool", "int", "str", "None", "keywords", "dataclass", "view", "input"],
)
def test_state_and_in_place_writes_beside_a_constant_input(
    network: Callable[[], nn.Module], sample: Any, recipe: str
) -> None:
    model = network().eval()
    expected = copy.deepcopy(model)
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), [copy.deepcopy(sample)] * 2)
    for _ in range(2):
        args, keywords = ((), sample) if isinstance(sample, dict) else (sample, {})
        found = result.run(*args, **keywords)
        wanted = expected(*copy.deepcopy(args), **copy.deepcopy(keywords))
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_state_is_held_as_integers() -> None:
    torch.manual_seed(0)
    frames = [(torch.randn(1, 4, 1),) for _ in range(20)]
    for network, dtype in ((Streamed, "int8"), (Mean, "int16")):
        model = network().eval()
        result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), frames)
        (method,) = result.report.methods
        (delegate,) = method.delegates
        states = [tensor for tensor in delegate.inputs if tensor.name.startswith("b_")]
        assert {tensor.dtype for tensor in states} == {dtype}
        assert len(states) == len(list(model.buffers()))
        # The buffers and the input; nothing is quantized but the input, nor dequantized but the output.
        assert sum(method.boundary.values()) == 2


@pytest.mark.parametrize("recipe", ["TOSA_FP", "TOSA_INT8"])
@pytest.mark.parametrize("start", [0, 5, 1 << 40])
def test_counters_are_held_in_int32(start: int, recipe: str) -> None:
    model = Counted(start).eval()
    expected = copy.deepcopy(model)
    frames = [(torch.randn(1, 4, 1),) for _ in range(10)]
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), frames)
    program = arm_recipes.load(result.buffer)
    for frame in frames:
        assert (program.execute(*frame)[0] - expected(*frame)).abs().max() < 0.02
    if start < 1 << 40 and recipe != "TOSA_FP":
        (method,) = result.report.methods
        assert not method.cpu_operators


class Holder:
    """Holds a tensor outside of any module."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, 4)


class Counting(nn.Module):
    """Sums its inputs. The state is in an object that is no module, and also a buffer if ``registered``."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.holder = Holder()
        if registered:
            self.register_buffer("state", self.holder.tensor)

    def forward(self, x: Tensor) -> Tensor:
        self.holder.tensor.add_(x)
        return self.holder.tensor * 2


def test_state_that_is_a_buffer_under_another_name() -> None:
    model = Counting(True).eval()
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.ones(1, 4),)])
    assert not model.holder.tensor.any()
    program = arm_recipes.load(result.buffer)
    assert [float(program.execute(torch.ones(1, 4))[0][0, 0]) for _ in range(3)] == [2, 4, 6]


RECIPES = ["TOSA_FP", "TOSA_INT8", *mark_verify(["TOSA_A16W8", "ETHOSU_U55_INT8"]), "ETHOSU_U85_INT8"]


class Decayed(nn.Module):
    """Halves its state and adds the frame."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(self.state * 0.5 + x)
        return self.state * 1


class Twice(nn.Module):
    """One stateful module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = Decayed()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.one(x) + self.other(x * 0.25))


class Pair(nn.Module):
    """Two buffers that share memory; ``writes`` names those that are written, and both are read."""

    one: Tensor
    other: Tensor

    def __init__(self, one: Tensor, other: Tensor, writes: tuple[str, ...]) -> None:
        super().__init__()
        self.register_buffer("one", one)
        self.register_buffer("other", other)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        for name in self.writes:
            getattr(self, name).mul_(0.5).add_(x)
        return self.one.sum(0) + self.other.sum(0)


def _same(*writes: str) -> Pair:
    state = torch.zeros(1, 4)
    return Pair(state, state.detach(), writes)


class Tied(nn.Module):
    """A buffer that is the memory of a parameter."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 4))
        self.register_buffer("state", self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(x * 0.5)
        return self.weight + x


class Spare(nn.Module):
    """Writes two buffers that are the halves of a third, which is not used."""

    whole: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(2, 1, 4))
        self.register_buffer("keys", self.whole[0])
        self.register_buffer("values", self.whole[1])

    def forward(self, x: Tensor) -> Tensor:
        self.keys.copy_(self.keys * 0.5 + x)
        self.values.copy_(self.values * 0.25 + x)
        return self.keys + self.values


SHARED_MEMORY: list[Callable[[], nn.Module]] = [
    Twice,
    lambda: _same("one"),
    lambda: _same("other"),
    lambda: _same("one", "other"),
    Tied,
    Spare,
]


@pytest.mark.parametrize("captured", [False, *mark_verify([True])])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("network", SHARED_MEMORY)
@torch.no_grad()
def test_names_of_one_buffer(network: Callable[[], nn.Module], recipe: str, captured: bool) -> None:
    torch.manual_seed(0)
    frames = [(torch.rand(1, 4),) for _ in range(20)]
    model = torch.export.export(network().eval(), frames[0]) if captured else network().eval()
    result = arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), frames)
    program = arm_recipes.load(result.buffer)
    found, expected = [program.execute(*frame)[0] for frame in frames], network().eval()
    assert sqnr([expected(*frame) for frame in frames], found) > (100 if recipe == "TOSA_FP" else 35)
    assert not result.report.cpu_operators


@torch.no_grad()
def test_training_of_a_model_with_two_names_of_one_buffer() -> None:
    frames = [(torch.rand(1, 4),) for _ in range(20)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    prepared, expected = arm_recipes.prepare_qat(Twice(), recipe, frames).eval(), Twice().eval()
    prepared.reset_state()
    assert sqnr([expected(*frame) for frame in frames], [prepared(*frame) for frame in frames]) > 35


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("writes", ["one", "other"])
def test_a_written_buffer_that_overlaps_another_is_refused(writes: str, recipe: str, captured: bool) -> None:
    state, frame = torch.zeros(2, 4), (torch.ones(1, 4),)
    module = Pair(state, state[:1], (writes,)).eval()
    model = torch.export.export(module, frame) if captured else module
    read = "other" if writes == "one" else "one"
    message = f"method 'forward' writes its buffer '{writes}', which overlaps its buffer '{read}' in memory: .*"
    with pytest.raises(arm_recipes.ExportError, match=message + "under one name, and take views of it in forward"):
        arm_recipes.export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), [frame])


def test_a_branch_on_a_buffer_that_is_written_under_another_name_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ready", torch.zeros(1))
            self.register_buffer("same", self.get_buffer("ready"))

        def forward(self, x: Tensor) -> Tensor:
            y = x if self.get_buffer("ready") else x * 2
            self.get_buffer("same").fill_(1)
            return y

    with pytest.raises(arm_recipes.ExportError, match="the model branches on its buffer 'ready', and writes it"):
        arm_recipes.export(Branching().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.ones(1, 4),)])


def test_a_random_generator_is_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(4, generator=torch.Generator().manual_seed(0))

    with pytest.raises(
        arm_recipes.ExportError, match=r"uses a torch\.Generator, which a program cannot hold: .* register_buffer\(\)"
    ):
        arm_recipes.export(Noisy().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.ones(1, 4),)])


def test_a_written_tensor_that_is_no_buffer_is_refused() -> None:
    message = r"a tensor of shape \[1, 4\] that is none of its buffers \(.*\): call register_buffer\(\)"
    with pytest.raises(arm_recipes.ExportError, match=message):
        arm_recipes.export(
            Counting(False).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.ones(1, 4),)]
        )


class _Positions(nn.Module):
    """Adds a tensor in place. The tensor is a plain attribute, and only the sum is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.places = torch.linspace(-1, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x += self.places.to(x.device, dtype=x.dtype)
        x *= self.places.view(1, 4)
        return x


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
@torch.no_grad()
def test_a_constant_that_is_added_in_place_is_no_state(kind: ArmRecipeType) -> None:
    model, x = _Positions().eval(), torch.linspace(-2, 2, 8).reshape(2, 4)
    result = arm_recipes.export(model, ExportRecipe.get_recipe(kind), [(x,)])
    assert not result.report.cpu_operators
    torch.testing.assert_close(result.run(x), model(x), atol=1e-5 if kind is ArmRecipeType.TOSA_FP else 0.05, rtol=0)


class _Literal(nn.Module):
    """Writes a tensor that each call creates, and reads ``data``, as older models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        scale[2:] = x[0, :2]
        y = nn.functional.linear(x, self.linear.weight.data, self.linear.bias)
        return torch.cat([y.data, torch.zeros(2, 2)], 1)[:, 1:5] * scale


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
@torch.no_grad()
def test_a_literal_that_is_written_is_no_state(kind: ArmRecipeType) -> None:
    model, x = _Literal().eval(), torch.linspace(-2, 2, 8).reshape(2, 4)
    result = arm_recipes.export(model, ExportRecipe.get_recipe(kind), [(x,), (-x,)])
    assert not result.report.cpu_operators
    for sample in (x, -x):
        tolerance = 1e-5 if kind is ArmRecipeType.TOSA_FP else 0.15
        torch.testing.assert_close(result.run(sample), model(sample), atol=tolerance, rtol=0)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8], ids=str)
def test_an_embedding_with_max_norm_is_refused_and_exports_after_the_advice(recipe: ArmRecipeType) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 3)).eval()
    sample = torch.arange(10, dtype=torch.int32).reshape(1, 10)
    with torch.no_grad():
        expected = copy.deepcopy(model)(sample)
    with pytest.raises(arm_recipes.ExportError, match=r"'0\.weight': an embedding with max_norm .* torch\.renorm"):
        arm_recipes.export(model, ExportRecipe.get_recipe(recipe), [(sample,)])
    embedding: Any = model[0]
    embedding.weight.data = torch.renorm(embedding.weight.data, 2.0, 0, embedding.max_norm)
    embedding.max_norm = None
    result = arm_recipes.export(model, ExportRecipe.get_recipe(recipe), [(sample,)])
    torch.testing.assert_close(result.run(sample), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("assigned", [True, False])
def test_a_parameter_that_is_written_is_refused(assigned: bool) -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            if assigned:
                self.weight.data = self.weight.data * 2
            else:
                self.weight.data.clamp_(-1, 1)
            return x @ self.weight

    message = (
        r"assigns to x\.data.*: compute a new" if assigned else "writes into its parameter 'weight': compute a new"
    )
    with pytest.raises(arm_recipes.ExportError, match=message):
        arm_recipes.export(Renormed().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.ones(1, 4),)])
