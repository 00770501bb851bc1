"""Sessions (`/open_session`): a turn goes on from what the turn before it returned, as with plain
decoding.

A verify pass accepts tokens behind the one that ends a turn, and it reserves K/V slots that it does
not fill. Upstream's sessions take both for the turn's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dlite.speculative import serves_dlite


def continue_what_was_returned(
    original: Callable[..., Any], session: Any, req: Any, *args: Any, **options: Any
) -> Any:
    """AROUND `Session.create_req`: drop what the turn that is continued accepted behind its end.

    Upstream joins that turn's `output_ids` to the new input. Nothing else reads them any more: the
    turn is over. (Streaming sessions are trimmed by upstream.)

    A turn that replaces the whole session deletes its nodes while upstream walks over them, which
    ends the scheduler: they are cleared before.
    """
    if serves_dlite():
        turn = req.session_params
        if turn.replace and turn.rid is None and not session.streaming:
            for root in [node for node in session.req_nodes.values() if node.parent is None]:
                root.clear(session.req_nodes)
        node = session.req_nodes.get(turn.rid)
        if node is not None and node.req.finished_len is not None:
            node.req.output_ids = node.req.output_ids[: node.req.finished_len]
    return original(session, req, *args, **options)


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


def forget_refused(req: Any) -> None:
    """Take a request that was refused out of its session, which waits for its end otherwise."""
    session = req.session
    if session is None:
        return
    if session.streaming:
        session.abort_req()
        return
    node = session.req_nodes.pop(req.rid)
    if node.parent is not None:
        node.parent.children.remove(node)
