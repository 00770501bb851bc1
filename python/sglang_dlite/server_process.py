"""One SGLang server as a child process: launched, watched until it answers, always stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from sglang_dlite import ALGORITHM

HOST = "127.0.0.1"
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0
LOG_TAIL_LINES = 15
# A line of SGLang's log, its time stamp apart.
LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d [^]]*\] (.*)")
# The last line of a Python traceback.
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b")

# Called about once a second while the server starts: seconds so far, newest line of its log.
Progress = Callable[[float, str], None]


class ServerError(RuntimeError):
    """The server could not be started, or it died; the message says why and shows its log."""


# Loaded here, since little is allowed between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: have the kernel end the server if we are killed without a chance to do so."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Refuse a busy port here: SGLang would notice only after loading the model."""
    with socket.socket() as probe:
        # As servers bind: a connection that lingers in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} is not available ({error.strerror}); choose another, "
                f"for example PORT={port + 1}"
            ) from error


def launch_command(
    model_path: Path | str, drafter_path: Path | None, port: int, extra_args: Sequence[str] = ()
) -> list[str]:
    """The command line of a server; without a drafter it is the same one, without speculation."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
    if drafter_path is not None:
        command += ["--speculative-algorithm", ALGORITHM]
        command += ["--speculative-draft-model-path", str(drafter_path)]
    command += ["--host", HOST, "--port", str(port)]
    # Cached tokens are reported in a reply's usage only on request.
    command += ["--enable-cache-report", *extra_args]
    return command


class ServerProcess:
    """A context manager around `python -m sglang.launch_server`.

    The server leads a process group of its own, so that stopping it takes its scheduler and
    detokenizer along, and so that Ctrl-C reaches us first. With `log_path=None` its output goes
    to ours.
    """

    def __init__(
        self,
        model_path: Path | str,
        drafter_path: Path | None = None,
        *,
        port: int | None = None,
        log_path: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """env is added to our own environment, and wins over it."""
        self.env = dict(env or {})
        self.port = free_port() if port is None else port
        self.log_path = log_path
        self.command = launch_command(model_path, drafter_path, self.port, extra_args)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it answers."""
        require_free(self.port)
        # Model and drafter are local directories: a machine without access to a hub must not
        # wait for its time-outs. Whoever needs the hub sets the variable to 0.
        env = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ, **self.env}
        log: IO[bytes] | None = None
        if self.log_path is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self.log_path.open("wb")
        try:
            self._process = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log is not None else None,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        finally:
            if log is not None:
                log.close()

    def wait_ready(
        self, timeout: float = START_TIMEOUT_S, on_progress: Progress | None = None
    ) -> float:
        """Wait until the server generates a token; returns the seconds that took."""
        started = time.monotonic()
        while True:
            self.require_alive()
            elapsed = time.monotonic() - started
            if self._answers():
                return elapsed
            if elapsed > timeout:
                raise ServerError(
                    f"the server did not answer within {timeout:.0f} s{self._log_tail()}"
                )
            if on_progress is not None:
                on_progress(elapsed, self._last_log_line())
            time.sleep(1.0)

    def require_alive(self) -> None:
        """Raise with the end of the log if the server has ended."""
        if self._process is None:
            raise ServerError("the server was not started")
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status}{self._log_tail()}")

    def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit status."""
        assert self._process is not None, "not started"
        return self._process.wait()

    def stop(self) -> None:
        """End the server's process group: politely, then firmly. Does nothing if it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        # The group may outlive its leader, hence the signals even after the leader has ended.
        # Its id cannot have been given to others as long as a member is left; if none is left
        # the kernel answers ProcessLookupError.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        try:
            # SGLang's own check takes up to 20 s before it gives up on its scheduler.
            reply = httpx.get(f"{self.base_url}/health_generate", timeout=30.0, trust_env=False)
            return reply.status_code == 200
        except httpx.TransportError:
            return False

    def _log_lines(self) -> list[str]:
        if self.log_path is None or not self.log_path.exists():
            return []
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    def _last_log_line(self) -> str:
        # SGLang's own lines begin with a time stamp; what is between them is warnings of imports.
        stamped = (LOG_LINE.match(line) for line in reversed(self._log_lines()))
        found = next(filter(None, stamped), None)
        return found[1] if found else ""

    def _log_tail(self) -> str:
        lines = self._log_lines()
        if not lines:
            return ""
        # SGLang's last lines are often those of the launcher that went down with its scheduler,
        # or the long tail of a torch message: the first error stands further up.
        error = next((line for line in lines if ERROR_LINE.match(line)), None)
        cause = f"; its log says:\n  {error[:500]}\n" if error else "; "
        tail = "\n  ".join(lines[-LOG_TAIL_LINES:])
        return f"{cause}the end of its log ({self.log_path}):\n  {tail}"
