"""Disk cache of Vela's configurations: the answers of its command line parser.

Vela's process needs 0.3 s to import the parser, as long as the lowering of a small model takes. With a cached
configuration, the process imports only Vela's C++ core, in 0.04 s. The key is the command line, the content of the
configuration file, the version of Vela and the script that reads the parser's answer. Errors of the parser are not
cached. If the cache folder cannot be read or written, Vela parses again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from arm_backend_core.disk_cache import cache_folder, write_atomically
from arm_backend_core.workers import vela, vela_process
from arm_backend_core.workers.vela import VelaConfiguration


def find_configuration(argv: Sequence[str], config_file: Path) -> VelaConfiguration | None:
    """Return the cached configuration of a command line; None if there is none.

    Args:
        argv: Vela's arguments.
        config_file: the configuration file that these arguments name.
    """
    # The file may be missing, truncated or in another format.
    with contextlib.suppress(OSError, ValueError, TypeError):
        return VelaConfiguration(**json.loads(_cache_path(argv, config_file).read_bytes()))
    return None


def get_configuration(argv: Sequence[str], config_file: Path) -> VelaConfiguration:
    """Return the configuration of a command line, from the cache or from Vela's parser.

    Raises:
        InvalidFlagsError, InvalidConfigurationError, ArmBackendError: see ``vela.parse_command_line``.
    """
    configuration = find_configuration(argv, config_file)
    if configuration is None:
        configuration = vela.parse_command_line(tuple(argv))
        with contextlib.suppress(OSError):
            path = _cache_path(argv, config_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(configuration)).encode())
    return configuration


def _cache_path(argv: Sequence[str], config_file: Path) -> Path:
    script = Path(vela_process.__file__).read_bytes()
    text = json.dumps([vela.version(), sorted(VelaConfiguration.__dataclass_fields__), list(argv)]).encode()
    key = hashlib.blake2b(script + text + config_file.read_bytes(), digest_size=16).hexdigest()
    return cache_folder() / "vela_configurations" / f"{key}.json"
