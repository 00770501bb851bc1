"""`sglang-dlite profile`: where the time of one decode step of the target goes on a CPU.

The step runs in this process, on SGLang's own model runner (the machinery of its
`bench_one_batch`), without a scheduler around it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

KERNEL_PARTS = ("linear", "attention", "other")  # in the order of the kernels' own counters
PARTS = (*KERNEL_PARTS, "sampling")


class Split(NamedTuple):
    """Milliseconds of one step: the whole, and its parts by name."""

    total: float
    parts: dict[str, float]

    @property
    def python(self) -> float:
        """What no part accounts for: module calls, batch preparation, small torch operators."""
        return self.total - sum(self.parts.values())


class PartClock:
    """Seconds spent in each part; a timed function inside another counts for the outer one.

    `kernels`, where given, count their own parts.
    """

    def __init__(self, kernels: ModuleType | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._kernels = kernels
        self._inside = False

    def time(self, owner: Any, name: str, part: str) -> None:
        """Replace the function `name` of a class by one that counts its time as `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self._inside = False

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """The milliseconds since the last call, by part."""
        if self._kernels is not None:
            self.seconds |= zip(KERNEL_PARTS, self._kernels.take_seconds(), strict=True)
        taken = {part: 1000 * seconds for part, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(PARTS, 0.0)
        return taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, help="target (default: the embedded model)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="requests")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[128, 2048, 8000], help="cached tokens each"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps per row; medians are shown")


def load_runner(model_path: Path, max_total_tokens: int) -> Any:
    """SGLang's model runner for a target in bf16, in this process.

    Raises:
        RuntimeError: an accelerator is present; the split is that of the CPU platform.
    """
    from sglang_dlite.platforms import has_accelerator

    if has_accelerator():
        raise RuntimeError("sglang-dlite profile measures the CPU platform; a GPU is present.")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    server_args = ServerArgs(
        model_path=str(model_path),
        dtype="bfloat16",
        max_total_tokens=max_total_tokens,
        context_length=None,
        log_level="error",
    )
    server_args.resolve_once()
    world_rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner


def clock_parts() -> PartClock:
    """Time the functions of SGLang and of the CPU platform that make up a step."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.sampler import Sampler

    from sglang_dlite.platforms.attention import CpuAttentionBackend
    from sglang_dlite.platforms.kernels import compiled_kernels
    from sglang_dlite.platforms.packed_linear import PackedLinearMethod

    clock = PartClock(compiled_kernels())
    clock.time(Sampler, "forward", "sampling")
    if compiled_kernels() is None:
        clock.time(PackedLinearMethod, "apply", "linear")
        clock.time(CpuAttentionBackend, "forward", "attention")
        clock.time(BaseFusedOp, "forward", "other")
    return clock


def decode_split(runner: Any, clock: PartClock, batch: int, context: int, steps: int) -> Split:
    """Medians over `steps` decode steps of `batch` requests behind `context` tokens each."""
    from sglang.benchmark.one_batch import prepare_synthetic_inputs_for_latency_test

    runner.clear()
    requests = prepare_synthetic_inputs_for_latency_test(batch, context)
    token_ids, _, state = runner.extend(requests)
    totals, parts = [], []
    for _ in range(steps):
        clock.take()
        start = time.perf_counter()
        token_ids, _ = runner.decode(token_ids, state)
        totals.append(1000 * (time.perf_counter() - start))
        parts.append(clock.take())
    return Split(
        statistics.median(totals),
        {name: statistics.median(part[name] for part in parts) for name in PARTS},
    )


def kv_bytes(runner: Any, batch: int, context: int) -> int:
    """Bytes of cached K and V that one step reads."""
    pool = runner.torch_runner.token_to_kv_pool
    row = sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    return batch * context * row


def run(args: argparse.Namespace) -> int:
    """Print one row per batch size and context."""
    from sglang_dlite.embedded_model import prepare_embedded_model
    from sglang_dlite.platforms.kernels import compiled_kernels

    shapes = [(batch, context) for batch in args.batch_size for context in args.context]
    largest = max(batch * (context + args.steps + 16) for batch, context in shapes)
    runner = load_runner(args.model_path or prepare_embedded_model(), largest)
    clock, kernels = clock_parts(), compiled_kernels()
    engine = "torch operators" if kernels is None else f"compiled kernels ({kernels.isa()})"
    print(f"decode step on {engine}, milliseconds, medians of {args.steps} steps\n")
    print("| batch | context | step | " + " | ".join(PARTS) + " | Python | K/V read |")
    print("|---" * (len(PARTS) + 5) + "|")
    for batch, context in shapes:
        split = decode_split(runner, clock, batch, context, args.steps)
        rate = kv_bytes(runner, batch, context) / split.parts["attention"] / 1e6
        cells = [split.total, *split.parts.values(), split.python]
        print(
            f"| {batch} | {context} | "
            + " | ".join(f"{cell:.1f}" for cell in cells)
            + f" | {rate:.1f} GB/s |",
            flush=True,
        )
    return 0
