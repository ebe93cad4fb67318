"""Exported programs for the tests of the ``.pte`` reader; each is exported once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, export
from tests.small_models import Small, Sorting, images, vectors

CONSTANTS = {"version": 3, "scale": 0.5, "ready": True, "label": "digits", "shape": [1, 28], "table": torch.ones(2, 3)}


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


def _tosa() -> bytes:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    return export(Small().eval(), recipe, images(), constant_methods=CONSTANTS).buffer


def _methods() -> bytes:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)
    models = {"encode": Small().eval(), "sort": Sorting().eval()}
    return export(models, recipe, {"encode": images(1), "sort": vectors(1)}).buffer


def _ethosu() -> bytes:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, quantized_io=True)
    return export(Small().eval(), recipe, images()).buffer


def _vgf() -> bytes:
    return export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.VGF_INT8), images()).buffer


def _xnnpack() -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    program = torch.export.export(nn.Linear(8, 4), vectors(1)[0])  # one layer: XNNPACK's passes take seconds for more
    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer


def _mutable_buffer() -> bytes:
    return to_edge(torch.export.export(Counter(), (torch.ones(1),))).to_executorch().buffer


def _segments() -> bytes:
    """Write a program with payloads after the flatbuffer (``extract_delegate_segments=True``) and named data."""
    return rewrite_program(
        program("methods"), named_data={"weights": bytes(range(200))}, extract_delegate_segments=True
    )


_MAKERS: dict[str, Callable[[], bytes]] = {
    "tosa": _tosa,
    "methods": _methods,
    "ethosu": _ethosu,
    "vgf": _vgf,
    "xnnpack": _xnnpack,
    "mutable_buffer": _mutable_buffer,
    "segments": _segments,
}
NAMES = tuple(_MAKERS)


@cache
def program(name: str) -> bytes:
    """Return the program of one of ``NAMES``."""
    return bytes(_MAKERS[name]())


def rewrite_program(
    data: bytes,
    *,
    named_data: dict[str, bytes] | None = None,
    payload: bytes | None = None,
    compile_specs: dict[str, bytes] | None = None,
    extract_delegate_segments: bool = False,
) -> bytes:
    """Rewrite a program with other named data, another payload of its first delegate, or other compile specs."""
    file = deserialize_pte_binary(data)
    # ExecuTorch leaves an empty segment in programs without segments, and would count offsets from its end.
    file.program.segments, file.program.constant_segment.offsets = [], []
    if payload is not None:
        file.program.backend_delegate_data[0].data = payload
    if compile_specs is not None:
        specs = [CompileSpec(key, value) for key, value in compile_specs.items()]
        file.program.execution_plan[0].delegates[0].compile_specs = specs
    store = NamedDataStore()
    for key, value in (named_data or {}).items():
        store.add_named_data(key, value)
    file.named_data = store.get_named_data_store_output()
    return bytes(serialize_pte_binary(file, extract_delegate_segments=extract_delegate_segments))
