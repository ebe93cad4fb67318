"""The lowering part of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.partitioner import Partitioner
from executorch.export import LoweringRecipe


def lowering_recipe(
    partitioner: Partitioner, edge_manager_passes: list[Callable[[EdgeProgramManager], Any]]
) -> LoweringRecipe:
    """Delegate with ``partitioner``, then apply ``edge_manager_passes`` to what is left.

    The compile config is that of ExecuTorch's XNNPACK recipes: ``ExportRecipe.combine`` accepts both.
    """
    return LoweringRecipe(
        partitioners=[partitioner],
        edge_manager_transform_passes=edge_manager_passes,
        edge_compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
