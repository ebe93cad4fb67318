"""What an export is made of, as a key: captured graphs with their weights, samples, recipe, and all code that makes it.

A model's Python is not in it, as what it does is in the captured graph: with every operator, the line that it comes
from, and every tensor. So a key takes the time of a capture.
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

from arm_backend_core.program import identity
from arm_recipes._internal.versions import TOOLS, version
from arm_recipes.pipeline.cache.digest import Digest, NotCacheable
from arm_recipes.recipe.recipe import NOT_SERIALIZABLE, ArmRecipe
from arm_recipes.samples.calibration import Calibration
from arm_recipes.samples.inputs import Model
from arm_recipes.samples.sample import Inputs, Pattern

#: What an operator's metadata has that reaches the program or its report.
_META = ("val", "stack_trace", "custom")
#: Settings of ours from outside, which choose tools.
_VARIABLES = ("ARM_BACKEND_CORE_STRICT", "MODEL_CONVERTER_PATH", "MODEL_CONVERTER_LIB_DIR")


class ReadSamples(Calibration):
    """Calibration data that are told apart by what is read of them, each time that all are read.

    Attributes:
        digests: of what was read.
    """

    def __init__(self, source: Calibration) -> None:
        super().__init__(source)
        self._given = source
        self.digests: set[str] = set()

    def read_all(self, pattern: Pattern) -> None:
        """Read the samples that a model of this pattern is calibrated with, for the digest alone."""
        for _ in self._samples(pattern):
            pass

    def _samples(self, pattern: Pattern | None) -> Iterator[Inputs]:
        digest = Digest()
        for sample in self._given._samples(pattern):
            digest.add(tuple(sample))
            digest.add(sample.keywords)
            yield sample
        self.digests.add(digest.hexdigest())


def key_of(
    recipe: ArmRecipe,
    models: Mapping[str, Model],
    programs: Mapping[str, ExportedProgram],
    examples: Mapping[str, Any],
    more: Any,
) -> str:
    """The key of an export.

    Args:
        programs: the models, captured.
        more: what else decides what it makes.

    Raises:
        Unknown: something of it cannot be told; the message names it.
    """
    digest = Digest()
    digest.add(toolchain())
    _add_recipe(digest, recipe)
    places: dict[Any, int] = {}
    for method, program in programs.items():
        digest.add(method)
        _add_program(digest, program, places)
    digest.add(_module_identities(models))
    digest.add({method: list(samples) for method, samples in examples.items()})
    digest.add(more)
    return digest.hexdigest()


def toolchain() -> dict[str, Any]:
    """All that makes a program, but what it is given."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    converter = Path(variables["MODEL_CONVERTER_PATH"] or "")
    stamp = (converter.stat().st_mtime_ns, converter.stat().st_size) if converter.is_file() else None
    tools = {name: version(name) for name in (*TOOLS, "numpy", "flatbuffers")}
    return {
        "sources": sources(),
        "tools": tools,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "variables": variables,
        "converter": stamp,
        "default": torch.get_default_dtype(),
    }


@lru_cache(maxsize=1)
def sources() -> str:
    """Of this package and its core: a digest of all Python files."""
    import arm_backend_core

    return digest_of_sources([Path(__file__).parents[2], Path(arm_backend_core.__file__).parent])


def digest_of_sources(packages: Iterable[Path]) -> str:
    """Of all Python files below these folders, with their names."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package.parent)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _add_recipe(digest: Digest, recipe: ArmRecipe) -> None:
    """A recipe as it is now: whoever made it may have changed its quantizer since."""
    digest.add(recipe.to_dict())
    for name, value in vars(recipe).items():
        if name == "options":
            digest.add({key: item for key, item in value.items() if key not in NOT_SERIALIZABLE})
        elif name != "quantization_recipe" or value is None:
            digest.add((name, _normalize_config(value) if isinstance(value, ExecutorchBackendConfig) else value))
        else:
            digest.add({key: None if isinstance(item, Calibration) else item for key, item in vars(value).items()})


def _normalize_config(config: ExecutorchBackendConfig) -> ExecutorchBackendConfig:
    """With what ExecuTorch writes from it into its pass, which is one for all exports of a process."""
    config, name = copy.copy(config), "enable_non_cpu_memory_planning"
    if hasattr(config.memory_planning_pass, name):
        config.memory_planning_pass = copy.copy(config.memory_planning_pass)
        setattr(config.memory_planning_pass, name, getattr(config, name))
    return config


def _module_identities(models: Mapping[str, Model]) -> list[tuple[str, str, int]]:
    """Modules of each method by path and number: where methods have one in common, they get the same scales there."""
    numbers: dict[int, int] = {}
    modules = ((method, model) for method, model in models.items() if isinstance(model, torch.nn.Module))
    return [
        (method, path, numbers.setdefault(id(module), len(numbers)))
        for method, model in modules
        for path, module in model.named_modules(remove_duplicate=False)
    ]


def _add_program(digest: Digest, program: ExportedProgram, places: dict[Any, int]) -> None:
    """``places``: numbers of tensors that were met, in this program or another one."""
    _add_graph(digest, program.graph_module)
    signature = program.graph_signature
    digest.add([(spec.kind, type(spec.arg), vars(spec.arg), spec.target) for spec in signature.input_specs])
    digest.add([(spec.kind, type(spec.arg), vars(spec.arg), spec.target) for spec in signature.output_specs])
    digest.add((program.call_spec.in_spec, program.call_spec.out_spec))
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        if not isinstance(tensor, torch.Tensor):
            raise NotCacheable(f"'{name}' of the model, a {type(tensor).__name__}")
        # What is one tensor under two names is read once, and written as one.
        place = identity(tensor)
        digest.add((name, places.setdefault(place, len(places))))
        if places[place] == len(places) - 1:
            digest.add(tensor)


def _add_graph(digest: Digest, module: GraphModule) -> None:
    graph: Graph = module.graph
    for node in graph.nodes:
        digest.add((node.op, node.name, _target(node), node.args, node.kwargs))
        digest.add([node.meta.get(name) for name in _META])
        digest.add(str(node.meta.get("nn_module_stack")))
        if node.op == "get_attr":
            held = attrgetter(str(node.target))(module)
            if isinstance(held, GraphModule):
                _add_graph(digest, held)
            else:
                digest.add(held)


def _target(node: Node) -> Any:
    return node.target if callable(node.target) else str(node.target)
