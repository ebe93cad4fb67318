"""ExecuTorch's developer tools on our programs: Inspector, ETRecord, ETDump and bundled programs."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.devtools import Inspector
from executorch.devtools.bundled_program.serialize import deserialize_from_flatbuffer_to_bundled_program
from executorch.devtools.etrecord import parse_etrecord
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from torch import Tensor, nn

from arm_backend_core.partitioner import TOSAPartitioner
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, Inputs, export, load
from arm_recipes.devtools import delegate_results
from arm_recipes.devtools.delegate_results import choose_layout
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.ethosu import EthosUOperation
from arm_recipes.runtime.tosa_flatbuffer import read_tosa_graph, replace_outputs
from tests.small_models import AttentionBlock, Small, Sorting, images, vectors

FP, INT8, A16W8 = ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8
U55, U85, VGF = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8, ArmRecipeType.VGF_FP
#: Minimum SQNR in dB between PyTorch and delegates of floating point.
_FLOAT_SQNR = 100.0
#: Minimum SQNR in dB if some elements differ by one int8 step.
_INT8_SQNR = 35.0


class Branches(nn.Module):
    """A condition on data; on targets with control flow, it is a COND_IF."""

    def forward(self, x: Tensor) -> Tensor:
        """One of two."""
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,)) - 3


class Joined(nn.Module):
    """A CONCAT, whose operands an NPU writes in place, and keyword inputs, one of them a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor, scale: float, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Of an image."""
        y = torch.cat([self.up(torch.relu(self.down(x))), x], 1)
        return {"y": self.last(torch.nn.functional.pad(y, (1, 1, 1, 1))) * scale}


SAMPLES = [(torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4) * factor,) for factor in (1, 2)]


def _exported(model: nn.Module, kind: ArmRecipeType, samples: Any, **options: Any) -> ExportResult:
    return export(model.eval(), ExportRecipe.get_recipe(kind, **options), samples)


def _delegated_events(inspector: Inspector) -> list[Any]:
    return [event for block in inspector.event_blocks for event in block.events if event.is_delegated_op]


def _numeric_gaps(inspector: Inspector, metric: str = "SNR") -> pd.DataFrame:
    return inspector.calculate_numeric_gap(metric)


def _worst(gaps: pd.DataFrame) -> float:
    return min(itertools.chain.from_iterable(gaps["gap"]))


def _node(result: ExportResult, name: str) -> int:
    nodes = [node.name for node in result.exported_programs["forward"].graph.nodes if node.op == "call_function"]
    return nodes.index(name) + 1


# Debug handles.


@pytest.mark.parametrize("kind", [FP, INT8, U85, VGF], ids=lambda kind: kind.name)
def test_every_operator_of_a_delegate_has_a_handle(kind: ArmRecipeType) -> None:
    result = _exported(Small(), kind, images())
    (delegate,) = result.executorch_program.delegate_map["forward"].values()
    handles = delegate["delegate_map"]
    (record,) = result.report.delegates
    assert list(handles) == list(range(len(record.tosa_operators)))
    convolutions = [index for index, name in enumerate(record.tosa_operators) if name == "CONV2D"]
    first = "batch_norm" if kind in (FP, VGF) else "conv2d"  # which it is folded into
    assert _node(result, first) in handles[convolutions[0]]
    assert _node(result, "linear") in handles[convolutions[-1]]


def test_the_cpu_has_handles_of_the_same_program() -> None:
    result = _exported(Sorting(), INT8, vectors())
    handles = result.executorch_program.debug_handle_map["forward"]
    assert _node(result, "topk") in handles.values()
    inside = [handle for handle in handles.values() if isinstance(handle, list)]
    assert [_node(result, name) in found for name, found in zip(("linear", "linear_1"), inside, strict=True)] == [
        True
    ] * 2


def test_executorch_s_own_flow_keeps_handles_apart() -> None:
    """In this flow, ExecuTorch numbers the operators on the CPU, from 1 on."""
    program = torch.export.export(Sorting().eval(), vectors()[0])
    partitioner = TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"), [lambda node: "topk" in node.name])
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner]).to_executorch()
    handles = manager.debug_handle_map["forward"]
    inside = {handle for found in handles.values() if isinstance(found, list) for handle in found}
    assert len(inside) == 2
    assert inside.isdisjoint({found for found in handles.values() if isinstance(found, int)})
    maps = [found["delegate_map"] for found in manager.delegate_map["forward"].values()]
    assert {handle for found in maps for own in found.values() for handle in own} == inside


# The Inspector.


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (FP, _FLOAT_SQNR),
        (INT8, _INT8_SQNR),
        (A16W8, _INT8_SQNR),
        (U55, _INT8_SQNR),
        (U85, _INT8_SQNR),
        (VGF, _FLOAT_SQNR),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_layers_are_what_pytorch_computes(kind: ArmRecipeType, least: float) -> None:
    result = _exported(AttentionBlock(), kind, SAMPLES)
    inspector = result.inspector(*SAMPLES[1])
    gaps = _numeric_gaps(inspector)
    assert _worst(gaps) > least
    inside = [event for event in _delegated_events(inspector) if event.debug_data]
    assert len(inside) >= (0 if kind is VGF else 12)
    assert {"conv2d", "layer_norm"} <= set(itertools.chain.from_iterable(gaps["aot_ops"]))
    traces = [trace for found in gaps["stacktraces"] for trace in found.values() if trace]
    assert any("self.norm(y + self.attention(y, y, y)[0])" in trace for trace in traces)


@pytest.mark.parametrize("kind", [INT8, U55, U85], ids=lambda kind: kind.name)
def test_integers_without_rounding_differences_are_exact(kind: ArmRecipeType) -> None:
    result = _exported(Small(), kind, images())
    gaps = _numeric_gaps(result.inspector(*images()[0]))
    assert len(gaps) == 5
    assert _worst(gaps) == math.inf


def test_a_differing_layer_is_detected() -> None:
    """From the linear layer on, the program differs from PyTorch's."""
    result = _exported(Small(), FP, images())
    with torch.no_grad():
        result.exported_programs["forward"].state_dict["head.weight"].mul_(1.5)
    gaps = _numeric_gaps(result.inspector(*images()[0]))
    found = {names[-1]: gap[0] for names, gap in zip(gaps["aot_ops"], gaps["gap"], strict=True)}
    assert found.pop("linear") < 20
    assert min(found.values()) > _FLOAT_SQNR


@pytest.mark.parametrize("kind", [U55, U85], ids=lambda kind: kind.name)
def test_cycles_of_layers_are_velas_estimates(kind: ArmRecipeType) -> None:
    result = _exported(AttentionBlock(), kind, SAMPLES)
    inside = [event for event in _delegated_events(result.inspector(*SAMPLES[0])) if event.perf_data is not None]
    figures = [delegate.vela for delegate in result.report.delegates if delegate.vela is not None]
    known = [event.delegate_debug_metadatas for event in inside]
    assert sum(entry["cycles"] for entry in known) == sum(each.total_cycles for each in figures)
    assert sum(entry["macs"] for entry in known) == sum(each.macs for each in figures)
    seconds = sum(each.inference_seconds for each in figures)
    assert sum(event.perf_data.avg for event in inside) == pytest.approx(seconds * 1e3, rel=1e-3)
    assert {"conv", "attention", "norm"} <= {entry["module"].split(".")[0] for entry in known}
    assert all(
        Path(inspect.getfile(AttentionBlock)).name in entry["source"] for entry in known if entry["module"] == "conv"
    )


def test_several_delegates_and_the_cpu_between_them() -> None:
    result = _exported(Sorting(), U85, vectors())
    inspector = result.inspector(*vectors()[0])
    gaps = _numeric_gaps(inspector)
    assert [names[0] for names in gaps["aot_ops"]].count("linear") == 1
    assert _worst(gaps) == math.inf
    assert {event.name for block in inspector.event_blocks for event in block.events} >= {"native_call_topk.values"}


def test_inspector_takes_float_or_quantized_inputs() -> None:
    result = _exported(Small(), U85, images(), quantized_io=True)
    (x,) = images()[0]
    for given in (x, result.inputs[0].quantize(x)):
        gaps = _numeric_gaps(result.inspector(given))
        assert _worst(gaps) == math.inf
        assert len(gaps) == 3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [FP, U55, U85], ids=lambda kind: kind.name)
def test_operands_that_are_written_into_a_concat(kind: ArmRecipeType, layout: torch.memory_format) -> None:
    sample = Inputs(images()[0][0].to(memory_format=layout), scale=0.5, mask=None)
    gaps = _numeric_gaps(_exported(Joined(), kind, [sample]).inspector(sample))
    assert _worst(gaps) > (_FLOAT_SQNR if kind is FP else _INT8_SQNR)
    found = set(itertools.chain.from_iterable(gaps["aot_ops"]))
    assert {"conv2d", "cat", "conv2d_1"} <= found
    # ETDump lacks the memory format of the CPU's result: it is left out, since its order may be wrong.
    assert ("quantize_per_tensor_default" in found) == (kind is not FP and layout is torch.contiguous_format)


@pytest.mark.verify
def test_delegates_of_xnnpack_beside_ours() -> None:
    xnnpack = ExportRecipe.get_recipe(XNNPackRecipeType.PT2E_INT8_STATIC_PER_CHANNEL)
    recipe = ExportRecipe.combine([ExportRecipe.get_recipe(INT8), xnnpack])
    gaps = _numeric_gaps(export(Sorting().eval(), recipe, vectors()).inspector(*vectors()[0]))
    assert _worst(gaps) == math.inf


def test_each_input_size_is_a_method() -> None:
    samples = {"batch": [1, 2]}
    shapes = ({0: torch.export.Dim("batch")},)
    result = export(Small().eval(), ExportRecipe.get_recipe(FP), images(), dynamic_shapes=shapes, sizes=samples)
    with pytest.raises(ValueError, match="no method 'forward'; the program has: "):
        result.inspector(*images()[0], method="forward")
    assert _worst(_numeric_gaps(result.inspector(*images()[0], method=result.report.methods[0].name))) > _FLOAT_SQNR


def test_types_that_etdump_lacks() -> None:
    class Halves(nn.Module):
        """Computes in float16."""

        def forward(self, x: Tensor) -> Tensor:
            """Of real numbers."""
            return torch.tanh(x.half() * 2).float() + 1

    sample = torch.linspace(-1, 1, 8)
    assert _worst(_numeric_gaps(_exported(Halves(), FP, [(sample,)]).inspector(sample))) > 60
    result = _exported(nn.Tanh(), FP, [(sample.half(),)])
    with pytest.raises(ValueError, match=r"'forward' computes with torch\.float16 outside of delegates"):
        result.inspector(sample.half())


def test_subgraphs_of_a_conditional_have_no_events() -> None:
    result = _exported(Branches(), FP, [(torch.ones(4),)], extensions=["cf"])
    assert "COND_IF" in result.report.delegates[0].tosa_operators
    inspector = result.inspector(torch.ones(4))
    assert not [event for event in _delegated_events(inspector) if event.debug_data]
    assert _worst(_numeric_gaps(inspector)) > _FLOAT_SQNR


def test_a_run_leaves_the_model_as_it_was() -> None:
    result = _exported(AttentionBlock(), FP, SAMPLES)
    for _ in range(2):
        assert _worst(_numeric_gaps(result.inspector(*SAMPLES[0]))) > _FLOAT_SQNR
    assert result.exported_programs["forward"].state_dict["calls"].item() == 0


def test_inspection_of_another_method() -> None:
    models = {"encode": Small().eval(), "decode": Sorting().eval()}
    result = export(models, ExportRecipe.get_recipe(INT8), {"encode": images(), "decode": vectors()})
    gaps = _numeric_gaps(result.inspector(*vectors()[0], method="decode"))
    assert "linear_1" in set(itertools.chain.from_iterable(gaps["aot_ops"]))
    with pytest.raises(ValueError, match="no method 'forward'; the program has: encode, decode"):
        result.inspector(*vectors()[0], method="forward")
    del result.exported_programs["decode"]  # as after a recipe whose stages capture nothing
    with pytest.raises(ValueError, match="the developer tools need the captured program of 'decode'"):
        result.inspector(*vectors()[0], method="decode")


# Files.


def test_files_are_what_executorch_reads(tmp_path: Path) -> None:
    result = _exported(AttentionBlock(), U85, SAMPLES)
    result.save(tmp_path / "model.pte", etrecord=True, bundled_samples=SAMPLES)
    dump = result.etdump(*SAMPLES[0], path=tmp_path / "model.etdp")
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.pte",
        "model.etrecord",
        "model.bpte",
        "model.etdp",
        "model.debug.bin",
    }
    inspector = Inspector(
        etdump_path=str(dump),
        debug_buffer_path=str(tmp_path / "model.debug.bin"),
        etrecord=str(tmp_path / "model.etrecord"),
    )
    assert _worst(_numeric_gaps(inspector)) > _INT8_SQNR
    event = next(event for event in _delegated_events(inspector) if event.perf_data is not None)
    assert json.loads(event.raw_delegate_debug_metadatas[0])["cycles"] > 0


def test_bundled_programs_verify(tmp_path: Path) -> None:
    result = _exported(AttentionBlock(), INT8, SAMPLES)
    result.save(tmp_path / "model.pte", bundled_samples=SAMPLES)
    data = (tmp_path / "model.bpte").read_bytes()
    held = deserialize_from_flatbuffer_to_bundled_program(data)
    assert bytes(held.program) == (tmp_path / "model.pte").read_bytes()
    host_backends.register_backends()
    module = portable_lib._load_bundled_program_from_buffer(data)
    for index in range(len(SAMPLES)):  # the model counts them
        module.verify_result_with_bundled_expected_output("forward", index, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="verification failed"):
        module.verify_result_with_bundled_expected_output("forward", 0, 0.0, 0.0)


def test_several_methods_have_a_record_each(tmp_path: Path) -> None:
    models = {"encode": Small().eval(), "decode": Sorting().eval()}
    samples = {"encode": images(), "decode": vectors()}
    result = export(models, ExportRecipe.get_recipe(INT8), samples)
    result.save(tmp_path / "model.pte", etrecord=True, bundled_samples={"decode": vectors(2)})
    record = parse_etrecord(str(tmp_path / "model.decode.etrecord"))
    assert torch.equal(record._representative_inputs[0], vectors()[0][0])
    (expected,) = load(tmp_path / "model.pte").execute(*vectors()[1], method="decode")
    assert torch.equal(record._reference_outputs["forward"][1][0], expected)
    assert parse_etrecord(str(tmp_path / "model.etrecord"))._representative_inputs is None


@pytest.mark.parametrize(
    ("bundled", "message"),
    [
        (3, "bundled_samples: give a list of samples"),
        ([], "bundled_samples: there are no samples of 'forward'"),
        ([(torch.ones(2),)], r"input 0 \('x'\) must be float32\[1, 3, 8, 8\]"),
        ([("text",)], "of type str, not a tensor"),
        ({"encode": SAMPLES}, "bundled_samples: the program has no method 'encode'; it has: forward"),
    ],
)
def test_samples_that_cannot_be_bundled(bundled: Any, message: str, tmp_path: Path) -> None:
    result = _exported(Small(), INT8, images())
    with pytest.raises(ValueError, match=message):
        result.save(tmp_path / "model.pte", bundled_samples=bundled)
    assert not list(tmp_path.iterdir())


def test_two_exports_give_the_same_bytes(tmp_path: Path) -> None:
    for model, samples, kind, options in (
        (AttentionBlock, SAMPLES, INT8, {}),
        (Branches, [(torch.ones(4),)], FP, {"extensions": ["cf"]}),
    ):
        found = []
        for _ in range(2):
            _exported(model(), kind, samples, **options).save(
                tmp_path / "model.pte", etrecord=True, bundled_samples=samples
            )
            found.append([(tmp_path / name).read_bytes() for name in ("model.etrecord", "model.bpte")])
        assert found[0] == found[1]


# Layers and layouts.


def test_any_tensor_of_a_tosa_graph_can_leave_it() -> None:
    from arm_backend_core.tosa import reference_model

    result = _exported(Small(), INT8, images())
    (record,) = result.report.delegates
    inputs = [np.zeros(io.shape, io.dtype) for io in record.inputs]
    operators = read_tosa_graph(memoryview(record.tosa)).operators
    found = [operator for operator in operators if operator.result.dtype != "int48"]  # for which NumPy has no type
    made = reference_model.run(replace_outputs(record.tosa, [operator.result.name for operator in found]), inputs)
    assert [array.shape for array in made] == [operator.result.shape for operator in found]
    (expected,) = reference_model.run(record.tosa, inputs)
    assert np.array_equal(made[-1], expected)


@pytest.mark.parametrize(
    "stored",
    [
        lambda x: x.transpose(0, 2, 3, 1),
        lambda x: x.transpose(1, 0, 3, 2),
        lambda x: x.transpose(2, 3, 0, 1).reshape(3, 4, -1),
        lambda x: x.reshape(-1),
    ],
)
def test_layout_of_a_stored_tensor_is_detected(stored: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 2, 3, 4))
    assert np.array_equal(choose_layout([stored(x)], x), x)


@pytest.mark.parametrize("addresses", [(0, 16, 0, 16), (48, 0, 32, 16)])
def test_stripes_are_concatenated_in_order_of_execution_or_of_memory(
    addresses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stripes in a rolling buffer of two rows, and inputs of a CONCAT that the NPU writes in any order."""
    rows = np.arange(8, dtype=np.int8).reshape(4, 1, 2)
    is_rolling = len(set(addresses)) < len(addresses)
    written = [rows[i : i + 1] if is_rolling else rows[at // 16 : at // 16 + 1] for i, at in enumerate(addresses)]
    delegate: Any = SimpleNamespace(
        header_bytes=0,
        trace=lambda _: [
            EthosUOperation("conv", 0, False, 1, at, row) for at, row in zip(addresses, written, strict=True)
        ],
    )
    estimate = SimpleNamespace(estimate=SimpleNamespace(tensor="y", index=0))
    monkeypatch.setattr(
        delegate_results, "CommandOrigins", lambda record: SimpleNamespace(find=lambda offset, indexed: estimate)
    )
    operator: Any = SimpleNamespace(index=0, result=SimpleNamespace(name="y", shape=rows.shape))
    execution: Any = SimpleNamespace(inputs=())
    record: Any = None
    pieces = delegate_results._written_pieces(delegate, execution, record, [operator])
    assert any(np.array_equal(array, rows) for array in delegate_results._concatenate_pieces(pieces[0], rows.shape))


# Limits of ExecuTorch's tools.


class Returning(nn.Module):
    """Returns a tensor and another value."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.more = nn.Linear(8, 8), more

    def forward(self, x: Tensor) -> Any:
        """A tensor and the other."""
        y = self.layer(x)
        return (y, y.half() if self.more is torch.half else self.more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (None, "output 1 of 'forward' is of the type Null"),  # the runtime ends the process
        (3, "output 1 of 'forward' is of the type Int"),
        (torch.half, "computes with torch.float16 outside of delegates"),
    ],
)
def test_what_an_etdump_cannot_hold_is_refused(more: Any, message: str, tmp_path: Path) -> None:
    result = _exported(Returning(more), FP, vectors())
    with pytest.raises(ValueError, match=message):
        result.inspector(*vectors()[0])
    with pytest.raises(ValueError, match=message):
        result.etdump(*vectors()[0], path=tmp_path / "model.etdp")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("more", "message"), [(None, "of input None"), (3, "output in Tensor type")])
def test_results_that_cannot_be_bundled(more: Any, message: str, tmp_path: Path) -> None:
    result = _exported(Returning(more), FP, vectors())
    with pytest.raises(ValueError, match=f"bundled programs cannot hold these samples: .*{message}"):
        result.save(tmp_path / "model.pte", bundled_samples=vectors())
    assert not list(tmp_path.iterdir())


def test_special_module_names_and_number_inputs() -> None:
    names = ["a b", "</script>", "ünï"]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

        def forward(self, x: Tensor, factor: int) -> Tensor:
            for layer in self.layers.values():
                x = layer(x) * factor
            return x

    result = _exported(Named(), FP, [(x, 2) for (x,) in vectors()])
    assert _worst(_numeric_gaps(result.inspector(*vectors()[0], 2))) > _FLOAT_SQNR


class Halves(nn.Module):
    """Computes the second half of a concatenation before the first."""

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return torch.cat([x, -x], 1)


@pytest.mark.parametrize("kind", [U55, U85], ids=lambda kind: kind.name)
def test_concat_operands_that_are_written_in_reverse_order(kind: ArmRecipeType) -> None:
    result = _exported(Halves(), kind, images())
    assert _worst(_numeric_gaps(result.inspector(*images()[0]))) > _INT8_SQNR
