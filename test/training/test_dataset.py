"""Data sets survive kills without loss or duplicates, in both formats, and know their target."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from sglang_dlite.training.anchors import is_held_out
from sglang_dlite.training.dataset import (
    DatasetError,
    Description,
    ReplyRecord,
    ReplyWriter,
    fingerprint,
    load_replies,
    tokens_hash,
)
from sglang_dlite.training.storage import StorageError

from .conftest import VOCAB, describe


def _record(name: str, length: int = 3) -> ReplyRecord:
    prompt = [1, *name.encode()]
    return ReplyRecord(name, "s", 0, "c", prompt, list(range(length)), f"text {name}", "stop")


def _folder(folder: Path, *records: tuple[str, list[int], list[int]]) -> Path:
    """A data set of these (id, prompt ids, reply ids)."""
    describe().bind(folder)
    writer = ReplyWriter(folder, "part-0")
    for name, prompt, reply in records:
        writer.append(ReplyRecord(name, "s", 0, "", prompt, reply, "", "stop"))
    writer.close()
    return folder


def _ids(folder: Path) -> list[str]:
    return [reply.id for reply in load_replies([folder], VOCAB)]


@pytest.mark.parametrize("parquet", [False, True])
def test_a_kill_between_any_two_replies_loses_none(tmp_path: Path, parquet: bool) -> None:
    describe().bind(tmp_path)
    names = [f"p/{i}#0" for i in range(8)]
    for name in names:  # a new process for each
        writer = ReplyWriter(tmp_path, "part-0", parquet, shard_size=3)
        assert list(writer.done) == names[: names.index(name)]
        writer.append(_record(name))
        with (tmp_path / f"part-0-{names.index(name) // 3:05d}.jsonl").open("ab") as file:
            if (names.index(name) + 1) % 3:  # the shard goes on: a torn line
                file.write(b'{"id": "torn", "sou')
        del writer
    for empty in [p for p in tmp_path.glob("*.jsonl") if not p.stat().st_size]:
        empty.unlink()  # made by the test's own torn-line helper
    assert sorted(_ids(tmp_path)) == names
    suffixes = sorted(path.suffix for path in tmp_path.glob("part-*"))
    assert suffixes == ([".jsonl", ".parquet", ".parquet"] if parquet else [".jsonl"] * 3)
    reply = load_replies([tmp_path], VOCAB)[0]
    assert reply.prompt_ids.tolist() == [1, *reply.id.encode()] and reply.reply_ids.tolist() == [
        0,
        1,
        2,
    ]


def test_the_format_can_change_from_run_to_run(tmp_path: Path) -> None:
    describe().bind(tmp_path)
    names: list[str] = []
    for count, is_parquet in ((3, False), (1, True), (1, False), (2, True), (3, True), (2, False)):
        writer = ReplyWriter(tmp_path, "part-0", is_parquet, shard_size=2)
        for _ in range(count):
            names.append(f"p/{len(names)}#0")
            writer.append(_record(names[-1]))
        writer.close()
    assert sorted(_ids(tmp_path)) == sorted(names)


def test_a_kill_during_conversion_leaves_no_duplicates(tmp_path: Path) -> None:
    describe().bind(tmp_path)
    writer = ReplyWriter(tmp_path, "part-0", True, shard_size=2)
    writer.append(_record("a"))
    lines = (tmp_path / "part-0-00000.jsonl").read_bytes()
    writer.append(_record("b"))
    # As if killed after the new file appeared and before the old one went.
    (tmp_path / "part-0-00000.jsonl").write_bytes(lines)
    again = ReplyWriter(tmp_path, "part-0", True, shard_size=2)
    assert list(again.done) == ["a", "b"]
    again.append(_record("c"))
    again.close()
    assert sorted(_ids(tmp_path)) == ["a", "b", "c"]


def test_a_full_disk_is_named_and_generation_goes_on_afterwards(
    tmp_path: Path, file_size_limit
) -> None:
    describe().bind(tmp_path)
    writer = ReplyWriter(tmp_path, "part-0")
    with file_size_limit(400), pytest.raises(StorageError, match="Free some space"):
        for i in range(100):
            writer.append(_record(f"{i}"))
    kept = list(ReplyWriter(tmp_path, "part-0").done)
    assert 0 < len(kept) < 100
    again = ReplyWriter(tmp_path, "part-0")
    again.append(_record("after"))
    again.close()
    assert _ids(tmp_path) == [*kept, "after"]


def test_other_settings_are_refused_by_name_and_runs_are_listed(tmp_path: Path) -> None:
    describe().bind(tmp_path)
    describe(provenance=[{"command": ["again"]}]).bind(tmp_path)
    assert [run["command"] for run in Description.read(tmp_path).provenance] == [
        ["test"],
        ["again"],
    ]
    with pytest.raises(DatasetError, match=r"temperature is 0\.0, now 1\.0"):
        describe(temperature=1.0).bind(tmp_path)


def test_runs_that_start_at_once_are_all_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Description.read
    monkeypatch.setattr(
        Description, "read", classmethod(lambda _, folder: (read(folder), time.sleep(0.02))[0])
    )
    shares = [describe(provenance=[{"command": [str(i)]}]) for i in range(6)]
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(lambda share: share.bind(tmp_path), shares))
    commands = [run["command"] for run in read(tmp_path).provenance]
    assert sorted(commands) == [[str(i)] for i in range(6)]


def test_another_vocabulary_is_refused(data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="vocabulary has 257 tokens; the target's has 300"):
        load_replies([data_folder], 300)
    describe().bind(tmp_path)
    writer = ReplyWriter(tmp_path, "part-0")
    writer.append(ReplyRecord("x", "s", 0, "", [1], [VOCAB], "", "stop"))
    with pytest.raises(
        DatasetError, match=r"'x' has token 257, the target's vocabulary ends at 256"
    ):
        load_replies([tmp_path], VOCAB)


def test_what_is_no_data_set_is_named(tmp_path: Path, data_folder: Path) -> None:
    with pytest.raises(DatasetError, match="sglang-dlite generate"):
        load_replies([tmp_path], VOCAB)
    with pytest.raises(DatasetError, match=r"data\.replies"):
        load_replies([], VOCAB)
    (tmp_path / "format.json").write_text("{}")
    with pytest.raises(DatasetError, match="earlier trainer"):
        load_replies([tmp_path], VOCAB)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    describe().bind(tmp_path)
    writer = ReplyWriter(tmp_path, "part-0")
    writer.append(_record("a"))
    before = fingerprint([tmp_path])
    writer.append(_record("b"))
    after = fingerprint([tmp_path])
    assert before.keys() == after.keys() and before != after
    assert json.loads((tmp_path / "dataset.json").read_text())["vocab_size"] == VOCAB


def test_data_sets_with_the_same_ids_can_be_combined(tmp_path: Path, capsys) -> None:
    first = _folder(tmp_path / "a", ("chat/0#0", [1], [5, 6]), ("chat/1#0", [2], [5, 6]))
    second = _folder(
        tmp_path / "b",
        ("chat/0#0", [3], [5, 6]),  # another prompt
        ("chat/1#0", [2], [5, 7]),  # another reply, as at a temperature
        ("chat/2#0", [1], [5, 6]),  # the same as the first folder's chat/0#0
        ("chat/3#0", [1], [8, 9]),  # another reply to its prompt
    )
    replies = load_replies([first, second], VOCAB)
    assert "1 replies occur more than once" in capsys.readouterr().err
    texts = [(r.prompt_ids.tolist(), r.reply_ids.tolist()) for r in replies]
    assert texts == [([1], [5, 6]), ([2], [5, 6]), ([3], [5, 6]), ([2], [5, 7]), ([1], [8, 9])]
    ids = [reply.id for reply in replies]
    assert ids[:2] == ["chat/0#0", "chat/1#0"] and len(set(ids)) == 5
    for percent in range(0, 100, 5):  # whatever is held out, one prompt is on one side
        held = [is_held_out(name, percent) for name in ids]
        assert held[0] == held[4] and held[1] == held[3]
    assert load_replies([second], VOCAB)[0].id == "chat/0#0"


def test_a_reply_is_found_by_its_prompt(tmp_path: Path) -> None:
    folder = _folder(tmp_path, ("old#0", [4, 5], [1]))  # as before prompts had a hash
    writer = ReplyWriter(folder, "part-0")
    writer.append(ReplyRecord("new#0", "s", 0, "", [6], [2], "", "stop", "", "1234"))
    writer.close()
    made = ReplyWriter(folder, "part-0").made
    assert {key: record["id"] for key, record in made.items()} == {
        tokens_hash([4, 5]): "old#0",
        "1234": "new#0",
    }


def test_full_shards_of_before_prompts_had_a_hash_are_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, ("old#0", [4, 5], [1]))
    part = folder / "part-0-00000.jsonl"
    record = json.loads(part.read_text())
    del record["prompt_hash"]
    parquet.write_table(pyarrow.Table.from_pylist([record]), part.with_suffix(".parquet"))
    part.unlink()
    assert _ids(folder) == ["old#0"] and tokens_hash([4, 5]) in ReplyWriter(folder, "part-0").made


def test_a_full_shard_keeps_the_fields_that_its_first_replies_lack(tmp_path: Path) -> None:
    folder = _folder(tmp_path, ("old#0", [4, 5], [1]))
    part = folder / "part-0-00000.jsonl"
    record = json.loads(part.read_text())
    del record["prompt_hash"], record["question"]
    part.write_text(json.dumps(record) + "\n")
    writer = ReplyWriter(folder, "part-0", True, shard_size=2)
    writer.append(ReplyRecord("new#0", "s", 0, "", [6], [2], "", "stop", "what?", "1234"))
    rows = parquet.read_table(part.with_suffix(".parquet")).to_pylist()
    assert [(row["question"], row["prompt_hash"]) for row in rows] == [("", ""), ("what?", "1234")]
    assert ReplyWriter(folder, "part-0").made.keys() == {tokens_hash([4, 5]), "1234"}


def test_a_damaged_full_shard_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path, ("a#0", [4, 5], [1]))
    (folder / "part-0-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DatasetError, match=r"part-0-00001\.parquet is damaged .* or remove it"):
        load_replies([folder], VOCAB)
