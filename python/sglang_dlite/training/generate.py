"""`sglang-dlite generate`: prompts in, the target's own replies out."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_dlite.training.answering import Answer, Answering, AnsweringError, engine_ask
from sglang_dlite.training.dataset import DatasetError, Description, ReplyRecord, ReplyWriter
from sglang_dlite.training.exclusion import (
    Exclusion,
    interleave,
    without_repetitions,
)
from sglang_dlite.training.prompts import (
    Prompt,
    PromptError,
    Turn,
    load_hf_prompts,
    load_prompts,
    parse_share,
)
from sglang_dlite.training.provenance import without_folders
from sglang_dlite.training.serving import add_engine_arguments, engine
from sglang_dlite.training.storage import StorageError, locked
from sglang_dlite.training.targets import TargetError

BUILTIN = ("stdlib-code", "stdlib-agent", "chat", "self-instruct", "self-chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, help="data set folder; a second run continues it")
    add_prompt_arguments(parser)
    add(
        "--builtin",
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help=f"prompts that need no file, NAME one of {', '.join(BUILTIN)}; repeatable",
    )
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="FILE[:FIELD]|FOLDER",
        help="JSONL of evaluation prompts that must not be used (default FIELD: turns, or "
        "messages), or a data set whose prompts must not; repeatable",
    )
    add("--max-new-tokens", type=int, default=256)
    add("--max-prompt-tokens", type=int, default=6144, help="longer prompts are left out")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=-1)
    add("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the full shards")
    add("--shard-size", type=int, default=1000, help="replies per shard")
    add("--share", default="0/1", metavar="I/N", help="do the I-th of N shares of the prompts")
    add("--drafter", help="speed generation up with this drafter (replies stay the target's)")
    add("--seed", type=int, default=0, help="of the builtin prompts")
    add_engine_arguments(parser, concurrency=32)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompt sources that `generate` and `eval` share."""
    add = parser.add_argument
    add(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE[:FIELD]",
        help="JSONL (.gz): OpenAI-style messages, or FIELD as the user turn(s); repeatable",
    )
    add(
        "--hf-dataset",
        action="append",
        default=[],
        metavar="NAME[@SPLIT][:FIELD]",
        help="the same of a Hugging Face data set; repeatable",
    )
    add(
        "--sessions",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="JSONL of agent sessions: every assistant turn is answered anew; repeatable",
    )
    add(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""of the target's chat template, e.g. '{"enable_thinking": false}'""",
    )
    add("--rows", metavar="[!]I/N", help="of --sessions: rows I modulo N, or (!) the others")
    add("--limit", type=_positive, help="use at most this many prompts of each file")
    add("--skip-bad-rows", action="store_true", help="leave out rows that cannot be used")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or above")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def load_prompt_groups(args: argparse.Namespace) -> list[list[Prompt]]:
    """The prompts of the shared options, one group per source."""
    from sglang_dlite.training.sessions import load_sessions

    skip = args.skip_bad_rows
    groups = [load_prompts(spec, skip) for spec in args.prompts]
    groups += [load_hf_prompts(spec, skip) for spec in args.hf_dataset]
    groups += [load_sessions(path, args.rows, skip) for path in args.sessions]
    return _with_distinct_sources([group[: args.limit] for group in groups if group])


def _with_distinct_sources(groups: list[list[Prompt]]) -> list[list[Prompt]]:
    """Files of the same name get a number: neither their ids nor their figures may mix."""
    taken: set[str] = set()
    distinct = []
    for group in groups:
        source = name = group[0].source
        numbers = itertools.count(2)
        while name in taken:
            name = f"{source}-{next(numbers)}"
        taken.add(name)
        distinct.append(
            [replace(p, id=name + p.id.removeprefix(source), source=name) for p in group]
        )
    return distinct


def run(args: argparse.Namespace) -> int:
    try:
        generate(args)
    except (PromptError, DatasetError, StorageError, TargetError, AnsweringError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


def _self_asked(source: str, turns: int, count: int, seed: int) -> list[Prompt]:
    """Conversations in which the target writes the user's messages as well."""
    return [
        Prompt(f"{source}-{seed}/{i}", source, (Turn(()),) * turns, asks_itself=True)
        for i in range(count)
    ]


def collect_prompts(args: argparse.Namespace, excluded: Exclusion) -> list[Prompt]:
    """All prompts of a run in their order; what is `excluded` is taken out.

    Deterministic for the same arguments. Sources are mixed so that any prefix is balanced.
    """
    from sglang_dlite.training.chat_prompts import chat_prompts
    from sglang_dlite.training.stdlib_prompts import agent_prompts, completion_prompts

    makers: dict[str, Any] = {
        "stdlib-code": completion_prompts,
        "stdlib-agent": agent_prompts,
        "chat": chat_prompts,
        "self-instruct": partial(_self_asked, "self-instruct", 1),
        "self-chat": partial(_self_asked, "self-chat", 2),
    }
    groups = load_prompt_groups(args)
    for item in args.builtin:
        name, _, count = item.partition("=")
        if name not in makers or not count.isdigit():
            raise PromptError(f"--builtin {item}: must be NAME=COUNT with NAME in {BUILTIN}")
        groups.append(makers[name](int(count), args.seed))
    kept = [[p for p in group if not excluded.covers(p)] for group in groups]
    dropped = sum(map(len, groups)) - sum(map(len, kept))
    if dropped:
        print(f"generate: {dropped} prompts overlap with --exclude, left out", file=sys.stderr)
    once, repeated = without_repetitions(kept)
    if repeated:
        print(f"generate: {repeated} prompts occur more than once, made once", file=sys.stderr)
    prompts = interleave([group for group in once if group])
    if not prompts:
        raise PromptError("no prompts: give --prompts, --hf-dataset, --sessions or --builtin")
    return prompts


def describe(args: argparse.Namespace) -> Description:
    """The data set's description, with this run's provenance. Raises `TargetError`."""
    from importlib.metadata import version

    from sglang_dlite.training.config import TargetSection
    from sglang_dlite.training.targets import read_shape, target_path

    shape = read_shape(TargetSection(path=args.target))
    run = {
        "command": ["sglang-dlite", *sys.argv[1:]],
        "arguments": json.loads(json.dumps(vars(args), default=str)),
        "versions": {n: version(n) for n in ("sglang-dlite", "sglang", "torch", "transformers")},
    }
    return Description(
        target=Path(target_path(args.target)).name,
        architecture=shape.architecture,
        vocab_size=shape.vocab_size,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_new_tokens=args.max_new_tokens,
        chat_template_kwargs=args.chat_template_kwargs,
        provenance=[without_folders(run)],
    )


def generate(args: argparse.Namespace) -> None:
    """Answer this process's share of the prompts, keeping every reply as it comes."""
    from sglang_dlite.training.targets import load_tokenizer

    share, shares = parse_share(args.share)
    excluded = Exclusion.read(args.exclude)
    prompts = collect_prompts(args, excluded)[share::shares]
    description = describe(args)
    tokenizer = load_tokenizer(args.target)
    if len(tokenizer) > description.vocab_size:
        raise DatasetError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary "
            f"{description.vocab_size}: they do not belong together"
        )
    with locked(args.out, f"part-{share}"):
        description.bind(args.out)
        parquet = args.format == "parquet"
        writer = ReplyWriter(args.out, f"part-{share}", parquet, args.shard_size)
        answer(args, prompts, excluded, tokenizer, writer)
        writer.close()


def answer(
    args: argparse.Namespace,
    prompts: list[Prompt],
    excluded: Exclusion,
    tokenizer: Any,
    writer: ReplyWriter,
) -> None:
    """Give `writer` the replies that it lacks, behind a progress bar."""
    from tqdm import tqdm

    total = sum(len(prompt.turns) for prompt in prompts)
    bar = tqdm(total=total, desc="replies", unit="reply", smoothing=0.05)
    tokens = 0

    def on_reply(record: ReplyRecord, _: Answer) -> None:
        nonlocal tokens
        tokens += len(record.reply_ids)
        bar.update()
        seconds = bar.format_dict["elapsed"] or 1
        bar.set_postfix(tokens=tokens, tok_s=f"{tokens / seconds:.0f}")

    params = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "max_new_tokens": args.max_new_tokens,
    }
    with engine(args, args.drafter) as running:
        answering = Answering(
            engine_ask(running), tokenizer, writer, params, args.max_prompt_tokens, on_reply,
            on_skip=lambda count: bar.update(count), template=args.chat_template_kwargs,
            unwanted=excluded.covers_question,
        )  # fmt: skip
        running.loop.run_until_complete(answering.run(prompts, args.concurrency))
    bar.close()
    for reason, count in answering.skipped.items():
        print(f"generate: {count} replies were not made: {reason}", file=sys.stderr)
