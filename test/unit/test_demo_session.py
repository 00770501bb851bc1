"""The demo's session and player, against a small HTTP server that stands in for SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sglang_dlite.demo.player import ChatClient, Played, Reply, RequestError, history, play
from sglang_dlite.demo.session import SESSION, Turn
from sglang_dlite.demo.stdlib_source import definition, definitions, outline

# The only files that the drafter's training leaves out.
HELD_OUT = {"textwrap", "bisect", "heapq", "shlex", "fnmatch", "colorsys", "string", "queue"}


class FakeServer:
    """Answers chat requests as SGLang does, with a prefix cache that counts characters."""

    def __init__(self, name: str, speculative: bool) -> None:
        self.name, self.speculative = name, speculative
        self.requests: list[dict[str, Any]] = []
        self.flushes = 0
        self.cache: list[str] = []
        self.status = 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        prompt = json.dumps(request["messages"])
        cached = max((_common_prefix(prompt, entry) for entry in self.cache), default=0)
        self.cache.append(prompt)
        body: dict[str, Any] = {
            "choices": [{"message": {"content": f"{self.name} {len(self.requests)}"}}],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
        if self.speculative:
            details = {"spec_num_correct_drafts": 6, "spec_verify_ct": 4}
            body["sglext"] = {"spec_tokens_details": details}
        return body

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path.startswith("/flush_cache"):
                    fake.flushes += 1
                    fake.cache.clear()
                    body: dict[str, Any] = {}
                else:
                    assert self.path == "/v1/chat/completions"
                    body = fake.answer(json.loads(payload))
                data = json.dumps(body).encode()
                self.send_response(fake.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _common_prefix(a: str, b: str) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    dlite, plain = FakeServer("dlite", True), FakeServer("plain", False)
    yield dlite, plain
    dlite.close()
    plain.close()


def _play(dlite: FakeServer, plain: FakeServer, turns: tuple[Turn, ...]) -> list[Played]:
    clients = {"dlite": ChatClient(dlite.url), "target-only": ChatClient(plain.url)}
    try:
        return list(play(clients, turns, repeats=2, max_tokens=32))
    finally:
        for client in clients.values():
            client.close()


def test_session_reads_only_held_out_files() -> None:
    read = {tool.module for turn in SESSION for tool in turn.tools}
    assert read <= HELD_OUT
    assert 6 <= len(SESSION) <= 8


def test_every_message_of_the_session_can_be_made() -> None:
    sizes = [len(turn.message()) for turn in SESSION]
    # SmolLM2 takes about 3.3 characters of such text to a token; its context has 8192.
    assert 6_000 < sum(sizes) < 16_000
    assert "def rgb_to_hsv(r, g, b):" in SESSION[0].message()


def test_definitions_are_the_text_of_the_file() -> None:
    assert definition("bisect", "bisect_right").startswith("def bisect_right(a, x, lo=0")
    assert definition("queue", "Queue.put").startswith("    def put(self, item")
    assert "def quote(s):" in outline("shlex")
    every = definitions("queue")
    assert every["Queue.put"] == definition("queue", "Queue.put") and "Queue" in every
    with pytest.raises(LookupError, match="no_such_name"):
        definition("shlex", "no_such_name")
    with pytest.raises(FileNotFoundError, match="no_such_module"):
        definition("no_such_module", "f")


def test_history_alternates_and_ends_with_the_open_turn() -> None:
    messages = history([Turn("one"), Turn("two"), Turn("three")], ["first reply"])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "first reply"
    assert messages[3]["content"] == "two"


def test_play_resends_the_first_replies_to_both_arms(
    servers: tuple[FakeServer, FakeServer],
) -> None:
    dlite, plain = servers
    turns = (Turn("one"), Turn("two"), Turn("three"))
    played = _play(dlite, plain, turns)

    order = [(item.repeat, item.turn, item.arm) for item in played]
    assert order[:2] == [(0, 1, "dlite"), (0, 1, "target-only")]
    assert order[6:8] == [(1, 1, "target-only"), (1, 1, "dlite")]
    assert len(order) == 2 * 2 * 3

    # Each session is a warm-up and the turns; histories agree between arms and repeats.
    sent = [[request["messages"] for request in server.requests] for server in servers]
    assert sent[0] == sent[1]
    assert sent[0][:4] == sent[0][4:]
    recorded = played[0].reply.text
    assert recorded == "dlite 2"
    assert sent[1][3][2] == {"role": "assistant", "content": recorded}
    assert all(request["temperature"] == 0 for request in dlite.requests)

    # Flushed before and after the warm-up of each repeat, and never inside a session.
    assert dlite.flushes == plain.flushes == 4
    for item in played:
        assert (item.reply.cached_tokens > 100) == (item.turn > 1)


def test_accept_length_counts_verify_passes(servers: tuple[FakeServer, FakeServer]) -> None:
    played = _play(*servers, (Turn("one"),))
    by_arm = {item.arm: item.reply for item in played}
    assert by_arm["dlite"].accept_length == 1 + 6 / 4
    assert by_arm["target-only"].accept_length is None
    assert by_arm["dlite"].output_tokens == 10
    assert by_arm["dlite"].seconds > 0


def test_tok_per_s() -> None:
    assert Reply("text", 1, 0, output_tokens=30, seconds=2.0).tok_per_s == 15.0


def test_errors_of_a_server_are_told(servers: tuple[FakeServer, FakeServer]) -> None:
    dlite, plain = servers
    plain.status = 400
    with pytest.raises(RequestError, match=r"flush_cache.* answered 400"):
        _play(dlite, plain, (Turn("one"),))


def test_a_dead_server_is_told() -> None:
    client = ChatClient("http://127.0.0.1:9")
    with pytest.raises(RequestError, match="ConnectError"):
        client.flush_cache()
    client.close()
