"""Import graph of both packages. ``python -m tests.import_graph [ROOT]`` lists cycles and imports of higher layers.

All imports count: at module level, in functions, under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
CORE = "arm_backend_core"
RECIPES = "arm_recipes"

LAYERS: Mapping[str, tuple[set[str], ...]] = {
    CORE: (
        {"errors", "disk_cache", "dtype", "format_count", "permutation", "qparams", "scalar_kind", "similar_names"}
        | {"nodes", "graph_edits", "workers", "program"},
        {"targets"},
        {"tosa"},
        {"backends", "compilation_log"},
        {"ops"},
        {"aten", "alternatives", "memory_reduction", "fusion", "insert_delegates"},
        {"quantization", "lowering", "bisect_failure"},
        {"selection", "cortex_m"},
        {"delegate"},
        {"recurrent"},
        {"partitioner"},
        {""},
    ),
    RECIPES: (
        {"_internal", "recipe_types", "passes"},
        {"runtime"},
        {"samples", "types"},
        {"recipe"},
        {"stages"},
        {"report"},
        {"pipeline"},
        {"provider"},
        {"comparison", "firmware", "devtools", "explore.sweep", "explore.advice"},
        {"result"},
        {"api"},
        {"qat", "explore"},
        {""},
        {"cli"},
        {"__main__"},
    ),
}
"""Modules and packages of each package, the lowest layer first; ``""`` is the package's own ``__init__``.

A module may import modules of its own layer or of lower ones."""


def list_sources(package: str, root: Path = ROOT) -> list[Path]:
    """List the files of a package, or the single file of a path with a suffix."""
    path = root / package
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file, without garbage collections, which would visit all nodes of all files many times."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a file below ``root``; for an ``__init__`` file, that of its package."""
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix(".__init__")


def list_imports(path: Path, root: Path = ROOT) -> set[str]:
    """List the modules that a file imports; an imported name that is no module counts as its module."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}:{node.lineno}: imports are absolute"
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if _is_module(name, root)}
            found |= modules if modules == names else modules | {node.module}
    return found


def _is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def package_imports(package: str, root: Path = ROOT) -> dict[str, set[str]]:
    """Map each module of a package to the modules of this package that it imports, by full names.

    An import of ``a.b.c`` also executes ``a.b``, unless the importing module is in ``a.b`` itself. It counts if ``a.b``
    imports anything.
    """
    graph = {}
    for path in list_sources(package, root):
        module = module_name(path, root)
        names = {name for name in list_imports(path, root) if f"{name}.".startswith(f"{package}.")}
        around = {
            parent
            for name in names
            for parent in _parents(name)
            if not f"{module}.".startswith(f"{parent}.")
            and list_imports(root.joinpath(*parent.split("."), "__init__.py"), root)
        }
        graph[module] = names | around
    return graph


def _parents(module: str) -> Iterator[str]:
    """Yield the packages that contain a module, except the outermost."""
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(2, len(parts)))


def find_cycles(package: str, root: Path = ROOT) -> list[list[str]]:
    """Find import cycles: groups of modules that import each other (strongly connected components)."""
    graph = networkx.DiGraph(
        (module, name) for module, names in package_imports(package, root).items() for name in names if name != module
    )
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def layer_entry(module: str) -> str:
    """Return the entry of ``LAYERS`` that a module belongs to: its own, or that of the innermost package around it.

    The package's own ``__init__`` is ``""``. A module that has no layer is its own unit.
    """
    package, _, path = module.partition(".")
    known = {name for layer in LAYERS[package] for name in layer}
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in prefixes if name in known), path)


def find_upward_imports(package: str, root: Path = ROOT) -> Iterator[str]:
    """Find imports of modules in a higher layer."""
    rank = {name: i for i, layer in enumerate(LAYERS[package]) for name in layer}
    for module, names in package_imports(package, root).items():
        for name in sorted(names):
            if rank[layer_entry(name)] > rank[layer_entry(module)]:
                yield f"{module} imports {name}"


def count_imports_in_functions(package: str, root: Path = ROOT) -> int:
    """Count the import statements of modules of both packages inside functions."""
    statements = {
        node
        for path in list_sources(package, root)
        for function in ast.walk(parse(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    return sum(any(name.split(".")[0] in LAYERS for name in _imported(node)) for node in statements)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def main(root: Path) -> int:
    """Print cycles and imports of higher layers. Returns 1 if there are any."""
    wrong = 0
    for package in LAYERS:
        groups = find_cycles(package, root)
        print(f"{package}: {len(groups)} cycles, {count_imports_in_functions(package, root)} imports in functions")
        for group in groups:
            print(f"  cycle of {len(group)}: {' '.join(name.removeprefix(f'{package}.') for name in group)}")
        wrong += len(groups)
        if root == ROOT:
            leading = list(find_upward_imports(package, root))
            print(f"{package}: {len(leading)} upward imports", *leading, sep="\n  ")
            wrong += len(leading)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT))
