"""Engine configurations that a module's tests run under, one engine start each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from workloads import CHUNK

OVERLAP = {"DLITE_CPU_OVERLAP": "1"}
REJECTION = {"speculative_use_rejection_sampling": True}  # else the default: sample and match
MIXED_CHUNKS = {"chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}


@dataclass(frozen=True)
class Configuration:
    """One engine start: its drafter's shape, its environment and its server options.

    `exact` is False where decode rows may ride in prefill batches: their number of verify passes
    is then not predictable. Those that are not `slow` are part of the fast tests.
    """

    name: str
    drafter: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    slow: bool = True


def by_name(configurations: Sequence[Configuration]) -> list[Any]:
    """Parameters of a fixture: each configuration by its name, slow ones marked."""
    return [
        pytest.param(each, id=each.name, marks=pytest.mark.slow if each.slow else ())
        for each in configurations
    ]


def check_retracted(configuration: Configuration, answers: Sequence[dict[str, Any]]) -> None:
    """Requests were retracted, where the configuration is there for that; else it tests nothing."""
    if "SGLANG_TEST_RETRACT" in configuration.env:
        assert any(answer["meta_info"]["num_retractions"] for answer in answers)
