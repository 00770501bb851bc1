"""The acceptance lab: drafters on one text, without a server.

The target answers the sessions' turns greedily; each reply is then played through every drafter as
serving would (see `walk`). What a CPU can measure is how much of the same text each would have
accepted, against the length of the context: the cost of drafting is not part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_dlite.bench.measures import context_bin
from sglang_dlite.bench.stats import ratio
from sglang_dlite.bench.workloads.sessions import Session, history
from sglang_dlite.drafter import DLiteDrafter, load_drafter


@dataclass(frozen=True)
class LabReply:
    """One greedy reply, and the target's layer outputs over prompt and reply."""

    prompt_ids: list[int]
    reply_ids: list[int]
    states: torch.Tensor  # [T, S, h]; row t: after token t, for the tokens from `first_row` on
    first_row: int  # position of row 0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.reply_ids


class Proposer(Protocol):
    """A drafter, as the lab needs it."""

    name: str

    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        """Up to K draft ids behind each anchor; an anchor is a position in `reply.ids`."""
        ...


class NgramLookup:
    """Copies what followed the latest earlier occurrence of the longest suffix, as prompt lookup.

    Looks for the last `longest` tokens ending in the anchor, then for fewer, down to one.
    """

    name = "n-gram lookup"

    def __init__(self, num_drafts: int, longest: int = 8) -> None:
        self._num_drafts, self._longest = num_drafts, longest

    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        ids = reply.ids
        return [self._behind(ids[: anchor + 1]) for anchor in anchors]

    def _behind(self, seen: list[int]) -> list[int]:
        last = len(seen) - 1
        for length in range(min(self._longest, last), 0, -1):
            suffix = seen[-length:]
            for end in range(last - 1, length - 2, -1):
                if seen[end] == suffix[-1] and seen[end - length + 1 : end + 1] == suffix:
                    return seen[end + 1 : end + 1 + self._num_drafts]
        return []


class DLiteProposer:
    """The DLite drafter: pivot states of the token before the anchor, and the last G tokens."""

    name = "DLITE"

    def __init__(self, drafter: DLiteDrafter, embed: torch.nn.Module) -> None:
        self._drafter, self._embed = drafter, embed

    @torch.no_grad()
    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        group_size = self._drafter.config.anchor_group_size
        ids = reply.ids
        places = torch.tensor(anchors)
        group = torch.tensor([ids[a - group_size + 1 : a + 1] for a in anchors])
        states = reply.states[places - 1 - reply.first_row]
        block = self._drafter.draft(states, group, self._embed)
        return block.token_ids.tolist()


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
    model: Any, ids: Sequence[int], layer_ids: Sequence[int], first_row: int
) -> torch.Tensor:
    """[T, S, h]: outputs of these layers for the tokens from `first_row` on, in one pass.

    The last layer's is taken after the final norm, as in serving (docs/structures.md).
    """
    found: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output  # [1, tokens, h]
            found[index] = value[0, first_row:].clone()

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
    return torch.stack([found[index] for index in layer_ids], dim=1)


def greedy_reply(
    model: Any, prompt_ids: list[int], max_tokens: int, layer_ids: Sequence[int]
) -> LabReply:
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
    first = len(prompt_ids) - 1
    states = layer_outputs(model, whole, layer_ids, first)
    return LabReply(prompt_ids, whole[len(prompt_ids) :], states, first)


def greedy_replies(
    model: Any,
    tokenizer: Any,
    session: Session,
    max_tokens: int,
    layer_ids: Sequence[int],
) -> Iterator[LabReply]:
    """The target's replies to the turns of a session, each fed back into the next."""
    fed_back: list[str] = []
    for _ in session.turns:
        chat = tokenizer.apply_chat_template(
            history(session, fed_back), tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer.encode(chat, add_special_tokens=False)
        reply = greedy_reply(model, prompt_ids, max_tokens, layer_ids)
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
) -> dict[str, Any]:
    """Play the lab; the result is what `lab.json` holds."""
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    drafter = load_drafter(drafter_path, dtype=torch.bfloat16)
    layer_ids = drafter.config.target_layer_ids
    replies: list[LabReply] = []
    total = sum(len(session.turns) for session in sessions)
    with tqdm(total=total, desc="lab: greedy replies", unit="reply") as bar:
        for session in sessions:
            for reply in greedy_replies(model, tokenizer, session, max_tokens, layer_ids):
                replies.append(reply)
                bar.update()
    embed = model.get_input_embeddings()
    proposers: list[Proposer] = [
        DLiteProposer(drafter, embed),
        NgramLookup(drafter.config.num_drafts),
    ]
    absent = {"history-aware teacher": "no checkpoint given (lab: teacher)"}
    return {
        "target": target,
        "drafter": str(drafter_path),
        "replies": len(replies),
        "reply_tokens": sum(len(reply.reply_ids) for reply in replies),
        "num_drafts": drafter.config.num_drafts,
        "absent": absent,
        "drafters": [figures(replies, proposer) for proposer in proposers],
    }
