"""Parameters of tests that ``make verify`` runs and ``make test`` leaves out."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

#: Test functions of many alike cases, by file and name: ``make test`` runs about one case in so many, and the first one
#: in any case; ``make verify`` runs all.
SAMPLED = {
    "test_composites::test_runs_whole_in_float": 3,
    "test_higher_order::test_flex_attention": 2,
    "test_device::test_a_folder_builds_and_runs_by_itself": 3,
    "test_device::test_the_self_test_on_a_cortex_m55": 3,
    "test_empty_tensors::test_programs_with_empty_tensors_run": 2,
    "test_firmware::test_the_device_gives_the_numbers_of_this_machine": 3,
    "test_regressions::test_regression": 2,
    "test_fuzz::test_graph": 2,
    "test_passes::test_edge_programs": 2,
    "test_roll_recurrent_loops::test_the_same_on_other_targets": 3,
    "test_roll_recurrent_loops::test_the_same_results": 2,
    "test_methods::test_a_decoder_goes_on_from_its_prompt": 2,
    "test_methods::test_weights_are_stored_once": 2,
    "test_notebooks::test_notebook_runs": 2,
    "test_ops::test_float": 2,
    "test_ops::test_quantized": 3,
    "test_plain_flow::test_an_operator_in_the_middle": 2,
    "test_recurrent::test_columns": 3,
    "test_recurrent::test_states_cost_less_than_a_decibel": 3,
    "test_state::test_streams": 2,
}


def mark_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark with ``verify`` what ``SAMPLED`` leaves out of ``make test``."""
    first: set[str] = set()
    for item in items:
        name = f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
        share = SAMPLED.get(name, 1)
        if share > 1 and name in first and zlib.crc32(item.name.encode()) % share:
            item.add_marker(pytest.mark.verify)
        first.add(name)


def mark_verify(values: Iterable[Any]) -> list[Any]:
    """Mark each value, so that only ``--verify`` runs it."""
    return [pytest.param(value, marks=pytest.mark.verify) for value in values]


def is_thorough(config: pytest.Config, name: str) -> bool:
    """Whether the test case ``name`` runs its expensive checks: one in three, all of them with ``--verify``."""
    return zlib.crc32(name.encode()) % 3 == 0 or bool(config.getoption("verify"))


def select_third(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations of the parameters' values; only ``--verify`` runs two thirds of them.

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
