"""The disk cache of Vela's configurations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arm_backend_core.targets import configuration_cache, vela_config
from arm_backend_core.targets.compile_spec import DEFAULT_CONFIG_INI, EthosUCompileSpec
from arm_backend_core.workers import vela, vela_process


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The command lines that Vela parses; the cache is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: list[tuple[str, ...]] = []
    parse = vela.parse_command_line

    def record(argv: tuple[str, ...]) -> vela.VelaConfiguration:
        found.append(argv)
        return parse(argv)

    monkeypatch.setattr(vela, "parse_command_line", record)
    return found


def test_vela_parses_a_command_line_once(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    first = EthosUCompileSpec("ethos-u55-128").configuration
    assert EthosUCompileSpec("ethos-u55-128").configuration == first
    assert len(calls) == 1
    other = EthosUCompileSpec("ethos-u55-128", extra_flags=["--disable-buffering"]).configuration
    assert other != first
    assert len(calls) == 2
    (damaged, *_) = (tmp_path / "cache").rglob("*.json")
    damaged.write_text("{")
    assert EthosUCompileSpec("ethos-u55-128").configuration == first
    assert EthosUCompileSpec("ethos-u55-128", extra_flags=["--disable-buffering"]).configuration == other
    assert len(calls) == 3


def test_key_contains_the_configuration_file_and_the_version(
    calls: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini = tmp_path / "own.ini"
    text = vela_config.config_path(DEFAULT_CONFIG_INI).read_text()
    ini.write_text(text)
    assert EthosUCompileSpec("ethos-u55-128", config_ini=ini).configuration.core_clock == 500e6
    ini.write_text(text.replace("core_clock=500e6", "core_clock=400e6"))
    assert EthosUCompileSpec("ethos-u55-128", config_ini=ini).configuration.core_clock == 400e6
    monkeypatch.setattr(vela, "version", lambda: "5.2.9")
    assert EthosUCompileSpec("ethos-u55-128", config_ini=ini).configuration.core_clock == 400e6
    assert len(calls) == 3


def test_key_contains_the_script_that_reads_the_answer_of_the_parser(
    calls: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version of this project may derive other values from the same answer."""
    assert EthosUCompileSpec("ethos-u55-128").configuration
    script = tmp_path / "vela_process.py"
    script.write_text("# newer")
    monkeypatch.setattr(vela_process, "__file__", str(script))
    assert EthosUCompileSpec("ethos-u55-128").configuration
    assert len(calls) == 2


def test_refusals_are_not_cached(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="extra_flags"):
            _ = EthosUCompileSpec("ethos-u55-128", extra_flags=["--no-such-flag"]).configuration
    assert len(calls) == 2
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_read_only_cache(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    for _ in range(2):
        assert EthosUCompileSpec("ethos-u55-128").configuration.accelerator == "EthosU55"
    assert len(calls) == 2


def test_user_without_a_home_directory(calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert EthosUCompileSpec("ethos-u55-128").configuration.accelerator == "EthosU55"
    assert len(calls) == 1


def test_vela_process_imports_the_parser_only_for_a_new_configuration(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(vela, "prestart", lambda *, parses_flags: started.append(parses_flags))
    for _ in range(2):
        assert EthosUCompileSpec("ethos-u85-256").configuration
    assert started == [True, False]
    assert len(calls) == 1
    argv, path = calls[0], vela_config.config_path(DEFAULT_CONFIG_INI)
    assert configuration_cache.find_configuration(argv, path) is not None
