"""Starting sglang.Engine for generation and evaluation."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# On a CPU the default share of the memory is most of the machine.
_CPU_TOTAL_TOKENS = 65536


def add_engine_arguments(parser: argparse.ArgumentParser, concurrency: int) -> None:
    """Options that `generate` and `eval` share."""
    add = parser.add_argument
    add("--target", help="HF directory or name of the target (default: the embedded model)")
    add("--concurrency", type=int, default=concurrency, help="requests decoded at once")
    add(
        "--max-total-tokens",
        type=int,
        help=f"size of the engine's KV cache (default: the engine's; {_CPU_TOTAL_TOKENS} on a CPU)",
    )
    add("--context-length", type=int, help="longest prompt and reply (default: the target's)")


def _leave(*_: object) -> None:
    sys.exit(143)


async def _take_sigterm(running: Any) -> None:
    running.tokenizer_manager.auto_create_handle_loop()  # takes the signal; it does so once
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _leave)


@contextmanager
def engine(args: argparse.Namespace, drafter: str | None = None) -> Iterator[Any]:
    """A running engine, with DLITE where a drafter is given; always ended, on SIGTERM too."""
    import sglang
    import torch

    from sglang_dlite import ALGORITHM
    from sglang_dlite.training.targets import target_path

    settings: dict[str, Any] = {
        "model_path": target_path(args.target),
        "max_running_requests": args.concurrency,
        "log_level": "warning",
    }
    if drafter is not None:
        settings["speculative_algorithm"] = ALGORITHM
        settings["speculative_draft_model_path"] = drafter
    total = args.max_total_tokens or (None if torch.cuda.is_available() else _CPU_TOTAL_TOKENS)
    if total is not None:
        settings["max_total_tokens"] = total
    if args.context_length is not None:
        settings["context_length"] = args.context_length
    # A polite kill must still end the engine's processes: they hold the memory.
    before = signal.signal(signal.SIGTERM, _leave)
    running = sglang.Engine(**settings)
    try:
        # Upstream's loop answers SIGTERM by waiting until no request is left, which a client that
        # always has another one never lets happen. Every reply is kept as it comes: leave at once.
        running.loop.run_until_complete(_take_sigterm(running))
        yield running
    finally:
        running.shutdown()
        signal.signal(signal.SIGTERM, before)
