"""The client and the replay, against a small server that streams as SGLang does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sglang_dlite.bench import schedule
from sglang_dlite.bench.client import StreamingClient
from sglang_dlite.bench.config import WorkloadSpec, config_from_dict
from sglang_dlite.bench.records import Reply, Round, RoundResult
from sglang_dlite.bench.replay import Load, Script, play_round, script_of
from sglang_dlite.bench.workloads.sessions import Session, Turn
from sglang_dlite.chat_api import RequestError

MakeServer = Callable[..., Any]


def session(name: str, turns: int = 2) -> Session:
    made = (Turn(({"role": "user", "content": f"{name} {i}"},), f"rec {i}") for i in range(turns))
    return Session(name, tuple(made))


def chat(url: str) -> Reply:
    async def ask() -> Reply:
        client = StreamingClient(url)
        try:
            messages = [{"role": "user", "content": "hello"}]
            return await client.chat(messages, max_tokens=9, temperature=0.0)
        finally:
            await client.close()

    return asyncio.run(ask())


def play(url: str, load: Load, concurrency: int = 1, cache: str = "warm") -> RoundResult:
    async def go() -> RoundResult:
        client = StreamingClient(url)
        try:
            return await play_round(client, Round("w", concurrency, cache, 0, "a"), load)
        finally:
            await client.close()

    return asyncio.run(go())


def load(*sessions: Session, history: str = "own", script: Script | None = None) -> Load:
    spec = WorkloadSpec("w", "generated", history=history, max_tokens=9)
    return Load(spec, sessions, 0.0, script or {})


def test_a_reply_with_its_passes(make_server: MakeServer) -> None:
    server = make_server("x", speculative=True)
    reply = chat(server.base_url)
    assert [tokens for _, tokens in reply.chunks] == [1, 3, 1, 2]
    assert (reply.output_tokens, reply.verify_passes, reply.correct_drafts) == (7, 3, 3)
    assert reply.histogram[:3] == [1, 1, 1] and reply.output_ids == list(range(7))
    assert reply.tau == 2.0
    assert (reply.prompt_tokens, reply.cached_tokens, reply.finish_reason) == (5, 2, "length")
    assert reply.text.startswith("x1 w w w ")
    times = [time for time, _ in reply.chunks]
    assert reply.ttft_s == times[0] and times == sorted(times) and times[-1] <= reply.latency_s
    assert reply.tpot_s == pytest.approx((reply.latency_s - reply.ttft_s) / 6)
    assert len(reply.gaps_s) == 3
    (sent,) = server.requests
    assert sent["stream"] and sent["max_tokens"] == 9 and sent["temperature"] == 0.0


def test_without_speculation_there_is_no_tau(make_server: MakeServer) -> None:
    reply = chat(make_server().base_url)
    assert reply.tau is None and reply.verify_passes == 0


def test_refusals_and_broken_streams_are_told(make_server: MakeServer) -> None:
    server = make_server()
    server.refuse = lambda request: True
    with pytest.raises(RequestError, match=r"chat/completions answered 400: .*not like this"):
        chat(server.base_url)
    server.refuse, server.break_off = (lambda request: False), True
    with pytest.raises(RequestError, match=r"broke off: .*out of memory"):
        chat(server.base_url)
    with pytest.raises(RequestError, match="ConnectError"):
        chat("http://127.0.0.1:9")


def test_own_replies_are_fed_back(make_server: MakeServer) -> None:
    server = make_server("x")
    result = play(server.base_url, load(session("s")))
    _, second = server.sessions
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == result.replies[0].text
    assert server.events == ["flush", "chat", "flush", "chat", "chat"]
    assert [(reply.session, reply.turn) for reply in result.replies] == [("s", 1), ("s", 2)]
    assert result.seconds > 0 and not result.failures


def test_fields_are_added_to_every_request(make_server: MakeServer) -> None:
    server, plan = make_server(), load(session("s"))
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    play(server.base_url, replace(plan, fields=fields))
    assert [request.get("chat_template_kwargs") for request in server.requests[1:]] == [
        {"enable_thinking": False}
    ] * 2


def test_a_script_is_fed_back_instead(make_server: MakeServer) -> None:
    server = make_server()
    play(server.base_url, load(session("s"), script={"s": ["as before"]}))
    assert server.sessions[1][1]["content"] == "as before"


def test_cold_rounds_flush_before_every_turn(make_server: MakeServer) -> None:
    server = make_server()
    play(server.base_url, load(session("s")), cache="cold")
    assert server.events[3:] == ["flush", "chat", "flush", "chat"]


def test_users_play_at_once_and_every_session_once(make_server: MakeServer) -> None:
    server = make_server()
    names = [f"s{i}" for i in range(7)]
    result = play(server.base_url, load(*map(session, names)), concurrency=3)
    assert sorted((reply.session, reply.turn) for reply in result.replies) == [
        (name, turn) for name in names for turn in (1, 2)
    ]
    assert 1 <= server.most_at_once <= 3


def test_a_failed_request_is_named_and_ends_its_session(make_server: MakeServer) -> None:
    server = make_server()
    server.refuse = lambda request: request["messages"][-1]["content"] == "bad 1"
    result = play(server.base_url, load(session("bad", 4), session("good")))
    (failure,) = result.failures
    assert (failure.session, failure.turn, failure.turns_not_played) == ("bad", 2, 2)
    assert "400" in failure.error
    assert [reply.session for reply in result.replies] == ["bad", "good", "good"]


def test_scripts_by_kind_of_history(make_reply: Callable[..., Reply]) -> None:
    sessions = [session("s")]
    played = [
        make_reply(turn=2, text="late", started=9.0),
        make_reply(turn=1, text="early", started=1.0),
        make_reply(turn=1, text="other arm", started=5.0),
    ]

    def script(history: str) -> Script:
        return script_of(WorkloadSpec("w", "generated", history=history), sessions, played)

    assert script("own") == {}
    assert script("recorded") == {"s": ["rec 0", "rec 1"]}
    assert script("first") == {"s": ["early", "late"]}


CONFIG = {
    "name": "n",
    "target": "embedded",
    "arms": [{"name": "target-only"}, {"name": "DLITE", "algorithm": "DLITE", "drafter": "d"}],
    "workloads": [
        {"name": "a", "kind": "generated", "cold": True},
        {"name": "b", "kind": "gsm8k", "concurrency": [2]},
    ],
    "concurrency": [1, 4],
    "repeats": 2,
}


def test_arms_take_turns_on_every_load() -> None:
    config = config_from_dict(CONFIG | {"placement": "together"})
    rounds = schedule.order(config, ["x", "y"], ["a", "b"])
    assert len(set(rounds)) == len(rounds) == 2 * 2 * (3 + 1)
    loads = [round.load for round in rounds]
    assert loads[::2] == loads[1::2]
    assert [round.arm for round in rounds[:6]] == ["x", "y", "y", "x", "x", "y"]
    assert [load[:3] for load in loads[:8:2]] == [
        ("a", 1, "warm"), ("a", 4, "warm"), ("a", 1, "cold"), ("b", 2, "warm"),
    ]  # fmt: skip
    assert [round.repeat for round in rounds] == [0] * 8 + [1] * 8


def test_servers_one_at_a_time_take_turns_on_repeats() -> None:
    config = config_from_dict(CONFIG | {"placement": "alone"})
    rounds = schedule.order(config, ["x", "y"], ["b"])
    assert [(round.repeat, round.arm) for round in rounds] == [
        (0, "x"), (0, "y"), (1, "y"), (1, "x"),
    ]  # fmt: skip


def test_sessions_of_a_load() -> None:
    sessions = [session(str(i)) for i in range(9)]
    spec = WorkloadSpec("w", "generated", min_sessions=3)
    assert [len(schedule.sessions_of(spec, sessions, c)) for c in (1, 4, 16)] == [3, 4, 9]
