"""Tool calls and reasoning through the OpenAI endpoint: with DLITE as without, streamed and not.

A target-only server answers first; an oracle then drafts those answers, so that calls and the end
of thinking come to stand at every place of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import oracle
import pytest
import tiny_models
from engines import environment
from oracle_engine import oracle_environment
from scripted_chat import (
    Case,
    ask,
    ask_streamed,
    body_of,
    save_chat_target,
    thinking_cases,
    tool_cases,
)
from sglang_dlite.server_process import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.slow]

OPTIONS = [
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--random-seed", "0", "--tool-call-parser", "qwen25", "--enable-custom-logit-processor"),
]
CASES = [*tool_cases(), *thinking_cases()]
PAUSE_S = 0.02  # between the reference's tokens: each then arrives in a chunk of its own
CLIENTS = 8


@dataclass(frozen=True)
class Setting:
    """One pair of servers: the reasoning parser, its tokenizer, and DLITE's scheduler."""

    parser: str
    whole_tags: bool
    overlap: str

    @property
    def always_thinks(self) -> bool:
        return self.parser == "deepseek-r1"


@dataclass
class Recorded:
    """What the target-only server answered, case by case."""

    setting: Setting
    target: Path
    table: Path
    bodies: list[dict[str, Any]]
    whole: list[dict[str, Any]]
    streamed: list[dict[str, Any]]
    think_end: list[int]


def slowly(body: dict[str, Any], pause_s: float) -> dict[str, Any]:
    return {**body, "custom_params": {**body["custom_params"], "pause_s": pause_s}}


def ask_token_by_token(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Streamed, with a chunk for each token: upstream's parsers lose text of larger ones.

    What may become a stop string is held back, by upstream, until it is one or not.
    """
    largest = max(map(len, body.get("stop", ["."])))
    for attempt in range(1, 5):
        answer = ask_streamed(http, slowly(body, attempt * PAUSE_S))
        if max(answer["chunks"]) <= largest:
            return answer
    pytest.fail("the server sent several tokens in a chunk; is the machine overloaded?")


def play(http: httpx.Client, how: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(partial(how, http), bodies))


@pytest.fixture(
    scope="module",
    params=[
        Setting("qwen3", whole_tags=False, overlap="1"),
        Setting("deepseek-r1", whole_tags=True, overlap="0"),
    ],
    ids=lambda setting: setting.parser,
)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    setting: Setting = request.param
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = save_chat_target(folder / "target", whole_tags=setting.whole_tags)
    bodies = [body_of(case, tokenizer, always_thinks=setting.always_thinks) for case in CASES]
    server = ServerProcess(
        folder / "target",
        log_path=folder / "plain.log",
        extra_args=[*OPTIONS, "--reasoning-parser", setting.parser],
    )
    with environment(), server:
        server.wait_ready()
        with httpx.Client(base_url=server.base_url, timeout=120.0, trust_env=False) as http:
            whole = play(http, ask, bodies)
            streamed = play(http, ask_token_by_token, bodies)
    prompts = [answer["ids"]["input_ids"] for answer in whole]
    outputs = [answer["ids"]["output_ids"][0] for answer in whole]
    table = oracle.record(
        folder / "table.safetensors",
        folder / "target",
        [prompt + output for prompt, output in zip(prompts, outputs, strict=True)],
        [len(prompt) for prompt in prompts],
    )
    think_end = tokenizer.encode("</think>")
    return Recorded(setting, folder / "target", table, bodies, whole, streamed, think_end)


class Server:
    """The DLITE server; `answers` plays all cases with a pattern of drafts."""

    def __init__(self, http: httpx.Client, folder: Path, bodies: list[dict[str, Any]]) -> None:
        self.http = http
        self.folder = folder
        self.bodies = bodies

    def answers(self, pattern: str, *, stream: bool) -> list[dict[str, Any]]:
        (self.folder / "pattern").write_text(pattern)
        assert self.http.post("/flush_cache").status_code == 200
        return play(self.http, ask_streamed if stream else ask, self.bodies)


@pytest.fixture(scope="module")
def dlite(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dlite")
    server = ServerProcess(
        recorded.target,
        tiny_models.make_drafter(folder / "drafter"),
        log_path=folder / "server.log",
        extra_args=[*OPTIONS, "--reasoning-parser", recorded.setting.parser],
    )
    variables = {
        **oracle_environment(recorded.table, folder),
        "DLITE_CPU_OVERLAP": recorded.setting.overlap,
    }
    with environment(**variables), server:
        server.wait_ready()
        with httpx.Client(base_url=server.base_url, timeout=120.0, trust_env=False) as http:
            yield Server(http, folder, recorded.bodies)


def visible(answer: dict[str, Any]) -> dict[str, Any]:
    """All that must be the same: messages, finish reasons, usage, token ids."""
    choices = [
        {name: value for name, value in choice.items() if name != "logprobs"}
        for choice in answer["choices"]
    ]
    return {"choices": choices, "usage": answer["usage"], "ids": answer["ids"]}


def check(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    wrong = [
        f"{case.name}: {name}: {visible(answer)[name]}, not {visible(plain)[name]}"
        for case, answer, plain in zip(CASES, answers, expected, strict=True)
        for name in visible(plain)
        if visible(answer)[name] != visible(plain)[name]
    ]
    assert not wrong, "\n".join(wrong)
    for answer, plain in zip(answers, expected, strict=True):
        for ours, theirs in zip(answer["choices"], plain["choices"], strict=True):
            for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
                assert mine["token"] == other["token"]
                assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


@pytest.mark.parametrize("pattern", ["right", "cycle", "wrong"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_reply_is_that_of_plain_decoding(
    recorded: Recorded, dlite: Server, pattern: str, stream: bool
) -> None:
    answers = dlite.answers(pattern, stream=stream)
    check(answers, recorded.streamed if stream else recorded.whole)


def test_whole_blocks_are_kept(recorded: Recorded, dlite: Server) -> None:
    """Else no call and no end of thinking stood inside a block: 7 right drafts, 8 tokens a pass."""
    for case, answer in zip(CASES, dlite.answers("right", stream=False), strict=True):
        tokens = len(answer["ids"]["output_ids"][0])
        assert answer["meta"]["spec_verify_ct"] == -(-(tokens - 1) // 8), case.name


def find(ids: list[int], part: list[int]) -> int | None:
    """Where `part` ends in `ids`."""
    ends = range(len(part), len(ids) + 1)
    return next((end for end in ends if ids[end - len(part) : end] == part), None)


def test_the_references_themselves(recorded: Recorded) -> None:
    """Calls of every kind were made, and thinking ended at every place of a block of 8."""
    replies = dict(zip((case.name for case in CASES), recorded.whole, strict=True))

    def calls(name: str) -> list[str]:
        return [function for function, _ in replies[name]["choices"][0]["calls"].values()]

    assert calls("auto: text and two calls") == ["weather", "other"]
    assert calls("required: two calls") == ["weather", "other"]
    assert calls("named: a call") == ["other"]
    assert calls("named, strict: not scripted")
    assert calls("none") == calls("auto: no call") == []
    assert replies["required: a call"]["choices"][0]["finish"][0] == "tool_calls"
    places = set()
    for case, answer in zip(CASES, recorded.whole, strict=True):
        end = find(answer["ids"]["output_ids"][0], recorded.think_end)
        if case.thinks and end is not None:
            places.add((end - 2) % 8)  # the prefill gives the first token
    assert places == set(range(8))


def test_cases_have_names_of_their_own() -> None:
    keys = [(case.name, case.thinks) for case in CASES]
    assert len(set(keys)) == len(keys)
    assert all(isinstance(case, Case) for case in CASES)
