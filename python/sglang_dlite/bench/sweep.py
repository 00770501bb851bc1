"""Open-loop sweeps: SGLang's own `python -m sglang.bench_serving`, called and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dlite.bench.config import SweepSpec

TIMEOUT_S = 3600.0


class SweepError(RuntimeError):
    """bench_serving failed; the message has the end of its output."""


def sweep_command(
    spec: SweepSpec,
    base_url: str,
    target: str,
    trace: Path,
    concurrency: int,
    output: Path,
    fields: Mapping[str, Any],
) -> list[str]:
    """The command line of one point: the workload as an agentic trace, C requests at once.

    Replies end where the model ends them, and conversations feed the server's replies back;
    `fields` are added to every request.
    """
    extra = ("--extra-request-body", json.dumps(dict(fields))) if fields else ()
    prompts = spec.prompts_per_user * concurrency
    return [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", base_url, "--model", target, "--tokenizer", target),
        *("--dataset-name", "agentic-trace", "--dataset-path", str(trace)),
        *("--num-prompts", str(prompts), "--max-concurrency", str(concurrency)),
        *("--sharegpt-output-len", str(spec.output_tokens), "--disable-ignore-eos"),
        *("--temperature", "0", "--warmup-requests", "1", "--flush-cache", "--disable-tqdm"),
        *("--output-file", str(output), *extra),
    ]


def run_sweep_point(command: Sequence[str], output: Path, log: Path) -> None:
    """Run one point; `output` holds its JSON line afterwards, or SweepError says why not."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # bench_serving appends
    with log.open("w", encoding="utf-8") as file:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=TIMEOUT_S
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise SweepError(f"bench_serving took over {TIMEOUT_S:.0f} s (log: {log})") from error
    if status or not output.is_file():
        tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise SweepError(f"bench_serving ended with status {status} (log: {log}):\n  {tail}")


def read_sweep_point(output: Path) -> dict[str, Any]:
    """The figures of one point that the report shows."""
    result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    keys = ("completed", "duration", "total_output_tokens", "output_throughput")
    latencies = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms")
    return {key: result.get(key) for key in (*keys, *latencies)}
