"""Loop rolling: several calls of one delegate compute the steps of a recurrent layer, with the results of one call.

Integers may differ by one quantization step, because an unrolled first time step, which reads zeros, rounds less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from executorch.devtools import Inspector
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arm_backend_core.errors import FullDelegationError
from arm_backend_core.partitioner import TOSAPartitioner
from arm_backend_core.recurrent.roll_recurrent_loops import choose_steps_per_call
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_recipes import ArmRecipeType, ExportResult, export, load
from tests.models.keyword_spotter import KeywordSpotter
from tests.small_models import Samples
from tests.verify_only import combine_pairwise

T, BATCH, FEATURES, UNITS = 6, 2, 5, 6


class _Net(nn.Module):
    """A recurrent layer behind a linear one; ``select_output`` selects from its output sequence and states."""

    def __init__(self, layer: nn.RNNBase, select_output: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.before, self.layer, self.select_output = nn.Linear(FEATURES, FEATURES), layer, select_output

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        """Return the selected output."""
        initial = None if not states else states[0] if len(states) == 1 else states
        return self.select_output(*self.layer(self.before(x), initial))


class _Twice(nn.Module):
    """One layer, applied to the input and then to its own reversed output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.layer(x)[0].flip(0))[0]
        return y


class _Stream(nn.Module):
    """An LSTM with its states in buffers."""

    h: Tensor
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, UNITS)
        self.register_buffer("h", torch.zeros(1, BATCH, UNITS))
        self.register_buffer("c", torch.zeros(1, BATCH, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.layer(x, (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return y + 0


class _PreviousState(nn.Module):
    """Returns the previous state, columns that a constant index selects, and a constant."""

    h: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(FEATURES, UNITS)
        self.register_buffer("h", torch.ones(1, BATCH, UNITS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        old = torch.stack([self.h, 2 * self.h])
        y, h = self.layer(x, self.h)
        self.h.copy_(h)
        return old[0], y[..., torch.tensor([0, 2, 5])], torch.arange(6.0) * 2


class _Continued(nn.Module):
    """The second call of a layer starts from the final states of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        _, states = self.layer(x)
        y: Tensor = self.layer(x.flip(0), states)[0]
        return y


class _Cells(nn.Module):
    """A loop in the model's own code, whose steps do not read slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(BATCH, UNITS)
        for t in range(T):
            h = self.cell(x[t].relu(), h)
        return h


def _first(y: Tensor, _: Any) -> Tensor:
    return y


def _all(y: Tensor, states: Any) -> Any:
    return y, states


def _x(*shape: int) -> tuple[int, ...]:
    return shape or (T, BATCH, FEATURES)


#: Model, shapes of its inputs, and number of loops.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...], int]] = {
    "lstm": (lambda: _Net(nn.LSTM(FEATURES, UNITS), _first), (_x(),), 1),
    "last": (
        lambda: _Net(nn.LSTM(FEATURES, UNITS, batch_first=True), lambda y, _: y[:, -1]),
        (_x(BATCH, T, FEATURES),),
        1,
    ),
    "some": (lambda: _Net(nn.LSTM(FEATURES, UNITS), lambda y, _: (y[3], y[-2:])), (_x(),), 1),
    "states": (lambda: _Net(nn.LSTM(FEATURES, UNITS), lambda _, states: states), (_x(),), 1),
    "layers": (
        lambda: _Net(nn.LSTM(FEATURES, UNITS, 2, bidirectional=True, batch_first=True), _all),
        (_x(BATCH, T, FEATURES),),
        4,
    ),
    "projected": (lambda: _Net(nn.LSTM(FEATURES, UNITS, proj_size=3, bias=False), _all), (_x(),), 1),
    "initial_states": (
        lambda: _Net(nn.LSTM(FEATURES, UNITS), _all),
        (_x(), (1, BATCH, UNITS), (1, BATCH, UNITS)),
        1,
    ),
    "unbatched": (lambda: _Net(nn.LSTM(FEATURES, UNITS), _first), (_x(T, FEATURES),), 1),
    "gru": (lambda: _Net(nn.GRU(FEATURES, UNITS, bidirectional=True), _all), (_x(),), 2),
    "gru_initial_state": (lambda: _Net(nn.GRU(FEATURES, UNITS), _first), (_x(), (1, BATCH, UNITS)), 1),
    "rnn": (lambda: _Net(nn.RNN(FEATURES, UNITS, 2), _first), (_x(),), 2),
    "rnn_relu": (lambda: _Net(nn.RNN(FEATURES, UNITS, nonlinearity="relu"), _all), (_x(),), 1),
    "twice": (_Twice, (_x(),), 2),
    "continued": (_Continued, (_x(),), 2),
}


def _samples(shapes: Iterable[tuple[int, ...]], count: int = 3) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)]


def _exported(name: str, kind: str, steps: int | str | None, **options: Any) -> tuple[ExportResult, Samples]:
    torch.manual_seed(0)
    make, shapes, _ = CASES[name]
    recipe = ExportRecipe.get_recipe(ArmRecipeType[kind], steps_per_call=steps, **options)
    return export(make().eval(), recipe, _samples(shapes)), _samples(shapes)


def _calls(result: ExportResult) -> list[int]:
    return [delegate.calls for delegate in result.report.delegates if delegate.calls > 1]


def _check_loops(name: str, kind: str, steps: int) -> None:
    whole, samples = _exported(name, kind, None)
    looped, _ = _exported(name, kind, steps)
    assert _calls(whole) == []
    assert _calls(looped) == [-(-T // steps)] * CASES[name][2]
    assert looped.report.methods[0].cpu_operators == ()
    for sample in samples:
        one, other = (pytree.tree_leaves(result.run(*sample)) for result in (whole, looped))
        for x, y, info in zip(one, other, looped.report.methods[0].outputs, strict=True):
            assert x.unique().numel() > 1
            assert (x - y).abs().max() <= 1.001 * (info.scale or 0)


@pytest.mark.parametrize(("name", "kind"), combine_pairwise([*CASES], ["TOSA_FP", "TOSA_INT8"]))
def test_loops_give_the_results_of_one_call(name: str, kind: str) -> None:
    """6 steps in two calls: three in each, or four in each, two of which are padding."""
    _check_loops(name, kind, 3 if kind == "TOSA_FP" else 4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TOSA_A16W8", "layers"),
        ("ETHOSU_U55_INT8", "layers"),
        ("ETHOSU_U65_INT8", "gru"),
        ("ETHOSU_U85_INT8", "last"),
        ("ETHOSU_U85_INT8", "gru"),
        ("ETHOSU_U85_A16W8", "layers"),
        ("VGF_INT8", "initial_states"),
    ],
)
def test_loops_on_other_targets_give_the_results_of_one_call(kind: str, name: str) -> None:
    _check_loops(name, kind, 4)


def test_loops_of_one_step_per_call() -> None:
    _check_loops("lstm", "TOSA_INT8", 1)


def test_states_in_buffers_persist_between_calls() -> None:
    samples = _samples([_x()], 4)
    results = []
    for steps in (None, 3):
        torch.manual_seed(0)
        recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, steps_per_call=steps)
        program = export(_Stream().eval(), recipe, samples).program()
        results.append([program.execute(*sample)[0] for sample in samples])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not torch.equal(results[0][0], program.execute(*samples[0])[0])


def test_outputs_beside_a_loop_are_unchanged() -> None:
    samples = _samples([_x()], 3)
    torch.manual_seed(0)
    model, recipe = _PreviousState().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, steps_per_call=3)
    result = export(model, recipe, samples)
    assert _calls(result) == [2]
    program = result.program()
    for sample in samples:
        for mine, theirs in zip(program.execute(*sample), model(*sample), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def test_advice_counts_calls() -> None:
    """The advice has the cycles of an export with the change."""
    chosen = {"memory_mode": "Sram_Only"}
    (now, _), (then, _) = (_exported("lstm", "ETHOSU_U55_INT8", 3, **given) for given in ({}, chosen))
    cycles = [sum(x.vela.total_cycles for x in each.report.delegates if x.vela is not None) for each in (now, then)]
    (advice,) = (item for item in now.advice() if "Sram_Only" in item.change)
    assert [advice.now.cycles, advice.then.cycles] == cycles


def test_an_input_named_like_a_builtin() -> None:
    """PyTorch's own layers call theirs ``input``, a name that fx gives to no node."""
    torch.manual_seed(0)
    model, samples = nn.GRU(FEATURES, UNITS).eval(), _samples([_x()])
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, steps_per_call=3), samples)
    assert _calls(result) == [2]
    found, expected = result.run(*samples[0])[0], model(*samples[0])[0]
    assert (found - expected).abs().max() < 0.05


def test_a_loop_in_the_models_own_code_stays_unrolled() -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, steps_per_call=2)
    result = export(_Cells().eval(), recipe, _samples([_x()]))
    assert len(result.report.delegates) == 1
    assert _calls(result) == []


def test_long_layers_are_rolled_by_default() -> None:
    """66 steps become a loop and 60 do not, so that the longer program is smaller. Cycles are those of all calls."""
    torch.manual_seed(0)
    model, results = KeywordSpotter().eval(), {}
    for count in (60, 66):
        samples = _samples([(1, count, 10)])
        results[count] = export(model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)
    short, long = results.values()
    assert _calls(short) == []
    assert _calls(long) == [3]
    assert len(long.buffer) < len(short.buffer)
    (once,), (_, loop, _) = short.report.delegates, long.report.delegates
    assert once.vela is not None
    assert loop.vela is not None
    assert loop.vela.total_cycles == sum(layer.cycles for layer in loop.vela.layers)
    assert 1 < loop.vela.total_cycles / 66 / (once.vela.total_cycles / 60) < 1.4
    assert sum(cost.cycles for cost in long.report.layers) == sum(
        delegate.vela.total_cycles for delegate in long.report.delegates if delegate.vela is not None
    )
    assert "called 3 times" in str(long.report)


@pytest.mark.parametrize(
    ("total", "wanted", "count"),
    [(64, "auto", 64), (100, "auto", 25), (96, "auto", 24), (1000, "auto", 25), (49, 7, 7), (5, 7, 5), (9, None, 9)],
)
def test_steps_per_call(total: int, wanted: int | str | None, count: int) -> None:
    assert choose_steps_per_call(total, wanted) == count


@pytest.mark.parametrize(
    ("total", "of_all", "count"), [(49, 256, 49), (49, 260, 7), (32, 1400, 8), (14, 1400, 7), (6, 999, 6)]
)
def test_steps_per_call_with_many_steps_in_all_layers(total: int, of_all: int, count: int) -> None:
    assert choose_steps_per_call(total, "auto", of_all) == count


def test_prime_numbers_of_steps_need_little_padding() -> None:
    for total in (67, 101, 997):
        count = choose_steps_per_call(total, "auto")
        assert -total % count <= 3, count


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "all"])
def test_wrong_values_of_steps_per_call_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match='TOSA_INT8: steps_per_call must be an int, "auto", or None for all; got'):
        ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, steps_per_call=value)


def test_a_partitioner_refuses_steps_below_one() -> None:
    with pytest.raises(ValueError, match='steps_per_call: takes a number of at least 1, "auto" or None, got 0'):
        TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"), steps_per_call=0)


def test_developer_tools_with_a_loop(tmp_path: Any) -> None:
    """The Inspector has no layers inside a loop. Saved files and comparisons work as for other programs."""
    result, samples = _exported("lstm", "ETHOSU_U85_INT8", 3)
    assert isinstance(result.inspector(*samples[0]), Inspector)
    result.save(tmp_path / "model.pte", etrecord=True, bundled_samples=samples)
    assert torch.equal(load(tmp_path / "model.pte").execute(*samples[0])[0], result.run(*samples[0]))
    (output,) = result.compare(samples).outputs
    assert output.gap is not None
    assert output.gap.sqnr > 30


def test_executorchs_own_flow_rolls_loops() -> None:
    """The partitioner of a recipe does it."""
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, steps_per_call=3)
    assert recipe.lowering_recipe is not None
    torch.manual_seed(0)
    model, (sample, *_) = _Net(nn.LSTM(FEATURES, UNITS), _first).eval(), _samples([_x()])
    edge = to_edge_transform_and_lower(
        torch.export.export(model, sample),
        partitioner=recipe.lowering_recipe.partitioners,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    (made,) = load(edge.to_executorch().buffer).execute(*sample)
    assert torch.allclose(made, model(*sample), atol=1e-5)
    assert edge.exported_program().graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)


def test_require_full_delegation_with_a_loop() -> None:
    result, _ = _exported("lstm", "TOSA_INT8", 3, require_full_delegation=True)
    assert _calls(result) == [2]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, steps_per_call=3, require_full_delegation=True)
    model = _Net(nn.LSTM(FEATURES, UNITS), lambda y, _: torch.linalg.eigvals(y[:, 0] @ y[:, 0].mT).real)
    with pytest.raises(FullDelegationError, match=r"aten\.linalg_eig\.default"):
        export(model.eval(), recipe, _samples([_x()]))
