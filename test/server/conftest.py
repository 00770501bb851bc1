"""Fixtures: one tiny target, its recorded references, and engines with the oracle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import references as recording
import tiny_models
from engines import engine
from oracle_engine import LaunchOracle, OracleEngine, oracle_environment
from references import References


def pytest_unconfigure(config: pytest.Config) -> None:
    """Upstream's exit handlers log to streams that pytest has closed: no traceback for that."""
    logging.raiseExceptions = False


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random fp32 Llama."""
    return tiny_models.make_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def references(target: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Target-only decoding of all workloads (one engine start per session)."""
    return recording.record_references(target, tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def launch_oracle(tmp_path_factory: pytest.TempPathFactory) -> LaunchOracle:
    """launch_oracle(target, table, drafter={...}, env={...}, **server options)."""

    @contextmanager
    def launch(
        target: Path,
        table: Path,
        drafter: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Iterator[OracleEngine]:
        folder = tmp_path_factory.mktemp("oracle")
        path = tiny_models.make_drafter(folder / "drafter", **(drafter or {}))
        env = {**oracle_environment(table, folder), **(env or {})}
        with engine(target, path, env=env, **options) as running:
            yield OracleEngine(running, folder, path)

    return launch
