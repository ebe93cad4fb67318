"""Search for a stage and a grid of patches with which a program fits the available SRAM.

A candidate is a stage (the first layers of a network, see ``patch_based_inference``) and a grid. A stage may end at
each image that is smaller than the results of all stages that end earlier. Candidates are compiled in ascending order
of recomputed work. Of the first two programs that fit, the one with fewer cycles by Vela's estimate is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from arm_backend_core.backends.payload import Payload
from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.memory_reduction.derived_specs import limit_arena, optimise_for_size
from arm_backend_core.memory_reduction.patch_based_inference import (
    PatchStage,
    count_recomputed_work,
    match_stage,
    rewrite_to_patches,
    split_image,
)
from arm_backend_core.memory_reduction.vela_configuration_search import (
    CompiledCandidate,
    available_arena_bytes,
    try_compile,
)
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Value, extract_subgraph
from arm_backend_core.tosa.passes.pipeline import Pass, assert_serializable, run_last_passes
from arm_backend_core.tosa.serialize import serialize

#: Compiles a graph for a spec; None if Vela fails.
CompileGraph = Callable[[Graph, EthosUCompileSpec], Payload | None]
#: Grids that are tried, as (rows of patches, columns of patches).
_GRIDS = ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (3, 3), (4, 4))
#: Maximum recomputed work of a candidate, relative to the work of the graph.
_MAX_RECOMPUTED_WORK = 0.4
#: The search ends after it has compiled this many candidates, or found this many programs that fit the SRAM.
_MAX_CANDIDATES, _MAX_FITTING = 16, 2
#: A candidate that exceeds the SRAM by at most this factor is also optimized for size.
_NEARLY_FITS = 1.1


class PatchCandidate(NamedTuple):
    """A stage with its grid.

    Attributes:
        position: index of the operator that computes the result of the stage.
        grid: (rows of patches, columns of patches).
        recomputed_work: additional work on pixels that several patches compute, relative to the work of the graph.
    """

    position: int
    grid: tuple[int, int]
    recomputed_work: float


class PatchedProgram(NamedTuple):
    """A program whose first layers are computed in patches.

    Attributes:
        graph: its TOSA graph.
        program: the compiled program.
        description: the grid, the end of the stage and the recomputed work, for the report.
    """

    graph: Graph
    program: CompiledCandidate
    description: str


def copy_graph(graph: Graph) -> Graph:
    """Copy a graph. The copy shares the constants."""
    position = {op: i for i, op in enumerate(graph.ops)}
    return extract_subgraph([(x, x.name) for x in graph.inputs], graph.outputs, position.__getitem__)


def list_candidates(graph: Graph, available: int) -> list[PatchCandidate]:
    """List stages and grids that may fit ``available`` bytes, in ascending order of the recomputed work.

    A stage is omitted if its inputs and its result, which are in memory at the same time, together take ``available``
    bytes or more.
    """
    total, smallest = sum(op.work for op in graph.ops), None
    candidates = list[PatchCandidate]()
    for position, op in enumerate(graph.ops):
        stage = match_stage(graph, op.output) if _is_integer_image(op.output) else ""
        if isinstance(stage, str) or (smallest is not None and _bytes_of(op.output) >= smallest):
            continue
        smallest = _bytes_of(op.output)
        if smallest + sum(map(_bytes_of, stage.sources)) < available:
            candidates += _list_grids(stage, position, total)
    return sorted(candidates, key=lambda candidate: candidate.recomputed_work)


def _is_integer_image(value: Value) -> bool:
    """Whether a value is an image [N, H, W, C] of int8 or int16."""
    return value.dtype in (DType.INT8, DType.INT16) and value.rank == 4


def _bytes_of(value: Value) -> int:
    return value.size * value.dtype.bytes


def _list_grids(stage: PatchStage, position: int, total: int) -> Iterator[PatchCandidate]:
    for grid in _GRIDS:
        if grid[0] <= stage.result.shape[1] and grid[1] <= stage.result.shape[2]:
            recomputed_work = count_recomputed_work(stage, split_image(stage.result, *grid)) / total
            if recomputed_work <= _MAX_RECOMPUTED_WORK:
                yield PatchCandidate(position, grid, recomputed_work)


def make_graph_saving_pass(spec: ArmCompileSpec, alternatives_pass: Pass) -> tuple[Pass, list[Graph]]:
    """Wrap the pass that chooses alternatives, so that it saves a copy of its result if patches may be needed.

    Returns:
        The pass, and the list to which it appends the copy. The list stays empty if ``spec`` is not for an Ethos-U, has
        no SRAM budget, or does not have ``optimise="auto"``. In these cases, patches are not tried.
    """
    saved_graphs = list[Graph]()
    if not isinstance(spec, EthosUCompileSpec) or spec.sram_budget is None or spec.optimise != "auto":
        return alternatives_pass, saved_graphs

    def choose_and_save(graph: Graph, target: Target) -> None:
        alternatives_pass(graph, target)
        saved_graphs.append(copy_graph(graph))

    return choose_and_save, saved_graphs


def compile_in_patches(
    saved_graphs: Sequence[Graph], payload: Payload, spec: ArmCompileSpec, compile_options: dict[str, Any]
) -> PatchedProgram | None:
    """Compile with patches if the program exceeds the SRAM; None if it fits, no graph was saved, or no patches help.

    Args:
        saved_graphs: the list from ``make_graph_saving_pass``.
        payload: the program without patches.
        spec: the compile spec of the delegate.
        compile_options: arguments of ``compile_ethosu`` besides the flatbuffer and the spec.
    """
    if not saved_graphs or not isinstance(spec, EthosUCompileSpec) or not CompiledCandidate(payload, spec).exceeds_sram:
        return None

    def compile_graph(graph: Graph, derived: EthosUCompileSpec) -> Payload | None:
        return try_compile(derived, serialize(graph, target=spec.target), compile_options)

    return find_patches(saved_graphs[0], CompiledCandidate(payload, spec), compile_graph)


def find_patches(graph: Graph, smallest: CompiledCandidate, compile_graph: CompileGraph) -> PatchedProgram | None:
    """Find patches with which the program fits the available SRAM; None if there are none.

    Args:
        graph: the graph before the last passes.
        smallest: the smallest program without patches, and its compile spec. The program does not fit the SRAM.
        compile_graph: compiles a graph for a spec; None if Vela fails.
    """
    found = list[PatchedProgram]()
    for candidate in list_candidates(graph, available_arena_bytes(smallest))[:_MAX_CANDIDATES]:
        patched = _rewrite(graph, smallest.spec, candidate)
        program = None if patched is None else _compile_candidate(patched, smallest, compile_graph)
        if patched is not None and program is not None and not program.exceeds_sram:
            found.append(PatchedProgram(patched, program, _describe(graph, candidate)))
        if len(found) == _MAX_FITTING:
            break
    return min(found, key=lambda each: each.program.vela.total_cycles, default=None)


def _rewrite(graph: Graph, spec: EthosUCompileSpec, candidate: PatchCandidate) -> Graph | None:
    """Rewrite a copy of the graph to patches, and run the last passes. None if the target lacks an operator."""
    patched = copy_graph(graph)
    stage = match_stage(patched, patched.ops[candidate.position].output)
    assert isinstance(stage, PatchStage), "a copy of the graph has other stages"
    try:
        rewrite_to_patches(patched, spec.target, stage, split_image(stage.result, *candidate.grid))
    except Unsupported:
        return None
    run_last_passes(patched, spec.target)
    assert_serializable(patched, spec.target)
    return patched


def _compile_candidate(
    graph: Graph, smallest: CompiledCandidate, compile_graph: CompileGraph
) -> CompiledCandidate | None:
    """Compile with an arena limit. If the program nearly fits the SRAM, compile for size. None if Vela fails."""
    spec, available = smallest.spec, available_arena_bytes(smallest)
    figures = smallest.vela.performance or (smallest.vela.total_cycles, smallest.vela.sram_bytes)
    for derived in (limit_arena(spec, available), optimise_for_size(spec)):
        payload = compile_graph(graph, derived)
        if payload is None or payload.vela is None:
            return None
        estimates = replace(payload.vela, sram_limit=smallest.vela.sram_limit, performance=figures)
        program = CompiledCandidate(replace(payload, vela=estimates), derived)
        if not program.exceeds_sram or program.ram_bytes > _NEARLY_FITS * available:
            return program
    return program


def _describe(graph: Graph, candidate: PatchCandidate) -> str:
    op = graph.ops[candidate.position]
    place = (op.origin.module or op.origin.operator) if op.origin is not None else op.kind
    (rows, columns), repeated = candidate.grid, f"{candidate.recomputed_work:.1%} of the work"
    return f"computed in {rows} x {columns} patches up to '{place}', which repeats {repeated}"
