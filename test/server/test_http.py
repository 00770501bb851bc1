"""One server, started as users start it: HTTP, streaming, reports, refusals, sampling."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from engines import environment
from oracle_engine import oracle_environment
from references import References
from sglang_dlite.server_process import ServerProcess
from workloads import Request

pytestmark = pytest.mark.server

OPTIONS = [
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--random-seed", "0", "--decode-log-interval", "1", "--enable-metrics"),
    *("--tool-call-parser", "qwen25"),
]


class Client:
    """Requests to a running server; `set_pattern` tells the oracle what to play."""

    def __init__(self, base_url: str, folder: Path) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=120.0, trust_env=False)
        self.folder = folder

    def set_pattern(self, pattern: str) -> None:
        (self.folder / "pattern").write_text(pattern)

    def generate(self, request: Request) -> dict[str, Any]:
        body = {"input_ids": list(request.prompt), "sampling_params": request.sampling_params}
        reply = self.http.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def flush(self) -> None:
        assert self.http.post("/flush_cache").status_code == 200


@pytest.fixture(scope="module")
def client(references: References, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("http")
    drafter = tiny_models.make_drafter(folder / "drafter")
    server = ServerProcess(
        references.target, drafter, log_path=folder / "server.log", extra_args=OPTIONS
    )
    with environment(**oracle_environment(references.table, folder)), server:
        server.wait_ready()
        yield Client(server.base_url, folder)


def test_sixteen_clients(client: Client, references: References) -> None:
    client.flush()
    client.set_pattern("mixed")
    requests = references.requests["mixed"]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(client.generate, requests))
    assert [answer["output_ids"] for answer in answers] == references.expected("mixed")


def events(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a streamed reply's events."""
    found = []
    with client.http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data: ")))
    return found


@pytest.mark.parametrize("pattern", ["right", "cycle"])
def test_streamed_text_is_the_whole_text(
    client: Client, references: References, pattern: str
) -> None:
    """A block arrives as one piece or several; none is lost, doubled or cut at a stop."""
    client.set_pattern(pattern)
    chosen = list(zip(references.requests["stops"], references.answers["stops"], strict=True))[::5]

    def stream(pair: tuple[Request, dict[str, Any]]) -> None:
        request, expected = pair
        body = {"input_ids": list(request.prompt), "sampling_params": request.sampling_params}
        pieces = events(client, "/generate", {**body, "stream": True})
        assert len(pieces) > 1 or len(expected["output_ids"]) <= 8
        assert pieces[-1]["text"] == expected["text"]
        for earlier, later in pairwise(pieces):
            assert later["text"].startswith(earlier["text"])
        options = {k: v for k, v in request.sampling_params.items() if k != "max_new_tokens"}
        completion = {
            "model": "default",
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            **options,
        }
        deltas = events(client, "/v1/completions", {**completion, "stream": True})
        text = "".join(piece["choices"][0]["text"] for piece in deltas if piece["choices"])
        assert text == expected["text"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(stream, chosen))


def test_ollama_streams_are_whole(client: Client, references: References) -> None:
    """Their last line has no text, which would be a block's."""
    client.set_pattern("right")
    request = references.requests["mixed"][20]
    text = "".join(chr(ord("!") + token) for token in request.prompt)
    options = {"options": {"temperature": 0, "num_predict": 30}}
    for path, asked in (
        ("/api/generate", {"prompt": text}),
        ("/api/chat", {"messages": [{"role": "user", "content": text}]}),
    ):
        body = {"model": "default", **asked, **options}
        whole = client.http.post(path, json={**body, "stream": False}).json()
        with client.http.stream("POST", path, json={**body, "stream": True}) as reply:
            pieces = [json.loads(line) for line in reply.iter_lines()]
        assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        said = [p["message"]["content"] if "message" in p else p["response"] for p in pieces]
        expected = whole["message"]["content"] if "message" in whole else whole["response"]
        assert expected and "".join(said) == expected


@pytest.mark.parametrize("pattern", ["right", "cycle"])
def test_log_probabilities_are_the_models_own(
    client: Client, references: References, pattern: str
) -> None:
    """Of input, output, best and chosen tokens, against HF; of three samples, and streamed."""
    import torch
    import transformers

    client.set_pattern(pattern)
    request = references.requests["mixed"][20]
    prompt, count, chosen = list(request.prompt), 21, [7, 70, 300]
    expected = references.answers["mixed"][20]["output_ids"][:count]
    assert len(expected) == count
    model = transformers.AutoModelForCausalLM.from_pretrained(
        references.target, dtype=torch.float32
    )
    with torch.no_grad():
        law = model(torch.tensor([prompt + expected])).logits[0].log_softmax(-1)  # [len, V]
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": count},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": chosen,
    }

    def check(meta: dict[str, Any], kind: str, ids: list[int], rows: torch.Tensor) -> None:
        tokens, top, picked = (
            meta[f"{kind}_{name}"]
            for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
        )
        if kind == "input":  # nothing comes before the prompt's first token
            assert (tokens[0][0], top[0], picked[0]) == (None, None, None)
            tokens, top, picked, ids = tokens[1:], top[1:], picked[1:], ids[1:]
        assert [entry[1] for entry in tokens] == ids
        for row, best, some in zip(rows, top, picked, strict=True):
            assert [entry[1] for entry in best] == row.topk(3).indices.tolist()
            assert [entry[1] for entry in some] == chosen
        close = {"abs": 1e-4}
        assert [entry[0] for entry in tokens] == pytest.approx(
            rows[range(len(ids)), ids].tolist(), **close
        )
        for entries, values in ((top, rows.topk(3).values), (picked, rows[:, chosen])):
            flat = [entry[0] for row in entries for entry in row]
            assert flat == pytest.approx(values.flatten().tolist(), **close)

    def check_reply(reply: dict[str, Any]) -> None:
        assert reply["output_ids"] == expected
        check(reply["meta_info"], "input", prompt, law[: len(prompt) - 1])
        check(reply["meta_info"], "output", expected, law[len(prompt) - 1 : -1])

    several = {**body, "sampling_params": {**body["sampling_params"], "n": 3}}
    replies = client.http.post("/generate", json=several).json()
    assert len(replies) == 3
    for reply in replies:
        check_reply(reply)
    pieces = events(client, "/generate", {**body, "stream": True})
    check_reply(pieces[-1])
    for piece in pieces:
        meta = piece["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_chat_turns_find_their_history_in_the_cache(client: Client) -> None:
    client.flush()
    messages = [{"role": "user", "content": "list the files"}]
    for turn in range(3):
        body = {"model": "default", "messages": messages, "max_tokens": 12, "temperature": 0}
        reply = client.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        cached = (reply.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        assert (cached > 0) == (turn > 0)
        answer = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": "and then?"}]


def metric(client: Client, name: str) -> float:
    text = client.http.get("/metrics").text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in /metrics"
    return float(found[1])


def server_info(client: Client) -> dict[str, Any]:
    return client.http.get("/server_info").json()["internal_states"][0]


def test_every_report_of_the_acceptance_length_agrees(
    client: Client, references: References
) -> None:
    """tau = 1 + correct drafts / verify passes. 5 passes that keep all 7 drafts: 41 tokens."""
    client.flush()  # resets the server's totals as well
    client.set_pattern("right")
    request = references.requests["lengths"][0]
    meta = client.generate(Request(request.prompt, request.sequence, 41))["meta_info"]
    assert meta["spec_verify_ct"] == 5
    assert meta["spec_num_correct_drafts"] == 35
    assert meta["spec_accept_rate"] == 1.0
    assert meta["spec_correct_drafts_histogram"] == [0, 0, 0, 0, 0, 0, 0, 5]
    assert 1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"] == 8.0
    # Upstream counts the prefill's token here as well (41 / 5).
    assert meta["spec_accept_length"] == pytest.approx(41 / 5)
    assert server_info(client)["avg_spec_accept_length"] == 8.0
    assert metric(client, "sglang:spec_accept_length") == 8.0
    client.set_pattern("wrong")
    meta = client.generate(Request(request.prompt, request.sequence, 11))["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (10, 0)
    assert server_info(client)["avg_spec_accept_length"] == pytest.approx(1 + 35 / 15)
    assert metric(client, "sglang:spec_accept_length") == 1.0


PLAIN = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
CHAT = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_reply_that_follows_a_schema(client: Client) -> None:
    """A grammar, beside a penalty."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    body = {
        **CHAT,
        "max_tokens": 60,
        "frequency_penalty": 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    reply = client.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert json.loads(choice["message"]["content"])["a"] in (1, 22)
    assert choice["finish_reason"] == "stop"


def test_a_required_tool_call(client: Client) -> None:
    """A structural tag, whole and streamed; test_chat_parsers.py has the other kinds."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    function = {"name": "f", "parameters": {**schema, "additionalProperties": False}}
    tool = {"type": "function", "function": {**function, "strict": True}}
    body = {**CHAT, "max_tokens": 80, "temperature": 0, "tools": [tool], "tool_choice": "required"}
    reply = client.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    call = reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "f"
    assert json.loads(call["arguments"])["a"] in (1, 22)
    pieces = events(client, "/v1/chat/completions", {**body, "stream": True})
    deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
    found = [part for delta in deltas for part in delta.get("tool_calls") or []]
    parts = [part["function"] for part in found if part["index"] == 0]
    assert "".join(part["name"] or "" for part in parts) == "f"
    assert "".join(part["arguments"] or "" for part in parts) == call["arguments"]


@pytest.mark.parametrize(
    "path,body",
    [
        ("/generate", {**PLAIN, "return_hidden_states": True}),
        ("/generate", {**PLAIN, "custom_logit_processor": "x"}),
        ("/generate", {**PLAIN, "lora_path": "adapter"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"beam_width": 2}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"frequency_penalty": 9}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"repetition_penalty": 0}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"9999": 1}}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "(unclosed"}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"ebnf": "no grammar"}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": "{"}}),
        ("/generate", {**PLAIN, "top_logprobs_num": [0]}),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": 1e39, "top_p": 0.9}}),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"repetition_penalty": 1e-40, "top_p": 0.9}},
        ),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"temperature": -1}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"top_k": 2**31}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"logit_bias": {"3": 1e39}}}),
        ("/generate", {**PLAIN, "return_logprob": True, "top_logprobs_num": 999}),
        ("/generate", {**PLAIN, "return_logprob": True, "logprob_start_len": -5}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"top_p": 2.0}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": -5}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"no_such_option": 1}}),
        ("/generate", {"input_ids": [1] * 5000}),
        ("/generate", {"input_ids": [10**6], "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"input_ids": [1, -1], "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"sampling_params": {}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": {"type": "object"}}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": ["a"]}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"skip_special_tokens": []}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"5": -(10**400)}}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"is_normalized": True}}),
        ("/generate", {**PLAIN, "session_params": {"id": ["x"]}}),
        ("/generate", {**PLAIN, "session_params": {"id": "x", "offset": "1"}}),
        ("/generate", {**PLAIN, "positional_embed_overrides": 5}),
        ("/set_internal_state", {"server_args": {"speculative_accept_threshold_acc": None}}),
        ("/v1/chat/completions", {"model": "default", "messages": "not a list"}),
    ],
)
def test_bad_requests_leave_the_server_serving(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    reply = client.http.post(path, json=body)
    assert 400 <= reply.status_code < 500, reply.text
    assert len(reply.text) > 20  # says why
    assert client.http.post("/generate", json=PLAIN).status_code == 200


def test_stop_tokens_that_no_output_holds_stop_nothing(client: Client) -> None:
    """SGLang's own JSON kit sends one; a minimal length would mask it beyond the vocabulary."""
    params = {"temperature": 0, "max_new_tokens": 9, "min_new_tokens": 4}
    replies = [
        client.http.post("/generate", json={"input_ids": [1, 2], "sampling_params": each}).json()
        for each in (params, {**params, "stop_token_ids": [9999]})
    ]
    assert replies[0]["output_ids"] == replies[1]["output_ids"]


def test_a_body_that_is_not_json(client: Client) -> None:
    reply = client.http.post("/generate", content=b"{", headers={"content-type": "text/json"})
    assert 400 <= reply.status_code < 500
    assert client.http.post("/generate", json=PLAIN).status_code == 200


@pytest.mark.slow
def test_bench_serving_prints_the_accept_length(
    client: Client, references: References, tmp_path: Path
) -> None:
    """The line is there, and says what the server says."""
    client.flush()
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
    command += ["--base-url", str(client.http.base_url), "--model", str(references.target)]
    command += ["--dataset-name", "random-ids", "--num-prompts", "4", "--warmup-requests", "0"]
    command += ["--random-input-len", "8", "--random-output-len", "8"]
    command += ["--output-file", str(tmp_path / "bench.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    line = re.search(r"^Accept length: +(\S+)", result.stdout, re.MULTILINE)
    assert line, result.stdout[-3000:]
    assert float(line[1]) == pytest.approx(server_info(client)["avg_spec_accept_length"], abs=0.01)
