"""Silence for third parties, and warnings that point at the user's line."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from executorch.export import ExportRecipe
from torch import nn

import arm_recipes
from arm_backend_core.nodes import source_line, source_location
from arm_recipes import ArmRecipesWarning, ArmRecipeType, export
from arm_recipes._internal.messages import announce, deduplicate_warnings, suppress_warnings, warn
from tests.import_graph import ROOT, list_sources
from tests.small_models import Small, images


def _warn_from(module: str) -> None:
    warnings.warn_explicit("noise", UserWarning, "file.py", 1, module=module, registry={})


def test_third_party_warnings_are_silenced_and_filters_restored() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with suppress_warnings():
            for module in (
                "torch",
                "torch.export._trace",
                "torchao.quantization",
                "executorch.exir",
                "copyreg",
            ):
                _warn_from(module)
            _warn_from("users_model")
            _warn_from("torchnot")
        assert warnings.filters == before
        _warn_from("torch")
    assert len(caught) == 3


def test_third_party_log_lines_are_silenced() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("executorch.something")
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with suppress_warnings():
            logger.warning("noise")
            logger.error("noise")
            root.handle(logging.LogRecord("root", 40, "/x/site-packages/executorch/a.py", 1, "noise", (), None))
            logging.getLogger("users_model").warning("kept")
        logger.warning("after")
    finally:
        root.removeHandler(handler)
    assert stream.getvalue() == "kept\nafter\n"


def test_no_handler_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with suppress_warnings():
        logging.info("installs a handler if there is none")
    assert root.handlers == []


_RUN = "import sys, torch, arm_recipes; arm_recipes.load(sys.argv[1]).run(torch.zeros(1, 3, 8, 8))"


@pytest.mark.parametrize("arguments", [["-c", _RUN], ["-m", "arm_recipes", "inspect"]])
def test_a_fresh_process_prints_nothing_of_third_parties(arguments: list[str], tmp_path: Path) -> None:
    program = tmp_path / "small.pte"
    export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), images(1), output=program)
    done = subprocess.run([sys.executable, *arguments, str(program)], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_modules_that_a_process_may_import_first_import_executorch_quietly() -> None:
    """An import statement of ExecuTorch outside ``suppress_warnings`` prints lines of torchao and PyTorch."""
    statements = [
        f"{source}:{node.lineno}"
        for folder in ("arm_recipes/cli", "arm_recipes/runtime")
        for source in list_sources(folder, ROOT)
        for block in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if not (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
        for node in ast.iter_child_nodes(block)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and ast.unparse(node).split()[1].split(".")[0] in ("executorch", "torchao")
    ]
    assert statements == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_announced_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((_Terminal(), "Building\n"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        announce("Building")
        assert stream.getvalue() == expected


def test_a_warning_points_at_the_line_outside_of_the_libraries() -> None:
    with pytest.warns(ArmRecipesWarning, match="look here") as caught, _library():
        warn("look here")
    assert caught[0].filename == __file__


@contextmanager
def _library() -> Iterator[None]:
    yield


def test_all_errors_have_one_base() -> None:
    errors = [name for name in arm_recipes.__all__ if name.endswith(("Error", "Unavailable"))]
    assert len(errors) > 10
    assert [name for name in errors if not issubclass(getattr(arm_recipes, name), arm_recipes.ArmRecipesError)] == []


def test_the_version_is_that_of_the_package() -> None:
    assert arm_recipes.__version__ == importlib.metadata.version("arm-recipes")


#: As Any: the typed signatures do not have the old names.
_export, _sweep, _tune, _load = cast(Any, (arm_recipes.export, arm_recipes.sweep, arm_recipes.tune, arm_recipes.load))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, r, s: arm_recipes.export(m, s, r), r"the order is export\(model, recipe, samples\)"),
        (lambda m, r, s: arm_recipes.prepare_qat(m, s, r), r"the order is prepare_qat\(model, recipe, samples\)"),
        (lambda m, r, s: arm_recipes.sweep(m, s, r), r"the order is sweep\(model, recipes, samples\)"),
        (lambda m, r, s: arm_recipes.tune(m, s, r), r"the order is tune\(model, recipe, samples\)"),
        (
            lambda m, r, s: _export(m, r, example_inputs=s),
            r"export\(\) has no argument 'example_inputs'; did",
        ),
        (
            lambda m, r, s: _sweep(m, r, s, folder="x"),
            "sweep.. has no argument 'folder'; did you mean 'cache_dir'",
        ),
        (
            lambda m, r, s: _tune(m, r, s, held_out=s),
            "tune.. has no argument 'held_out'; did you mean 'test_s",
        ),
        (
            lambda m, r, s: _export(m, r, s, sram_budget=1),
            r"'sram_budget'; it belongs to ExportRecipe.get_recipe\(recipe, \.\.\.\)",
        ),
        (lambda m, r, s: _export(m, r, s, verfiy=True), r"export\(\) has no argument 'verfiy'; did you mean 'verify'"),
        (lambda m, r, s: _load(b"", tosa=b""), "load.. has no argument 'tosa'; did you mean 'reference'"),
    ],
)
def test_arguments_in_another_order_or_under_old_names(call: Callable[[Any, Any, Any], Any], message: str) -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8)
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(4, 4).eval(), recipe, [(torch.ones(1, 4),)])


def test_the_log_has_the_stages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="arm_recipes"):
        export(nn.Linear(4, 4).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.ones(1, 4),)])
    stages = [record.getMessage() for record in caplog.records if record.name == "arm_recipes"]
    assert any(re.fullmatch(r"torch_export: \d+\.\d\d s", stage) for stage in stages), stages


def test_layers_of_pytorch_have_no_source_line() -> None:
    """Every ``nn.Conv2d`` has the same line, so the module is named."""
    program = torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), (torch.ones(1, 3, 8, 8),))
    conv, relu = program.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default) + (
        program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    )
    assert (source_line(conv), source_location(conv)) == ("", "'0' (Conv2d)")
    assert source_location(relu) == "'1' (ReLU)"


def test_reports_of_sequential_models_have_no_lines_of_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8)
    report = export(model, recipe, [(torch.rand(1, 3, 8, 8),), (torch.rand(1, 3, 8, 8),)]).report
    assert "torch/nn" not in f"{report}{report.to_dict()}"


def test_a_message_is_issued_once_in_a_block() -> None:
    def count(messages: list[str]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for message in messages:
                warn(message)
        return len(caught)

    assert count(["same", "same"]) == 2
    with deduplicate_warnings():
        assert count(["same", "other", "same"]) == 2
        assert count(["same"]) == 0
    assert count(["same"]) == 1
