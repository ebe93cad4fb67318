"""``python -m tests.verify``: the checks of a release, in parts.

All parts together take about three hours on two cores. The output of each part is kept in
``build/verify/<revision>``, and a part that has passed at a revision is not run again. A working tree with changes is
checked anew each time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.verify_counts import GRAPHS_PER_TARGET

ROOT = Path(__file__).resolve().parents[1]
#: Tests whose results depend on the release of Vela; the older release runs them too.
VELA_TESTS = (
    "tests/backends/test_ethosu.py",
    "tests/models",
    "tests/alternatives/test_size_or_speed.py",
    "tests/targets/test_vela_config.py",
    "tests/runtime/test_ethosu.py",
    "tests/runtime/test_ethosu_emulator.py",
    "tests/runtime/test_access_checker.py",
    "tests/backends/test_ethosu_weight_cache.py",
    "tests/alternatives/test_alternatives_pass.py",
    "tests/targets",
    "tests/tosa/test_hardware_passes.py",
    "tests/tosa/test_legality.py",
    "tests/tosa/test_vela_workarounds.py",
    "tests/ops/test_ops.py",
)
_NO_TESTS = 5  # pytest's exit code if it selects no test


@dataclass(frozen=True)
class Part:
    """A command. It passes with exit code 0, or with one of ``passing_codes``."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    passing_codes: tuple[int, ...] = (0,)


def list_parts(arguments: argparse.Namespace, revision: str) -> Iterator[Part]:
    """All parts; those that find faults in the least time come first."""
    workers, seed = str(arguments.workers), str(arguments.seed)
    pytest = (sys.executable, "-m", "pytest", "-n", workers, "-q")
    verify = (*pytest, "-m", "verify", "--verify")
    older = {"PYTHONPATH": str(ROOT / "build" / f"vela-{arguments.older_vela}")}
    yield Part("cpp", ("scripts/lint_cpp.sh", str(Path(sys.executable).parent), "vgf"))
    yield Part("cpp-suites", (*pytest, "--cpp-suites"))
    if arguments.golden:
        yield Part("golden", (sys.executable, "-m", "tests.golden", arguments.golden))
    for folder in sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))):
        if folder != "models":
            yield Part(f"tests-{folder}", (*verify, f"tests/{folder}"), passing_codes=(0, _NO_TESTS))
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    yield Part("tests-top", (*verify, *files))
    record = f"build/conformance/{revision}"
    yield Part("conformance", (sys.executable, "-m", "tests.tosa.conformance", "--record", record))
    yield Part("older-vela", (*pytest, *VELA_TESTS), older)
    yield Part("tests-models", (*verify, "tests/models"))
    yield Part("older-vela-models", (*verify, "tests/models"), older)
    fuzz = (sys.executable, "-m", "tests.fuzz", "--verify", "--seed", seed, "--workers", workers)
    for target in GRAPHS_PER_TARGET:
        yield Part(f"fuzz-{target}-{seed}", (*fuzz, "--target", target, "--record", f"build/fuzz/{revision}"))


def select_parts(parser: argparse.ArgumentParser, parts: Iterable[Part], names: Sequence[str] | None) -> list[Part]:
    """The parts whose names begin with one of ``names``; all without names. A name of no part is an error."""
    parts = list(parts)
    for name in names or ():
        if not any(part.name.startswith(name) for part in parts):
            parser.error(f"--parts: no part begins with {name!r}; there are: {', '.join(part.name for part in parts)}")
    return [part for part in parts if not names or part.name.startswith(tuple(names))]


def run_part(part: Part, folder: Path) -> str | None:
    """Run a part, unless its output says that it has passed.

    Returns:
        The last line of the output; None if the part failed.
    """
    passed, running = folder / f"{part.name}.passed", folder / f"{part.name}.log"
    if passed.exists():
        return _last_line(passed)
    with running.open("w") as output:
        environment = {**os.environ, **part.environment}
        done = subprocess.run(part.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode not in part.passing_codes:
        return None
    running.rename(passed)
    return _last_line(passed)


def _last_line(path: Path) -> str:
    return next((line for line in reversed(path.read_text().splitlines()) if line.strip()), "passed")


def describe_revision() -> str:
    """The commit, with "-dirty" if the working tree has changes."""
    command = ("git", "describe", "--always", "--dirty")
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def default_seed() -> int:
    """The number of commits: each release check draws random graphs that earlier ones have not checked."""
    command = ("git", "rev-list", "--count", "HEAD")
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Run the parts. The exit status is 1 if one failed or is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__)
    parser.add_argument("--parts", nargs="+", help="names or beginnings of names; by default all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no part after this time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--seed", type=int, default=default_seed(), help="of the random graphs; by default other graphs at each commit"
    )
    parser.add_argument("--older-vela", default="5.1", help="release in build/vela-<release>")
    parser.add_argument("--golden", help="folder of programs that others made, with their results")
    arguments = parser.parse_args()
    revision, started, left = describe_revision(), time.monotonic(), 0
    folder = ROOT / "build" / "verify" / revision
    folder.mkdir(parents=True, exist_ok=True)
    if revision.endswith("-dirty"):
        for path in folder.glob("*.passed"):
            path.unlink()
    for part in select_parts(parser, list_parts(arguments, revision), arguments.parts):
        if time.monotonic() - started > 60 * arguments.minutes:
            left += 1
            print(f"{part.name}: not started", flush=True)
            continue
        before = time.monotonic()
        line = run_part(part, folder)
        left += line is None
        text = line if line is not None else f"FAILED, see {folder / part.name}.log"
        print(f"{part.name}: {text} ({(time.monotonic() - before) / 60:.1f} min)", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
