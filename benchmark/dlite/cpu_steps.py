"""What a step costs on a CPU: torch operators, compiled kernels, and DLITE on the kernels.

Each arm is an engine in a process of its own; all stay up, an idle one sleeps. Arms take turns
within every repeat, and medians over the repeats are shown. A step of DLITE is a verify pass of 8
rows per request and the draft of the next block, with the embedded model and its drafter.

    python benchmark/dlite/cpu_steps.py

What the policy of --speculative-adaptive weighs up, steps at every width and number of requests,
as JSON (test/unit/step_costs.json is one such):

    python benchmark/dlite/cpu_steps.py --widths 1 2 3 4 6 8 > step_costs.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Ask = Callable[[int], tuple[Any, ...]]  # the number of a repeat -> what an arm is asked
ARMS: dict[str, tuple[str, int]] = {  # DLITE_CPU_KERNELS, width of a verify pass
    "torch": ("0", 1),
    "kernels": ("1", 1),
    "dlite": ("1", 8),
}
REQUESTS, WIDTH_PROMPT, WIDTH_STEPS = (1, 2, 4, 8, 16, 32), 256, 16  # of --widths
# (requests, prompt tokens of each, steps timed)
DECODES = ((1, 64, 40), (8, 64, 20), (1, 3000, 20))
PREFILL = 2048
SHORT = 4  # tokens of the run that is subtracted: request handling and the prefix look-up


def serve_arm(width: int) -> None:
    """The child: an engine that answers one JSON line per request line; width 1 is no DLITE."""
    import sglang
    from sglang_dlite.assets import shipped_drafter_dir
    from sglang_dlite.embedded_model import prepare_embedded_model

    options: dict[str, Any] = {}
    if width > 1:
        options = {
            "speculative_algorithm": "DLITE",
            "speculative_draft_model_path": str(shipped_drafter_dir()),
            "speculative_num_draft_tokens": width,
        }
    engine = sglang.Engine(
        model_path=str(prepare_embedded_model()),
        dtype="bfloat16",
        max_total_tokens=40_000,
        max_running_requests=max(REQUESTS),
        log_level="error",
        **options,
    )
    print("READY", flush=True)
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        measure = {"decode": decode_step, "prefill": prefill}[kind]
        print("DONE", json.dumps(measure(engine, *arguments)), flush=True)
    engine.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + position * 31) % 40_000 + 100 for position in range(length)]


def decode_step(engine: Any, requests: int, length: int, steps: int) -> float:
    """Milliseconds of a step with `requests` running behind cached prompts of `length`."""
    prompts = [prompt(seed, length) for seed in range(requests)]

    def run(tokens: int) -> tuple[float, float]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        spent = time.perf_counter() - start
        metas = [answer["meta_info"] for answer in answers]
        # The mean: requests end after different numbers of passes, the last ones run with fewer.
        passes = [meta.get("spec_verify_ct") or meta["completion_tokens"] - 1 for meta in metas]
        return spent, statistics.mean(passes)

    run(1)  # the prompts enter the prefix cache
    short, long = run(SHORT), run(SHORT + steps)
    return 1000 * (long[0] - short[0]) / (long[1] - short[1])


def prefill(engine: Any, length: int, seed: int) -> float:
    """Milliseconds to the first token of a prompt that is not cached."""
    engine.flush_cache()
    start = time.perf_counter()
    engine.generate(
        input_ids=[prompt(1000 + seed, length)],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
    )
    return 1000 * (time.perf_counter() - start)


class Arm:
    """The parent's end of one child."""

    def __init__(self, kernels: str, width: int) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--arm", str(width)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "DLITE_CPU_KERNELS": kernels},
        )
        self._read("READY")

    def ask(self, *request: Any) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(self._read("DONE"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise RuntimeError(f"the engine ended: {self.process.args}")


def play(arms: dict[Any, Arm], requests: dict[Any, Ask], repeats: int) -> dict[Any, Any]:
    """Median milliseconds by request and arm; arms take turns within every repeat."""
    times: dict[Any, dict[Any, list[float]]] = {row: {arm: [] for arm in arms} for row in requests}
    for repeat in range(repeats):
        order = list(arms.items()) if repeat % 2 == 0 else list(arms.items())[::-1]
        for row, request in requests.items():
            for name, arm in order:
                times[row][name].append(arm.ask(*request(repeat)))
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    for arm in arms.values():
        arm.close()
    return {
        row: {name: statistics.median(each) for name, each in by_arm.items()}
        for row, by_arm in times.items()
    }


def decoding(requests: int, length: int, steps: int) -> Ask:
    return lambda _: ("decode", requests, length, steps)


def width_costs(widths: list[int], repeats: int) -> dict[str, Any]:
    """Median milliseconds of a step by number of requests and width, drafts included."""
    arms = {width: Arm("1", width) for width in widths}
    medians = play(arms, {n: decoding(n, WIDTH_PROMPT, WIDTH_STEPS) for n in REQUESTS}, repeats)
    rounded = {
        n: {w: round(ms, 2) for w, ms in by_width.items()} for n, by_width in medians.items()
    }
    return {"prompt_tokens": WIDTH_PROMPT, "repeats": repeats, "ms_by_requests_by_width": rounded}


def main() -> None:
    """Play every arm in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", help="measure these widths instead")
    parser.add_argument("--arm", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        serve_arm(args.arm)
        return
    if args.widths:
        print(json.dumps(width_costs(args.widths, args.repeats), indent=1))
        return
    requests = {f"step, {n} x {length} tokens": decoding(n, length, k) for n, length, k in DECODES}
    requests[f"prefill of {PREFILL}"] = lambda repeat: ("prefill", PREFILL, repeat)
    medians = play({name: Arm(*how) for name, how in ARMS.items()}, requests, args.repeats)
    print("| ms | torch | kernels | DLITE | torch / kernels | DLITE / kernels |")
    print("|---|---|---|---|---|---|")
    for row, by_arm in medians.items():
        torch_ms, kernel_ms, dlite_ms = (by_arm[name] for name in ARMS)
        print(
            f"| {row} | {torch_ms:.1f} | {kernel_ms:.1f} | {dlite_ms:.1f} | "
            f"{torch_ms / kernel_ms:.2f} | {dlite_ms / kernel_ms:.2f} |"
        )


if __name__ == "__main__":
    main()
