"""Warnings about programs that behave as in training: batch statistics, dropout, random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.nodes import constant_nodes, is_random
from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, export
from arm_recipes.cli.main import main
from arm_recipes.stages.capture.training_mode import describe_training_behavior
from tests.ops.runner import FunctionModule


class Block(nn.Module):
    """Convolution, batch norm and dropout in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, 4]."""
        made: Tensor = self.body(x).mean((2, 3))
        return made


class Functional(nn.Module):
    """Applies a function such as dropout, whatever the mode of the module is."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = FunctionModule(function)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        made: Tensor = self.inner(x * 2) + 1
        return made


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
WITHOUT_EVAL = (
    "'forward' normalizes with the statistics of each batch, not with the running statistics: 'body.1' "
    "(BatchNorm2d); call model.eval() before torch.export.export()",
    "'forward' is random at every run, and the elements that it keeps are not divided by 1 - p, unlike in training: "
    "'body.3' (Dropout); call model.eval() before torch.export.export()",
)


def _export_warnings(model: Any, *args: Tensor, recipe: ArmRecipeType = ArmRecipeType.TOSA_FP) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export(model, ExportRecipe.get_recipe(recipe), [args] if args else None)
    return [str(x.message) for x in caught if issubclass(x.category, ArmRecipesWarning)], result


def _captured(model: nn.Module, *args: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, args)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
@pytest.mark.parametrize("core", [False, True], ids=["captured", "decomposed"])
def test_a_program_captured_without_eval_is_warned_about(recipe: ArmRecipeType, core: bool) -> None:
    program = _captured(Block().train(), X)
    messages, result = _export_warnings(program.run_decompositions() if core else program, recipe=recipe)
    assert set(WITHOUT_EVAL) <= set(messages)
    assert set(WITHOUT_EVAL) <= set(result.report.notes)
    assert len([text for text in messages if "training" in text or "statistics" in text]) == 2


def test_programs_captured_in_eval_mode_and_models_in_training_mode_are_not_warned_about() -> None:
    messages, _ = _export_warnings(_captured(Block().eval(), X))
    assert not messages
    messages, _ = _export_warnings(Block().train(), X)
    assert [text for text in messages if "training" in text] == [
        "the model of 'forward' is in training mode; it is exported in evaluation mode"
    ]


def test_the_command_line_prints_training_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.pt2"
    torch.export.save(_captured(Block().train(), X), str(path))
    assert main(["export", str(path), "--recipe", "TOSA_FP", "-o", str(tmp_path / "out.pte")]) == 0
    printed = capsys.readouterr()
    for text in WITHOUT_EVAL:
        assert f"warning: {text}" in printed.err
        assert text in printed.out


DROPS = "is random at every run, and the elements that it keeps are not divided by 1 - p"
AS_TRAINED = "is random at every run, as in training"
DRAWS = "draws random numbers at every run"
#: Functions that are random or normalize by the batch in evaluation mode, and the beginning of the warning.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dropout": (lambda x: F.dropout(x, 0.5), DROPS),
    "dropout in place": (lambda x: F.dropout(x + 1, 0.5, inplace=True), DROPS),
    "channels": (lambda x: F.dropout2d(x, 0.5), DROPS),
    "alpha": (lambda x: F.alpha_dropout(x, 0.5, training=True), AS_TRAINED),
    "alpha channels": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), AS_TRAINED),
    "rrelu": (lambda x: F.rrelu(x, training=True), AS_TRAINED),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "asks for dropout at every call"),
    "statistics": (
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        "normalizes with the statistics of each batch",
    ),
    "noise": (lambda x: x + torch.randn_like(x), DRAWS),
    "uniform": (lambda x: x * torch.rand(8), DRAWS),
    "mask": (lambda x: x * torch.bernoulli(x.sigmoid()), DRAWS),
    "choice": (lambda x: torch.multinomial(x.flatten(1).softmax(1), 2), DRAWS),
    "gumbel": (lambda x: F.gumbel_softmax(x.flatten(1)), DRAWS),
    "order": (lambda x: x[:, :, torch.randperm(8)], DRAWS),
    "written": (lambda x: x + torch.empty(8).uniform_(), DRAWS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_random_functions_in_eval_mode_are_warned_about_with_their_line(name: str) -> None:
    function, begins = FUNCTIONS[name]
    (message,) = describe_training_behavior(_captured(Functional(function).eval(), X))
    assert message.startswith(begins)
    assert "('inner', runner.py:" in message
    assert "model.eval()" not in message
    own = dict.fromkeys((DROPS, AS_TRAINED), "training=self.training")
    remedy = ({DRAWS: "as an input"} | own).get(begins, "self.training")
    assert remedy in message


QUIET: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "nothing dropped": lambda x: F.dropout(x, 0.0),
    "rrelu": lambda x: F.rrelu(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "instance norm": lambda x: F.instance_norm(x),
    "batch norm without running statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "empty": lambda x: x + torch.empty_like(x).zero_(),
}


@pytest.mark.parametrize("name", QUIET)
def test_deterministic_functions_are_not_warned_about(name: str) -> None:
    assert not describe_training_behavior(_captured(Functional(QUIET[name]).eval(), X))


def test_library_layers_that_drop_are_named() -> None:
    model = nn.ModuleDict({"gru": nn.GRU(4, 4, 2, dropout=0.5), "attention": nn.MultiheadAttention(4, 2, dropout=0.3)})

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Any:
            y = self.layers["gru"](x)[0]
            return self.layers["attention"](y, y, y)[0]

    program = _captured(Layers().train(), torch.zeros(5, 2, 4))
    (message,) = describe_training_behavior(program, captured_by_user=True)
    assert "'layers.gru' (GRU), 'layers.attention' (MultiheadAttention); call model.eval()" in message


def test_a_list_of_many_layers_is_abbreviated() -> None:
    program = _captured(nn.Sequential(*(nn.Dropout(0.5) for _ in range(7))).train(), X)
    (message,) = describe_training_behavior(program, captured_by_user=True)
    assert "'3' (Dropout) and 3 more; call" in message


def test_active_dropout_is_warned_of_by_export() -> None:
    messages, result = _export_warnings(Functional(lambda x: F.dropout(x, 0.5)).eval(), X)
    assert any("pass training=self.training" in text for text in messages)
    assert any("pass training=self.training" in text for text in result.report.notes)


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.feature_alpha_dropout(torch.ones(2, 3, 8), 0.5, training=True),
        lambda: F.dropout2d(torch.ones(2, 3, 8, 8), 0.5),
        lambda: F.rrelu(-torch.ones(8), training=True),
        lambda: torch.ones(8).random_(),
    ],
    ids=["alpha channels", "channels", "rrelu", "written"],
)
def test_random_numbers_are_no_constants(function: Callable[[], Tensor]) -> None:
    """PyTorch does not tag all random operators. What untagged ones drew at export became a constant."""
    module = _captured(Functional(lambda x: x + function().sum()).eval(), X).module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    functionalize(module.graph)
    random = set(filter(is_random, module.graph.nodes))
    assert random
    assert not random & constant_nodes(module.graph)
