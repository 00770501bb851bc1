"""Does a sample have a law?"""

from __future__ import annotations

import torch


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's test of counts [...] against probabilities [...] of sum 1.

    Cells of fewer than 5 expected are taken together; an observation where the law has 0 gives 0.
    """
    counts, law = counts.flatten().double(), law.flatten().double()
    assert abs(float(law.sum()) - 1) < 1e-4, "not a law"
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law / law.sum() * counts.sum()
    small = expected < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        counts, expected = counts[expected > 0], expected[expected > 0]
    assert len(counts) > 1, "too few observations for any test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
