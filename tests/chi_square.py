"""Pearson's goodness of fit, without scipy."""

from __future__ import annotations

import numpy as np


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells that expect under 5 are pooled."""
    expected = probabilities * counts.sum()
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] == 0:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Within five standard deviations of chi-square's mean: by chance once in a million."""
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)
