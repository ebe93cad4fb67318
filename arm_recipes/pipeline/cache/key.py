"""Cache key of an export: a digest of captured graphs with weights, samples, recipe, and toolchain.

The Python code of the model is not part of the key. The captured graph represents it: every operator with its source
line, and every tensor. Therefore, the model must be captured to compute its key.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from executorch.exir.capture import ExecutorchBackendConfig
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from arm_backend_core.program import tensor_identity
from arm_recipes._internal.versions import TOOLS, version
from arm_recipes.pipeline.cache.digest import Digest, NotCacheable
from arm_recipes.recipe.recipe import NOT_SERIALIZABLE, ArmRecipe
from arm_recipes.samples.calibration import Calibration
from arm_recipes.samples.call_inputs import Inputs, InputSignature
from arm_recipes.samples.export_arguments import Examples, Model

#: Keys of ``node.meta`` whose values affect the program or its report.
_HASHED_META_KEYS = ("val", "stack_trace", "custom")
#: Environment variables that affect an export: strict checks of the compiler, and the path of the VGF model converter.
_ENVIRONMENT_VARIABLES = ("ARM_BACKEND_CORE_STRICT", "MODEL_CONVERTER_PATH", "MODEL_CONVERTER_LIB_DIR")


class DigestedCalibration(Calibration):
    """Calibration data that records a digest of its samples each time they are read completely.

    Attributes:
        digests: the recorded digests, each once. There are several if the samples differ each time they are read, or if
            methods with different batch sizes read a ``DataLoader``.
    """

    def __init__(self, source: Calibration) -> None:
        super().__init__(source)
        self._wrapped = source
        self.digests: set[str] = set()

    def read_all(self, input_signature: InputSignature) -> None:
        """Record the digest of the samples for a model with this input signature."""
        for _ in self._samples(input_signature):
            pass

    def _samples(self, input_signature: InputSignature | None) -> Iterator[Inputs]:
        digest = Digest()
        for sample in self._wrapped._samples(input_signature):
            digest.add_sample(sample)
            yield sample
        self.digests.add(digest.hexdigest())


def compute_cache_key(
    recipe: ArmRecipe,
    models: Mapping[str, Model],
    programs: Mapping[str, ExportedProgram],
    examples: Examples,
    extra: Any,
) -> str:
    """The cache key of an export.

    Args:
        recipe: the recipe.
        models: model of each method.
        programs: captured model of each method.
        examples: samples of each method.
        extra: other arguments that affect the program or its report.

    Raises:
        NotCacheable: the content of an object cannot be determined; the message names the object.
    """
    digest = Digest()
    digest.add(toolchain())
    _add_recipe(digest, recipe)
    tensor_numbers: dict[Any, int] = {}
    for method, program in programs.items():
        digest.add(method)
        _add_program(digest, program, tensor_numbers)
    digest.add(_module_identities(models))
    for method, samples in examples.items():
        digest.add((method, len(samples)))
        for sample in samples:
            digest.add_sample(sample)
    digest.add(extra)
    return digest.hexdigest()


def toolchain() -> dict[str, Any]:
    """Return what affects every program and report besides model, samples and recipe.

    That is the sources of this package, the versions of tools, the platform, and environment variables.
    """
    variables = {name: os.environ.get(name) for name in _ENVIRONMENT_VARIABLES}
    converter = Path(variables["MODEL_CONVERTER_PATH"] or "")
    converter_stamp = (converter.stat().st_mtime_ns, converter.stat().st_size) if converter.is_file() else None
    tools = {name: version(name) for name in (*TOOLS, "numpy", "flatbuffers")}
    return {
        "sources": source_digest(),
        "tools": tools,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "variables": variables,
        "converter": converter_stamp,
        "default": torch.get_default_dtype(),
    }


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Digest of all Python files of this package and of the compiler core."""
    import arm_backend_core

    return digest_of_sources([Path(__file__).parents[2], Path(arm_backend_core.__file__).parent])


def digest_of_sources(packages: Iterable[Path]) -> str:
    """Digest of names and contents of all Python files in the folders ``packages`` and their subfolders."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package.parent)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _add_recipe(digest: Digest, recipe: ArmRecipe) -> None:
    """Add a recipe in its current state: its quantizer may have been modified after ``get_recipe``."""
    digest.add(recipe.to_dict())
    for name, value in vars(recipe).items():
        if name == "options":
            digest.add({key: item for key, item in value.items() if key not in NOT_SERIALIZABLE})
        elif name != "quantization_recipe" or value is None:
            digest.add((name, _normalize_config(value) if isinstance(value, ExecutorchBackendConfig) else value))
        else:
            digest.add({key: None if isinstance(item, Calibration) else item for key, item in vars(value).items()})


def _normalize_config(config: ExecutorchBackendConfig) -> ExecutorchBackendConfig:
    """Copy a configuration, and set the field of its memory planning pass that ExecuTorch sets during an export.

    All exports of a process share the pass object. Without this copy, the cache key would depend on earlier exports.
    """
    config, name = copy.copy(config), "enable_non_cpu_memory_planning"
    if hasattr(config.memory_planning_pass, name):
        config.memory_planning_pass = copy.copy(config.memory_planning_pass)
        setattr(config.memory_planning_pass, name, getattr(config, name))
    return config


def _module_identities(models: Mapping[str, Model]) -> list[tuple[str, str, int]]:
    """Return (method, path, number) of each module. A module that several methods share has one number."""
    numbers: dict[int, int] = {}
    modules = ((method, model) for method, model in models.items() if isinstance(model, torch.nn.Module))
    return [
        (method, path, numbers.setdefault(id(module), len(numbers)))
        for method, model in modules
        for path, module in model.named_modules(remove_duplicate=False)
    ]


def _add_program(digest: Digest, program: ExportedProgram, tensor_numbers: dict[Any, int]) -> None:
    """Add a program to the digest, and its new tensors to ``tensor_numbers``: ``{tensor identity: number}``."""
    _add_graph(digest, program.graph_module)
    signature = program.graph_signature
    digest.add([(spec.kind, type(spec.arg), vars(spec.arg), spec.target) for spec in signature.input_specs])
    digest.add([(spec.kind, type(spec.arg), vars(spec.arg), spec.target) for spec in signature.output_specs])
    digest.add((program.call_spec.in_spec, program.call_spec.out_spec))
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        if not isinstance(tensor, torch.Tensor):
            raise NotCacheable(f"'{name}' of the model, a {type(tensor).__name__}")
        # Hash a tensor with two names once. Its number records that the names share the tensor.
        identity = tensor_identity(tensor)
        digest.add((name, tensor_numbers.setdefault(identity, len(tensor_numbers))))
        if tensor_numbers[identity] == len(tensor_numbers) - 1:
            digest.add(tensor)


def _add_graph(digest: Digest, module: GraphModule) -> None:
    graph: Graph = module.graph
    for node in graph.nodes:
        digest.add((node.op, node.name, _target_identity(node), node.args, node.kwargs))
        digest.add([node.meta.get(name) for name in _HASHED_META_KEYS])
        digest.add(str(node.meta.get("nn_module_stack")))
        if node.op == "get_attr":
            attribute = attrgetter(str(node.target))(module)
            if isinstance(attribute, GraphModule):
                _add_graph(digest, attribute)
            else:
                digest.add(attribute)


def _target_identity(node: Node) -> Any:
    return node.target if callable(node.target) else str(node.target)
