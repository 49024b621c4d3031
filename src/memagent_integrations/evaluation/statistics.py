"""Statistics of scores: a mean with its interval, and a test whether two readers differ on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev
from typing import Any

from memagent_integrations.errors import MissingExtra, UsageError

_Z = NormalDist().inv_cdf(0.975)
_RESAMPLES = 1 << 16  # all signs of 16 differences


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean of `n` values from 0 to 1, its standard error, and its 95 % interval.

    `mean` is None without values, `stderr` with fewer than two.
    """

    mean: float | None
    n: int
    stderr: float | None
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of two readers on the same `n` samples.

    `difference` is the mean of the first minus that of the second, `p` the probability of one at least as large by
    chance. The first reader was better in `better` samples, worse in `worse`.
    """

    n: int
    difference: float
    better: int
    worse: int
    p: float


def score(values: Sequence[float]) -> Score:
    """Return the mean of the values with its 95 % interval; a failed sample is to be passed as 0.

    For values of 0 and 1 it is Wilson's interval (Journal of the American Statistical Association 22, 1927), and also
    where all values are equal: no distribution from 0 to 1 with the same mean spreads wider, so that the interval is at
    least as wide as the true one. Otherwise it is Student's, clipped to 0 and 1.

    Raises:
        UsageError: a value is not a number from 0 to 1.
    """
    _check(values)
    n = len(values)
    if n == 0:
        return Score(mean=None, n=0, stderr=None, low=0.0, high=1.0)
    average = mean(map(float, values))
    stderr = stdev(map(float, values)) / math.sqrt(n) if n > 1 else None
    if not stderr or set(values) <= {0, 1}:
        low, high = _wilson(average, n)
    else:
        reach = float(_scipy().special.stdtrit(n - 1, 0.975)) * stderr
        low, high = max(average - reach, 0.0), min(average + reach, 1.0)
    return Score(mean=average, n=n, stderr=stderr, low=low, high=high)


def compare(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Comparison:
    """Test whether two readers differ on the same samples, with Fisher's paired permutation test, two-sided.

    If the readers were equal, each difference could as well have the opposite sign. Where all differences have the same
    size, as with values of 0 and 1, the number of positive signs is binomial and p exact: this is McNemar's test, so
    that one function serves every metric. Otherwise all combinations of signs are tried for up to 16 differences, and
    65,536 random ones, drawn with `seed`, for more.

    Raises:
        UsageError: the sequences differ in length, or a value is not a number from 0 to 1.
    """
    if len(first) != len(second):
        raise UsageError(f"a paired test needs the same samples of both readers, not {len(first)} and {len(second)}")
    _check((*first, *second))
    differences = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
    return Comparison(
        n=len(differences),
        difference=mean(differences) if differences else 0.0,
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        p=_p([difference for difference in differences if difference], seed),
    )


def _p(differences: Sequence[float], seed: int) -> float:
    """Return the p value of differences that are not 0; the others have no sign to change."""
    if not differences:
        return 1.0
    if len({abs(difference) for difference in differences}) == 1:
        positive = sum(difference > 0 for difference in differences)
        return float(_scipy().stats.binomtest(positive, len(differences)).pvalue)
    result = _scipy().stats.permutation_test(
        (differences,),
        _mean,
        vectorized=True,
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        batch=4096,
        rng=seed,
    )
    return float(result.pvalue)


def _mean(values: Any, axis: int) -> Any:
    return values.mean(axis=axis)


def _scipy() -> Any:
    """Import scipy, which is slow and only needed for statistics."""
    try:
        import scipy.special
        import scipy.stats
    except ImportError as error:
        raise MissingExtra.extra("scipy", "eval") from error
    return scipy


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share of n."""
    weight = 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / weight
    reach = _Z / weight * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def _check(values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value <= 1:  # also catches nan
            raise UsageError(f"a score has to be a number from 0 to 1, not {value!r}")
