"""State that methods share has one observer; ``tests/pipeline/test_methods.py`` runs such programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.observer import FixedQParamsObserver

from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_quantization_config
from arm_backend_core.quantization.cross_method_observers import share_observers_across_methods
from arm_backend_core.quantization.observer import FixedRangeObserver
from arm_backend_core.quantization.ptq import ObservedProgram, SharedTensors
from arm_backend_core.quantization.state_observers import InterleavedCalibration
from tests.ops.runner import make_compile_spec


class Writing(nn.Module):
    """Writes its buffer as ``how`` says; with a parameter if it is a network."""

    state: Tensor

    def __init__(self, state: Tensor, how: str) -> None:
        super().__init__()
        self.register_buffer("state", state)
        self.how = how
        if how == "network":
            self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "average":
            self.state.copy_(self.state * 0.5 + x)
        elif self.how == "tanh":
            self.state.copy_(torch.tanh(x))
        elif self.how == "network":
            self.state.copy_(self.linear(torch.cat([x, self.state])))
        elif self.how == "set":
            self.state.copy_(x)
        elif self.how == "clear":
            self.state.mul_(0)
        else:
            self.state.copy_(self.state.clone())
        return self.state * 2


def _observe(*how: str) -> dict[str, tuple[ObservedProgram, Any]]:
    state, common = torch.zeros(4), SharedTensors()
    config = get_symmetric_quantization_config()
    methods: dict[str, tuple[ObservedProgram, Any]] = {}
    models = {name: Writing(state, name).eval() for name in how}
    for name, model in models.items():
        program = torch.export.export(model, (torch.ones(4),))
        observed = ObservedProgram(program, TOSAQuantizer(make_compile_spec("int")).set_global(config), common)
        methods[name] = observed, program
    share_observers_across_methods({name: observed for name, (observed, _) in methods.items()}, models)
    return methods


def _state_observers(model: ObservedProgram) -> list[Any]:
    (write,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [model.observers[write.args[0]], model.observers[write.args[1], write]]


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        (("tanh", "set"), torch.int8),
        (("set", "tanh"), torch.int8),
        (("tanh", "average"), torch.int16),
        (("average", "set", "own"), torch.int16),
        (("own", "tanh"), torch.int8),
        (("clear", "network"), torch.int8),
        (("clear", "set"), torch.int16),
    ],
)
def test_methods_share_the_dtype_of_the_one_that_determines_the_state(how: tuple[str, ...], dtype: torch.dtype) -> None:
    observers = [observer for model, _ in _observe(*how).values() for observer in _state_observers(model)]
    assert {observer.dtype for observer in observers} == {dtype}
    assert len({id(observer) for observer in observers}) == 1


@pytest.mark.parametrize(("largest", "fixed"), [(0.9, True), (3.0, False)])
def test_a_fixed_range_yields_to_values_beyond_it(largest: float, fixed: bool) -> None:
    parameters = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127}
    observer = FixedRangeObserver(FixedQParamsObserver(scale=1 / 128, zero_point=0, **parameters))
    assert observer.calculate_qparams()[0] == 1 / 128
    observer(torch.tensor([-0.5, largest]))
    scale, zero_point = observer.calculate_qparams()
    assert (float(scale) == 1 / 128) is fixed
    assert float(scale) * (127 - int(zero_point)) == pytest.approx(largest if not fixed else 127 / 128, abs=0.02)


def test_interleaved_calibration_runs_methods_with_less_influence_and_restores_the_state() -> None:
    methods = _observe("network", "clear", "own")
    interleaved = InterleavedCalibration({name: (model, [(torch.ones(4),)]) for name, (model, _) in methods.items()})
    model, _ = methods["network"]
    model(torch.ones(4))
    (state,) = model._shared.states.values()
    before = state.clone()
    assert before.any()
    interleaved.run("network")
    assert torch.equal(state, before)
    assert [model.sample_count for model, _ in methods.values()] == [1, 1, 1]
    interleaved.run("clear")
    interleaved.run("own")
    assert [model.sample_count for model, _ in methods.values()] == [1, 1, 2]


def test_preserve_states_restores_the_state_after_an_exception() -> None:
    model, _ = _observe("set")["set"]
    (state,) = model._shared.states.values()
    before = state.clone()

    def run_and_fail() -> None:
        with model.preserve_states():
            model(torch.ones(4))
            assert not torch.equal(state, before)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        run_and_fail()
    assert torch.equal(state, before)
