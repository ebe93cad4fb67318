"""The worker process: reuse, death, time limits, threads, forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import joblib
import pytest
from joblib.externals.loky import get_reusable_executor

from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import Worker, WorkerDied, WorkerError
from arm_recipes._internal.parallel import starmap_unordered
from tests.backends.tosa_programs import conv2d

# A worker with the protocol of vela_process.py, which executes the requested action.
_SCRIPT = """
import os, pickle, struct, sys, time
requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
while header := requests.read(8):
    name, arguments = pickle.loads(requests.read(*struct.unpack("<Q", header)))
    os.ftruncate(2, 0); os.lseek(2, 0, 0)
    if name == "print":
        os.write(1, arguments[0]); reply = "ok", os.getpid()
    elif name == "raise":
        reply = "error", "KeyError", "text", (1, 2)
    elif name == "exit":
        os.write(2, b"last words"); os._exit(arguments[0])
    elif name == "kill":
        os.kill(os.getpid(), arguments[0])
    elif name == "sleep":
        time.sleep(arguments[0]); reply = "ok", None
    data = pickle.dumps(reply)
    replies.write(struct.pack("<Q", len(data)) + data); replies.flush()
"""


@pytest.fixture
def shadowing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, first on the search path as in a notebook, has files named like the standard library's."""
    for name in ("queue", "random", "selectors", "array"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    made = Worker(script)
    yield made
    made.close()


@pytest.mark.usefixtures("shadowing")
def test_user_files_do_not_shadow_the_standard_library_in_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import queue, random, selectors, array, arm_backend_core\n{_SCRIPT}")
    worker = Worker(script)
    assert worker.call("print", b"one").log == "one"
    worker.close()


@pytest.fixture
def stop_joblib_processes() -> None:
    """Processes of other tests were started before the shadowing files existed."""
    get_reusable_executor().shutdown(wait=True)


@pytest.mark.usefixtures("stop_joblib_processes", "shadowing")
def test_user_files_do_not_shadow_the_standard_library_in_joblib_processes() -> None:
    before = dict(os.environ)
    with joblib.parallel_config(n_jobs=2):
        assert sorted(starmap_unordered(os.path.join, [("a", "b"), ("c", "d")])) == ["a/b", "c/d"]
    assert os.environ == before


def test_process_is_reused_and_its_output_returned(worker: Worker) -> None:
    first, second = worker.call("print", b"one"), worker.call("print", b"two")
    assert first.value == second.value == worker.pid
    assert (first.log, second.log) == ("one", "two")


def test_exception_leaves_the_process_alive(worker: Worker) -> None:
    pid = worker.call("print", b"").value
    with pytest.raises(WorkerError, match="KeyError: text") as error:
        worker.call("raise")
    assert error.value.detail == (1, 2)
    assert worker.call("print", b"").value == pid


@pytest.mark.parametrize(
    ("request_name", "argument", "description"),
    [
        ("exit", 3, "ended with exit code 3"),
        ("kill", 11, "crashed with SIGSEGV"),
        ("exit", 0, "exit code 0"),
        ("kill", 35, "signal 35"),
    ],
)
def test_death_is_reported_and_the_next_call_works(
    worker: Worker, request_name: str, argument: int, description: str
) -> None:
    pid = worker.call("print", b"").value
    with pytest.raises(WorkerDied, match=description) as death:
        worker.call(request_name, argument)
    assert death.value.log == ("last words" if request_name == "exit" else "")
    assert worker.pid is None
    assert worker.call("print", b"").value not in (None, pid)


def test_death_between_calls_restarts_the_process(worker: Worker) -> None:
    pid = worker.call("print", b"").value
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert worker.call("print", b"").value != pid


def test_timeout_kills_the_process(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match=r"did not finish within 0.05 s"):
        worker.call("sleep", 60, timeout=0.05)
    assert worker.call("print", b"x", timeout=60).log == "x"


def test_interrupted_call_restarts_the_process(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = worker.call("print", b"").value

    def interrupt(message: object) -> tuple[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.call("print", b"")
    assert worker.call("print", b"").value != pid


def test_vela_process_has_its_own_session_and_no_torch() -> None:
    EthosUCompileSpec("ethos-u55-128")  # starts the process
    pid = vela._worker.pid
    assert pid not in (None, os.getpid())
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getsid(pid or 0) != os.getsid(0)  # Ctrl-C does not reach it


def test_threads_share_the_process() -> None:
    spec, flatbuffer = EthosUCompileSpec("ethos-u55-128"), conv2d()
    results: list[bytes] = []

    def compile_some() -> None:
        for _ in range(5):
            results.append(compile_payload(spec, flatbuffer, delegate="d", find_operator=lambda text: None).data)

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert len(set(results)) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_gets_a_process_of_its_own() -> None:
    spec, flatbuffer = EthosUCompileSpec("ethos-u55-128"), conv2d()
    data = compile_payload(spec, flatbuffer, delegate="d", find_operator=lambda text: None).data
    parent_pid = vela._worker.pid
    child = os.fork()
    if child == 0:
        try:
            same = compile_payload(spec, flatbuffer, delegate="d", find_operator=lambda text: None).data == data
            own = vela._worker.pid not in (None, parent_pid)
            vela._worker.close()
            os._exit(0 if same and own else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert vela._worker.pid == parent_pid
    assert compile_payload(spec, flatbuffer, delegate="d", find_operator=lambda text: None).data == data
