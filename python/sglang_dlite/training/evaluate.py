"""`sglang-dlite eval`: the acceptance length of a drafter as SGLang serves it, by prompt file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_dlite.training.prompts import Prompt, PromptError, load_prompts


@dataclass
class Served:
    """Counts over the replies to one prompt file."""

    source: str
    prompts: int = 0
    output_tokens: int = 0
    verify_passes: int = 0
    accepted_drafts: int = 0
    tau: float = float("nan")

    def add(self, meta: dict[str, Any]) -> None:
        """Count one reply by SGLang's meta_info; tau = 1 + accepted drafts / verify passes."""
        self.prompts += 1
        self.output_tokens += meta["completion_tokens"]
        self.verify_passes += meta["spec_verify_ct"]
        self.accepted_drafts += meta["spec_num_correct_drafts"]
        if self.verify_passes:
            self.tau = 1 + self.accepted_drafts / self.verify_passes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="HF directory or name of the target (default: the embedded model)")
    add("--drafter", help="drafter directory (default: the shipped one)")
    add(
        "--prompts",
        action="append",
        required=True,
        metavar="FILE[:FIELD]",
        help="JSONL of OpenAI-style messages, or of FIELD as the user message; repeatable",
    )
    add("--limit", type=int, help="use at most this many prompts of each file")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--concurrency", type=int, default=8, help="requests decoded at once")
    add("--json", type=Path, help="also write the counts to this file")


def run(args: argparse.Namespace) -> int:
    try:
        groups = [load_prompts(spec)[: args.limit] for spec in args.prompts]
    except PromptError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1
    # A polite kill must still end the engine's processes: they hold the memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = [result for result in serve(args, groups) if result.prompts]
    mean = sum(result.tau for result in results) / len(results)
    print(f"{'prompts':<32}{'replies':>8}{'tokens':>9}{'passes':>9}{'tau':>7}")
    for r in results:
        print(f"{r.source:<32}{r.prompts:>8}{r.output_tokens:>9}{r.verify_passes:>9}{r.tau:>7.2f}")
    print(f"mean tau {mean:.3f}")
    if args.json is not None:
        report = {"mean_tau": mean, "sources": [asdict(result) for result in results]}
        part = args.json.with_name(args.json.name + ".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(part, args.json)
    return 0


def serve(args: argparse.Namespace, groups: Sequence[Sequence[Prompt]]) -> list[Served]:
    """Answer every prompt with a DLITE engine; one result per group. Only first turns are asked."""
    import sglang
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from sglang_dlite import ALGORITHM
    from sglang_dlite.assets import shipped_drafter_dir
    from sglang_dlite.embedded_model import prepare_embedded_model

    target = args.target or str(prepare_embedded_model())
    tokenizer = AutoTokenizer.from_pretrained(target)
    params = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    engine = sglang.Engine(
        model_path=target,
        speculative_algorithm=ALGORITHM,
        speculative_draft_model_path=str(args.drafter or shipped_drafter_dir()),
        max_running_requests=args.concurrency,
        mem_fraction_static=0.3,  # on a CPU this is a share of the machine
        log_level="warning",
    )
    try:
        results = []
        for group in groups:
            served = Served(group[0].source if group else "(empty)")
            # A few batches at a time, so that the bar moves.
            step = 4 * args.concurrency
            for start in tqdm(range(0, len(group), step), desc=served.source, unit="batch"):
                texts = [
                    tokenizer.apply_chat_template(
                        list(prompt.messages), tokenize=False, add_generation_prompt=True
                    )
                    for prompt in group[start : start + step]
                ]
                for answer in engine.generate(prompt=texts, sampling_params=params):
                    served.add(answer["meta_info"])
            results.append(served)
        return results
    finally:
        engine.shutdown()
