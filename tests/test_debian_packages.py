"""``scripts/debian_packages.sh`` with stubs: dpkg has installed ``present``, apt-get does not know ``unknown``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "scripts" / "debian_packages.sh"
_DPKG = '#!/bin/sh\nfor package; do :; done\n[ "$package" = present ] && echo installed\n'
#: Like the real apt-get, it installs none of several packages if one is unknown.
_APT = """#!/bin/sh
echo "apt-get $*" >> "$CALLS"
for argument; do [ "$argument" = unknown ] && exit 100; done
exit 0
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    for name, text in (("dpkg-query", _DPKG), ("apt-get", _APT), ("id", "#!/bin/sh\necho 0\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path / "calls"


def _run(calls: Path, *packages: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{calls.parent}:/usr/bin:/bin", "CALLS": str(calls), **variables}
    done = subprocess.run([_SCRIPT, *packages], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def _installed(calls: Path) -> list[str]:
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [line.split()[-1] for line in lines if " install " in line]


def test_an_unknown_package_does_not_stop_the_others(calls: Path) -> None:
    done = _run(calls, "one", "unknown", "present", "two")
    assert _installed(calls) == ["one", "unknown", "two"]
    assert done.stdout == "Installing Debian packages, which SYSTEM_PACKAGES=no leaves out: one unknown two\n"
    assert done.stderr == "apt-get could not install unknown; what needs it says so\n"


def test_system_packages_no_installs_nothing(calls: Path) -> None:
    done = _run(calls, "one", "present", SYSTEM_PACKAGES="no")
    assert not calls.exists()
    assert done.stderr == "Left out, as SYSTEM_PACKAGES=no says: one\n"


def test_installed_packages_are_not_installed_again(calls: Path) -> None:
    done = _run(calls, "present")
    assert (done.stdout, done.stderr, calls.exists()) == ("", "", False)
