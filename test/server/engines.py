"""Launching SGLang for tests: an Engine in this process, its scheduler in a child."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from workloads import Request

HERE = Path(__file__).resolve().parent

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "random_seed": 0,
    "log_level": "warning",
}


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables (None removes one) for what is started inside; restores all afterwards."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    values = {"PYTHONPATH": path, **values}
    before = {name: os.environ.get(name) for name in values}

    def put(settings: dict[str, str | None]) -> None:
        for name, value in settings.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def scheduler_died(signum: int, frame: FrameType | None) -> None:
    """Upstream's own handler would kill this process, and all other tests' results with it."""
    raise RuntimeError("a process of the engine died; its log is in the captured output")


@contextlib.contextmanager
def engine(target: Path, drafter: Path | None = None, **options: Any) -> Iterator[Any]:
    """An Engine, ended on exit; `env` in options is set while its processes start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang

    settings = {**COMMON, "custom_sigquit_handler": scheduler_died, "model_path": str(target)}
    if drafter is not None:
        settings |= {
            "speculative_algorithm": "DLITE",
            "speculative_draft_model_path": str(drafter),
        }
    with environment(**options.pop("env", {})):
        running = sglang.Engine(**{**settings, **options})
        try:
            yield running
        finally:
            running.shutdown()


def play(running: Any, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Send all requests at once; the engine runs at most max_running_requests of them together.

    Log-probabilities are those of input and output.
    """
    with_logprobs = any(request.logprobs for request in requests)
    processors = [request.processor for request in requests]
    return running.generate(
        input_ids=[list(request.prompt) for request in requests],
        sampling_params=[request.sampling_params for request in requests],
        return_logprob=[request.logprobs for request in requests] if with_logprobs else None,
        logprob_start_len=[0 if request.logprobs else -1 for request in requests],
        top_logprobs_num=[3 * request.logprobs for request in requests] if with_logprobs else None,
        custom_logit_processor=processors if any(processors) else None,
    )


def flush_when_idle(running: Any) -> bool:
    """Empty the prefix cache as soon as nothing is left of any request; False if that stays.

    The scheduler is not idle at once when the last reply is out.
    """
    flush = running.tokenizer_manager.flush_cache(timeout_s=10.0)
    return running.loop.run_until_complete(flush).success


def scheduler_memory_mb() -> float:
    """Resident memory of the scheduler process of this process's engine or server."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended engines leave zombies
            if any("sglang::scheduler" in part for part in process.cmdline()):
                found.append(process.memory_info().rss / 1e6)
    (memory,) = found
    return memory
