"""The tree of tests mirrors the source tree: the test of a module is found by its name."""

from __future__ import annotations

from collections import Counter

from tests.import_graph import CORE, RECIPES, ROOT, list_sources, module_name

TESTS = ROOT / "tests"

#: Package -> test -> modules without a test of their name that it tests. A test has cases for all of these modules, or
#: runs whole exports that need them.
ELSEWHERE = {
    "arm_backend_core": {
        "ops/test_refusals.py": "errors compilation_log",
        "test_delegate.py": "graph_edits insert_delegates nodes program selection",
        "test_plain_flow.py": "partitioner",
    },
    "arm_backend_core.alternatives": {
        "alternatives/test_alternatives_pass.py": "attention_heads attention_matmul axis_factors broadcast_tiles "
        "channel_permutation channels_as_taps choose concat_copies conv_epilogue cost_model deferred dilation "
        "factorized_pools "
        "int16_as_int8_rows packed_channels pad_channels parallel_compile pixel_rows pixel_shuffle pixels_as_channels "
        "short_axis_concat space_to_depth_folding strided_slices transpose_split transposed_convolution "
        "unconditional",
    },
    "arm_backend_core.aten": {
        "ops/test_ops.py": "batch_norm fourier functionalize int_to_float memory_format",
        "ops/test_composites.py": "decompose decomposition_rules",
        "quantization/test_mask_bounds.py": "masked_rows",
        "pipeline/test_state.py": "quantized_state",
    },
    "arm_backend_core.backends": {
        "backends/test_ethosu.py": "artifacts ethosu_bounds payload vela_estimates",
        "backends/test_ethosu_prefetch.py": "ethosu_accesses ethosu_liveness ethosu_prefetch_plan ethosu_depth_slices",
        "models/test_models.py": "vela_tables",
        "runtime/test_access_checker.py": "ethosu_waits",
    },
    "arm_backend_core.cortex_m": {
        "cortex_m/test_lower.py": "library_kernels custom_ops quantized_value quantizer lookup_tables",
    },
    "arm_backend_core.cortex_m.rules": {
        "cortex_m/test_lower.py": "context",
        "cortex_m/rules/test_convolution.py": "image_layout linear",
        "cortex_m/rules/test_pooling.py": "softmax",
    },
    "arm_backend_core.fusion": {"test_fusion.py": "plan rules univariate"},
    "arm_backend_core.lowering": {
        "test_lowering.py": "constant_operands qparams_reader fx_to_tosa",
        "ops/test_refusals.py": "checks",
    },
    "arm_backend_core.ops": {
        "ops/test_ops.py": "accumulator binary_arithmetic catalog common_scale comparison_and_logic convolution "
        "float_expression floor_division formulas linear movement normalization operands pooling "
        "reduction registry unary",
        "aten/test_higher_order.py": "loop_markers",
        "models/test_recurrent.py": "recurrent",
        "aten/test_int64_range_analysis.py": "intervals",
    },
    "arm_backend_core.quantization": {
        "quantization/test_ptq.py": "annotator config graph_interpreter graph_observers lifting observer_interpreter "
        "cross_method_observers torchao_convert",
    },
    "arm_backend_core.quantization.diagnostics": {"comparison/test_compare.py": "error_metrics"},
    "arm_backend_core.quantization.fake_quant": {
        "qat/test_prepare.py": "training_layers program learned_step_size tape"
    },
    "arm_backend_core.recurrent": {
        "models/test_recurrent.py": "unrolled_steps",
        "stages/test_trace_constants.py": "recurrent_ops",
        "recurrent/test_roll_recurrent_loops.py": "chunk",
    },
    "arm_backend_core.cortex_m.cost": {"cortex_m/cost/test_kernels.py": "instructions work"},
    "arm_backend_core.targets": {
        "targets/test_new_npu.py": "hardware target",
        "tosa/test_hardware_passes.py": "operator_limits transpose_swaps",
    },
    "arm_backend_core.tosa": {
        "ops/test_ops.py": "reference_model serialize",
        "tosa/test_passes.py": "builder graph",
    },
    "arm_backend_core.workers": {
        "workers/test_worker.py": "reference_process request_loop",
        "backends/test_ethosu.py": "vela vela_process",
        "backends/test_vgf.py": "model_converter",
    },
    "arm_recipes": {
        "_internal/test_messages.py": "api",
        "test_provider.py": "recipe_types",
    },
    "arm_recipes._internal": {
        "_internal/test_messages.py": "error_location errors unknown_arguments versions",
        "cli/test_main.py": "file_kinds files",
        "pipeline/test_export.py": "frozen_gc",
        "backends/test_new_backend.py": "executorch_programs",
        "report/test_report.py": "rendering",
        "workers/test_worker.py": "parallel",
    },
    "arm_recipes.cli": {
        "cli/test_main.py": "arguments compare export firmware html_output inspect_program list_commands run sweep "
        "tune",
    },
    "arm_recipes.comparison": {
        "comparison/test_compare.py": "compared_tensors diagnosis parallel_run intermediate_outputs interpreter_plan "
        "layer_errors plan_interpreter program_specs samples worker worker_job",
    },
    "arm_recipes.devtools": {
        "devtools/test_debug_artifacts.py": "debug_handle_groups delegate_calls delegate_results etdump etrecord "
        "inspector_graph",
    },
    "arm_recipes.explore.advice": {"explore/test_advise.py": "channels result per_tensor_weights"},
    "arm_recipes.firmware": {
        "firmware/test_memory_pools.py": "io_tensors saving",
        "firmware/test_render_templates.py": "kernels versions",
    },
    "arm_recipes.pipeline": {
        "pipeline/test_export.py": "artifact method_results pipeline progress stage_runner",
        "report/test_npu_layer_costs.py": "budgets",
        "pipeline/test_retarget.py": "unlowered_programs",
        "pipeline/test_verify.py": "reference_program",
        "pipeline/test_methods.py": "program_io shared_buffers",
        "comparison/test_compare.py": "float_reference",
    },
    "arm_recipes.recipe": {
        "recipe/test_options.py": "recipe saved_recipe typed_options",
        "recipe/test_precisions.py": "profiles",
        "test_provider.py": "compile_specs",
    },
    "arm_recipes.report": {
        "report/test_cpu_layer_costs.py": "kernels",
        "report/test_report.py": "comparisons costs lowered_program memory layer_graph record",
    },
    "arm_recipes.runtime": {
        "runtime/test_program.py": "calls delegates errors sandbox signature tensor_info vgf_payload",
        "runtime/test_host_backends.py": "build host_plugin",
        "runtime/test_ethosu.py": "ethosu_stream payload_parts",
        "runtime/test_access_checker.py": "ethosu_abi",
        "runtime/test_trace.py": "command_origins",
        "runtime/test_pte.py": "flatbuffer pte_schema",
        "runtime/test_vela_tflite.py": "vela_program",
        "runtime/test_vulkan.py": "vgf",
        "samples/test_shape_variants.py": "padding shape_variants",
        "runtime/test_ethosu_payload.py": "ethosu_blocks ethosu_command_header",
    },
    "arm_recipes.samples": {
        "samples/test_export_arguments.py": "call_inputs",
        "test_channels_last.py": "memory_format",
    },
    "arm_recipes.stages": {
        "ops/test_block_scaled.py": "block_scaled",
        "pipeline/test_export.py": "lower quantize",
        "qat/test_prepared.py": "train",
    },
    "arm_recipes.stages.capture": {"pipeline/test_export.py": "capture"},
    "arm_recipes.stages.edge": {
        "report/test_report.py": "cpu_operators",
        "pipeline/test_methods.py": "shared_weights",
    },
}


def _find_test(module: str) -> str | None:
    """Find the test named after a module, or after a package that contains it, such as ``tosa.passes``.

    The folder of the test has the path of the module below ``tests``, or is a parent of that folder.
    """
    _, *packages, name = module.split(".")
    folders = ["/".join(packages[:depth]) for depth in range(len(packages), 0, -1)] or ["."]
    candidates = [f"{folder}/test_{name}.py" for folder in folders]
    candidates += [
        f"{'/'.join(packages[:folder_depth])}/test_{packages[depth]}.py"
        for depth in range(len(packages) - 1, 0, -1)
        for folder_depth in range(depth, 0, -1)
    ]
    return next((path for path in candidates if (TESTS / path).exists()), None)


def test_every_module_has_a_test_by_its_name_or_is_listed() -> None:
    modules = {
        module_name(path) for package in (CORE, RECIPES) for path in list_sources(package) if path.name[0] != "_"
    }
    listed = Counter(
        f"{package}.{name}"
        for package, tests in ELSEWHERE.items()
        for names in tests.values()
        for name in names.split()
    )
    assert {module for module in modules if _find_test(module) is None} == set(listed)
    assert listed.total() == len(listed), "a module is listed twice"


def test_listed_tests_are_there() -> None:
    assert [test for tests in ELSEWHERE.values() for test in tests if not (TESTS / test).exists()] == []


def test_folders_of_tests_are_those_of_the_source() -> None:
    source = {path.name for package in (CORE, RECIPES) for path in (ROOT / package).iterdir() if path.is_dir()}
    across = {"fuzz", "models", "tflite"}  # whole models and random graphs, judged by others' programs
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - source == across
