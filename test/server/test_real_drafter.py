"""The real drafter (random weights): the output is plain decoding's whatever it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import engine, play
from oracle_engine import output_ids
from references import References

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    "drafter,width,overlap",
    [
        pytest.param({"anchor_group_size": 3, "target_layer_ids": (4, 5, 0)}, 3, "0", id="g3-d3"),
        pytest.param({"anchor_group_size": 1}, 2, "0", id="g1-d2", marks=pytest.mark.slow),
        pytest.param({"anchor_group_size": 2}, 8, "1", id="g2-d8", marks=pytest.mark.slow),
        pytest.param({"anchor_group_size": 3}, 8, "1", id="g3-d8", marks=pytest.mark.slow),
    ],
)
def test_group_sizes_and_widths(
    references: References, tmp_path: Path, drafter: dict[str, Any], width: int, overlap: str
) -> None:
    path = tiny_models.make_drafter(tmp_path / "drafter", **drafter)
    with engine(
        references.target,
        path,
        env={"DLITE_CPU_OVERLAP": overlap, "DLITE_DRAFTER_FACTORY": None},
        speculative_num_draft_tokens=width,
    ) as running:
        for name in ("mixed", "lengths", "turns"):
            answers = play(running, references.requests[name])
            assert output_ids(answers) == references.expected(name)
            proposed = sum(a["meta_info"].get("spec_num_proposed_drafts", 0) for a in answers)
            assert proposed > 0
