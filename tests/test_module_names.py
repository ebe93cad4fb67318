"""The tree of tests mirrors the source tree: the test of a module is found by its name."""

from __future__ import annotations

from tests.import_graph import CORE, RECIPES, ROOT, module_name, sources

#: Modules without a test of their name, by package or module -> where they are tested.
ELSEWHERE = {
    "arm_backend_core.alternatives": "alternatives/test_chooser.py has a case for every alternative",
    "arm_backend_core.aten": "ops/test_ops.py, ops/test_composites.py and ops/test_refusals.py run every rewrite",
    "arm_backend_core.backends": "backends/ and runtime/ have the tests of payloads and streams",
    "arm_backend_core.dtype": "tosa/test_operators.py",
    "arm_backend_core.errors": "_internal/test_messages.py, ops/test_refusals.py",
    "arm_backend_core.events": "report/test_report.py",
    "arm_backend_core.fusion": "ops/test_fusion.py",
    "arm_backend_core.graph_edits": "test_delegate.py",
    "arm_backend_core.insert_delegates": "test_delegate.py, test_plain_flow.py",
    "arm_backend_core.lowering": "ops/test_lowering.py; ops/test_refusals.py for the checks",
    "arm_backend_core.nodes": "test_delegate.py",
    "arm_backend_core.ops": "ops/test_ops.py has rows for every operator record",
    "arm_backend_core.partitioner": "test_plain_flow.py",
    "arm_backend_core.permutation": "tosa/test_passes.py",
    "arm_backend_core.program": "test_delegate.py",
    "arm_backend_core.qparams": "ops/test_integers.py",
    "arm_backend_core.quantization": "quantization/test_ptq.py, test_quantizer.py; qat/test_prepare.py for fake_quant",
    "arm_backend_core.recurrent": "recurrent/test_roll_recurrent_loops.py, models/test_recurrent.py",
    "arm_backend_core.selection": "test_delegate.py",
    "arm_backend_core.targets": "targets/, tosa/test_hardware_passes.py",
    "arm_backend_core.tosa": "tosa/ has the tests of passes, legality, serializer and workarounds",
    "arm_backend_core.workers": "workers/test_worker.py",
    "arm_recipes._internal": "_internal/test_messages.py, pipeline/test_export.py, cli/test_main.py",
    "arm_recipes.api": "pipeline/test_export.py",
    "arm_recipes.cli": "cli/test_main.py runs every command",
    "arm_recipes.comparison": "comparison/test_compare.py",
    "arm_recipes.devtools": "devtools/test_inspection.py",
    "arm_recipes.explore": "explore/test_sweep.py, test_tune.py, test_advise.py",
    "arm_recipes.firmware": "firmware/",
    "arm_recipes.pipeline": "pipeline/test_export.py, test_methods.py, test_cache.py",
    "arm_recipes.qat": "qat/test_prepare.py, test_prepared.py",
    "arm_recipes.recipe": "recipe/test_options.py",
    "arm_recipes.recipe_types": "test_provider.py",
    "arm_recipes.report": "report/test_report.py, test_layers.py, test_page.py",
    "arm_recipes.runtime": "runtime/test_program.py, test_inspect.py, test_ethosu.py, test_bad_programs.py",
    "arm_recipes.samples": "samples/test_inputs.py",
    "arm_recipes.stages": "stages/, pipeline/test_export.py",
}


def _has_test(module: str) -> bool:
    """Whether there is a ``test_<name>.py`` for the module."""
    parts = module.split(".")[1:]
    return any((ROOT / "tests").rglob(f"test_{parts[-1]}.py")) if parts else False


def _listed(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in ELSEWHERE)


def test_every_module_has_a_test_by_its_name_or_is_listed() -> None:
    modules = [module_name(path) for package in (CORE, RECIPES) for path in sources(package) if path.name[0] != "_"]
    assert [module for module in modules if not _has_test(module) and not _listed(module)] == []


def test_what_is_listed_is_there() -> None:
    modules = {module_name(path) for package in (CORE, RECIPES) for path in sources(package)}
    assert ELSEWHERE.keys() <= modules


def test_folders_of_tests_are_those_of_the_source() -> None:
    source = {path.name for package in (CORE, RECIPES) for path in (ROOT / package).iterdir() if path.is_dir()}
    across = {"fuzz", "models", "tflite"}  # whole models and random graphs, judged by others' programs
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - source == across
