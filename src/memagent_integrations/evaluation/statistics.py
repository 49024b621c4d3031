"""What scores say: a mean with its interval, and whether one reader is better than another on the same samples."""

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

    `mean` is None of no values, `stderr` of fewer than two.
    """

    mean: float | None
    n: int
    stderr: float | None
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two readers on the same `n` samples: the mean `difference` of the first to the second, and how likely one as large is by chance (`p`).

    The first was better in `better` samples, worse in `worse`.
    """

    n: int
    difference: float
    better: int
    worse: int
    p: float


def score(values: Sequence[float]) -> Score:
    """The mean of the values with its 95 % interval; a sample that failed counts as 0.

    Of values of 0 and 1 it is Wilson's interval (Journal of the American Statistical Association 22, 1927). So it is where the values do not differ:
    no distribution from 0 to 1 with the same mean spreads wider, and its interval is then at least as wide as the true one. Else it is Student's,
    within 0 and 1.

    Raises:
        UsageError: a value is no number from 0 to 1.
    """
    _check(values)
    n = len(values)
    if n == 0:
        return Score(mean=None, n=0, stderr=None, low=0.0, high=1.0)
    middle = mean(map(float, values))
    error = stdev(map(float, values)) / math.sqrt(n) if n > 1 else None
    if not error or set(values) <= {0, 1}:
        low, high = _wilson(middle, n)
    else:
        reach = float(_scipy().special.stdtrit(n - 1, 0.975)) * error
        low, high = max(middle - reach, 0.0), min(middle + reach, 1.0)
    return Score(mean=middle, n=n, stderr=error, low=low, high=high)


def compare(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Comparison:
    """Whether two readers differ on the same samples: Fisher's paired permutation test, two-sided.

    If the readers are alike, each difference could as well have the other sign. Where all differences are of one size, as those of values of 0 and 1
    are, how often a sign comes is binomial, and p exact: the test is then McNemar's, so that one function serves every metric. Else all signs are
    tried of up to 16 differences, and 65,536 random ones, drawn by `seed`, of more.

    Raises:
        UsageError: the two have not the same length, or a value is no number from 0 to 1.
    """
    if len(first) != len(second):
        raise UsageError(f"a paired test needs the same samples of both readers, not {len(first)} and {len(second)}")
    _check((*first, *second))
    pairs = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
    differing = [pair for pair in pairs if pair]  # the others have no sign to change
    return Comparison(
        n=len(pairs),
        difference=mean(pairs) if pairs else 0.0,
        better=sum(pair > 0 for pair in pairs),
        worse=sum(pair < 0 for pair in pairs),
        p=_p(differing, seed),
    )


def _p(differing: Sequence[float], seed: int) -> float:
    if not differing:
        return 1.0
    if len({abs(pair) for pair in differing}) == 1:
        return float(_scipy().stats.binomtest(sum(pair > 0 for pair in differing), len(differing)).pvalue)
    drawn = _scipy().stats.permutation_test(
        (differing,),
        _mean,
        vectorized=True,
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        batch=4096,
        rng=seed,
    )
    return float(drawn.pvalue)


def _mean(values: Any, axis: int) -> Any:
    return values.mean(axis=axis)


def _scipy() -> Any:
    """scipy, which takes its time, and which only those need who measure."""
    try:
        import scipy.special
        import scipy.stats
    except ImportError as error:
        raise MissingExtra.extra("scipy", "eval") from error
    return scipy


def _wilson(middle: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share of n."""
    weight = 1 + _Z**2 / n
    centre = (middle + _Z**2 / (2 * n)) / weight
    reach = _Z / weight * math.sqrt(middle * (1 - middle) / n + _Z**2 / (4 * n**2))
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def _check(values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value <= 1:  # nan neither
            raise UsageError(f"a score has to be a number from 0 to 1, not {value!r}")
