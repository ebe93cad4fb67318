"""Tests of the TOSA conformance generator (tosa-tools), generated one at a time in this process.

The generator's command line tool writes all tests of a configuration entry, starts a process for each batch and runs
the reference model on all tests. This module selects the same tests, and generates each only when it is used. Names,
flatbuffers and inputs are those of the tool.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from arm_backend_core.targets.target import EXTENSIONS
from arm_backend_core.tosa.operators import OPERATORS

Array = np.ndarray[Any, Any]
#: TOSA versions of the tests. Only features of the draft of 1.1 use the second one.
VERSIONS = ("1.0.1", "1.1.0")
_DRAFT_EXTENSIONS = ("mxfp",)
_PROFILES = ("tosa-pro-int", "tosa-pro-fp")
_PREFIX = "tosa-ext-"
#: Operators with nested graphs. They have no record; a pass emits them.
CONTROL_FLOW = ("COND_IF", "WHILE_LOOP")


@dataclass(frozen=True)
class GeneratedTest:
    """A generated test.

    Attributes:
        name: name of the test.
        flatbuffer: the TOSA graph.
        fails: the ERROR_IF or REQUIRE statement that the test violates; None if the test expects success.
        profiles: profiles that support the test; one of them is needed.
        extensions: extensions that the test requires; all are needed.
        inputs: arrays in the order of the graph's inputs.
    """

    name: str
    flatbuffer: bytes
    inputs: tuple[Array, ...]
    fails: str | None
    profiles: tuple[str, ...]
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A configuration entry: tests of one operator for some profiles or extensions.

    Attributes:
        operator: name of the operator in the configuration, for example ``conv2d``.
        kind: name of the operator in TOSA.
        group: name of the entry among the operator's entries.
        version: TOSA version.
    """

    operator: str
    kind: str
    group: str
    version: str

    def __str__(self) -> str:
        return f"{self.operator}/{self.group}@{self.version}"


@dataclass(frozen=True)
class SelectedTest:
    """A test that is selected but not generated yet.

    Attributes:
        name: name of the test.
        fails: as in ``GeneratedTest``.
        elements: number of elements of the largest operand.
    """

    name: str
    fails: str | None
    elements: int
    _generator: Any
    _test: Any

    def write(self) -> GeneratedTest | None:
        """Generate the test; None if the generator rejects its arguments."""
        from schemavalidation.schemavalidation import TestDescSchemaValidator

        test = self._test
        # The schema checks of the generator are disabled: five per test, each takes 0.1 s.
        unchecked = mock.patch.object(TestDescSchemaValidator, "validate_config")
        with unchecked, tempfile.TemporaryDirectory() as folder, _silence_generator():
            self._generator.basePath = folder
            arguments = (test.testOpName, self.name, test.dtype, test.error, test.shapeList, test.argsDict)
            if not self._generator.serializeTest(*arguments):
                return None
            return _read_test(Path(folder, test.testOpName, self.name), self.name, self.fails)


def _read_test(folder: Path, name: str, fails: str | None) -> GeneratedTest:
    from tosa_serializer.numpy_utils import load_npy

    description = json.loads((folder / "desc.json").read_text())
    assert description["expected_failure"] == (fails is not None), name
    requirements, tensors = (
        description["test_requirements"],
        description["meta"].get("data_gen", {"tensors": {}})["tensors"],
    )
    inputs = []
    for tensor, file in zip(description["ifm_name"], description["ifm_file"], strict=True):
        stored = folder / file
        known = tensor in tensors
        inputs.append(load_npy(str(stored), tensors[tensor]["data_type"]) if known else np.load(stored))
    extensions = [extension.removeprefix(_PREFIX) for extension in requirements.get("extensions_required", ())]
    profiles = [profile.removeprefix("tosa-pro-").upper() for profile in requirements["profiles_supported"]]
    flatbuffer = (folder / description["tosa_file"]).read_bytes()
    return GeneratedTest(name, flatbuffer, tuple(inputs), fails, tuple(profiles), tuple(extensions))


@cache
def _configuration() -> tuple[Path, dict[str, Any]]:
    from conformance import tosa_verif_conformance_generator as command

    path = Path(command.__file__).with_name("cts-config_v1.0.json")
    return path, {name: entry for name, entry in json.loads(path.read_text()).items() if name != "$comment"}


@cache
def _find_generator_library() -> str:
    from conformance import model_files

    model = model_files.find_tosa_file(model_files.TosaFileType.REF_MODEL, None, False)
    return str(model_files.find_tosa_file(model_files.TosaFileType.GENERATE_LIBRARY, model))


@contextlib.contextmanager
def _silence_generator() -> Iterator[None]:
    """Suppress the generator's output: it prints skipped tests, and logs them as errors."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def entries() -> list[Entry]:
    """List the entries of all operators that the compiler emits, for the profiles and extensions that it supports."""
    kinds = {*OPERATORS, *CONTROL_FLOW}
    found = []
    for version in VERSIONS:
        supported = _supported_features(version)
        draft_features = {_PREFIX + extension for extension in _DRAFT_EXTENSIONS}
        for operator, operator_config in sorted(_configuration()[1].items()):
            kind = operator.upper()
            if kind not in kinds or not _is_in_version(version, operator_config):
                continue
            for group, group_config in operator_config["generation"].items():
                any_of, all_of = group_config.get("supports_any", []), group_config.get("supports_all", [])
                if (
                    not supported.issuperset(all_of)
                    or (any_of and supported.isdisjoint(any_of))
                    or not _is_in_version(version, group_config)
                ):
                    continue
                if version == VERSIONS[0] or draft_features.intersection(all_of):
                    found.append(Entry(operator, kind, group, version))
    return found


def _supported_features(version: str) -> set[str]:
    extensions = [x for x in EXTENSIONS if x not in _DRAFT_EXTENSIONS or version != VERSIONS[0]]
    return {*_PROFILES, *(_PREFIX + extension for extension in extensions)}


def _is_in_version(version: str, config: dict[str, Any]) -> bool:
    from conformance.tosa_verif_conformance_generator import in_version
    from semver import Version

    with _silence_generator():
        return bool(in_version(Version.parse(version), config))


def batch_arguments(entry: Entry) -> list[list[str]]:
    """List the generator's arguments for each batch of an entry. The last batch has the ERROR_IF tests, if any."""
    group_config = _configuration()[1][entry.operator]["generation"][entry.group]
    found = [["--test-type", "positive", *arguments] for arguments in group_config["generator_args"]]
    if group_config.get("no_negative_tests"):
        return found
    types: dict[str, None] = {}
    for arguments in group_config["generator_args"]:
        option = ""
        for argument in arguments:
            if argument.startswith("--"):
                option = argument
            elif option == "--target-dtype":
                types[argument] = None
    negative = ["--test-type", "negative", "--tensor-dim-range", group_config.get("negative_dim_range", "1,16")]
    return [*found, negative + [part for name in types for part in ("--target-dtype", name)]]


def list_tests(entry: Entry, arguments: Sequence[str]) -> list[SelectedTest]:
    """List the tests of one batch that the configuration selects."""
    import generator.tosa_test_select as select
    import generator.tosa_verif_build_tests as build
    from semver import Version

    path, configuration = _configuration()
    operator_config = configuration[entry.operator]
    criteria = operator_config["generation"][entry.group].get("selector", "default")
    supported = sorted(_supported_features(entry.version))
    options = ["--generate-lib-path", _find_generator_library(), "--tosa-version", entry.version]
    options += ["--test-selection-config", str(path), "--test-selection-criteria", criteria]
    options += ["--profile", *_PROFILES, "--extension", *(name for name in supported if name.startswith(_PREFIX))]
    options += ["--random-const-inputs"] * ("random_const_inputs" in operator_config.get("support_for", []))
    with _silence_generator():
        args = build.parseArgs([*options, *arguments])
        source = _test_generator(args, Version.parse(entry.version))
        tests = select.TestList(configuration, selectionCriteria=criteria)
        pattern = re.compile(operator_config.get("gen_filter", f"^{entry.operator}$"))
        for name in source.TOSA_OP_LIST:
            if pattern.match(source.getOperatorNameStr(name)):
                for test in _generate_tests(source, name, args):
                    tests.add(test)
        selected = tests.select(
            rng=source.testSelect_rng, profiles_chosen=args.profile, extensions_chosen=args.extension
        )
    return [
        SelectedTest(str(test), test.error, max((prod(map(int, x)) for x in test.shapeList), default=0), source, test)
        for test in selected
    ]


def _test_generator(args: Any, version: Any) -> Any:
    """Create a generator with its own operator table, because it writes kernel sizes into the table of its class."""
    from generator.tosa_test_gen import TosaTestGen

    with mock.patch.object(TosaTestGen, "TOSA_OP_LIST", copy.deepcopy(TosaTestGen.TOSA_OP_LIST)):
        source = TosaTestGen(args, version)
        source.TOSA_OP_LIST = TosaTestGen.TOSA_OP_LIST
    return source


def _generate_tests(source: Any, name: Any, args: Any) -> Iterator[Any]:
    from generator.tosa_test_select import Test

    filters = {"shapeFilter": args.target_shapes, "rankFilter": args.target_ranks, "dtypeFilter": args.target_dtypes}
    for op, text, dtype, error, shapes, arguments in source.genOpTestList(name, **filters, testType=args.test_type):
        yield Test(source.getOperatorNameStr(op), text, dtype, error, shapes, arguments, op)
