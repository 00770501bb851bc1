"""The acceptance lab: drafters on one text, without a server.

The target answers the sessions' turns greedily; each reply is then played through every drafter as
serving would (see `walk`). What a CPU can measure is how much of the same text each would have
accepted, against the length of the context: the cost of drafting is not part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dlite.bench.lab_drafters import (
    DLiteProposer,
    LabReply,
    LayerOutputs,
    NgramLookup,
    Proposer,
    TeacherProposer,
)
from sglang_dlite.bench.measures import context_bin
from sglang_dlite.bench.stats import ratio
from sglang_dlite.bench.workloads.sessions import Session, history
from sglang_dlite.drafter import load_drafter


def walk(reply: LabReply, proposer: Proposer) -> tuple[int, int]:
    """(verify passes, accepted drafts) of a reply.

    The prefill gives the first reply token. From an anchor the proposed tokens that agree with
    the reply are accepted up to the first that does not, the token after them is the target's
    own, and becomes the next anchor.
    """
    ids, last = reply.ids, len(reply.ids) - 1
    # All anchors are asked for at once: a draft depends on the text before its anchor only.
    anchors = list(range(len(reply.prompt_ids), last))
    proposals = proposer.propose(reply, anchors) if anchors else []
    anchor, passes, accepted = len(reply.prompt_ids), 0, 0
    while anchor < last:
        kept = 0
        for guess, truth in zip(
            proposals[anchor - len(reply.prompt_ids)], ids[anchor + 1 :], strict=False
        ):
            if guess != truth:
                break
            kept += 1
        passes, accepted = passes + 1, accepted + kept
        anchor += kept + 1
    return passes, accepted


def layer_outputs(
    model: Any, ids: Sequence[int], layer_ids: Sequence[int], first: int
) -> LayerOutputs:
    """Outputs of these layers for the tokens from `first` on, in one pass.

    The last layer's is taken after the final norm, as in serving (docs/structures.md).
    """
    found: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output  # [1, tokens, h]
            found[index] = value[0, first:].clone()

        return hook

    last = model.config.num_hidden_layers - 1
    modules = {i: model.model.norm if i == last else model.model.layers[i] for i in layer_ids}
    handles = [module.register_forward_hook(keep(i)) for i, module in modules.items()]
    try:
        with torch.inference_mode():
            model.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return LayerOutputs(found, first)


@dataclass(frozen=True)
class Wanted:
    """What the drafters of a lab need of the target."""

    layer_ids: tuple[int, ...]
    before: int  # tokens before the reply


def greedy_reply(model: Any, prompt_ids: list[int], max_tokens: int, wanted: Wanted) -> LabReply:
    """The target's own reply to a prompt, with the layer outputs that drafters look at."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,  # one sequence: nothing is padded
        )[0].tolist()
    first = max(0, len(prompt_ids) - wanted.before)
    outputs = layer_outputs(model, whole, wanted.layer_ids, first)
    return LabReply(prompt_ids, whole[len(prompt_ids) :], outputs)


def greedy_replies(
    model: Any,
    tokenizer: Any,
    session: Session,
    max_tokens: int,
    wanted: Wanted,
    template: Mapping[str, Any],
) -> Iterator[LabReply]:
    """The target's replies to the turns of a session, each fed back into the next."""
    fed_back: list[str] = []
    for _ in session.turns:
        chat = tokenizer.apply_chat_template(
            history(session, fed_back),
            tokenize=False,
            add_generation_prompt=True,
            **template,
        )
        prompt_ids = tokenizer.encode(chat, add_special_tokens=False)
        reply = greedy_reply(model, prompt_ids, max_tokens, wanted)
        fed_back.append(tokenizer.decode(reply.reply_ids, skip_special_tokens=True))
        yield reply


def figures(replies: Sequence[LabReply], proposer: Proposer) -> dict[str, Any]:
    """tau over all replies, and by context length."""
    counts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for reply in replies:
        passes, accepted = walk(reply, proposer)
        if passes:
            counts[context_bin(len(reply.prompt_ids))].append((passes, accepted))

    def tau(units: Sequence[tuple[int, int]]) -> list[float]:
        extra = ratio([accepted for _, accepted in units], [passes for passes, _ in units])
        return [1 + value for value in extra]

    everything = [unit for units in counts.values() for unit in units]
    return {
        "name": proposer.name,
        "tau": tau(everything),
        "passes": sum(passes for passes, _ in everything),
        "by_context": [
            {"at": at, "tau": tau(units), "passes": sum(passes for passes, _ in units)}
            for at, units in sorted(counts.items())
        ],
    }


def run_lab(
    target: str,
    drafter_path: Path,
    sessions: Sequence[Session],
    max_tokens: int,
    teacher_path: Path | None = None,
    template: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Play the lab; the result is what `lab.json` holds. `template`: for the chat template."""
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    embed = model.get_input_embeddings()
    drafter = load_drafter(drafter_path, dtype=torch.bfloat16)
    proposers: list[Proposer] = [
        DLiteProposer(drafter, embed),
        NgramLookup(drafter.config.num_drafts),
    ]
    absent = {}
    wanted = Wanted(tuple(drafter.config.target_layer_ids), before=1)
    if teacher_path is None:
        absent[TeacherProposer.name] = "no checkpoint given (lab: teacher)"
    else:
        from sglang_dlite.training.run_folder import load_teacher

        teacher = load_teacher(teacher_path, dtype=torch.bfloat16)
        proposer = TeacherProposer(teacher, embed)
        proposers.insert(1, proposer)
        layers = {*wanted.layer_ids, *teacher.config.target_layer_ids, *proposer.layer_ids}
        wanted = Wanted(tuple(sorted(layers)), before=teacher.window + 1)
    replies: list[LabReply] = []
    total = sum(len(session.turns) for session in sessions)
    with tqdm(total=total, desc="lab: greedy replies", unit="reply") as bar:
        for session in sessions:
            for reply in greedy_replies(
                model, tokenizer, session, max_tokens, wanted, template or {}
            ):
                replies.append(reply)
                bar.update()
    return {
        "target": target,
        "drafter": str(drafter_path),
        "teacher": str(teacher_path) if teacher_path else None,
        "replies": len(replies),
        "reply_tokens": sum(len(reply.reply_ids) for reply in replies),
        "num_drafts": drafter.config.num_drafts,
        "absent": absent,
        "drafters": [figures(replies, proposer) for proposer in proposers],
    }
