"""Aliased buffers: tensors that share memory with a mutated buffer, within a program and across methods.

A program stores each buffer separately. If one buffer has several names, they are merged. Other overlaps are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.nodes import is_written
from arm_backend_core.program import (
    TensorIdentity,
    copy_program,
    mutated_buffers,
    shares_memory,
    store_of,
    tensor_identity,
)

_KIND_NAMES = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "tensor"}


@dataclass(frozen=True, eq=False)
class _ProgramTensor:
    """A parameter, buffer or constant of a method.

    Attributes:
        method: name of the method.
        name: name of the tensor in the program.
        kind: kind of the tensor in the program's signature.
        node: placeholder of the tensor.
        tensor: value of the tensor.
        identity: from ``tensor_identity``.
    """

    method: str
    name: str
    kind: InputKind
    node: Node
    tensor: Tensor
    identity: TensorIdentity

    @property
    def description(self) -> str:
        return f"{_KIND_NAMES[self.kind]} '{self.name}'"


def merge_buffer_aliases(program: ExportedProgram) -> ExportedProgram:
    """Replace aliases by the buffer: constants that are a buffer, and other names of a buffer that is mutated.

    A constant is an alias if, for example, a cache is both a buffer and a plain attribute of the model. Unused views of
    mutated buffers are removed. PyTorch cannot functionalize a program that contains such aliases or views.

    Returns:
        ``program`` itself if there is nothing to merge, else a copy.
    """
    replacements = _find_replacements(program)
    if not replacements:
        return program
    program = copy_program(program)
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = {str(spec.target): spec for spec in program.graph_signature.input_specs if spec.kind in _KIND_NAMES}
    for name, buffer in replacements.items():
        node = nodes[specs[name].arg.name]
        if buffer is not None:
            node.replace_all_uses_with(nodes[specs[buffer].arg.name])
        program.graph.erase_node(node)
        program.graph_signature.input_specs.remove(specs[name])
        del store_of(program, name)[name]
    program.graph_module.recompile()
    return program


def _find_replacements(program: ExportedProgram) -> dict[str, str | None]:
    """Find the tensors to remove.

    Returns:
        for example ``{"alias": "cache", "view": None}``: the buffer "cache" replaces "alias", and "view" is unused.
    """
    tensors = list(_iterate_tensors("", program))
    mutated = [each for each in tensors if is_written(each.node)]
    buffers: dict[TensorIdentity, str] = {}
    for each in tensors:
        if each.kind is InputKind.BUFFER:
            buffers.setdefault(each.identity, each.name)
    identities = {each.identity for each in mutated}
    replacements: dict[str, str | None] = {}
    for each in tensors:
        buffer = buffers.get(each.identity, each.name)
        if each.identity in identities or each.kind is InputKind.CONSTANT_TENSOR:
            if buffer != each.name:
                replacements[each.name] = buffer
        elif not each.node.users and any(shares_memory(each.tensor, other.tensor) for other in mutated):
            replacements[each.name] = None
    return replacements


def mark_read_state_as_mutated(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Mark buffers that one method mutates as mutated in the methods that only read them.

    A method that only reads a buffer then returns the unchanged value as the buffer's new value. Without the mark, the
    program would store this method's buffer as a constant, with the value at export.

    Args:
        programs: programs by method name. They must hold the modules' own tensors, not copies.

    Returns:
        The programs by method name. A program that only reads a buffer that another method writes is replaced by a
        copy.
    """
    mutated = {method: mutated_buffers(program) for method, program in programs.items()}
    tensors = {method: list(_iterate_tensors(method, program)) for method, program in programs.items()}
    state = {each.identity for method in programs for each in tensors[method] if each.name in mutated[method]}
    result = dict(programs)
    for method, program in programs.items():
        read = [each for each in tensors[method] if each.identity in state and each.node.users]
        names = {each.name: each.node.name for each in read if each.name not in mutated[method]}
        if names:
            result[method] = _add_identity_mutations(copy_program(program), names)
    return result


def _add_identity_mutations(program: ExportedProgram, names: Mapping[str, str]) -> ExportedProgram:
    """Add a mutation of each buffer in ``names``. The new value is the value that the method read.

    Args:
        program: the program, which is edited.
        names: name of the placeholder of each buffer, by the buffer's name.

    Returns:
        ``program``.
    """
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    signature, output = program.graph_signature, program.graph.output_node()
    for spec in signature.input_specs:
        if spec.target in names:
            spec.kind, spec.persistent = InputKind.BUFFER, spec.persistent is not False
    count = len(signature.buffers_to_mutate)
    signature.output_specs[count:count] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node), name) for name, node in names.items()
    ]
    values = list(pytree.tree_leaves(output.args[0]))
    values[count:count] = [nodes[node] for node in names.values()]
    output.args = (tuple(values),)
    program.graph_module.recompile()
    program.validate()
    return program


def describe_unshareable_buffer(programs: Mapping[str, ExportedProgram]) -> str | None:
    """Describe a mutated buffer that shares memory with another tensor in a way that a program cannot represent.

    Args:
        programs: programs by method name. They must hold the modules' own tensors, not copies.

    Returns:
        Description of the problem and its remedy; None if there is no such buffer.
    """
    tensors = [each for method, program in programs.items() for each in _iterate_tensors(method, program)]
    mutated = {method: mutated_buffers(program) for method, program in programs.items()}
    written = [each for each in tensors if each.name in mutated[each.method]]
    for buffer in written:
        for other in tensors:
            if other is buffer or not other.node.users:
                continue
            if other.identity == buffer.identity and other.method != buffer.method:
                continue
            if shares_memory(other.tensor, buffer.tensor):
                whose = "its" if other.method == buffer.method else "the"
                of = "" if other.method == buffer.method else f" of method '{other.method}'"
                return (
                    f"method '{buffer.method}' writes its {buffer.description}, which overlaps {whose} "
                    f"{other.description}{of} in memory: a program holds them separately, so the write would not "
                    "reach the other. Register the tensor that contains both under one name, and take views of it in "
                    "forward()"
                )
    return None


def _iterate_tensors(method: str, program: ExportedProgram) -> Iterator[_ProgramTensor]:
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind in _KIND_NAMES:
            name = str(spec.target)
            tensor = store_of(program, name)[name]
            yield _ProgramTensor(method, name, spec.kind, nodes[spec.arg.name], tensor, tensor_identity(tensor))
