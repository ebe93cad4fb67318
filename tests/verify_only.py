"""Selection of the test cases that only ``make verify`` runs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.kept_cases import KEPT_CASES

#: Test functions with many similar cases, by file and name. ``make test`` runs the first case and about one in n of the
#: others (with 1000 only the first); ``make verify`` runs all.
SAMPLED = {
    "test_access_checker::test_where_waits_are_put": 3,
    "test_angles::test_every_position": 6,
    "test_bad_programs::test_every_flip_is_found": 2,
    "test_bad_programs::test_flips_without_a_checksum": 1000,
    "test_bias_correction::test_the_mean_of_each_channel_is_kept": 3,
    "test_board_files::test_zephyr_places_the_sections_that_its_linker_script_does_not": 1000,
    "test_channels_last::test_convolutions": 3,
    "test_channels_last::test_inputs_with_other_strides": 3,
    "test_channels_last::test_the_cpu_between_delegates": 2,
    "test_check_kernels::test_kernels_that_run": 2,
    "test_check_kernels::test_kernels_that_would_fail": 2,
    "test_chooser::test_alternatives_are_bit_equal": 4,
    "test_complex_numbers::test_inverse_short_time_transforms_run_whole_in_float": 3,
    "test_complex_numbers::test_runs_whole_in_float": 5,
    "test_complex_numbers::test_short_time_transforms_run_whole_in_float": 3,
    "test_composites::test_runs_whole_in_float": 8,
    "test_composites::test_runs_whole_in_int8": 2,
    "test_conformance::test_npus_compute_what_the_reference_model_does": 3,
    "test_conformance::test_records_agree_with_the_generator": 6,
    "test_convolution::test_lowering": 4,
    "test_cortex_m::test_a_missing_path_is_named": 1000,
    "test_data_dependent_shapes::test_indexing_by_a_scalar_tensor": 2,
    "test_data_dependent_shapes::test_selections_run_in_one_delegate": 2,
    "test_device::test_the_self_test_on_a_cortex_m55": 1000,
    "test_elementwise::test_lowering": 4,
    "test_empty_tensors::test_programs_with_empty_tensors_run": 4,
    "test_ethosu::test_a_program_gives_the_numbers_of_its_tosa_graph": 2,
    "test_ethosu_emulator::test_models": 1000,
    "test_ethosu_emulator::test_operators_read_slices_and_write_into_concat": 2,
    "test_executorch_limits::test_programs_are_within_the_limits": 3,
    "test_export::test_every_recipe_gives_one_delegate_and_the_models_results": 2,
    "test_export::test_executorchs_own_export_takes_the_recipes": 2,
    "test_export::test_the_faster_stage_gives_what_executorchs_own_gives": 2,
    "test_firmware::test_the_device_gives_the_numbers_of_this_machine": 1000,
    "test_fixed_point::test_lowerings_are_valid_tosa_and_compile_with_vela": 4,
    "test_fuzz::test_graph": 2,
    "test_higher_order::test_either_branch_is_taken": 2,
    "test_higher_order::test_flex_attention": 2,
    "test_higher_order::test_nested_loops_and_branches": 2,
    "test_higher_order::test_loops_with_a_constant_trip_count_are_unrolled": 2,
    "test_host_run::test_no_access_is_beyond_a_pool": 1000,
    "test_inspection::test_layers_are_what_pytorch_computes": 2,
    "test_inspection::test_operands_that_are_written_into_a_concat": 3,
    "test_integers::test_binary": 2,
    "test_integers::test_rows": 2,
    "test_lower::test_modules": 2,
    "test_lower::test_random_graphs": 8,
    "test_many_paths::test_paths_are_not_followed_one_by_one": 2,
    "test_mask_bounds::test_masked_scores_that_exceed_the_others_by_hundreds_have_no_weight": 3,
    "test_mask_bounds::test_rows_without_a_key_give_zero": 3,
    "test_methods::test_a_buffer_that_one_method_only_reads": 2,
    "test_methods::test_decode_continues_from_the_cache_that_prefill_wrote": 1000,
    "test_methods::test_methods_that_reset_set_and_read_state": 2,
    "test_methods::test_weights_are_stored_once": 2,
    "test_mismatch::test_the_trace_of_a_matrix_product_accepts_what_pytorch_refuses": 4,
    "test_mixed::test_a_program_of_any_mixture_gives_what_its_quantized_graph_gives": 2,
    "test_mixed::test_islands_in_floating_point_stay_in_the_delegate": 2,
    "test_models::test_an_output_two_steps_off_is_seen": 1000,
    "test_models::test_int8_output_is_at_most_a_step_from_pytorchs": 2,
    "test_movement::test_lowering": 4,
    "test_movement::test_runtime": 3,
    "test_ops::test_float": 10,
    "test_ops::test_quantized": 20,
    "test_passes::test_edge_program_after_a_pass": 3,
    "test_passes::test_random_graphs_keep_every_bit": 2,
    "test_passes::test_operators_after_a_pass": 2,
    "test_passes::test_work_of_the_pipeline_grows_with_the_graph_and_no_faster": 1000,
    "test_plain_flow::test_an_operator_in_the_middle": 2,
    "test_plain_flow::test_constants_and_paths_across_delegates": 2,
    "test_plain_flow::test_quantized": 2,
    "test_plugin::test_programs_end_while_others_run": 2,
    "test_plugin::test_threads": 2,
    "test_pooling::test_lowering": 4,
    "test_pools::test_firmware_needs_exactly_the_pool_sizes": 6,
    "test_pools::test_the_golden_outputs_are_those_of_run": 2,
    "test_recurrent::test_columns": 3,
    "test_recurrent::test_keyword_spotter": 1000,
    "test_recurrent::test_states_cost_less_than_a_decibel": 3,
    "test_regressions::test_regression": 16,
    "test_resize::test_lowering": 3,
    "test_roll_recurrent_loops::test_loops_give_the_results_of_one_call": 3,
    "test_roll_recurrent_loops::test_loops_on_other_targets_give_the_results_of_one_call": 1000,
    "test_scatter_add::test_constant_indices_take_a_form_without_mask": 2,
    "test_where::test_lowering": 3,
    "test_sources::test_another_version_does_not_compile": 2,
    "test_sources::test_c_compiles_without_a_warning": 4,
    "test_sources::test_the_self_test_compiles_with_the_assumed_type_sizes": 1000,
    "test_special_values::test_float": 2,
    "test_state::test_names_of_one_buffer": 3,
    "test_state::test_state_and_in_place_writes_beside_a_constant_input": 3,
    "test_state::test_streams": 5,
    "test_sweep::test_figures_are_those_of_an_export": 3,
    "test_training_mode::test_a_program_captured_without_eval_is_warned_about": 2,
    "test_uint8::test_bytes_that_are_moved": 3,
}


def mark_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that ``SAMPLED`` excludes from ``make test`` with ``verify``, except those of ``KEPT_CASES``."""
    first: set[str] = set()
    for item in items:
        name, case = _split_name(item)
        share = SAMPLED.get(name, 1)
        if item.get_closest_marker("verify"):
            continue  # it is not the first case that make test runs
        is_sampled_out = share > 1 and name in first and zlib.crc32(item.name.encode()) % share
        if is_sampled_out and case not in KEPT_CASES.get(name, ()):
            item.add_marker(pytest.mark.verify)
        first.add(name)


def list_missing_cases(items: Iterable[pytest.Item]) -> list[str]:
    """The entries of ``KEPT_CASES`` that are not among all tests."""
    kept = {(name, case) for name, cases in KEPT_CASES.items() for case in cases}
    return [f"{name}[{case}]" for name, case in sorted(kept - set(map(_split_name, items)))]


def _split_name(item: pytest.Item) -> tuple[str, str]:
    """The name of a test, as in ``SAMPLED``, and the id of its case."""
    function = getattr(item, "originalname", item.name)
    case = item.name.removeprefix(function).removeprefix("[").removesuffix("]")
    return f"{item.path.stem}::{function}", case


def mark_scaled(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that check more cases with ``--verify`` with ``verify``: those that read the options."""
    for item in items:
        if "pytestconfig" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.verify)


def mark_verify(values: Iterable[Any]) -> list[Any]:
    """Mark each value, so that its tests run only with ``--verify``."""
    return [pytest.param(value, marks=pytest.mark.verify) for value in values]


def is_thorough(config: pytest.Config, name: str) -> bool:
    """Whether the test case ``name`` runs its expensive checks: one in three, all of them with ``--verify``."""
    return zlib.crc32(name.encode()) % 3 == 0 or bool(config.getoption("verify"))


def select_third(*parameters: Sequence[Any]) -> list[Any]:
    """List all combinations of the parameters' values. Two thirds of them run only with ``--verify``.

    Each pair of values of two parameters stays in ``make test`` if a third parameter has three values or more.
    """
    numbers = itertools.product(*(range(len(values)) for values in parameters))
    return [
        pytest.param(
            *(values[i] for values, i in zip(parameters, row, strict=True)),
            marks=[pytest.mark.verify] if sum(row) % 3 else [],
        )
        for row in numbers
    ]
