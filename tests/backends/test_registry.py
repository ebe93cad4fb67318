"""``compile_payload``: the backend of a compile spec; that of TOSA stores the flatbuffer."""

from __future__ import annotations

from pathlib import Path

from arm_backend_core.backends.artifacts import dump_artifacts
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.tosa.graph import Graph
from tests.backends.tosa_programs import conv2d


def test_payload_is_the_flatbuffer(tmp_path: Path) -> None:
    flatbuffer = conv2d()
    spec = TosaCompileSpec()
    payload = compile_payload(spec, flatbuffer, delegate="delegate_0", find_operator=lambda text: None)
    assert payload.data == flatbuffer
    assert payload.vela is None
    assert dump_artifacts(spec, "delegate_0", flatbuffer, payload, Graph()) == []
    spec.dump_intermediate_artifacts_to(tmp_path)
    assert spec.get_intermediate_path() == str(tmp_path)
    assert dump_artifacts(spec, "delegate_0", flatbuffer, payload, Graph()) == [str(tmp_path / "delegate_0.tosa")]
