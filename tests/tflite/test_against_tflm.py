"""The emulator against TFLM: networks compiled by Vela's TFLite front end, and TFLM's reference kernels."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.vela_program import VelaProgram
from tests.accelerators import ACCELERATORS, VERIFY_ACCELERATORS
from tests.tflite import tflm
from tests.tflite.conftest import COUNTS
from tests.tflite.deviations import DEVIATIONS, DIFFERS, FAILS, ON_CPU, STARTS_EARLY, Deviation, list_deviations
from tests.tflite.network import Array, Network
from tests.tflite.random_networks import DTYPES, NETWORKS, OPERATORS, draw_inputs, draw_network
from tests.tflite.vela import CORES, VelaRefusal, compile_tflite

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="TFLM has a Python package for x86-64 only")

#: Networks of each kind, and inputs of each network.
_FEW, _MANY = (1, 2), (20, 8)


@dataclass(frozen=True)
class _Outcome:
    """Outcome of the comparison of a network.

    Attributes:
        effects: effects as in ``deviations.py``, or an error that no deviation explains; empty if all values equal
            TFLM's.
        largest: the largest difference.
    """

    effects: frozenset[str]
    values: int = 0
    different: int = 0
    largest: int = 0
    message: str = ""


def _targets(verify: bool) -> Iterator[tuple[str, str]]:
    """Pairs of an NPU and a core of Vela that compiles for it."""
    for accelerator in (*ACCELERATORS, *VERIFY_ACCELERATORS) if verify else ACCELERATORS:
        for core in CORES:
            if core == "regor" or "u85" not in accelerator:
                yield accelerator, core


def _run(net: Network, accelerator: str, core: str, inputs: int) -> _Outcome:
    flatbuffer = net.serialize()
    try:
        program = VelaProgram(compile_tflite(flatbuffer, accelerator, *CORES[core]))
    except VelaRefusal as refusal:
        return _Outcome(frozenset({FAILS}), message=str(refusal))
    except ProgramError as error:
        return _Outcome(frozenset({ON_CPU}), message=str(error))
    except RunError as error:
        return _Outcome(frozenset({"refused"}), message=str(error))
    values = different = largest = 0
    samples = [draw_inputs(net, seed) for seed in range(inputs)]
    for sample, expected in zip(samples, tflm.run(flatbuffer, samples, len(net.outputs)), strict=True):
        for ours, theirs in zip(program.run_arrays(sample), expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            distance = np.abs(ours.astype(np.int64) - theirs)
            values += distance.size
            different += int(np.count_nonzero(distance))
            largest = max(largest, int(distance.max()))
    effects = {DIFFERS} if different else set()
    finding = _check_accesses(program, samples[0])
    if finding:
        effects.add(STARTS_EARLY if finding.endswith("BLOCKDEP is too large") else finding)
    return _Outcome(frozenset(effects), values, different, largest, finding)


def _check_accesses(program: VelaProgram, sample: list[Array]) -> str:
    """Run a sample with the access checker. Returns its finding, or an empty string."""
    try:
        program.run_checked(sample)
    except RunError as error:
        return str(error)
    return ""


def _is_explained(outcome: _Outcome, known: list[Deviation]) -> bool:
    effects = {deviation.effect for deviation in known}
    if not outcome.effects <= effects or (effects & {FAILS, ON_CPU} and not outcome.effects):
        return False
    bounds = [deviation.max_difference for deviation in known if deviation.effect == DIFFERS]
    return None in bounds or outcome.largest <= max((bound for bound in bounds if bound is not None), default=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*OPERATORS, *NETWORKS])
def test_emulator_agrees_with_tflm(
    name: str, dtype: str, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    verify = pytestconfig.getoption("verify")
    counts: dict[str, Counter[str]] = {}
    unexplained = []
    networks, inputs = _MANY if verify else _FEW
    for number in range(networks):
        net = draw_network(name, dtype, number)
        for accelerator, core in _targets(verify):
            outcome = _run(net, accelerator, core, inputs)
            known = list_deviations(net, core)
            if not _is_explained(outcome, known):
                unexplained.append(f"{name} {dtype} {number}, {accelerator}, {core}: {outcome}")
            counts.setdefault(f"{name}, {dtype}, {core}", Counter()).update(
                {
                    "programs": 1,
                    "values": outcome.values,
                    "different": outcome.different,
                    "known kinds": bool(known),
                    "not compiled": bool(outcome.effects & {FAILS, ON_CPU}),
                }
            )
    record_property(COUNTS, {key: dict(counter) for key, counter in counts.items()})
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.parametrize(
    "deviation", DEVIATIONS, ids=lambda deviation: f"{deviation.name}, {'+'.join(deviation.cores)}"
)
def test_known_deviation_still_occurs(deviation: Deviation) -> None:
    """Fails if a release of Vela fixes the deviation: then set ``fixed_in``."""
    net = draw_network(*deviation.example)
    for core in deviation.cores:
        assert (deviation in list_deviations(net, core)) != deviation.is_fixed()
        effects = _run(net, "ethos-u55-128", core, inputs=2).effects
        assert (deviation.effect in effects) != deviation.is_fixed(), core


def test_lstm_states_are_reset_to_their_zero_point() -> None:
    """The zero point of the state is not 0."""
    net = draw_network("lstm", "int8", 9)
    assert any(tensor.is_variable and tensor.quantization.zero_point for tensor in net.tensors)
    (sample,) = samples = [draw_inputs(net, 0)]
    ((expected,),) = tflm.run(net.serialize(), samples, 1)
    program = VelaProgram(compile_tflite(net.serialize(), "ethos-u85-256"))
    first, second = (program.run_arrays(sample)[0] for _ in range(2))
    assert np.array_equal(first, expected)
    assert not np.array_equal(second, expected)
    program.reset()
    assert np.array_equal(program.run_arrays(sample)[0], expected)
