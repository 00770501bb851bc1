"""Closed-loop replay: each of C users plays one session after the other, turn by turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dlite.bench.client import StreamingClient
from sglang_dlite.bench.config import WorkloadSpec
from sglang_dlite.bench.records import Failure, Reply, Round, RoundResult
from sglang_dlite.bench.workloads.sessions import Session, history
from sglang_dlite.chat_api import RequestError

# A session's replies as they are to be fed back; shorter than the session where unknown.
Script = Mapping[str, Sequence[str]]

_WARM_UP = ({"role": "user", "content": "Count from one to twenty."},)
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Load:
    """What a round plays."""

    workload: WorkloadSpec
    sessions: Sequence[Session]
    temperature: float
    script: Script  # {} for "own"
    fields: Mapping[str, Any] = field(default_factory=dict)  # added to every request


async def warm_up(client: StreamingClient, users: int) -> None:
    """As many requests at once as the round has users, then an empty cache.

    The first requests after a start or a flush pay for what they are not measured for.
    """
    await client.flush_cache()
    await asyncio.gather(
        *(client.chat(_WARM_UP, max_tokens=_WARM_UP_TOKENS, temperature=0.0) for _ in range(users))
    )
    await client.flush_cache()


async def play_round(
    client: StreamingClient,
    round: Round,
    load: Load,
    on_turn: Callable[[], None] = lambda: None,
) -> RoundResult:
    """Play the sessions with `round.concurrency` users; `on_turn` is called after each turn.

    Raises:
        RequestError: the warm-up failed. Failures of the sessions are in the result.
    """
    await warm_up(client, min(round.concurrency, len(load.sessions)))
    result = RoundResult(round, started=time.time(), seconds=0.0)
    begin = time.perf_counter()
    waiting = iter(load.sessions)

    async def user() -> None:
        for session in waiting:
            await _play(client, session, load, round.cache == "cold", result, on_turn)

    async with asyncio.TaskGroup() as users:
        for _ in range(round.concurrency):
            users.create_task(user())
    result.seconds = time.perf_counter() - begin
    return result


async def _play(
    client: StreamingClient,
    session: Session,
    load: Load,
    cold: bool,
    result: RoundResult,
    on_turn: Callable[[], None],
) -> None:
    fed_back: list[str] = []
    recorded = load.script.get(session.id, ())
    for index in range(len(session.turns)):
        try:
            if cold:
                await client.flush_cache()
            reply = await client.chat(
                history(session, fed_back),
                max_tokens=load.workload.max_tokens,
                temperature=load.temperature,
                fields=load.fields,
                session=session.id,
                turn=index + 1,
            )
        except RequestError as error:
            left = len(session.turns) - index - 1
            result.failures.append(Failure(session.id, index + 1, str(error), left))
            for _ in range(left + 1):
                on_turn()
            return
        result.replies.append(reply)
        fed_back.append(recorded[index] if index < len(recorded) else reply.text)
        on_turn()


def script_of(spec: WorkloadSpec, sessions: Sequence[Session], played: Sequence[Reply]) -> Script:
    """The replies to feed back, by session, for the workload's kind of history.

    own: the server's own. recorded: those of the data. first: the first ones that any arm gave
    to a turn in this run, so that every arm and repeat sees the same text.
    """
    if spec.history == "own":
        return {}
    if spec.history == "recorded":
        return {
            session.id: [turn.recorded for turn in session.turns if turn.recorded is not None]
            for session in sessions
        }
    script: dict[str, list[str]] = {}
    for reply in sorted(played, key=lambda item: item.started):
        known = script.setdefault(reply.session, [])
        if reply.turn == len(known) + 1:
            known.append(reply.text)
    return script
