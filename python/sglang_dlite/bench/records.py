"""What is kept of a run: one JSONL file per round, in a directory bound to its configuration.

    manifest.json        configuration, arms (launch lines, why skipped), versions, device
    raw/<round>.jsonl    line 1 the round, then a line per reply or failure
    steps/<arm>.jsonl    a line per step of the model, written by the server
    logs/                the servers' and bench_serving's output

A round's file appears when the round is complete, so that a killed run resumes with the next one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dlite.files import write_atomic


class RunDirectoryError(ValueError):
    """A run's directory holds another run, or none; the message says what to do."""


@dataclass(frozen=True, order=True)
class Round:
    """One arm plays one workload once, at one load."""

    workload: str
    concurrency: int
    cache: str  # "warm"; "cold": flushed before every turn
    repeat: int
    arm: str

    @property
    def load(self) -> tuple[str, int, str, int]:
        """What the arms have in common that are compared with each other."""
        return self.workload, self.concurrency, self.cache, self.repeat

    @property
    def file_name(self) -> str:
        load = f"c{self.concurrency}{'' if self.cache == 'warm' else '-cold'}"
        return f"{self.workload}/{load}/{self.repeat}/{self.arm}.jsonl"


@dataclass(frozen=True)
class Reply:
    """One reply of a server, as it came over the wire; times are seconds from the request."""

    session: str
    turn: int  # from 1
    started: float  # Unix time
    latency_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str | None
    chunks: list[tuple[float, int]]  # (time, tokens), one per streamed chunk that held tokens
    correct_drafts: int = 0
    verify_passes: int = 0  # 0 without speculation
    histogram: list[int] = field(default_factory=list)  # [i]: passes that accepted i drafts
    output_ids: list[int] = field(default_factory=list)

    @property
    def tok_per_s(self) -> float:
        """Output tokens over the time that the user waited for them."""
        return self.output_tokens / self.latency_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunks[0][0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a reply of one token."""
        rest = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / rest if rest > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks: what a reader of the stream waits for one or more tokens."""
        times = [time for time, _ in self.chunks]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tau(self) -> float | None:
        """Acceptance length: 1 + accepted drafts / verify passes."""
        return 1 + self.correct_drafts / self.verify_passes if self.verify_passes else None


@dataclass(frozen=True)
class Failure:
    """A request that brought no reply; the rest of its session is then not played."""

    session: str
    turn: int
    error: str
    turns_not_played: int  # after this one


@dataclass
class RoundResult:
    round: Round
    started: float  # Unix time
    seconds: float
    replies: list[Reply] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class RunDirectory:
    """Where one run lives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    def bind(self, config: dict[str, Any]) -> None:
        """Claim a new directory for a configuration, or go on in one with the same.

        Raises:
            RunDirectoryError: the directory belongs to another configuration.
        """
        stored = self.manifest()["config"] if self.manifest_path.exists() else None
        mine = json.loads(json.dumps(config))
        if stored is None:
            write_atomic(self.manifest_path, json.dumps({"config": mine}, indent=1))
        elif stored != mine:
            keys = sorted(k for k in {*stored, *mine} if stored.get(k) != mine.get(k))
            raise RunDirectoryError(
                f"{self.path} holds a run with another configuration (different: "
                f"{', '.join(keys)}); choose another --out, or remove it"
            )

    def manifest(self) -> dict[str, Any]:
        """What is known of the run.

        Raises:
            RunDirectoryError: there is no run here.
        """
        try:
            return json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"{self.path} holds no run (no manifest.json); give --out the folder of one"
            ) from error

    def update_manifest(self, **values: Any) -> None:
        write_atomic(self.manifest_path, json.dumps(self.manifest() | values, indent=1))

    def is_done(self, round: Round) -> bool:
        return self._file(round).is_file()

    def write(self, result: RoundResult) -> None:
        """Keep a complete round, whole or not at all."""
        head = asdict(result.round) | {"started": result.started, "seconds": result.seconds}
        lines: Iterable[dict[str, Any]] = (
            head,
            *({"kind": "reply"} | asdict(reply) for reply in result.replies),
            *({"kind": "failure"} | asdict(failure) for failure in result.failures),
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomic(self._file(result.round), text)

    def read(self, round: Round) -> RoundResult:
        return _parse(self._file(round))

    def results(self) -> list[RoundResult]:
        """All complete rounds, in the order in which they were played."""
        files = (self.path / "raw").rglob("*.jsonl")
        return sorted((_parse(file) for file in files), key=lambda result: result.started)

    def _file(self, round: Round) -> Path:
        return self.path / "raw" / round.file_name


def _parse(file: Path) -> RoundResult:
    with file.open(encoding="utf-8") as lines:
        head = json.loads(next(lines))
        started, seconds = head.pop("started"), head.pop("seconds")
        result = RoundResult(Round(**head), started, seconds)
        for line in lines:
            values = json.loads(line)
            if values.pop("kind") == "reply":
                values["chunks"] = [(time, tokens) for time, tokens in values["chunks"]]
                result.replies.append(Reply(**values))
            else:
                result.failures.append(Failure(**values))
    return result
