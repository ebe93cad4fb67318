"""Damaged programs and payloads, and those of another export or target, end in errors that name the cause.

Programs that might crash the runtime run in a child process.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ProgramError, RunError, export, load
from arm_recipes.runtime.errors import PayloadError
from tests.runtime import child_processes, pte_programs
from tests.runtime.child_processes import run_in_child, run_programs
from tests.runtime.host_programs import (
    MIXED,
    export_methods,
    export_mixed,
    export_small,
    export_without_recipe,
    remove_checksums,
    remove_file_checksum,
)
from tests.small_models import images, vectors

#: The tests run in one xdist worker, so that they share worker processes and exported programs.
pytestmark = pytest.mark.xdist_group("child_processes")

FP, INT8, VGF = ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8
U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
DAMAGED = r"^(truncated|damaged|not an ExecuTorch program)"


def _flip_bit(data: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


def _random_flips(data: bytes, count: int, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """Copies of ``data`` with 1 to 8 flipped bits in the bytes from ``first`` to ``last``."""
    numbers = random.Random(len(data))
    for _ in range(count):
        damaged = bytearray(data)
        for _ in range(numbers.choice((1, 1, 2, 8))):
            damaged[numbers.randrange(first, len(data) if last is None else last)] ^= 1 << numbers.randrange(8)
        if damaged != data:
            yield bytes(damaged)


# Programs with a checksum of the whole file, as arm_recipes exports them.


@pytest.mark.parametrize("recipe", [INT8, VGF, U55], ids=lambda recipe: recipe.name)
def test_every_flip_is_found(recipe: ArmRecipeType) -> None:
    data = export_small(recipe).buffer
    load(data)
    at_each_byte = (_flip_bit(data, at, at % 8) for at in range(len(data)))
    for damaged in itertools.chain(at_each_byte, _random_flips(data, 300)):
        with pytest.raises(ProgramError, match=DAMAGED):
            load(damaged)


def test_every_truncation_is_refused() -> None:
    data = export_small(INT8).buffer
    for length in [*range(0, len(data), 7), *range(len(data) - 64, len(data))]:
        with pytest.raises(ProgramError, match=DAMAGED):
            load(data[:length])


@pytest.mark.parametrize("tail", [b"\0", b"more", bytes(4096)])
def test_trailing_bytes_are_refused(tail: bytes) -> None:
    with pytest.raises(ProgramError, match="damaged: its CRC-32 is not the one recorded at export; export or copy the"):
        load(export_small(INT8).buffer + tail)


def test_checksum_of_another_program_is_refused() -> None:
    ours, other = export_small(INT8).buffer, export_small(FP).buffer
    checksum = re.compile(rb'(?<={"crc32": ")[0-9a-f]{8}')
    (mine,), (theirs,) = checksum.findall(ours), checksum.findall(other)
    with pytest.raises(ProgramError, match="CRC-32"):
        load(ours.replace(mine, theirs))


# Without the checksum, the runtime reads damaged programs. It checks most of the fields that it reads.


@pytest.mark.parametrize("name", ["one delegate", "many tensors", "ExecuTorch's own export"])
def test_flips_without_a_checksum(name: str) -> None:
    """At most 5% of the damaged programs crash the runtime or return other numbers. The checksum prevents those."""
    data, tensors = {
        "one delegate": (remove_file_checksum(export_small(INT8).buffer), images(1)[0]),
        "many tensors": (remove_file_checksum(export_mixed(FP).buffer), MIXED),
        "ExecuTorch's own export": (export_without_recipe(INT8), images(1)[0]),
    }[name]
    expected = [output.numpy() for output in load(data).execute(*tensors)]
    damaged = list(_random_flips(data, 400))
    kinds: Counter[str] = Counter()
    for outcome in run_programs(damaged, *tensors):
        if isinstance(outcome, str):
            kinds[re.split("[: ]", outcome)[0]] += 1
        else:
            kinds["same" if all(map(np.array_equal, outcome, expected)) else "other numbers"] += 1
    assert set(kinds) <= {"same", "other numbers", "ProgramError", "PayloadError", "RunError", "ValueError", "crash"}
    assert sum(kinds.values()) == len(damaged)
    assert kinds["crash"] + kinds["other numbers"] <= len(damaged) // 20, kinds
    assert min(kinds["PayloadError"], kinds["ProgramError"], kinds["RunError"]) > 20, kinds


def test_truncated_program_without_checksum_is_refused() -> None:
    data = export_without_recipe(INT8)
    for length in range(0, len(data), 11):
        with pytest.raises((ProgramError, PayloadError, RunError)):
            load(data[:length]).execute(*images(1)[0])


@pytest.mark.parametrize("field", [12, 16, 24, 32])
@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_damaged_header_field_without_checksum_is_refused_or_harmless(field: int, value: int) -> None:
    data = bytearray(remove_file_checksum(export_small(INT8).buffer))
    assert data[8:12] == b"eh00"
    layout = "<I" if field == 12 else "<Q"
    struct.pack_into(layout, data, field, value & (0xFFFFFFFF if field == 12 else -1))
    (outcome,) = run_programs([bytes(data)], *images(1)[0])
    if isinstance(outcome, str):
        assert outcome.startswith(
            ("ProgramError: truncated", "ProgramError: damaged", "RunError: ExecuTorch's runtime")
        )
    else:  # the field locates the segments; this program has only that of the names
        assert field != 16
        assert np.array_equal(outcome[0], load(export_small(INT8).buffer).execute(*images(1)[0])[0].numpy())


# Payloads.


def _payload_range(program: bytes) -> tuple[int, int]:
    """Byte range of the payload of the only delegate."""
    (delegate,) = load(program).content.methods["forward"].delegates
    start = program.index(bytes(delegate.data))
    return start, start + len(delegate.data)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [(INT8, "TOSABackend"), (VGF, "VgfBackend"), (U55, "EthosUBackend")],
    ids=["TOSA", "VGF", "NPU"],
)
def test_damaged_payload_with_checksum_is_refused(recipe: ArmRecipeType, backend: str) -> None:
    program = remove_file_checksum(export_small(recipe).buffer)
    first, last = _payload_range(program)
    message = rf"'forward' cannot be run: a payload of {backend} \([\d,]+ bytes\) is damaged: its CRC-32 is not the"
    for damaged in _random_flips(program, 100, first, last):
        with pytest.raises(PayloadError, match=message):
            load(damaged).execute(*images(1)[0])


def test_damaged_tosa_payload_without_checksum_does_not_crash_this_process() -> None:
    """The reference model, which may crash, runs in another process."""
    program = remove_checksums(export_small(INT8).buffer)
    first, last = _payload_range(program)
    (x,) = images(1)[0]
    kinds: Counter[str] = Counter()
    for damaged in (_flip_bit(program, first + 4, 0), *_random_flips(program, 12, first, last)):
        try:
            assert load(damaged).execute(x)[0].shape == (1, 4)
            kinds["ran"] += 1  # flips in weights are as good as others
        except RunError as error:
            kinds[f"{type(error).__name__}{str(error).partition(':')[0]}"] += 1
    assert set(kinds) <= {"ran", "PayloadError'forward' cannot be run", "RunError'forward' cannot be run"}
    assert min(kinds["PayloadError'forward' cannot be run"], kinds["RunError'forward' cannot be run"]) > 0
    assert torch.equal(load(program).execute(x)[0], load(export_small(INT8).buffer).execute(x)[0])


def test_damaged_vgf_payload_without_checksum_is_refused() -> None:
    """Vulkan may crash, so that the runtime tries the payload in another process first."""
    program = remove_checksums(export_small(VGF).buffer)
    first, _ = _payload_range(program)
    spirv = program.index(struct.pack("<I", 0x07230203), first)
    (x,) = images(1)[0]
    wrong = {
        "not a VGF file": _flip_bit(program, first, 1),
        "a section of the VGF file ends at byte": program[: first + 16] + b"\xff" * 8 + program[first + 24 :],
        "cannot be run: ": program[: spirv + 20] + b"\xff" * 400 + program[spirv + 420 :],
    }
    for reason, damaged in wrong.items():
        with pytest.raises(PayloadError, match=rf"'forward' cannot be run: .*{reason}"):
            run_in_child(child_processes.run, damaged, x)


@pytest.mark.parametrize("recipe", [U55, U85], ids=lambda recipe: recipe.name)
def test_damaged_ethosu_payload_without_checksum_runs_or_is_refused(recipe: ArmRecipeType) -> None:
    """The emulator checks all commands and accesses, so that none crashes it."""
    program = remove_checksums(export_small(recipe).buffer)
    first, last = _payload_range(program)
    (x,) = images(1)[0]
    kinds: Counter[str] = Counter()
    for outcome in run_programs(list(_random_flips(program, 300, first, last)), x):
        if not isinstance(outcome, str):
            kinds["ran"] += 1  # flips in weights are as good as others
            continue
        kinds[outcome.partition(":")[0]] += 1
        pattern = (
            "block '[a-z_]+' at byte|In its command stream, .* at byte|the program passes tensor [01] of a delegate"
        )
        assert re.search(pattern, outcome), outcome
    assert set(kinds) <= {"ran", "PayloadError", "RunError"}
    assert min(kinds["ran"], kinds["PayloadError"]) > 20, kinds


def test_payload_of_another_backend_is_refused() -> None:
    """A VGF file in place of a TOSA graph, and the reverse."""
    (x,) = images(1)[0]
    tosa = remove_checksums(export_small(INT8).buffer)
    first, last = _payload_range(tosa)
    vgf = b"VGF1" + bytes(last - first - 4)
    with pytest.raises(PayloadError, match=r"not a TOSA flatbuffer \(magic b'.*', expected b'TOSA'\)"):
        load(tosa[:first] + vgf + tosa[last:]).execute(x)
    program = remove_checksums(export_small(VGF).buffer)
    first, last = _payload_range(program)
    with pytest.raises(PayloadError, match=r"not a VGF file \(magic b'.*', expected b'VGF1'\)"):
        load(program[:first] + bytes(4) + b"TOSA" + program[first + 8 :]).execute(x)


def test_payload_of_another_export_is_refused() -> None:
    """Program and payload are intact, but from different exports."""

    class Scale(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    shapes = {name: torch.ones(shape) for name, shape in {"one": (1, 6), "other": (1, 3)}.items()}
    recipe = ExportRecipe.get_recipe(FP)
    programs = {name: remove_checksums(export(Scale(2).eval(), recipe, [(x,)]).buffer) for name, x in shapes.items()}
    first, last = _payload_range(programs["one"])
    other_first, other_last = _payload_range(programs["other"])
    assert last - first == other_last - other_first
    mixed_up = programs["one"][:first] + programs["other"][other_first:other_last] + programs["one"][last:]
    with pytest.raises(
        RunError,
        match=r"TOSABackend: the program passes 'x' of a delegate as float32\[1, 6\] \(in memory order\), its payload "
        r"expects float32\[1, 3\]. They do not match: export the program again",
    ):
        load(mixed_up).execute(shapes["one"])


def test_ethosu_payload_of_another_export_is_refused() -> None:
    recipe = ExportRecipe.get_recipe(U55)
    programs = {}
    for width in (16, 32):  # the payloads have equal sizes and differ in the tensors only
        model = nn.ReLU().eval()
        programs[width] = remove_checksums(export(model, recipe, [(torch.randn(1, width),) for _ in range(2)]).buffer)
    (first, last), (other_first, other_last) = _payload_range(programs[32]), _payload_range(programs[16])
    assert last - first == other_last - other_first
    mixed_up = programs[32][:first] + programs[16][other_first:other_last] + programs[32][last:]
    with pytest.raises(
        RunError,
        match=r"EthosUBackend: the program passes tensor 0 of a delegate as 32 bytes of int8, its payload expects "
        r"\[16\] x 1 B, byte 0 of region 1\. They do not match: export the program again",
    ):
        load(mixed_up).execute(torch.ones(1, 32))


# Inputs with values for which a delegate has no result.


def test_embedding_index_out_of_range_is_an_error() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 4)

        def forward(self, index: Tensor) -> Tensor:
            return self.table(index)

    model, good = Lookup().eval(), torch.tensor([[3, 9]], dtype=torch.int32)
    program = load(export(model, ExportRecipe.get_recipe(FP), [(good,)]).buffer)
    for wrong in (10, -1, 10**6, 2**31 - 1, -(2**31)):
        with pytest.raises(RunError, match=r"'forward' cannot be run: the TOSA reference model (ended with|crashed)"):
            program.execute(torch.tensor([[wrong, 1]], dtype=torch.int32))
        assert torch.equal(program.execute(good)[0], model(good))


def test_integer_overflow_is_an_error() -> None:
    x, scale, count, mask = MIXED
    with pytest.raises(RunError, match=r"ended with TOSA_UNPREDICTABLE: .*overflow, 2147483647 \+ 1 exceeds"):
        load(export_mixed(FP).buffer).execute(x, scale, torch.full_like(count, 2**31 - 1), mask)


# Programs that this machine cannot run.


def test_backend_tosa_without_reference_program_is_an_error() -> None:
    program = load(export_small(U55).buffer)
    with pytest.raises(
        RunError, match=r"backend='tosa' needs the TOSA graphs of this program, and no reference program is loaded\."
    ):
        program.execute(*images(1)[0], backend="tosa")


def test_program_for_an_unknown_backend_is_refused() -> None:
    program = remove_file_checksum(export_small(INT8).buffer).replace(b"TOSABackend", b"MarsBackend")
    with pytest.raises(
        RunError,
        match=r"'forward' needs the backend MarsBackend, which is not registered .*; registered: .*TOSABackend",
    ):
        load(program).execute(*images(1)[0])


def test_method_with_unregistered_kernels_is_refused() -> None:
    """The other methods of the program still run."""

    class Neighbour(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nextafter(x * 2, x) + 1

    models = {"usual": Neighbour().eval(), "twice": nn.Linear(8, 4).eval()}
    recipe = ExportRecipe.get_recipe(FP)
    program = load(export(models, recipe, dict.fromkeys(models, vectors(1))).buffer)
    with pytest.raises(
        RunError, match=r"'usual' needs kernels .* not registered .*: aten::nextafter\.\w+\. Load the library"
    ):
        program.execute(*vectors(1)[0], method="usual")
    assert program.execute(*vectors(1)[0], method="twice")[0].shape == (1, 4)


def test_constant_methods_are_not_among_the_methods() -> None:
    program = load(pte_programs.program("tosa"))
    assert program.methods == ("forward",)
    assert program.execute(*images(1)[0])[0].shape == (1, 4)


@pytest.mark.parametrize("data", [b"", b"ET12", bytes(64), b"PK\x03\x04" + bytes(100)])
def test_bytes_that_are_no_program_are_refused(data: bytes) -> None:
    with pytest.raises(ProgramError, match=DAMAGED):
        load(data)


def test_crash_of_a_child_process_is_reported() -> None:
    """The tests above rely on this."""
    with pytest.raises(child_processes.ChildDied, match="-11"):
        run_in_child(child_processes.crash)
    (outcome,) = run_programs([export_methods()], torch.ones(1, 9))
    assert outcome == "ValueError: no method 'forward'; the program has: between, first, second"
