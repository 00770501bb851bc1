"""A small HTTP server that streams as SGLang does, and records of runs that were never played."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sglang_dlite.bench.records import Reply, Round, RoundResult


class FakeServer:
    """Streams `passes` of tokens per reply; with `speculative` they are verify passes."""

    def __init__(self, name: str, speculative: bool = False) -> None:
        self.name, self.speculative = name, speculative
        self.passes = [3, 1, 2]  # tokens per chunk after the first
        self.requests: list[dict[str, Any]] = []
        self.events: list[str] = []  # "flush" and "chat", in order
        self.refuse: Callable[[dict[str, Any]], bool] = lambda request: False
        self.break_off = False
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def sessions(self) -> list[list[dict[str, str]]]:
        """The messages of every request but the warm-up's."""
        sent = [request["messages"] for request in self.requests]
        return [messages for messages in sent if not messages[0]["content"].startswith("Count")]

    def stream(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt = sum(len(message["content"]) for message in request["messages"])
        total = 0
        for size in [1, *self.passes]:
            total += size
            usage = {"prompt_tokens": prompt, "completion_tokens": total}
            usage["prompt_tokens_details"] = {"cached_tokens": prompt // 2}
            text = f"{self.name}{len(self.requests)} " if total == size else "w " * size
            yield {"choices": [{"index": 0, "delta": {"content": text}}], "usage": usage}
            if self.break_off:
                return
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        ext: dict[str, Any] = {"output_ids": [list(range(total))]}
        if self.speculative:
            histogram = [self.passes.count(n + 1) for n in range(8)]
            ext["spec_tokens_details"] = {
                "spec_num_correct_drafts": sum(self.passes) - len(self.passes),
                "spec_verify_ct": len(self.passes),
                "spec_correct_drafts_histogram": histogram,
            }
        yield {"choices": [], "sglext": ext}
        yield {"choices": [], "usage": usage}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path.startswith("/flush_cache"):
                    fake.events.append("flush")
                    self._answer(200, b"{}")
                    return
                request = json.loads(payload)
                fake.requests.append(request)
                fake.events.append("chat")
                if fake.refuse(request):
                    self._answer(400, b'{"message": "not like this"}')
                    return
                with fake._lock:
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                lines = [f"data: {json.dumps(event)}\n\n" for event in fake.stream(request)]
                if fake.break_off:
                    lines.append('data: {"error": {"message": "out of memory"}}\n\n')
                with fake._lock:
                    fake.at_once -= 1
                self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

            def do_GET(self) -> None:
                body = {"version": "0", "speculative_num_draft_tokens": 8}
                self._answer(200, json.dumps(body).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(name: str = "server", speculative: bool = False) -> FakeServer:
        made.append(FakeServer(name, speculative))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="session")
def make_reply() -> Callable[..., Reply]:
    """A reply of 1 + 3 + 1 + 2 tokens in three passes, at one chunk per 0.1 s."""

    def make(**changes: Any) -> Reply:
        values: dict[str, Any] = {
            "session": "s",
            "turn": 1,
            "started": 100.0,
            "latency_s": 0.4,
            "text": "abcdefg",
            "prompt_tokens": 600,
            "cached_tokens": 300,
            "output_tokens": 7,
            "finish_reason": "length",
            "chunks": [(0.1, 1), (0.2, 3), (0.3, 1), (0.4, 2)],
            "correct_drafts": 3,
            "verify_passes": 3,
            "histogram": [1, 1, 1],
            "output_ids": list(range(97, 104)),
        }
        return Reply(**(values | changes))

    return make


@pytest.fixture(scope="session")
def make_result(make_reply: Callable[..., Reply]) -> Callable[..., RoundResult]:
    """One round of one session and two turns; `plain`: no speculation, twice as slow."""

    def make(arm: str = "DLITE", plain: bool = False, **place: Any) -> RoundResult:
        values: dict[str, Any] = {"workload": "agent", "concurrency": 1, "cache": "warm"}
        round = Round(**(values | {"repeat": 0, "arm": arm} | place))
        changes: dict[str, Any] = {}
        if plain:
            chunks = [(0.1 * (i + 1), 1) for i in range(7)]
            changes = {"latency_s": 0.8, "chunks": chunks, "correct_drafts": 0}
            changes |= {"verify_passes": 0, "histogram": []}
        replies = [
            make_reply(turn=turn, prompt_tokens=600 * turn, started=100.0 + turn, **changes)
            for turn in (1, 2)
        ]
        return RoundResult(round, started=100.0, seconds=2.0, replies=replies)

    return make
