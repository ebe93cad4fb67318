"""The C++ and the Python reader of Ethos-U payloads: compiled, hand-written and damaged payloads.

Devices run the C++ reader. ``Reader.read`` passes each payload to the Python reader too, and compares the layouts and
messages.
"""

from __future__ import annotations

import ctypes
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tosa_serializer as ts

from arm_backend_core.backends.payload import pack_block_stream, pack_io_block
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_recipes.runtime.errors import PayloadError
from arm_recipes.runtime.ethosu_payload import EthosUPayload, EthosUTensor, read_payload_content
from tests.accelerators import ACCELERATORS
from tests.backends.tosa_programs import Flatbuffer, conv2d
from tests.runtime.cpp_build import RUNTIME, SANITIZERS, compile_cpp, run

_NAMES = ["vela_bin_stream", "cmd_data", "weight_data", "scratch_size", "inputs", "outputs", "vela_end_stream"]
_SOURCES = [RUNTIME / "payload/ethosu_payload.cpp", RUNTIME / "tests/payload/payload_abi.cpp"]
_TRUNCATED, _MISSING = 1, 5
_FUZZ = RUNTIME / "tests/fuzz"


class _Info(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("command_offset", "command_size", "weight_offset", "weight_size")),
        *((name, ctypes.c_uint64) for name in ("scratch_size", "fast_scratch_size")),
        *((name, ctypes.c_uint32) for name in ("input_count", "output_count", "product", "macs", "stream_kind")),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("shape", ctypes.c_int32 * 6),
        ("element_size", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("region", ctypes.c_int32),
    ]


Record = tuple[list[int], int, int, int]


@dataclass
class Reader:
    library: ctypes.CDLL

    def read(self, data: bytes, message_size: int = 256) -> tuple[int, str, _Info]:
        info, message = _Info(), ctypes.create_string_buffer(b"\x7f" * 256, 257)
        code = self.library.arm_payload_read(
            data, ctypes.c_uint64(len(data)), ctypes.byref(info), message, ctypes.c_uint64(message_size)
        )
        assert message.raw[message_size:256] == b"\x7f" * (256 - message_size)
        if message_size == 256:
            self._agree(data, message.value.decode() if code else None, info)
        return code, message.value.decode(), info

    def _agree(self, data: bytes, refusal: str | None, info: _Info) -> None:
        """Check that the Python reader returns the same layout or message."""
        if refusal is not None:
            with pytest.raises(PayloadError) as caught:
                read_payload_content(data)
            assert str(caught.value) == refusal
            return
        content = read_payload_content(data)
        cop2 = info.stream_kind == 2
        assert content.payload == EthosUPayload(
            product=info.product,
            macs=info.macs,
            stream="COP2" if cop2 else "COP1",
            command_bytes=info.command_size,
            weight_bytes=info.weight_size,
            scratch_bytes=info.scratch_size,
            fast_scratch_bytes=info.fast_scratch_size if cop2 else None,
            inputs=self._tensors(data, 0, info.input_count),
            outputs=self._tensors(data, 1, info.output_count),
        )
        assert content.commands == data[info.command_offset :][: info.command_size]
        assert content.weights == data[info.weight_offset :][: info.weight_size]

    def _tensors(self, data: bytes, side: int, count: int) -> tuple[EthosUTensor, ...]:
        records = [self.tensor(data, side, index) for index in range(count)]
        return tuple(EthosUTensor(tuple(record[0]), *record[1:]) for record in records if record is not None)

    def tensor(self, data: bytes, side: int, index: int) -> Record | None:
        tensor = _Tensor()
        code = self.library.arm_payload_tensor_at(
            data, ctypes.c_uint64(len(data)), side, ctypes.c_uint32(index), ctypes.byref(tensor)
        )
        return None if code else (list(tensor.shape), tensor.element_size, tensor.offset, tensor.region)

    def accept(self, data: bytes) -> _Info:
        code, message, info = self.read(data)
        assert code == 0, message
        return info

    def refuse(self, data: bytes, block: str, reason: str) -> None:
        code, message, info = self.read(data)
        assert code > 0
        assert re.search(rf"^block '{block}' at byte \d+: .*{reason}", message), message
        assert bytes(info) == bytes(ctypes.sizeof(_Info))
        assert self.tensor(data, 0, 0) is None


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    output = tmp_path_factory.mktemp("reader") / "reader.so"
    return Reader(
        ctypes.CDLL(str(compile_cpp(output, _SOURCES, ["-O2", "-fPIC", "-fvisibility=hidden"], link=["-shared"])))
    )


# --- hand-written payloads ---


def _cop1(commands: bytes = b"\0\0\xff\xff", config: int = 0x10001808, words: int | None = None) -> bytes:
    words = len(commands) // 4 if words is None else words
    length = (words >> 16) << 8 | (words & 0xFFFF) << 16
    return b"COP1" + struct.pack("<7I", 0x00100001, config, 0x10066001, 5, 5, 5, length | 2) + commands


def _tensor(offset: int, region: int = 1, shape: list[int] | None = None, size: int = 1) -> Record:
    return ([1, 1, 1, 1, 1, 4] if shape is None else shape, size, offset, region)


def _blocks(
    commands: bytes | None = None,
    scratch: int = 64,
    inputs: list[Record] | None = None,
    outputs: list[Record] | None = None,
) -> list[tuple[str, bytes]]:
    contents = [
        b"",
        _cop1() if commands is None else commands,
        b"\0",
        struct.pack("<I", scratch),
        pack_io_block([_tensor(0)] if inputs is None else inputs),
        pack_io_block([_tensor(16)] if outputs is None else outputs),
        b"",
    ]
    return list(zip(_NAMES, contents, strict=True))


def _payload(
    commands: bytes | None = None,
    scratch: int = 64,
    inputs: list[Record] | None = None,
    outputs: list[Record] | None = None,
) -> bytes:
    return pack_block_stream(_blocks(commands, scratch, inputs, outputs))


def _positions(data: bytes) -> dict[str, int]:
    """Name of each block -> offset of its header."""
    found, at = {}, 0
    while at < len(data):
        found[data[at : at + 16].rstrip(b"\0").decode()] = at
        (length,) = struct.unpack_from("<I", data, at + 16)
        at += 32 + (length + 15) // 16 * 16
    return found


def _put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# --- accepted payloads ---


def _compile(target: str, flatbuffer: bytes, *flags: str) -> bytes:
    spec = EthosUCompileSpec(target, extra_flags=list(flags))
    return compile_payload(spec, flatbuffer, delegate="delegate", find_operator=lambda text: None).data


def _check_against_blocks(reader: Reader, data: bytes) -> _Info:
    """Check the result of the reader against the fields of the blocks, which are decoded here."""
    info = reader.accept(data)
    at = _positions(data)
    assert info.command_offset == at["cmd_data"] + 32
    assert info.weight_offset == at["weight_data"] + 32
    lengths = [struct.unpack_from("<I", data, at[name] + 16)[0] for name in ("cmd_data", "weight_data")]
    assert [info.command_size, info.weight_size] == lengths
    assert info.scratch_size == struct.unpack_from("<I", data, at["scratch_size"] + 32)[0]
    for side, (name, count) in enumerate([("inputs", info.input_count), ("outputs", info.output_count)]):
        assert count == struct.unpack_from("<i", data, at[name] + 32)[0]
        for index in range(count):
            *shape, size, offset, region = struct.unpack_from("<9i", data, at[name] + 36 + 36 * index)
            assert reader.tensor(data, side, index) == (shape, size, offset, region)
        assert reader.tensor(data, side, count) is None
    return info


@pytest.mark.parametrize(
    "target",
    [
        "ethos-u55-32",
        "ethos-u55-128",
        "ethos-u65-256",
        "ethos-u65-512",
        "ethos-u85-128",
        "ethos-u85-256",
        "ethos-u85-2048",
    ],
)
def test_compiled_payload_is_accepted(reader: Reader, target: str) -> None:
    info = _check_against_blocks(reader, _compile(target, conv2d()))
    assert f"ethos-u{info.product}-{info.macs}" == target
    assert (info.stream_kind, info.input_count, info.output_count) == (1, 1, 1)


def _several_outputs() -> bytes:
    """Two inputs; a sum that is returned twice, and the sum of that and an input."""
    graph = Flatbuffer()
    attribute = ts.TosaSerializerAttribute()
    attribute.AddAttribute()
    x, y = (graph.input([4, 8], ts.DType.INT32) for _ in range(2))
    total = graph.op(ts.Op.ADD, [x, y], [4, 8], ts.DType.INT32, attribute)
    return graph.finish([total, graph.op(ts.Op.ADD, [total, y], [4, 8], ts.DType.INT32, attribute), total])


@pytest.mark.parametrize("target", ACCELERATORS)
def test_outputs_that_share_memory_are_accepted(reader: Reader, target: str) -> None:
    data = _compile(target, _several_outputs())
    info = _check_against_blocks(reader, data)
    assert (info.input_count, info.output_count) == (2, 3)
    assert reader.tensor(data, 1, 0) == reader.tensor(data, 1, 2)


@pytest.mark.parametrize(("flags", "regions"), [((), (1, 1)), (("--separate-io-regions",), (3, 4))])
def test_direct_drive_payload_is_accepted(reader: Reader, flags: tuple[str, ...], regions: tuple[int, int]) -> None:
    data = _compile("ethos-u85-256", _several_outputs(), "--cop-format=COP2", *flags)
    info = _check_against_blocks(reader, data)
    assert (info.stream_kind, info.product, info.macs) == (2, 85, 256)
    tensors = [reader.tensor(data, side, 0) for side in (0, 1)]
    assert [tensor and tensor[3] for tensor in tensors] == list(regions)


@pytest.mark.parametrize(
    "data",
    [
        _payload(),
        # Blocks in another order.
        pack_block_stream([_blocks()[0], *_blocks()[5:0:-1], _blocks()[6]]),
        # An output may take the memory of an input; an input that nothing reads has no memory.
        _payload(inputs=[_tensor(0), _tensor(-1)], outputs=[_tensor(2)]),
        _payload(inputs=[], outputs=[]),
        # At the limits of an offset and of a size.
        _payload(scratch=2**31 + 3, inputs=[_tensor(2**31 - 1)]),
        _payload(scratch=2**32 - 1, inputs=[_tensor(0, shape=[1, 1, 1, 1, 65535, 65537])], outputs=[]),
        _payload(_cop1(bytes(4 * 0x10001))),
    ],
)
def test_valid_hand_written_payload_is_accepted(reader: Reader, data: bytes) -> None:
    _check_against_blocks(reader, data)


def test_external_weights_have_no_bytes_in_the_payload(reader: Reader) -> None:
    assert reader.accept(_with_external_weights(b"w" * 64)).weight_size == 0


def test_unaligned_payload_is_accepted(reader: Reader) -> None:
    """The reader accepts any alignment; backends check the alignment that their NPU requires."""
    for shift in range(4):
        data = b"x" * shift + _payload()
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        info = _Info()
        size = ctypes.c_uint64(len(data) - shift)
        assert reader.library.arm_payload_read(ctypes.byref(buffer, shift), size, ctypes.byref(info), None, 0) == 0


# --- refused payloads ---


def _names_a_block(message: str) -> bool:
    return any(message.startswith(f"block '{name}' at byte ") for name in _NAMES)


def test_every_truncation_is_refused(reader: Reader) -> None:
    data = _compile("ethos-u55-128", conv2d(channels=1, out_channels=1))
    reader.accept(data)
    starts = set(_positions(data).values()) - {0}
    for length in range(len(data)):
        code, message, _ = reader.read(data[:length])
        assert code == (_MISSING if length in starts else _TRUNCATED), (length, message)
        assert _names_a_block(message), message


@pytest.mark.parametrize("name", _NAMES)
def test_damage_of_every_header_byte_is_refused(reader: Reader, name: str) -> None:
    data = _payload()
    at = _positions(data)[name]
    for byte in range(32):
        for mask in (0x01, 0x80, 0xFF):
            code, message, _ = reader.read(_put(data, at + byte, bytes([data[at + byte] ^ mask])))
            assert code > 0, (byte, mask)
            assert _names_a_block(message), message


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("length", [2**31 - 1, 2**31, 2**32 - 16, 2**32 - 15, 2**32 - 1])
def test_block_length_beyond_the_payload_is_refused(reader: Reader, name: str, length: int) -> None:
    data = _payload()
    reader.refuse(_put(data, _positions(data)[name] + 16, struct.pack("<I", length)), name, f"its length is {length}")


@pytest.mark.parametrize("name", _NAMES[1:])
def test_missing_block_is_refused(reader: Reader, name: str) -> None:
    data = pack_block_stream([block for block in _blocks() if block[0] != name])
    reader.refuse(data, name, "ends without")


@pytest.mark.parametrize("name", _NAMES[:-1])
def test_repeated_block_is_refused(reader: Reader, name: str) -> None:
    blocks = _blocks()
    again = next(block for block in blocks if block[0] == name)
    reader.refuse(pack_block_stream([*blocks[:-1], again, blocks[-1]]), name, "twice")


def _corrupt(name: str, at: int, new: bytes) -> bytes:
    data = _payload()
    return _put(data, _positions(data)[name] + at, new)


def _cop2(commands: bytes = bytes(16)) -> bytes:
    header = b"COP2" + struct.pack("<HHQII", 1, 0, 48 + len(commands), 1, 40 + len(commands))
    metadata = struct.pack("<I4sHHIIIIQI", 36, b"VEUM", 1, 0, 20, 0x20000108, 0x20007000, 1, 0, 0xFFFFFFFF)
    return header + metadata + commands


def _with_external_weights(name: bytes) -> bytes:
    """A payload whose weights are external data with the key ``name``."""
    blocks = [(block, name if block == "weight_data" else content) for block, content in _blocks()]
    return pack_block_stream(blocks, external=("weight_data",))


_BAD: list[tuple[Callable[[], bytes], str, str]] = [
    (lambda: b"", "vela_bin_stream", "empty"),
    (lambda: bytes(64), "vela_bin_stream", "not a program compiled for an Ethos-U"),
    (lambda: b"COP1" * 16, "vela_bin_stream", "not a program compiled for an Ethos-U"),
    (lambda: _payload()[32:], "vela_bin_stream", "not a program compiled for an Ethos-U"),
    (lambda: _corrupt("cmd_data", 8, b"\0x"), "vela_bin_stream", "unknown name"),
    (lambda: _corrupt("outputs", 0, b"results"), "inputs", "unknown name"),
    (lambda: _corrupt("weight_data", 20, b"\x01"), "weight_data", r"key of its external data \(1 bytes\)"),
    *(
        (
            lambda name=name: _with_external_weights(name),
            "weight_data",
            rf"\({len(name)} bytes\) is not 64 printable characters: export",
        )
        for name in (b"", b"w" * 63, b"w" * 65, b"arm_weights_" + b"0" * 64, b"w" * 63 + b" ", b"w" * 63 + b"\xe9")
    ),
    (lambda: _corrupt("weight_data", 20, b"\x02"), "weight_data", "reserved byte is 2"),
    (lambda: _corrupt("inputs", 31, b"\x80"), "inputs", "reserved byte is 128"),
    (lambda: _payload() + bytes(1), "vela_end_stream", "1 bytes follow"),
    (lambda: _payload() + _payload(), "vela_end_stream", "bytes follow"),
    (lambda: pack_block_stream([*_blocks()[:3], ("vela_end_stream", b"")]), "scratch_size", "ends without"),
    (lambda: pack_block_stream([("vela_bin_stream", b"x"), *_blocks()[1:]]), "vela_bin_stream", "is 1 bytes, not 0"),
    (lambda: pack_block_stream([*_blocks()[:-1], ("vela_end_stream", b"x")]), "vela_end_stream", "is 1 bytes, not 0"),
    (
        lambda: pack_block_stream([*_blocks()[:3], ("scratch_size", bytes(8)), *_blocks()[4:]]),
        "scratch_size",
        "8 bytes",
    ),
    # Counts.
    (lambda: pack_block_stream([*_blocks()[:4], ("inputs", b""), *_blocks()[5:]]), "inputs", "hold a count"),
    (lambda: _corrupt("inputs", 32, struct.pack("<i", 2)), "inputs", "2 tensors .* must fill the 40"),
    (lambda: _corrupt("outputs", 32, struct.pack("<i", 0)), "outputs", "0 tensors .* must fill the 40"),
    (lambda: _corrupt("outputs", 32, struct.pack("<i", -1)), "outputs", "4294967295 tensors"),
    # 2**30 tensors of 36 bytes take 2**32 * 9 bytes, which is 0 in 32 bits.
    (lambda: _corrupt("inputs", 32, struct.pack("<I", 2**30 + 1)), "inputs", "1073741825 tensors"),
    (lambda: _payload(inputs=[_tensor(-1)] * 1025), "inputs", "1025 tensors"),
    # Shapes and sizes.
    (lambda: _payload(inputs=[_tensor(0, shape=[1, 1, 1, 1, 0, 4])]), "inputs", "dimension 4 of tensor 0 is 0"),
    (lambda: _payload(outputs=[_tensor(0, shape=[-3, 1, 1, 1, 1, 4])]), "outputs", "dimension 0 of tensor 0 is -3"),
    (lambda: _payload(inputs=[_tensor(0, shape=[-(2**31)] * 6)]), "inputs", "is -2147483648"),
    (lambda: _payload(inputs=[_tensor(0, shape=[2**31 - 1] * 6)]), "inputs", "larger than 4 GiB"),
    (lambda: _payload(inputs=[_tensor(0, shape=[1, 1, 1, 1, 2**16, 2**16])]), "inputs", "larger than 4 GiB"),
    (lambda: _payload(inputs=[_tensor(0, shape=[1, 1, 1, 1, 1, 2**31 - 1], size=8)]), "inputs", "larger than 4 GiB"),
    *(
        (lambda size=size: _payload(inputs=[_tensor(0, size=size)]), "inputs", f"of {size} b")
        for size in (0, -1, 3, 16)
    ),
    # Offsets and regions.
    (lambda: _payload(inputs=[_tensor(-2)]), "inputs", "tensor 0 is at offset -2"),
    (lambda: _payload(inputs=[_tensor(-(2**31))]), "inputs", "offset -2147483648"),
    (lambda: _payload(outputs=[_tensor(61)]), "outputs", "ends at byte 65 of a scratch of 64"),
    (lambda: _payload(scratch=2**31 - 1, outputs=[_tensor(2**31 - 1)]), "outputs", "ends at byte 2147483651"),
    (lambda: _payload(scratch=0, outputs=[]), "inputs", "ends at byte 4 of a scratch of 0"),
    (lambda: _payload(inputs=[_tensor(0, 0)]), "inputs", "region 0, not in 1 or 3"),
    (lambda: _payload(outputs=[_tensor(0, 3)]), "outputs", "region 3, not in 1 or 4"),
    (lambda: _payload(outputs=[_tensor(0, -1)]), "outputs", "region -1"),
    (lambda: _payload(inputs=[_tensor(0, 3)]), "inputs", "region 3, which its commands do not address"),
    (lambda: _payload(inputs=[_tensor(0), _tensor(3)]), "inputs", "tensors 0 and 1 overlap in region 1"),
    (lambda: _payload(inputs=[_tensor(8), _tensor(8)]), "inputs", "tensors 0 and 1 overlap"),
    (lambda: _payload(outputs=[_tensor(32), _tensor(8), _tensor(9)]), "outputs", "tensors 1 and 2 overlap"),
    # Commands.
    (lambda: _payload(b""), "cmd_data", "the command stream is empty"),
    (lambda: _payload(b"COP"), "cmd_data", "neither with COP1 nor with COP2"),
    (lambda: _payload(b"COP3" + _cop1()[4:]), "cmd_data", "neither with COP1 nor with COP2"),
    (lambda: _payload(b"COP1"), "cmd_data", "ends without commands"),
    (lambda: _payload(_cop1()[:8]), "cmd_data", "configuration is cut off"),
    (lambda: _payload(_cop1()[:28]), "cmd_data", "ends without commands"),
    (lambda: _payload(_cop1()[:32]), "cmd_data", "gives 4 bytes of commands, but 0 bytes follow"),
    (lambda: _payload(_cop1() + bytes(4)), "cmd_data", "gives 4 bytes of commands, but 8 bytes follow"),
    (lambda: _payload(_cop1()[:-1]), "cmd_data", "gives 4 bytes of commands, but 3 bytes follow"),
    (lambda: _payload(_cop1(words=0)), "cmd_data", "gives 0 bytes"),
    (lambda: _payload(_cop1(words=0xFFFFFF)), "cmd_data", "gives 67108860 bytes"),
    (lambda: _payload(_cop1(config=0x30001808)), "cmd_data", "unknown product 3"),
    *((lambda log2=log2: _payload(_cop1(config=log2)), "cmd_data", rf"2\*\*{log2} ") for log2 in (0, 4, 12, 15)),
    (lambda: _payload(_cop1()[:4] + _cop1()[28:]), "cmd_data", "without a configuration"),
    (lambda: _payload(_cop1()[:16] + _cop1()[20:]), "cmd_data", "multiple of 16"),
    (lambda: _payload(_put(_cop1(), 16, b"\x06")), "cmd_data", "unknown record 6"),
    (lambda: _payload(_cop2()[:59]), "cmd_data", "header of a COP2 stream has 60 bytes, this stream has 59 bytes"),
    *(
        (lambda new=new: _payload(_put(_cop2(), 4, new)), "cmd_data", f"its major version is {major}, not 1")
        for new, major in [(b"\x00", 0), (b"\x02", 2), (b"\x01\x01", 257)]
    ),
    *(
        (lambda new=new: _payload(_put(_cop2(), 32, new)), "cmd_data", f"version of its metadata is {major}, not 1")
        for new, major in [(b"\x00", 0), (b"\x02", 2), (b"\x01\x01", 257)]
    ),
    (lambda: _payload(_cop2(commands=b"")), "cmd_data", "ends without commands"),
    (lambda: _payload(_cop2() + bytes(16)), "cmd_data", "its length field is 64 "),
    (lambda: _payload(_put(_cop2(), 12, b"\x01")), "cmd_data", r"length field is 64 \(upper 32 bits: 1\), but 64"),
    (lambda: _payload(_put(_cop2(), 16, b"\x02")), "cmd_data", "has kind 2"),
    (lambda: _payload(_put(_cop2(), 20, b"\x00")), "cmd_data", "has kind 1 and 0 bytes"),
    (lambda: _payload(_put(_cop2(), 28, b"veum")), "cmd_data", "metadata is not of the known kind"),
    (lambda: _payload(_put(_cop2(), 36, b"\x00")), "cmd_data", "metadata is not of the known kind"),
    *(
        (
            lambda size=size: _payload(_put(_cop2(), 24, struct.pack("<I", size))),
            "cmd_data",
            f"{size} bytes of metadata",
        )
        for size in (0, 20, 35, 40, 53, 68, 2**31, 2**32 - 16)
    ),
    (lambda: _payload(_put(_cop2(), 43, b"\x50")), "cmd_data", "unknown product 5"),
    (lambda: _payload(_put(_cop2(), 48, b"\x03")), "cmd_data", "unknown addressing 3"),
]


@pytest.mark.parametrize(("make", "block", "reason"), _BAD)
def test_invalid_payload_is_refused(reader: Reader, make: Callable[[], bytes], block: str, reason: str) -> None:
    reader.refuse(make(), block, reason)


@pytest.mark.parametrize("stream", [_cop2(), _put(_cop2(), 6, b"\x07"), _put(_cop2(), 34, b"\x07")])
def test_hand_written_cop2_stream_is_accepted(reader: Reader, stream: bytes) -> None:
    """The stream from which the corrupted COP2 streams above are made, also with newer minor versions."""
    _check_against_blocks(reader, _payload(stream))


def test_readers_agree_on_damaged_payloads(reader: Reader) -> None:
    """``Reader.read`` compares them."""
    damage, refused = random.Random(0), 0
    payloads = [_compile("ethos-u55-128", _several_outputs()), _payload(_cop2()), _payload()]
    for data in payloads:
        for _ in range(1500):
            damaged = bytearray(data)
            for _ in range(damage.choice((1, 1, 2, 4))):
                at = damage.randrange(len(data)) if damage.random() < 0.5 else damage.randrange(0, len(data), 4)
                damaged[at] = damage.choice((0, 1, 16, 255, damaged[at] ^ 1 << damage.randrange(8)))
            refused += reader.read(bytes(damaged))[0] != 0
    assert 1000 < refused < 4000


def test_readers_agree_on_the_fuzzers_corpus(reader: Reader) -> None:
    codes = [reader.read(path.read_bytes())[0] for path in sorted((_FUZZ / "corpus").iterdir())]
    assert len(set(codes)) > 5


def test_message_is_truncated_to_its_buffer(reader: Reader) -> None:
    _, full, _ = reader.read(b"")
    assert [reader.read(b"", size)[1] for size in (1, 2, 10)] == ["", full[:1], full[:9]]


def test_tensor_index_out_of_range_is_refused(reader: Reader) -> None:
    for side, index in [(0, 1), (1, 1), (0, 2**32 - 1), (2, 0), (-1, 0)]:
        assert reader.tensor(_payload(), side, index) is None


@pytest.mark.verify
def test_fuzzing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The corpus, then new inputs for two seconds (20 with ``--verify``), with AddressSanitizer and UBSan."""
    flags = [*SANITIZERS, "-fsanitize=fuzzer"]
    fuzzer = compile_cpp(tmp_path / "fuzzer", [_FUZZ / "payload_fuzzer.cpp", *_SOURCES], flags, compiler="clang++-14")
    corpus = _FUZZ / "corpus"
    assert len(list(corpus.iterdir())) > 20
    (tmp_path / "new").mkdir()
    # The peak of resident memory that libFuzzer reads starts with that of this process, which may be gigabytes.
    memory = ["-rss_limit_mb=0", "-malloc_limit_mb=64"]
    seconds = 20 if pytestconfig.getoption("verify") else 2
    dictionary = f"-dict={_FUZZ / 'payload.dict'}"
    limits = [f"-max_total_time={seconds}", "-max_len=4096", dictionary, "-print_final_stats=1", *memory]
    output = run([str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", str(tmp_path / "new"), str(corpus)])
    executed = re.search(r"stat::number_of_executed_units: *(\d+)", output)
    assert executed is not None, output
    assert int(executed[1]) > 10_000
