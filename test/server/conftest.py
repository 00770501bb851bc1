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
from identifiers import Echo, record_echo
from oracle_engine import LaunchOracle, OracleEngine, oracle_environment
from references import References
from sglang_dlite.embedded_model import EmbeddedModelError, prepare_embedded_model


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


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The chat model that comes with the package; the drafter for it is shipped_drafter_dir()."""
    try:
        return prepare_embedded_model()
    except EmbeddedModelError as error:
        pytest.skip(f"the embedded model cannot be prepared: {error}")


@pytest.fixture(scope="session")
def exact_dtype() -> str:
    """The cheapest one in which a row does not depend on its batch (docs/testing.md)."""
    try:
        import sglang_dlite_kernel
    except ImportError:
        return "float32"
    return "bfloat16" if sglang_dlite_kernel.has_matrix_unit() else "float32"


@pytest.fixture(scope="session")
def echo(embedded_model: Path, exact_dtype: str) -> Echo:
    """Prompts that ask for identifiers, and the target's own replies (one engine start)."""
    return record_echo(embedded_model, exact_dtype)
