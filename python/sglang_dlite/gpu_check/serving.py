"""A tiny random Qwen3 served with and without DLITE, graphs and overlap: text, acceptance, K/V.

Only this file of the package imports sglang. Nothing of it has run on a GPU yet; on a CPU, where
there are no graphs, it compares overlap on and off (test/server/test_gpu_check_serving.py).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dlite.gpu_check.report import Report
from sglang_dlite.gpu_check.tiny_pair import KV_BYTES_PER_TOKEN, VOCAB, make_pair

NEW_TOKENS = 64
CAPTURED = [1, 2, 4]  # a batch of 3 is padded, one of 5 to 8 runs eagerly
MAX_RUNNING = 8
TOTAL_TOKENS = 65536  # large enough that SGLang's rounding of GB does not hide a drafter's K/V
# In 16 bits a verify pass and a decode step differ in rounding. Where the target's own two best
# logits are nearer than this, either token is the target's.
NEAR_TIE = 0.25
# Rounding may also turn a draft over; stale pivot states cost most of the accepted ones.
ACCEPTANCE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Arm:
    """One engine start."""

    name: str
    dlite: bool = True
    graphs: bool = True
    overlap: bool = True
    adaptive: bool = False


@dataclass
class Played:
    """What an arm gave for the same requests."""

    texts: list[list[int]]
    gaps: list[list[float]]  # target-only: best less second-best log-probability, per token
    accepted: int
    passes: int
    kv_gb: float
    graph_gb: dict[str, float]
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / verify passes."""
        return 1 + self.accepted / self.passes if self.passes else 1.0


TARGET_ONLY = Arm("target only", dlite=False)
PLAIN = Arm("graphs, overlap")
NO_GRAPHS = Arm("no graphs, overlap", graphs=False)
NO_OVERLAP = Arm("graphs, no overlap", overlap=False)
ADAPTIVE = Arm("graphs, overlap, adaptive width", adaptive=True)


def requests() -> list[dict[str, Any]]:
    """Prompts of mixed length; every third has a logit bias, and so is no plainly greedy one."""
    chance = random.Random(0)
    made = []
    for index in range(15):
        prompt = [chance.randrange(VOCAB - 2) for _ in range(chance.randrange(2, 200))]
        sampling: dict[str, Any] = {
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": NEW_TOKENS - chance.randrange(32),
        }
        if index % 3 == 2:
            sampling["logit_bias"] = {str(chance.randrange(VOCAB - 2)): 3.0 for _ in range(20)}
        made.append({"input_ids": prompt, "sampling_params": sampling})
    return made


@contextmanager
def _cpu_overlap(on: bool) -> Iterator[None]:
    """The CPU platform's own switch, for the processes that start inside; CUDA knows none."""
    name = "DLITE_CPU_OVERLAP"
    before = os.environ.get(name)
    os.environ[name] = str(int(on))
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def play(arm: Arm, target: Path, drafter: Path, dtype: str) -> Played:
    """Start an engine, play all requests twice over (the second time from a warm cache)."""
    import sglang

    settings: dict[str, Any] = {
        "model_path": str(target),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "warning",
        "max_total_tokens": TOTAL_TOKENS,
        "max_running_requests": MAX_RUNNING,
        "disable_overlap_schedule": not arm.overlap,
        "disable_decode_cuda_graph": not arm.graphs,
        "cuda_graph_bs_decode": CAPTURED if arm.graphs else None,
        "disable_prefill_cuda_graph": True,  # off with DLITE; both sides alike
    }
    if arm.dlite:
        settings["speculative_algorithm"] = "DLITE"
        settings["speculative_draft_model_path"] = str(drafter)
        settings["speculative_adaptive"] = arm.adaptive
    batch = requests()
    started = time.perf_counter()
    with _cpu_overlap(arm.overlap):
        engine = sglang.Engine(**settings)
    try:
        answers: list[dict[str, Any]] = []
        for _ in range(2):
            answers += engine.generate(
                input_ids=[request["input_ids"] for request in batch],
                sampling_params=[request["sampling_params"] for request in batch],
                return_logprob=not arm.dlite,
                top_logprobs_num=0 if arm.dlite else 2,
            )
        memory = engine.get_server_info()["internal_states"][0]["memory_usage"]
    finally:
        engine.shutdown()
    metas = [answer["meta_info"] for answer in answers]
    return Played(
        texts=[answer["output_ids"] for answer in answers],
        gaps=[
            [best[0] - second[0] for best, second, *_ in meta.get("output_top_logprobs", ())]
            for meta in metas
        ],
        accepted=sum(meta.get("spec_num_correct_drafts", 0) for meta in metas),
        passes=sum(meta.get("spec_verify_ct", 0) for meta in metas),
        kv_gb=float(memory["kvcache"]),
        graph_gb={phase: float(size) for phase, size in memory["graph"].items()},
        seconds=time.perf_counter() - started,
    )


def divergences(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> list[tuple[int, int, float]]:
    """(request, place, the target's gap there) of the first difference of each pair of texts."""
    found = []
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(left, right, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None and len(left) != len(right):
            place = min(len(left), len(right))
        if place is not None:
            gap = gaps[index][place] if place < len(gaps[index]) else float("inf")
            found.append((index, place, gap))
    return found


def compare(report: Report, arms: dict[Arm, Played]) -> None:
    """All checks, on what has been played."""
    target, plain = arms[TARGET_ONLY], arms[PLAIN]
    for arm, played in arms.items():
        if not arm.dlite:
            continue
        found = divergences(played.texts, target.texts, target.gaps)
        report.add(
            f"serving: text equals target only ({arm.name})",
            all(gap < NEAR_TIE for *_, gap in found),
            {
                "texts": len(played.texts),
                "near_ties": [list(entry) for entry in found],
                "seconds": round(played.seconds, 1),
            },
        )
        difference = abs(played.acceptance_length - plain.acceptance_length)
        if arm.adaptive:
            # It measures plain decoding in between: those passes accept nothing.
            report.add(
                f"serving: other widths than D were played ({arm.name})",
                played.passes > plain.passes,
                {"passes": played.passes, "at_fixed_width": plain.passes},
            )
        else:
            report.add(
                f"serving: acceptance equals graphs and overlap ({arm.name})",
                played.acceptance_length > 1.5
                and difference <= ACCEPTANCE_TOLERANCE * plain.acceptance_length,
                {
                    "acceptance_length": round(played.acceptance_length, 4),
                    "accepted": played.accepted,
                    "passes": played.passes,
                },
            )
        report.add(
            f"serving: K/V bytes per token equal target only ({arm.name})",
            played.kv_gb == target.kv_gb,
            {
                "bytes_per_token": round(played.kv_gb * 2**30 / TOTAL_TOKENS),
                "target_only": round(target.kv_gb * 2**30 / TOTAL_TOKENS),
                "by_arithmetic_in_16_bits": KV_BYTES_PER_TOKEN,
            },
        )


def affordable(seconds: Sequence[float], now: float, deadline: float) -> bool:
    """Whether another arm, as long as the longest so far, ends before the deadline."""
    return now + max(seconds, default=0.0) <= deadline


def run_serving_checks(
    report: Report, device: str = "cuda", deadline: float = float("inf")
) -> None:
    """Play the arms and report; about five engine starts. Needs sglang, no network.

    The target alone and DLITE are always played; what else would not end before `deadline` (of
    time.monotonic()) is left out, and noted.
    """
    on_cuda = device == "cuda"
    optional = [*([NO_GRAPHS] if on_cuda else []), NO_OVERLAP, ADAPTIVE]
    dtype = torch.bfloat16 if on_cuda else torch.float32
    with tempfile.TemporaryDirectory(prefix="dlite-gpu-check-") as folder:
        target, drafter = make_pair(Path(folder), dtype)
        played: dict[Arm, Played] = {}
        for arm in (TARGET_ONLY, PLAIN, *optional):
            lasted = [each.seconds for each in played.values()]
            if arm in optional and not affordable(lasted, time.monotonic(), deadline):
                report.note(f"serving: {arm.name} was left out, six minutes would not do for it")
                continue
            played[arm] = play(arm, target, drafter, str(dtype).removeprefix("torch."))
    compare(report, played)
    if on_cuda:
        graphs = played[PLAIN].graph_gb
        # A tiny model's graphs may round to 0.000 GB; the phases must be there all the same.
        report.add(
            "serving: memory of verify and draft graphs is reported",
            {"target_verify", "draft_decode"} <= set(graphs),
            {"graph_gb": graphs},
        )
