"""The data set on disk survives kills without loss, duplicates or shifted rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.training.replies import ReplyStoreError, ReplyWriter, read_parts

from .conftest import TOP, tiny_format, write_replies


def _contents(folder: Path):
    return [
        (p.records, np.array(p.states), np.array(p.top_ids), np.array(p.top_logprobs))
        for p in read_parts(folder)
    ]


def _append(writer: ReplyWriter, name: str, length: int) -> None:
    writer.append(
        {"id": name, "source": "s", "prompt_tail": [1], "reply_ids": list(range(length))},
        torch.full((length, 3, 16), float(length)).bfloat16(),
        torch.full((length, TOP), length, dtype=torch.int32),
        torch.zeros(length, TOP, dtype=torch.float16),
    )


@pytest.mark.parametrize("tear", ["line", "arrays", "both"])
def test_a_kill_loses_only_what_was_not_committed(tmp_path: Path, tear: str) -> None:
    write_replies(tmp_path, "part-0", [4, 6])
    before = _contents(tmp_path)
    if tear in ("line", "both"):
        with (tmp_path / "part-0.jsonl").open("ab") as file:
            file.write(b'{"id": "torn", "row": 10, "reply_i')
    if tear in ("arrays", "both"):
        with (tmp_path / "part-0.states").open("ab") as file:
            file.write(b"\1" * 77)
    writer = ReplyWriter(tmp_path, "part-0", tiny_format())
    assert list(writer.done) == ["part-0/0#0", "part-0/1#0"]
    _append(writer, "new", 3)
    writer.close()
    (records, states, top_ids, _), *rest = _contents(tmp_path)
    assert not rest
    assert [r["id"] for r in records] == ["part-0/0#0", "part-0/1#0", "new"]
    assert records[2]["row"] == 10 and len(states) == 13
    assert (states[:10] == before[0][1]).all()
    assert (top_ids[10:] == 3).all()


def test_a_part_being_written_shows_its_committed_replies(tmp_path: Path) -> None:
    writer = ReplyWriter(tmp_path, "part-0", tiny_format())
    _append(writer, "a", 3)
    writer.commit()
    _append(writer, "b", 4)  # not committed: wholly or partly in buffers
    ((records, states, *_),) = _contents(tmp_path)
    assert [r["id"] for r in records] == ["a"] and len(states) == 3


def test_lost_rows_are_an_error(tmp_path: Path) -> None:
    write_replies(tmp_path, "part-0", [4])
    (tmp_path / "part-0.topids").write_bytes(b"")
    with pytest.raises(ReplyStoreError, match="topids is shorter"):
        ReplyWriter(tmp_path, "part-0", tiny_format())


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    write_replies(tmp_path, "part-0", [4])
    with pytest.raises(ReplyStoreError, match="max_new_tokens is 20, now 30"):
        ReplyWriter(tmp_path, "part-1", tiny_format(max_new_tokens=30))


def test_a_folder_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReplyStoreError, match="sglang-dlite generate"):
        list(read_parts(tmp_path))
