"""Random traffic to one server, for a while, every reply checked."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from soak_cases import Case
from soak_checks import greedy_error, sampled_error
from soak_report import Leg

MAX_IN_FLIGHT = 48  # the server runs 16 at a time: the others wait
TIMEOUT_S = 240.0
# The server closes an idle connection after 5 s: one that is used at that moment fails.
KEEP_IDLE_S = 2.0
# Mean gap between arrivals in seconds, by weather; the weather changes every few seconds.
GAPS = (0.002, 0.03, 0.3, 3.0)
SAMPLED, ABORTED, URGENT, STREAMED, SHORTENED = 0.25, 0.15, 0.1, 0.4, 0.3  # shares of requests
PRIORITY = 100


class Traffic:
    """Plays cases at random times with random changes that leave their reply known."""

    def __init__(self, base_url: str, cases: Sequence[Case], seed: int, leg: Leg) -> None:
        limits = httpx.Limits(max_connections=2 * MAX_IN_FLIGHT, keepalive_expiry=KEEP_IDLE_S)
        self.http = httpx.AsyncClient(
            base_url=base_url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        )
        self.cases = cases
        self.rng = random.Random(seed)
        self.leg = leg
        self.number = 0
        self.running: dict[str, asyncio.Task[None]] = {}
        self.aborted: set[str] = set()
        """Requests that were told to end, or may have been."""
        self.ending_all = False

    async def run(self, seconds: float, on_tick: Callable[[float], None]) -> None:
        """Send traffic for `seconds`, then wait for what is under way."""
        started = time.monotonic()
        events = asyncio.create_task(self._events(started + seconds))
        gap, weather_until = GAPS[1], started
        while (now := time.monotonic()) < started + seconds and not self.leg.counts["unhealthy"]:
            on_tick(now - started)
            if now >= weather_until:
                gap, weather_until = self.rng.choice(GAPS), now + self.rng.uniform(1.0, 6.0)
            if len(self.running) < MAX_IN_FLIGHT and not self.ending_all:
                self._start()
            await asyncio.sleep(min(self.rng.expovariate(1 / gap), weather_until - now + 0.001))
        await events
        await asyncio.gather(*self.running.values())
        await self.http.aclose()

    def _start(self) -> None:
        self.number += 1
        rid = f"soak-{self.number:07d}"  # an abort ends all ids that begin so
        task = asyncio.create_task(self._play(rid))
        self.running[rid] = task
        task.add_done_callback(lambda _: self.running.pop(rid))

    # -- one request ----------------------------------------------------------------------------

    def _body(self, rid: str, case: Case) -> dict[str, Any]:
        rng, request = self.rng, case.request
        params = request.sampling_params
        if rng.random() < SHORTENED:
            fewest = params.get("min_new_tokens", 1)
            params["max_new_tokens"] = rng.randrange(fewest, request.max_new_tokens + 1)
        if rng.random() < SAMPLED:
            params["temperature"] = rng.uniform(0.3, 1.5)
            params |= rng.choice(
                [{}, {"top_k": rng.randrange(2, 50)}, {"top_p": 0.9}, {"min_p": 0.05}]
            )
        params["n"] = rng.choice([1, 1, 1, 2, 3])
        body: dict[str, Any] = {"input_ids": list(request.prompt), "sampling_params": params}
        if params["n"] == 1:
            body |= {"rid": rid, "stream": rng.random() < STREAMED}
        if request.logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 3}
        if request.processor:
            body["custom_logit_processor"] = request.processor
        if rng.random() < URGENT:
            body["priority"] = PRIORITY
        return body

    async def _play(self, rid: str) -> None:
        case = self.rng.choice(self.cases)
        body = self._body(rid, case)
        self.leg.counts["requests"] += 1
        aborter = None
        if self.rng.random() < ABORTED:
            aborter = asyncio.create_task(self._abort(rid, "rid" in body))
        try:
            if body.get("stream"):
                answers = await self._stream(body)
            else:
                reply = await self.http.post("/generate", json=body)
                answers = self._answers(reply.status_code, reply.text, rid)
            for answer in answers:
                self._check(case, body["sampling_params"], answer, rid)
        except asyncio.CancelledError:
            self.leg.counts["disconnected"] += 1
        except Exception as error:  # whatever it is, it is the finding
            self.leg.problem("failure", f"{rid} ({case.kind}): {type(error).__name__}: {error}")
        finally:
            if aborter is not None:
                aborter.cancel()

    def _answers(self, status: int, text: str, rid: str) -> list[dict[str, Any]]:
        if status != 200 and rid in self.aborted and "abort" in text.lower():
            self.leg.counts["aborted"] += 1
            return []
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {text[:500]}")
        answers = json.loads(text)
        return answers if isinstance(answers, list) else [answers]

    async def _stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        newest: dict[str, Any] | None = None
        async with self.http.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                return self._answers(reply.status_code, (await reply.aread()).decode(), body["rid"])
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    return self._answers(500, line, body["rid"])
                if newest and not piece["text"].startswith(newest["text"]):
                    raise RuntimeError(f"streamed {newest['text']!r}, then {piece['text']!r}")
                newest = piece
        if newest is None:
            raise RuntimeError("a stream without a piece")
        self.leg.counts["streamed"] += 1
        return [newest]

    def _check(self, case: Case, params: dict[str, Any], answer: dict[str, Any], rid: str) -> None:
        sampled = params["temperature"] > 0
        check, counted = (sampled_error, "sampled") if sampled else (greedy_error, "compared")
        error = check(case, answer, params["max_new_tokens"], rid in self.aborted)
        if error is not None:
            self.leg.problem("mismatch", f"{rid} ({case.kind}, {params}): {error}")
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            counted = "aborted"
        self.leg.counts[counted] += 1
        self.leg.counts["tokens"] += len(answer["output_ids"])
        self.leg.counts["retractions"] += meta.get("num_retractions") or 0
        self.leg.counts["cached tokens"] += meta.get("cached_tokens") or 0

    async def _abort(self, rid: str, by_id: bool) -> None:
        """After a while, by a call or by hanging up."""
        await asyncio.sleep(self.rng.expovariate(1 / 0.4))
        self.aborted.add(rid)
        if by_id and self.rng.random() < 0.6:
            await self.http.post("/abort_request", json={"rid": rid})
        elif rid in self.running:
            self.running[rid].cancel()

    # -- events ---------------------------------------------------------------------------------

    async def _events(self, deadline: float) -> None:
        """Now and then a flush, a pause, an end of everything, a look at the server's health."""
        while True:
            wait = self.rng.uniform(2.0, 8.0)
            if time.monotonic() + wait >= deadline:
                return
            await asyncio.sleep(wait)
            event = self.rng.choice(["flush", "in_place", "retract", "abort_all", "health"])
            try:
                await self._event(event)
            except Exception as error:  # a server that does not answer
                self.leg.problem("unhealthy", f"{event}: {type(error).__name__}: {error}")
                return

    async def _event(self, event: str) -> None:
        self.leg.counts[event] += 1
        if event == "flush":
            await self._flush()
        elif event == "abort_all":
            self.ending_all = True  # a request that starts now might be hit or not
            self.aborted |= set(self.running)
            await self.http.post("/abort_request", json={"rid": "", "abort_all": True})
            self.ending_all = False
        elif event == "health":
            reply = await self.http.get("/health_generate")
            assert reply.status_code == 200, reply.text
        else:
            await self.http.post("/pause_generation", json={"mode": event})
            await asyncio.sleep(self.rng.uniform(0.1, 1.0))
            if event == "retract":
                await self._flush()
            await self.http.post("/continue_generation", json={})

    async def _flush(self) -> None:
        """Refused while busy; in a pause with retraction only where a grammar is not ready."""
        reply = await self.http.post("/flush_cache")
        assert reply.status_code in (200, 400), reply.text
        self.leg.counts["flushed"] += reply.status_code == 200
