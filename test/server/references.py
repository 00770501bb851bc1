"""What plain decoding gives: recorded once per session by a target-only engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import oracle
from engines import engine, play
from greedy import greedy_with_transformers
from option_workloads import OPTIONS, PROCESSOR, option_params, option_prompts
from tiny_models import MAX_POSITIONS
from workloads import RECORD_LEN, Request, base_prompts, mixed_requests, random_prompts
from workloads import stop_requests as make_stop_requests


@dataclass
class References:
    """Requests by workload, and the target-only engine's answers to them, in the same order."""

    target: Path
    table: Path
    requests: dict[str, list[Request]]
    answers: dict[str, list[dict[str, Any]]]
    server_info: dict[str, Any]

    def expected(self, name: str) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.answers[name]]


def truncated(answer: dict[str, Any], length: int) -> dict[str, Any]:
    return {"output_ids": answer["output_ids"][:length]}


def record_references(target: Path, folder: Path) -> References:
    """Play every workload on a target-only engine and write the oracle's table."""
    requests: dict[str, list[Request]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    sequences: list[list[int]] = []
    prompt_lens: list[int] = []

    def keep(prompt: tuple[int, ...], output: list[int]) -> int:
        sequences.append([*prompt, *output])
        prompt_lens.append(len(prompt))
        return len(sequences) - 1

    with engine(target, enable_custom_logit_processor=True) as running:
        text_of = running.tokenizer_manager.tokenizer.decode

        def plain(prompts: list[tuple[int, ...]], **params: Any) -> list[dict[str, Any]]:
            return play(running, [Request(p, -1, RECORD_LEN, params) for p in prompts])

        prompts = base_prompts()
        long = {name: plain(items) for name, items in prompts.items()}
        first: dict[str, int] = {}
        for name, items in prompts.items():
            first[name] = len(sequences)
            for prompt, answer in zip(items, long[name], strict=True):
                keep(prompt, answer["output_ids"])

        requests["mixed"] = mixed_requests(prompts["mixed"], first["mixed"])
        requests["boundary"] = [
            Request(p, first["boundary"] + i, 24) for i, p in enumerate(prompts["boundary"])
        ]
        requests["lengths"] = [
            Request(prompts["lengths"][0], first["lengths"], n) for n in range(1, 18)
        ]
        for name in ("mixed", "boundary", "lengths"):
            answers[name] = [
                truncated(long[name][request.sequence - first[name]], request.max_new_tokens)
                for request in requests[name]
            ]

        requests["stops"] = make_stop_requests(
            prompts["stops"], first["stops"], [a["output_ids"] for a in long["stops"]], text_of
        )
        # The same prompts as `mixed`, to the end of what is recorded.
        requests["recorded"] = [
            Request(p, first["mixed"] + i, RECORD_LEN) for i, p in enumerate(prompts["mixed"])
        ]
        answers["recorded"] = long["mixed"]
        # The end-of-text token, honoured: a prompt of `mixed` whose output has one.
        requests["stops"] += [
            Request(request.prompt, request.sequence, 48, {"ignore_eos": False})
            for request in requests["mixed"][:24]
        ]
        requests["logprobs"] = [
            Request(p, first["logprobs"] + i, 20, logprobs=True)
            for i, p in enumerate(prompts["logprobs"])
        ]
        for name in ("stops", "logprobs"):
            answers[name] = play(running, requests[name])

        # A second turn: the first one's prompt and answer, then something new.
        turns = [
            (*request.prompt, *answer["output_ids"], *extra)
            for request, answer, extra in zip(
                requests["mixed"], answers["mixed"], random_prompts(9, [7] * 16), strict=False
            )
        ]
        # Favoured and forbidden tokens, not in the plain continuation of any recorded prompt.
        biased = random_prompts(10, [6, 21])
        bias = {str(token): -100.0 for token in range(0, 40)} | {"77": 5.0}
        for name, items, params in (
            ("turns", turns, {}),
            ("biased", biased, {"logit_bias": bias}),
        ):
            longer = plain(items, **params)
            requests[name] = [
                Request(p, keep(p, a["output_ids"]), 30, params)
                for p, a in zip(items, longer, strict=True)
            ]
            answers[name] = [truncated(answer, 30) for answer in longer]

        for name in OPTIONS:
            items = [
                Request(
                    p, -1, RECORD_LEN, params, True, PROCESSOR if name == "processors" else None
                )
                for p, params in zip(option_prompts(name), option_params(name), strict=True)
            ]
            answers[name] = play(running, items)
            requests[name] = [
                replace(request, sequence=keep(request.prompt, answer["output_ids"]))
                for request, answer in zip(items, answers[name], strict=True)
            ]

        requests["unended_grammars"] = [
            replace(request, params={**request.params, "ignore_eos": True}, logprobs=False)
            for request in requests["grammars"]
        ]
        answers["unended_grammars"] = play(running, requests["unended_grammars"])

        at_end = random_prompts(11, [1004, 1005, 1006, 1010])
        requests["context_end"] = [Request(p, -1, MAX_POSITIONS - len(p)) for p in at_end]
        answers["context_end"] = play(running, requests["context_end"])
        for i, (prompt, answer) in enumerate(zip(at_end, answers["context_end"], strict=True)):
            # The oracle knows tokens beyond the context's end, too.
            output = answer["output_ids"]
            more = greedy_with_transformers(target, [*prompt, *output], oracle.RECORDED)
            sequence = keep(prompt, [*output, *more])
            requests["context_end"][i] = Request(prompt, sequence, MAX_POSITIONS - len(prompt))
        info = running.get_server_info()
    table = oracle.record(folder / "table.safetensors", target, sequences, prompt_lens)
    return References(target, table, requests, answers, info)
