"""`sglang-dlite eval`: acceptance and speed of a drafter as SGLang serves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_dlite.drafter import DLiteConfig, DrafterConfigError
from sglang_dlite.training.answering import Answer, Answering, AnsweringError, Ask, engine_ask
from sglang_dlite.training.dataset import ReplyRecord
from sglang_dlite.training.eval_metrics import Measured, summarise
from sglang_dlite.training.generate import add_prompt_arguments, load_prompt_groups
from sglang_dlite.training.prompts import Prompt, PromptError
from sglang_dlite.training.reply_kinds import is_looping, lookup_walk
from sglang_dlite.training.serving import add_engine_arguments, engine
from sglang_dlite.training.storage import StorageError
from sglang_dlite.training.targets import TargetError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", help="drafter directory (default: the shipped one)")
    add_prompt_arguments(parser)
    add("--max-new-tokens", type=int, default=128)
    add("--min-prompt-tokens", type=int, default=0, help="shorter prompts are not counted")
    add("--max-prompt-tokens", type=int, default=6144, help="longer prompts are left out")
    add(
        "--temperature",
        type=float,
        action="append",
        metavar="T",
        help="repeatable (default: 0, greedy)",
    )
    add("--no-baseline", action="store_true", help="do not time the target without a drafter")
    add("--out", type=Path, default=Path("work/eval-report"), help="folder of the report")
    add_engine_arguments(parser, concurrency=1)


def run(args: argparse.Namespace) -> int:
    try:
        evaluate(args)
    except (
        PromptError, AnsweringError, StorageError, TargetError, DrafterConfigError,
    ) as error:  # fmt: skip
        print(f"eval: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass
class Collected:
    """Replies in memory, with what the engine said of them."""

    # Both stay empty: a prompt that occurs twice is measured twice.
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    replies: list[tuple[ReplyRecord, Answer]] = field(default_factory=list)

    def append(self, record: ReplyRecord) -> None:
        """`keep` gets it, with what the engine said of it."""

    def keep(self, record: ReplyRecord, answer: Answer) -> None:
        self.replies.append((record, answer))


def evaluate(args: argparse.Namespace) -> None:
    """Play all prompts with the drafter and, on the same prompts, without; write the report."""
    from sglang_dlite.assets import shipped_drafter_dir
    from sglang_dlite.training.eval_report import markdown, write_report
    from sglang_dlite.training.targets import load_tokenizer

    prompts = [prompt for group in load_prompt_groups(args) for prompt in group]
    if not prompts:
        raise PromptError("no prompts: give --prompts, --hf-dataset or --sessions")
    drafter = str(args.drafter or shipped_drafter_dir())
    config = DLiteConfig.from_pretrained(drafter)
    tokenizer = load_tokenizer(args.target)
    temperatures = args.temperature or [0.0]
    with engine(args, drafter) as running:
        num_drafts = running.get_server_info()["speculative_num_draft_tokens"] - 1
        played = {
            temperature: play(running, args, tokenizer, prompts, temperature)
            for temperature in temperatures
        }
    rows = [
        measured(record, answer, temperature, num_drafts)
        for temperature, collected in played.items()
        for record, answer in collected.replies
        if len(record.prompt_ids) >= args.min_prompt_tokens
    ]
    if not args.no_baseline:
        with engine(args) as running:
            alone = {
                temperature: play_again(running, args, collected, temperature)
                for temperature, collected in played.items()
            }
        rows = [with_baseline(row, alone[row.temperature][row.id]) for row in rows]
    report = {
        "settings": {
            "command": ["sglang-dlite", *sys.argv[1:]],
            "drafter": config.to_dict(),
            "num_drafts": num_drafts,
            "concurrency": args.concurrency,
            "max_new_tokens": args.max_new_tokens,
        },
        "temperatures": {
            str(temperature): summarise(
                [row for row in rows if row.temperature == temperature], num_drafts
            )
            for temperature in temperatures
        },
    }
    write_report(args.out, report, rows)
    print(markdown(report))
    print(f"The report, every reply and the plots are in {args.out}")


def _params(args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    return {"temperature": temperature, "max_new_tokens": args.max_new_tokens}


def play(
    running: Any,
    args: argparse.Namespace,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    temperature: float,
) -> Collected:
    """Answer every turn of every prompt."""
    from tqdm import tqdm

    running.flush_cache()
    collected = Collected()
    total = sum(len(prompt.turns) for prompt in prompts)
    with tqdm(total=total, desc=f"DLITE, T={temperature}", unit="reply") as bar:

        def on_reply(record: ReplyRecord, answer: Answer) -> None:
            collected.keep(record, answer)
            bar.update()

        answering = Answering(
            engine_ask(running), tokenizer, collected, _params(args, temperature),
            args.max_prompt_tokens, on_reply, on_skip=bar.update,
            template=args.chat_template_kwargs,
        )  # fmt: skip
        running.loop.run_until_complete(answering.run(prompts, args.concurrency))
    return collected


def play_again(
    running: Any, args: argparse.Namespace, played: Collected, temperature: float
) -> dict[str, Answer]:
    """The same prompts, in the same order, without a drafter; answers by id."""
    import asyncio

    from tqdm import tqdm

    running.flush_cache()
    ask: Ask = engine_ask(running)
    answers: dict[str, Answer] = {}
    waiting = iter(played.replies)
    with tqdm(total=len(played.replies), desc=f"target alone, T={temperature}") as bar:

        async def worker() -> None:
            for record, _ in waiting:
                answers[record.id] = await ask(record.prompt_ids, _params(args, temperature))
                bar.update()

        async def everything() -> None:
            await asyncio.gather(*(worker() for _ in range(args.concurrency)))

        running.loop.run_until_complete(everything())
    return answers


def measured(record: ReplyRecord, answer: Answer, temperature: float, num_drafts: int) -> Measured:
    """One reply's figures from SGLang's meta_info."""
    passes, accepted = lookup_walk(record.prompt_ids, answer.ids, num_drafts)
    meta = answer.meta
    return Measured(
        id=record.id,
        source=record.source,
        category=record.category,
        turn=record.turn,
        temperature=temperature,
        prompt_tokens=len(record.prompt_ids),
        cached_tokens=meta.get("cached_tokens", 0),
        output_tokens=meta["completion_tokens"],
        seconds=answer.seconds,
        # A reply of one token comes from the prefill alone: no pass, and no field for it.
        verify_passes=meta.get("spec_verify_ct", 0),
        accepted=meta.get("spec_num_correct_drafts", 0),
        histogram=list(meta.get("spec_correct_drafts_histogram", [])),
        looping=is_looping(answer.ids),
        lookup_passes=passes,
        lookup_accepted=accepted,
    )


def with_baseline(row: Measured, answer: Answer) -> Measured:
    """The row, with the target's own speed on the same prompt."""
    return replace(row, alone_tokens=answer.meta["completion_tokens"], alone_seconds=answer.seconds)
