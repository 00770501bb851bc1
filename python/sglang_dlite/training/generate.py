"""`sglang-dlite generate`: prompts in, the target's own greedy replies and states out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_dlite.training.prompts import (
    Message,
    Prompt,
    PromptError,
    excluded_texts,
    interleave,
    load_prompts,
    overlaps,
    single_turn,
)
from sglang_dlite.training.replies import ReplyStoreError, ReplyWriter, StoreFormat

BUILTIN = ("stdlib-code", "stdlib-agent", "chat", "self-instruct")
# Requests are decoded in rounds: a prefix of the run then holds every source in proportion.
ROUND = 512
# Longer prompts go to a batch of their own, where they do not widen everybody's attention.
LONG_PROMPT = 400


def select_target_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """The S layers whose outputs condition the drafter: first, last, and S-2 spread over [1, L-2].

    The rule of the DLite release; e.g. L=36, S=14 -> 0,1,4,7,10,13,16,19,22,25,28,31,34,35.
    """
    if count < 1 or count > num_layers:
        raise ValueError(f"target layers: {count} of {num_layers} cannot be selected")
    if count == 1:
        return (num_layers - 1,)
    inner = count - 2
    if inner == 1:
        middle = [1 + round((num_layers - 3) * 0.5)]
    else:
        middle = [1 + round(i * (num_layers - 3) / (inner - 1)) for i in range(inner)]
    return (0, *middle, num_layers - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="HF directory or name of the target (default: the embedded model)")
    add("--out", required=True, type=Path, help="data set folder; a second run continues it")
    add(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE[:FIELD]",
        help="JSONL (.gz): OpenAI-style messages, or FIELD as the user message; repeatable",
    )
    add(
        "--builtin",
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help=f"prompts that need no file, NAME one of {', '.join(BUILTIN)}; repeatable",
    )
    add("--limit", type=int, help="use at most this many prompts of each --prompts file")
    add(
        "--exclude",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="evaluation prompts that must not be used; repeatable",
    )
    add("--max-new-tokens", type=int, default=160)
    add("--target-layers", type=int, default=8, metavar="S", help="pivot states per token")
    add("--top", type=int, default=48, metavar="M", help="target log-probabilities per token")
    add("--slots", type=int, default=96, help="replies decoded at once")
    add("--max-prompt-tokens", type=int, default=2600, help="longer prompts are skipped")
    add("--shard", default="0/1", metavar="I/N", help="do the I-th of N shares, one per process")
    add("--threads", type=int, help="CPU threads of this process")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    try:
        generate(args)
    except (PromptError, ReplyStoreError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


def collect_prompts(args: argparse.Namespace, questions: list[str]) -> list[Prompt]:
    """All prompts of a run in their order, evaluation prompts taken out.

    `questions`: what the `self-instruct` source yielded. Deterministic for the same arguments.
    """
    from sglang_dlite.training.chat_prompts import chat_prompts
    from sglang_dlite.training.stdlib_prompts import agent_prompts, completion_prompts

    groups = [load_prompts(spec)[: args.limit] for spec in args.prompts]
    for name, count in _builtin_counts(args).items():
        if name == "self-instruct":
            groups.append([single_turn(f"{name}/{i}", name, q) for i, q in enumerate(questions)])
        else:
            maker = {"stdlib-code": completion_prompts, "stdlib-agent": agent_prompts}
            groups.append(maker.get(name, chat_prompts)(count, args.seed))
    excluded = excluded_texts(args.exclude)
    kept = [[p for p in group if not overlaps(p, excluded)] for group in groups]
    dropped = sum(map(len, groups)) - sum(map(len, kept))
    if dropped:
        print(f"generate: {dropped} prompts overlap with --exclude, left out", file=sys.stderr)
    return interleave([group for group in kept if group])


def _builtin_counts(args: argparse.Namespace) -> dict[str, int]:
    counts = {}
    for item in args.builtin:
        name, _, count = item.partition("=")
        if name not in BUILTIN or not count.isdigit():
            raise PromptError(f"--builtin {item}: must be NAME=COUNT with NAME in {BUILTIN}")
        counts[name] = int(count)
    return counts


def generate(args: argparse.Namespace) -> None:
    """Decode this process's share, committing every few replies."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sglang_dlite.embedded_model import prepare_embedded_model

    if args.threads:
        torch.set_num_threads(args.threads)
    share, shares = (int(x) for x in args.shard.split("/"))
    path = args.target or prepare_embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    config = model.config
    fmt = StoreFormat(
        target=Path(path).name,
        target_layer_ids=select_target_layers(config.num_hidden_layers, args.target_layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        top_count=args.top,
        max_new_tokens=args.max_new_tokens,
    )
    fmt.bind(args.out)
    wanted = _builtin_counts(args).get("self-instruct", 0)
    questions = self_instruct(args, model, tokenizer, share, shares, wanted)
    prompts = collect_prompts(args, questions)
    # Self-instruct questions are written per share, everything else is dealt out.
    mine = [p for i, p in enumerate(prompts) if p.source == "self-instruct" or i % shares == share]
    if shares > 1:
        mine = [_prefixed(p, share) if p.source == "self-instruct" else p for p in mine]
    writer = ReplyWriter(args.out, f"part-{share}", fmt)
    decode_prompts(args, model, tokenizer, mine, writer, fmt)


def _prefixed(prompt: Prompt, share: int) -> Prompt:
    return Prompt(f"s{share}/{prompt.id}", prompt.source, prompt.messages, prompt.followups)


def self_instruct(
    args: argparse.Namespace, model: Any, tokenizer: Any, share: int, shares: int, count: int
) -> list[str]:
    """Let the target write user questions itself: the chat template's user header is the prompt.

    Sampled at temperature 1, kept in a file of the data set, made once. Returns this share's.
    """
    if not count:
        return []
    path = args.out / f"self-instruct-{share}.json"
    if path.exists():
        return list(json.loads(path.read_text()))
    from tqdm import tqdm

    from sglang_dlite.training.decoder import Request, SlotDecoder

    mark = "\u241f"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    header = tokenizer.encode(chat.split(mark)[0], add_special_tokens=False)
    goal = -(-count // shares)
    found: dict[str, None] = {}
    bar = tqdm(total=goal, desc="self-instruct questions", unit="q", smoothing=0.1)
    seed = args.seed * 1000 + share

    def keep(request: Request) -> None:
        text = tokenizer.decode(request.reply_ids, skip_special_tokens=True).strip()
        finished = request.reply_ids[-1] in eos
        if finished and len(text) >= 15 and len(found) < goal and text not in found:
            found[text] = None
            bar.update()

    eos = _eos_ids(model)
    decoder = SlotDecoder(model, (), eos, args.slots, 0, temperature=1.0, seed=seed)
    while len(found) < goal:
        missing = int(1.3 * (goal - len(found))) + 8
        decoder.decode([Request(i, list(header)) for i in range(missing)], 80, keep)
    bar.close()
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(list(found), ensure_ascii=False))
    scratch.replace(path)
    return list(found)


def _eos_ids(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return list(eos) if isinstance(eos, list) else [eos]


def decode_prompts(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    writer: ReplyWriter,
    fmt: StoreFormat,
) -> None:
    """Answer every turn of every prompt that the part does not hold yet."""
    import torch
    from tqdm import tqdm

    from sglang_dlite.training.decoder import Request, SlotDecoder

    decoder = SlotDecoder(model, fmt.target_layer_ids, _eos_ids(model), args.slots, args.top)
    narrow = max(1, args.slots // 6)  # long prompts: fewer rows, about the same memory
    total = sum(1 + len(p.followups) for p in prompts)
    bar = tqdm(total=total, desc="replies", unit="reply", initial=len(writer.done), smoothing=0.05)
    uncommitted = 0

    def store(request: Request) -> None:
        nonlocal uncommitted
        prompt, turn = request.key
        record = {
            "id": f"{prompt.id}#{turn}",
            "source": prompt.source,
            "prompt_tokens": len(request.prompt_ids),
            "prompt_tail": request.prompt_ids[-8:],
            "reply_ids": request.reply_ids,
            "text": tokenizer.decode(request.reply_ids, skip_special_tokens=True),
        }
        writer.append(
            record,
            torch.stack(request.states),
            torch.stack(request.top_ids),
            torch.stack(request.top_logprobs),
        )
        uncommitted += 1
        if uncommitted >= 32:
            writer.commit()
            uncommitted = 0
        bar.update()
        bar.set_postfix(tokens=writer.rows)

    for start in range(0, len(prompts), ROUND):
        chunk = prompts[start : start + ROUND]
        for turn in range(max(1 + len(p.followups) for p in chunk)):
            requests = []
            for prompt in chunk:
                if turn > len(prompt.followups) or f"{prompt.id}#{turn}" in writer.done:
                    continue
                ids = _prompt_ids(prompt, turn, writer, tokenizer)
                if ids is not None and len(ids) <= args.max_prompt_tokens:
                    requests.append(Request((prompt, turn), ids))
            for long in (False, True):
                some = [r for r in requests if (len(r.prompt_ids) > LONG_PROMPT) == long]
                decoder.slots = narrow if long else args.slots
                decoder.decode(some, args.max_new_tokens, store)
    writer.close()
    bar.close()


def _prompt_ids(prompt: Prompt, turn: int, writer: ReplyWriter, tokenizer: Any) -> list[int] | None:
    """The conversation up to user turn `turn` as token ids; None if an earlier turn was skipped."""
    messages: list[Message] = list(prompt.messages)
    for earlier in range(turn):
        record = writer.done.get(f"{prompt.id}#{earlier}")
        if record is None:
            return None
        messages.append({"role": "assistant", "content": record["text"]})
        messages.append({"role": "user", "content": prompt.followups[earlier]})
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(chat, add_special_tokens=False))
