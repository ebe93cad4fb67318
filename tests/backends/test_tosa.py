"""The TOSA target stores the flatbuffer."""

from __future__ import annotations

from pathlib import Path

from arm_backend_core.targets.compile_spec import TosaCompileSpec
from tests.backends.tosa_programs import conv2d


def test_payload_is_the_flatbuffer(tmp_path: Path) -> None:
    flatbuffer = conv2d()
    spec = TosaCompileSpec()
    payload = spec.compile(flatbuffer, delegate="delegate_0", locate=lambda text: None)
    assert payload.data == flatbuffer
    assert payload.vela is None
    assert spec.dump("delegate_0", flatbuffer, payload, []) == []
    spec.dump_intermediate_artifacts_to(tmp_path)
    assert spec.get_intermediate_path() == str(tmp_path)
    assert spec.dump("delegate_0", flatbuffer, payload, []) == [str(tmp_path / "delegate_0.tosa")]
