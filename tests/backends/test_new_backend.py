"""A new backend: a compile spec, a compiler of the TOSA graph and a partitioner."""

from __future__ import annotations

import json

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from arm_backend_core.backends import registry as backends
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.registry import CompileRequest, compile_payload, register_backend
from arm_backend_core.partitioner import ArmPartitioner
from arm_backend_core.targets.compile_spec import ArmCompileSpec, TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes._internal.executorch_programs import lowered_modules


class ListingCompileSpec(ArmCompileSpec):
    """Compile spec of a backend whose payload is the list of the graph's operators."""

    backend_id = "ListingBackend"
    _output_format = "listing"

    def __init__(self) -> None:
        super().__init__(Target.from_tosa_spec("TOSA-1.0+FP"))


class ListingPartitioner(ArmPartitioner):
    spec_class = ListingCompileSpec


def _list_operators(spec: ListingCompileSpec, request: CompileRequest) -> Payload:
    assert request.graph is not None
    return Payload(json.dumps([op.kind for op in request.graph.ops]).encode())


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_COMPILERS", dict(backends._COMPILERS))
    register_backend(ListingCompileSpec, _list_operators)


@pytest.mark.usefixtures("registered")
def test_a_program_is_delegated_to_the_new_backend() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).relu()

    program = torch.export.export(Sum().eval(), (torch.ones(2, 3), torch.ones(2, 3)))
    partitioner = ListingPartitioner(ListingCompileSpec(), require_full_delegation=True)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    (delegate,) = lowered_modules(edge.exported_program().graph_module)
    assert delegate.backend_id == "ListingBackend"
    assert json.loads(delegate.processed_bytes) == ["ADD", "CLAMP"]
    assert {spec.key: spec.value for spec in delegate.compile_specs}["output_format"] == b"listing"


@pytest.mark.usefixtures("registered")
def test_a_subclass_has_the_backend_of_its_base_and_a_second_one_is_refused() -> None:
    class Derived(TosaCompileSpec):
        pass

    assert compile_payload(Derived(), b"graph", delegate="d", find_operator=lambda text: None).data == b"graph"
    with pytest.raises(ValueError, match="ListingCompileSpec has a backend already"):
        register_backend(ListingCompileSpec, _list_operators)


def test_a_compile_spec_without_a_backend_is_named() -> None:
    with pytest.raises(TypeError, match=r"no backend for ListingCompileSpec; call register_backend \(known: EthosU"):
        compile_payload(ListingCompileSpec(), b"", delegate="d", find_operator=lambda text: None)
