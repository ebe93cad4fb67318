"""Server that runs commands of ``arm-recipes`` in forked processes, so that PyTorch is imported once for all of them.

A command has its own process, working folder, output and exit code, as in a shell. Importing PyTorch and ExecuTorch
takes each process three to four seconds; a fork takes milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]


class CommandServer:
    """Client of a server process, which starts with the first command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run ``arm-recipes`` with these arguments in ``folder``.

        Returns:
            exit code, and standard output with standard error.
        """
        if self._process is None:
            # A sweep without processes of its own: they would import PyTorch again, and pytest uses all cores already.
            environment = {**os.environ, "PYTHONPATH": str(_ROOT), "LOKY_MAX_CPU_COUNT": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.command_server"],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what third parties print when they are imported
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = folder / ".command_output"
        request = {"arguments": list(arguments), "folder": str(folder), "output": str(output)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline() or "-1")
        text = output.read_text(errors="replace")
        output.unlink()
        return code, text

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.communicate()


def _import_packages() -> None:
    """Import what the commands import."""
    import arm_backend_core
    import arm_recipes
    import arm_recipes.cli.main

    for package in (arm_backend_core, arm_recipes):
        for name in package.__all__:
            getattr(package, name)


def _run_command(request: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Run a command in this process, a child of the server."""
    from arm_recipes.cli.main import main

    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    try:
        return main(arguments)
    except SystemExit as end:  # of argparse
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def serve() -> None:
    """Run one command after the other: requests on standard input, exit codes on standard output."""
    _import_packages()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            sys.exit(_run_command(request, request["arguments"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
