"""Sessions (`/open_session`): a turn goes on from what the turn before it returned, as with plain
decoding.

A verify pass accepts tokens behind the one that ends a turn, and it reserves K/V slots that it does
not fill. Upstream's sessions take both for the turn's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sglang_dlite.speculative import serves_dlite


def continue_what_was_returned(
    original: Callable[..., Any], session: Any, req: Any, *args: Any, **options: Any
) -> Any:
    """AROUND `Session.create_req`: drop what the turn that is continued accepted behind its end.

    Upstream joins that turn's `output_ids` to the new input. Nothing else reads them any more: the
    turn is over. (Streaming sessions are trimmed by upstream.)

    Two mends of what ends upstream's scheduler, or lends a turn the K/V that another one writes:
    turns that a `replace` drops are taken out before, and a turn that a streaming session refuses
    leaves it, so that its end is not taken for that of the turn that runs.
    """
    if not serves_dlite():
        return original(session, req, *args, **options)
    turn = req.session_params
    node = session.req_nodes.get(turn.rid)
    if turn.replace and not session.streaming:
        if turn.rid is None:
            _drop(session.req_nodes, session.req_nodes.values())
        elif node is not None:
            _drop(session.req_nodes, node.children)
            node.children = []
    if node is not None and node.req.finished_len is not None:
        node.req.output_ids = node.req.output_ids[: node.req.finished_len]
    made = original(session, req, *args, **options)
    if session.streaming and made.to_finish is not None:
        made.session = None
    return made


def _drop(nodes: dict[str, Any], turns: Iterable[Any]) -> None:
    """Abort these turns and all that follow them, and take them out of `nodes`.

    Upstream walks over the dictionary that it deletes from, and takes every turn to be in it: one
    whose id was used again is not.
    """
    pending = list(turns)
    while pending:
        turn = pending.pop()
        turn.abort()
        rid = turn.req.rid
        if nodes.get(rid) is turn:
            del nodes[rid]
        pending += turn.children


def keep_what_was_computed(original: Callable[..., bool], sessions: Any, req: Any) -> bool:
    """AROUND `StreamingSession.try_cache_finished_req`: the next turn's prefix is committed K/V.

    Upstream bounds the prefix by the allocated length. That is the committed one in plain decoding;
    here it covers the last token, whose K/V no pass has written yet.
    """
    if not serves_dlite() or req.session is None or not req.session.streaming:
        return original(sessions, req)
    committed, session_id = req.kv.kv_committed_len, req.session.session_id
    kept = original(sessions, req)
    if kept:
        record = sessions.slots[session_id].kv
        record.kv_committed_len = min(record.kv_committed_len, committed)
    return kept
