"""Student's t distribution, for any number of degrees of freedom; infinity is the normal distribution."""

import math
from functools import cache
from statistics import NormalDist

LARGE = 1e6  # degrees of freedom from which the normal distribution is used


def p_value(t: float, freedom: float) -> float:
    """P(|T| >= t), t >= 0: the incomplete beta function I_x(freedom / 2, 1 / 2), x = freedom / (freedom + t^2).

    >>> round(p_value(2.776445, 4), 4), round(p_value(1.959964, math.inf), 4)
    (0.05, 0.05)
    """
    if freedom > LARGE:
        return 2 * NormalDist().cdf(-t)
    x, a, b = freedom / (freedom + t * t), freedom / 2, 0.5
    if x >= 1:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method (Numerical Recipes, 6.4)."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        before = value
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            value *= c * d
        if abs(value - before) < 1e-15 * abs(value):
            break
    return value


@cache
def quantile(level: float, freedom: float) -> float:
    """The t that |T| exceeds with probability `level`, by bisection."""
    low, high = 0.0, 2.0
    while p_value(high, freedom) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > level else (low, middle)
    return (low + high) / 2
