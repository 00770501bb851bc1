"""The requests that every configuration plays, and what they are compared by."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tiny_models import EOS_ID, NUM_PRINTABLE

CHUNK = 32  # the chunked configuration's --chunked-prefill-size
RECORD_LEN = 64  # tokens recorded per prompt: further than any request goes, plus a block


@dataclass(frozen=True)
class Request:
    """One request, and the recorded sequence it belongs to (its index in the oracle's table)."""

    prompt: tuple[int, ...]
    sequence: int
    max_new_tokens: int
    params: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    processor: str | None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        defaults = {"temperature": 0, "ignore_eos": True, "max_new_tokens": self.max_new_tokens}
        return {**defaults, **self.params}


def random_prompts(seed: int, lengths: list[int]) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(NUM_PRINTABLE) for _ in range(length)) for length in lengths]


def base_prompts() -> dict[str, list[tuple[int, ...]]]:
    """Prompts by purpose; each is recorded once, by plain decoding of RECORD_LEN tokens."""
    rng = random.Random(7)
    boundaries = [k * CHUNK + d for k in (1, 2, 3) for d in (-1, 0, 1)]
    return {
        "mixed": random_prompts(1, [1, 2, 3] + [rng.randrange(4, 120) for _ in range(61)]),
        "boundary": random_prompts(2, boundaries),
        "lengths": random_prompts(3, [9]),
        "stops": random_prompts(4, [12, 33]),
        "logprobs": random_prompts(5, [5, 17, 40, *boundaries]),
    }


def first_places(ids: list[int], limit: int) -> list[int]:
    """Places of tokens that do not occur earlier in `ids`, up to `limit`."""
    return [i for i, token in enumerate(ids[:limit]) if token not in ids[:i]]


def mixed_requests(prompts: list[tuple[int, ...]], first: int) -> list[Request]:
    """64 requests of mixed prompt and output length, so that they arrive and leave at all times."""
    rng = random.Random(8)
    return [Request(p, first + i, rng.randrange(6, 45)) for i, p in enumerate(prompts)]


def stop_requests(
    prompts: list[tuple[int, ...]], first: int, outputs: list[list[int]], text_of: Any
) -> list[Request]:
    """Stop tokens and stop strings of one and two characters at every place of the blocks.

    A token that plain decoding produces is declared a stop: the check then sees a stop at the
    anchor, at each draft and across a block's edge (whatever the width is).
    """
    requests = []
    for offset, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True)):
        for place in first_places(ids, 20):
            sequence = first + offset
            stop = {"stop_token_ids": [ids[place]], "ignore_eos": False}  # else it is ignored, too
            requests.append(Request(prompt, sequence, 40, stop))
            if ids[place] == EOS_ID:
                continue
            requests.append(Request(prompt, sequence, 40, {"stop": [text_of([ids[place]])]}))
            pair = ids[place : place + 2]
            if EOS_ID not in pair:
                requests.append(Request(prompt, sequence, 40, {"stop": [text_of(pair)]}))
            behind = ids[place + 2 : place + 3]  # in the same block, but not what ends the request
            if behind and EOS_ID not in behind and not place % 3:
                stops = [text_of(behind), text_of([ids[place]])]
                requests.append(Request(prompt, sequence, 40, {"stop": stops}))
    return requests
