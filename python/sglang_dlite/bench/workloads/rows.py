"""Rows from a local file or from the Hugging Face hub; a bad line is named, not dropped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dlite.bench.workloads.sessions import Loaded, RowError, Session, WorkloadError


class Row(NamedTuple):
    """One row and where it stands, for messages; `value` is a RowError for an unreadable line."""

    where: str
    value: Any


class HubSource(NamedTuple):
    """Where a public data set lives."""

    repo: str
    split: str
    config: str | None = None
    file: str | None = None  # one JSON-lines file of the repository, where rows cannot be loaded


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file (`.gz` too) or of a JSON array.

    Raises:
        WorkloadError: the file is absent, or is JSON but no list.
    """
    if not path.is_file():
        raise WorkloadError(f"{path}: no such file")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        if path.suffix == ".json":
            head = file.read(1)
            file.seek(0)
            if head == "[":
                try:
                    values = json.load(file)
                except ValueError as error:
                    raise WorkloadError(f"{path}: not JSON: {error}") from error
                yield from (Row(f"{path}[{i}]", value) for i, value in enumerate(values))
                return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except ValueError as error:
                value = RowError(f"not JSON: {error}")
            yield Row(f"{path}:{number}", value)


def hub_rows(source: HubSource) -> Iterator[Row]:
    """The rows of a data set on the hub; needs access to it, or its files in the local cache.

    Raises:
        WorkloadError: names the data set and the remedy.
    """
    try:
        if source.file is not None:
            from huggingface_hub import hf_hub_download

            local = hf_hub_download(source.repo, source.file, repo_type="dataset")
            yield from file_rows(Path(local))
            return
        from datasets import load_dataset

        rows = load_dataset(source.repo, source.config, split=source.split)
    except Exception as error:  # the hub's client raises some forty kinds
        raise WorkloadError(
            f"data set {source.repo} could not be loaded ({type(error).__name__}: "
            f"{str(error)[:200]}); give access to the hub, or `path:` a JSONL file of its rows"
        ) from error
    for number, value in enumerate(rows):
        yield Row(f"{source.repo}[{number}]", value)


def collect(rows: Iterator[Row], make: Callable[[str, Any], Session | None]) -> Loaded:
    """Turn rows into sessions; `make` gives None for rows that are not asked for."""
    loaded = Loaded()
    for where, value in rows:
        try:
            if isinstance(value, RowError):
                raise value
            session = make(where, value)
        except RowError as error:
            loaded.rejected.append(f"{where}: {error}")
            continue
        if session is not None:
            loaded.sessions.append(session)
    return loaded
