"""VGF payloads, and errors when the model converter is missing, is too old, refuses or crashes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from arm_backend_core.backends.artifacts import dump_artifacts
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.backends.vgf import compile_vgf
from arm_backend_core.errors import ArmBackendError, CompileError
from arm_backend_core.targets.compile_spec import VgfCompileSpec
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.workers import model_converter
from tests.backends.tosa_programs import conv2d


def _find_no_operator(text: str) -> None:
    return None


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _write_converter_stub(path: Path, version: str, action: str = "exit 0") -> str:
    """Write a stub of the converter that prints ``version``, and otherwise runs ``action``."""
    answer = f'{{"version": "{version}"}}'
    path.write_text(f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{answer}'; exit 0; fi\n{action}\n")
    path.chmod(0o755)
    return str(path)


def test_payload_is_the_vgf_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = VgfCompileSpec().dump_intermediate_artifacts_to(tmp_path / "dump")
    payload = compile_payload(spec, conv2d(), delegate="delegate_0", find_operator=_find_no_operator)
    assert b"VGF1" in payload.data[:16]
    assert payload.vela is None
    paths = dump_artifacts(spec, "delegate_0", conv2d(), payload, Graph())
    assert [Path(path).name for path in paths] == ["delegate_0.tosa", "delegate_0.vgf"]
    assert (tmp_path / "dump" / "delegate_0.vgf").read_bytes() == payload.data
    assert capfd.readouterr() == ("", "")


def test_flags_reach_the_converter() -> None:
    plain = compile_payload(VgfCompileSpec(), conv2d(), delegate="d", find_operator=_find_no_operator)
    debug = compile_payload(
        VgfCompileSpec(compiler_flags=["--emit-debug-info"]), conv2d(), delegate="d", find_operator=_find_no_operator
    )
    assert plain.data != debug.data


def test_refusal_keeps_the_flatbuffer() -> None:
    asked = []

    def find_operator(text: str) -> tuple[str, str]:
        asked.append(text)
        return "aten.conv2d.default", "model.py:3"

    with pytest.raises(CompileError, match="failed flatbuffer verification") as caught:
        compile_payload(VgfCompileSpec(), conv2d()[:300], delegate="delegate_7", find_operator=find_operator)
    assert "delegate_7" in str(caught.value)
    assert "aten.conv2d.default (model.py:3)" in str(caught.value)
    assert "verification" in asked[0]
    assert Path(caught.value.artifact or "").read_bytes() == conv2d()[:300]


def test_crash_keeps_the_flatbuffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write_converter_stub(tmp_path / "crashing", "0.11.0", "echo oops >&2; kill -SEGV $$")
    monkeypatch.setenv("MODEL_CONVERTER_PATH", path)
    with pytest.raises(CompileError, match=r"crashed with SIGSEGV\noops") as caught:
        compile_payload(VgfCompileSpec(), b"bytes", delegate="delegate_7", find_operator=_find_no_operator)
    assert Path(caught.value.artifact or "").read_bytes() == b"bytes"


def test_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CONVERTER_PATH", _write_converter_stub(tmp_path / "slow", "0.11.0", "exec sleep 60"))
    with pytest.raises(CompileError, match=r"did not finish within 0.1 s"):
        compile_vgf(b"bytes", VgfCompileSpec(), delegate="d", find_operator=_find_no_operator, timeout=0.1)


@pytest.mark.parametrize("version", ["0.10.3", "0.9.0"])
def test_old_converter(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CONVERTER_PATH", _write_converter_stub(tmp_path / "old", version))
    with pytest.raises(ArmBackendError, match=rf"{version}, which is too old.*converter>=0.11.0"):
        VgfCompileSpec()


def test_newer_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CONVERTER_PATH", _write_converter_stub(tmp_path / "new", "0.12.0-rc1"))
    assert VgfCompileSpec().target.family == "vgf"


def test_an_executable_that_is_not_the_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other"
    path.write_text("#!/bin/sh\necho hello\n")
    monkeypatch.setenv("MODEL_CONVERTER_PATH", str(path))
    with pytest.raises(ArmBackendError, match="not an executable file"):
        VgfCompileSpec()
    path.chmod(0o755)
    with pytest.raises(ArmBackendError, match="does not report its version"):
        VgfCompileSpec()


def test_missing_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_CONVERTER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(model_converter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ArmBackendError,
        match=r"not installed.*pip install 'arm-recipes\[vgf\]', or 'ai-ml-sdk-model-converter>=0.11.0'",
    ):
        VgfCompileSpec()


def test_converter_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write_converter_stub(tmp_path / "model-converter", "0.11.0")
    monkeypatch.delenv("MODEL_CONVERTER_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(model_converter.importlib.util, "find_spec", lambda name: None)
    assert model_converter.find_converter() == path


def test_libraries_of_the_converter_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo $LD_LIBRARY_PATH"]
    monkeypatch.setenv("MODEL_CONVERTER_LIB_DIR", "/own")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert model_converter.run_converter(command, 10).stdout == b"/own\n"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/others")
    assert model_converter.run_converter(command, 10).stdout == b"/own:/others\n"


def test_converter_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    monkeypatch.setenv("MODEL_CONVERTER_PATH", str(path))
    with pytest.raises(ArmBackendError, match=r"does not start.*Exec format error"):
        VgfCompileSpec()
    crashing = tmp_path / "crashing"
    crashing.write_text("#!/bin/sh\necho no such library >&2; exit 127\n")
    crashing.chmod(0o755)
    monkeypatch.setenv("MODEL_CONVERTER_PATH", str(crashing))
    with pytest.raises(ArmBackendError, match="ended with exit code 127: no such library"):
        VgfCompileSpec()


def test_a_flatbuffer_is_kept_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    spec = VgfCompileSpec().dump_intermediate_artifacts_to(tmp_path / "dump")
    (tmp_path / "dump").touch()
    with pytest.raises(CompileError) as caught:
        compile_payload(spec, b"bytes", delegate="d", find_operator=_find_no_operator)
    kept = Path(caught.value.artifact or "")
    assert kept.read_bytes() == b"bytes"
    assert kept.parent.parent == tmp_path
