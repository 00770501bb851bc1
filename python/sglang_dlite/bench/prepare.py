"""Workloads made ready to be played: loaded, cut to the context, described."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_dlite.bench.config import BenchConfig, WorkloadSpec
from sglang_dlite.bench.context_limit import fit, tokenizer_count
from sglang_dlite.bench.workloads import load
from sglang_dlite.bench.workloads.sessions import Session, WorkloadError


@dataclass
class Prepared:
    """Workloads ready to be played, and what a reader must know of them."""

    specs: dict[str, WorkloadSpec] = field(default_factory=dict)
    sessions: dict[str, list[Session]] = field(default_factory=dict)
    notes: dict[str, dict[str, object]] = field(default_factory=dict)


def prepare_workload(spec: WorkloadSpec, target: str) -> tuple[list[Session], dict[str, object]]:
    """The sessions of a workload that fit, and what the report says of them.

    Raises:
        WorkloadError: there is none.
    """
    loaded = load(spec)
    sessions, cut = fit(loaded.sessions, spec, tokenizer_count(target))
    if not sessions:
        raise WorkloadError(f"workload {spec.name!r}: no session fits; the first: {cut[0]}")
    return sessions, {
        "sessions": len(sessions),
        "turns": sum(len(session.turns) for session in sessions),
        "text": loaded.note,
        "rejected": loaded.rejected,
        "cut": cut,
    }


def prepare_workloads(config: BenchConfig, target: str) -> Prepared:
    """Every workload of a configuration; absent optional ones are noted with their reason.

    Raises:
        WorkloadError: one that is not optional cannot be played, or none can.
    """
    prepared = Prepared()
    for spec in config.workloads:
        note: dict[str, object] = {"kind": spec.kind, "history": spec.history}
        prepared.notes[spec.name] = note
        try:
            sessions, facts = prepare_workload(spec, target)
        except WorkloadError as error:
            if not spec.optional:
                raise
            note["skipped"] = str(error)
            continue
        note |= facts
        prepared.specs[spec.name], prepared.sessions[spec.name] = spec, sessions
    if not prepared.sessions:
        raise WorkloadError("no workload can be played")
    return prepared
