"""The wheel of ``pip wheel`` works in an environment that has nothing else of this project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SOURCES = ("arm_recipes", "arm_backend_core", "runtime", "pyproject.toml", "README.md", "LICENSE")
#: Packages of the extras [ethosu] and [vgf].
_TOOLS = ("ethosu", "model_converter", "scenario_runner_py", "emulation_layer")

_MODEL = """
import torch

import arm_recipes
from arm_backend_core.errors import ArmBackendError
from arm_recipes import ArmRecipeType, ExportRecipe, export

assert arm_recipes.__file__.startswith({environment!r}), arm_recipes.__file__
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
"""
_EXPORT_SCRIPT = (
    _MODEL
    + """
for recipe in (ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8):
    result = export(model, ExportRecipe.get_recipe(recipe), [(x,)])
    assert (result.run(x) - model(x)).abs().max() < 0.05
"""
)
_MISSING_EXTRAS_SCRIPT = (
    _MODEL
    + """
result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
assert torch.allclose(result.run(x), model(x), atol=1e-5)
for recipe, extra in ((ArmRecipeType.ETHOSU_U85_INT8, "ethosu"), (ArmRecipeType.VGF_FP, "vgf")):
    try:
        ExportRecipe.get_recipe(recipe)
    except ArmBackendError as error:
        assert f"pip install 'arm-recipes[{{extra}}]'" in str(error), error
    else:
        raise AssertionError(recipe)
"""
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools leaves its build folder in the tree.
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    for part in _SOURCES:
        if (_ROOT / part).is_dir():
            shutil.copytree(_ROOT / part, source / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(_ROOT / part, source)
    made = tmp_path_factory.mktemp("wheel")
    _run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(made), str(source)])
    (found,) = made.glob("arm_recipes-*.whl")
    return found


def _environment(folder: Path, wheel: Path, *, without: Sequence[str] = ()) -> Path:
    """Make an environment with the wheel and links to the dependencies of this one; return its Python."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")])
    python = folder / "env" / "bin" / "python"
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "arm_recipes" not in entry.name and entry.name.split(".")[0] not in without and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            str(wheel),
        ]
    )
    return python


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=_clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _clean_environment() -> dict[str, str]:
    """Environment variables without the paths of the environment that runs the tests."""
    programs = [path for path in os.environ["PATH"].split(os.pathsep) if path != sysconfig.get_path("scripts")]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"PATH": os.pathsep.join(programs)}


def test_the_wheel_has_the_sources_of_all_backends(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        prefix = "arm_recipes/runtime/cpp/"
        held = {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}
    runtime = _ROOT / "runtime"
    files = {str(path.relative_to(runtime)) for path in runtime.rglob("*") if path.is_file()}
    assert held == {name for name in files if not name.startswith("tests/")}


@pytest.mark.verify
def test_the_installed_wheel_exports_and_runs(wheel: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path, wheel)
    _run([str(python), "-c", _EXPORT_SCRIPT.format(environment=str(tmp_path))], cwd=tmp_path)
    assert _run([str(python.parent / "arm-recipes"), "recipes"], cwd=tmp_path).startswith("ETHOSU_U55_INT8")


@pytest.mark.verify
def test_without_extras_tosa_works_and_other_recipes_name_the_extra(wheel: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path, wheel, without=_TOOLS)
    _run([str(python), "-c", _MISSING_EXTRAS_SCRIPT.format(environment=str(tmp_path))], cwd=tmp_path)
