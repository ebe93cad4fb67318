"""Random graphs of each target, and injected faults that the fuzzer must detect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core.ops.catalog import aten_entries
from arm_backend_core.tosa import reference_model
from tests.cortex_m.lowering import LoweredCortexMProgram
from tests.fuzz import campaign, oracle
from tests.fuzz.arguments import EXCLUDED_OPERATORS, draw_call, list_steps
from tests.fuzz.generator import draw, draw_with
from tests.fuzz.program import Program, make_generator
from tests.fuzz.shrink import shrink
from tests.ops.runner import Input

#: Graphs that ``make verify`` checks, from number 0 on; ``make test`` checks every fourth one.
GRAPHS = {
    "TOSA_FP": 24,
    "TOSA_INT8": 20,
    "TOSA_A16W8": 10,
    "ETHOSU_U55_INT8": 6,
    "ETHOSU_U85_INT8": 6,
    "ETHOSU_U55_A16W8": 3,
    "ETHOSU_U85_A16W8": 4,
    "CORTEX_M_INT8": 6,
    "CORTEX_M_INT8_DSP": 3,
    "CORTEX_M_INT8_SCALAR": 3,
}


@pytest.fixture(autouse=True)
def _silence_output() -> Iterator[None]:
    """Disable logging: formatting the log messages of torch.export takes as long as the export."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("target", "index"),
    [
        pytest.param(target, i, marks=[pytest.mark.verify] if i % 4 else [])
        for target, count in GRAPHS.items()
        for i in range(count)
    ],
)
def test_graph(target: str, index: int) -> None:
    verdict = campaign.check_graph(target, 0, index)
    wide = oracle.TARGETS[target].int16_activations
    source = draw(0, index, integer=wide is not None).source
    assert verdict.kind in ("right", "undefined"), f"{verdict.detail}\n{source}"


def test_every_operator_with_a_record_can_be_drawn() -> None:
    missing = []
    for overload in (o for o in aten_entries() if str(o) not in EXCLUDED_OPERATORS):
        program = draw_with(str(overload), partial(draw_call, overload), 0, integer=True)
        if program is None or program.steps[-1].operator != str(overload):
            missing.append(str(overload))
    assert not missing, "give their arguments in OPERATORS (tests/fuzz/arguments.py)"


def test_every_module_and_function_can_be_drawn() -> None:
    kinds = list_steps()[-2:]
    missing = [name for kind in kinds for name, make in kind if draw_with(name, make, 0, integer=True) is None]
    assert not missing


def test_seed_and_index_determine_a_graph() -> None:
    first, second = _program(7), _program(7)
    assert first == second
    assert _program(8) != first
    for ours, theirs in zip(first.samples(1), second.samples(1), strict=True):
        assert torch.equal(ours, theirs)


def test_shrinking_keeps_only_the_failing_step() -> None:
    program = next(p for p in map(_program, range(100)) if len(p.steps) > 8 and _has_writes(p))
    step = next(step for step in program.steps if step.writes)

    def fails(candidate: Program) -> bool:
        return any(step.operator == other.operator for other in candidate.steps)

    small = shrink(program, fails)
    assert [other.operator for other in small.steps] == [step.operator]


def _has_writes(program: Program) -> bool:
    return any(step.writes for step in program.steps)


def _program(index: int) -> Program:
    return draw(0, index, integer=True)


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


_SAMPLES = [(Input((2, 8)).sample(torch.Generator().manual_seed(seed)),) for seed in range(3)]


@pytest.mark.parametrize(("target", "error"), [("TOSA_FP", 1e-3), ("TOSA_INT8", 300), ("TOSA_A16W8", 1e4)])
def test_a_wrong_value_is_detected(monkeypatch: pytest.MonkeyPatch, target: str, error: float) -> None:
    oracle.check(_Model(), _SAMPLES, target)
    run = reference_model.run

    def wrong(flatbuffer: bytes, inputs: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        first, *others = run(flatbuffer, inputs)
        first = first.copy()
        first.flat[3] = first.flat[3] + np.array(error, first.dtype) if first.flat[3] < 0 else first.flat[3] - error
        return [first, *others]

    monkeypatch.setattr(reference_model, "run", wrong)
    with pytest.raises(oracle.Failure) as failure:
        oracle.check(_Model(), _SAMPLES, target)
    assert failure.value.kind == "wrong"


def test_a_wrong_kernel_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_executorch = LoweredCortexMProgram.run_in_executorch
    monkeypatch.setattr(
        LoweredCortexMProgram,
        "run_in_executorch",
        lambda program, inputs: [x * 2 for x in run_in_executorch(program, inputs)],
    )
    with pytest.raises(oracle.Failure, match="the runtime's kernels differ from their records"):
        oracle.check(_Model(), _SAMPLES, "CORTEX_M_INT8")


def test_an_unstable_export_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_program = oracle.compile_program
    models = iter((_Model(), torch.nn.Sigmoid()))
    monkeypatch.setattr(oracle, "compile_program", lambda model, *rest: compile_program(next(models), *rest))
    with pytest.raises(oracle.Failure, match="two exports differ"):
        oracle.check(_Model(), _SAMPLES, "TOSA_FP")


def test_an_illegal_flatbuffer_is_detected() -> None:
    flatbuffer = oracle.compile_program(_Model(), _SAMPLES, "TOSA_FP").log.delegates[0].tosa
    with pytest.raises(oracle.Failure, match="illegal") as failure:
        oracle.validate(flatbuffer, oracle.TARGETS["TOSA_INT8"].tosa)
    assert failure.value.kind == "illegal"


def test_results_that_rounding_determines_are_not_compared() -> None:
    """The sum is 0 except for rounding, which determines the results of the comparison and of the division."""

    class RoundingNoise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest = (x.sin() ** 2 + x.cos() ** 2) - 1
            return rest > 0, rest / rest.abs().clamp_min(1e-30)

    oracle.check(RoundingNoise(), _SAMPLES, "TOSA_FP")


class _WriteToOverlappingWindows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.select_scatter(x.unfold(1, 2, 1), x[:, 1:] * 2, 2, 1)


def test_a_merged_rescale_of_a_selection_is_no_fault() -> None:
    """The RESCALEs of the normalization and of ``where`` round once if no other operator needs the first result.

    A step of the operand of this softmax is up to 32 steps of its result.
    """

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Buffer(Input((8,), -1, 1).sample(make_generator(13)))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            normalized = torch.nn.functional.group_norm(x, 1, self.gain, self.gain)
            noise = torch.ops.aten.rrelu_with_noise.default(self.gain, self.gain)
            return noise, torch.softmax(normalized.masked_fill(normalized > 1, -1e4), 0)

    samples = [(Input((6, 8, 4, 6), -30, 30).sample(make_generator(11 + 1000 * i)),) for i in range(3)]
    oracle.check(Masked().eval(), samples, "TOSA_A16W8", export_twice=False)


def test_in_place_writes_to_overlapping_memory_are_undefined() -> None:
    """PyTorch's copy of overlapping windows overlaps too, so that a write also changes other elements."""
    with pytest.raises(oracle.NoExpectedResult, match="share memory"):
        oracle.check(_WriteToOverlappingWindows(), _SAMPLES, "TOSA_FP")
