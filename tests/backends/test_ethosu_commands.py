"""Decoder and encoder of Ethos-U command streams, on the streams that Vela writes."""

from __future__ import annotations

import itertools
import re

import pytest

from arm_backend_core.backends.ethosu_commands import decode_commands, encode_command, is_u85, pack_command_stream
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.workers import vela
from tests.backends.tosa_programs import conv2d

_DIRECT_DRIVE = ("--cop-format=COP2", "--separate-io-regions")


def _compile_stream(accelerator: str, flags: tuple[str, ...] = ()) -> bytes:
    configuration = EthosUCompileSpec(accelerator, extra_flags=list(flags)).configuration
    return bytes(vela.compile_tosa(conv2d(), configuration, 60.0)[0]["command_stream"])


@pytest.mark.parametrize(
    ("accelerator", "flags"),
    [("ethos-u55-128", ()), ("ethos-u65-512", ()), ("ethos-u85-256", ()), ("ethos-u85-256", _DIRECT_DRIVE)],
)
def test_encoder_inverts_decoder(accelerator: str, flags: tuple[str, ...]) -> None:
    stream = _compile_stream(accelerator, flags)
    assert is_u85(stream) == accelerator.startswith("ethos-u85")
    words = itertools.chain.from_iterable(encode_command(number, value) for _, number, value in decode_commands(stream))
    assert pack_command_stream(stream, list(words)) == stream


@pytest.mark.parametrize("product", [3, 15])
def test_an_unknown_product_is_an_error(product: int) -> None:
    stream = bytearray(_compile_stream("ethos-u85-256"))
    stream[11] = product << 4 | stream[11] & 15
    with pytest.raises(ValueError, match=re.escape(f"a command stream for product {product}: its registers are")):
        is_u85(bytes(stream))
