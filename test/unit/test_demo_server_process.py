"""Starting, watching and ending a server process, with a stand-in for SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sglang_dlite import server_process
from sglang_dlite.server_process import ServerError, ServerProcess, launch_command

# A server with a child process of its own, whose id it logs.
FAKE = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid)
print("[2026-01-02 03:04:05 TP0] loading\\n  warnings.warn(", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    status = 503  # as SGLang while it warms up
    def do_GET(self):
        self.send_response(Handler.status)
        Handler.status = 200
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the stand-in without the pauses that a real server deserves."""
    sleep = time.sleep
    monkeypatch.setattr(server_process.time, "sleep", lambda seconds: sleep(seconds / 20))


def _fake(tmp_path: Path, code: str) -> ServerProcess:
    server = ServerProcess(Path("model"), log_path=tmp_path / "logs" / "server.log")
    server.command = [sys.executable, "-c", code, str(server.port)]
    return server


def _alive(pid: int) -> bool:
    try:
        # A process that has ended but is not yet collected by its parent is as good as gone.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_arms_differ_only_in_the_speculation() -> None:
    with_drafter = launch_command(Path("m"), Path("d"), 1234, ["--x"])
    without = launch_command(Path("m"), None, 1234, ["--x"])
    extra = ["--speculative-algorithm", "DLITE", "--speculative-draft-model-path", "d"]
    at = with_drafter.index(extra[0])
    assert with_drafter[at : at + 4] == extra
    assert with_drafter[:at] + with_drafter[at + 4 :] == without
    assert without[1:3] == ["-m", "sglang.launch_server"]
    assert "--enable-cache-report" in without


def test_ready_then_stopped_with_its_children(tmp_path: Path) -> None:
    seen: list[str] = []
    with _fake(tmp_path, FAKE) as server:
        server.wait_ready(20, lambda seconds, line: seen.append(line))
        assert server.log_path is not None
        child = int(server.log_path.read_text().split()[1])
        assert _alive(child)
    assert seen[-1] == "loading"  # the newest line of the log proper
    deadline = time.monotonic() + 5
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def test_stopped_when_the_body_fails(tmp_path: Path) -> None:
    server = _fake(tmp_path, FAKE)
    with pytest.raises(KeyboardInterrupt), server:
        assert server._process is not None
        pid = server._process.pid
        raise KeyboardInterrupt
    assert not _alive(pid)


def test_early_death_shows_the_log(tmp_path: Path) -> None:
    server = _fake(tmp_path, "raise SystemExit('no such model')")
    with server, pytest.raises(ServerError, match=r"status 1(.|\n)*no such model"):
        server.wait_ready(20)


def test_early_death_names_the_error_above_a_long_tail(tmp_path: Path) -> None:
    lines = ["ValueError: D = 99 is out of range", *(f"noise {i}" for i in range(100))]
    server = _fake(tmp_path, f"print({chr(10).join(lines)!r}); raise SystemExit(3)")
    with server, pytest.raises(ServerError) as caught:
        server.wait_ready(20)
    text = str(caught.value)
    assert "its log says:\n  ValueError: D = 99 is out of range\n" in text
    assert "noise 99" in text and "noise 50" not in text


def test_timeout_is_an_error(tmp_path: Path) -> None:
    server = _fake(tmp_path, "import time; time.sleep(600)")
    with server, pytest.raises(ServerError, match="did not answer within 0 s"):
        server.wait_ready(0.1)


def test_a_group_that_ignores_sigterm_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STOP_TIMEOUT_S", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    server = _fake(tmp_path, code)
    server.start()
    assert server._process is not None and server.log_path is not None
    pid = server._process.pid
    while "deaf" not in server.log_path.read_text():
        time.sleep(0.05)
    server.stop()
    assert not _alive(pid)
    server.stop()  # a second time is harmless


@pytest.mark.skipif(sys.platform != "linux", reason="a service of the Linux kernel")
def test_ended_when_we_are_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import os, sys; from sglang_dlite.server_process import *;"
        "server = ServerProcess(Path('m'), log_path=Path(sys.argv[1]));"
        "server.command = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "server.start(); print(server._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    pid = int(killed.stdout)
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_a_busy_port_is_refused() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        server = ServerProcess(Path("model"), port=busy.getsockname()[1])
        with pytest.raises(ServerError, match="is not available"):
            server.start()


def test_the_hub_is_left_alone_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print('offline', os.environ['HF_HUB_OFFLINE'], flush=True)"
    for value, expected in ((None, "1"), ("0", "0")):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        if value is not None:
            monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", value)
        with _fake(tmp_path, code) as server:
            server.wait()
            assert server.log_path is not None
            assert f"offline {expected}" in server.log_path.read_text()
