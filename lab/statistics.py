"""The statistics behind every guarantee: exact tails, bounds and tests that hold for finitely many examples. No torch.

binomial_*           exact probabilities of many counts at once; share_interval is the interval of Clopper and Pearson
chernoff             a mean of independent numbers in [0, 1] (Hoeffding 1963, Theorem 1)
agreement_p_values   the share of rows that agree, each row alone or in texts (Korn & Graubard 1998)
paired_p_values      the loss of a rule against the last exit, example by example (Tango 1998; Berger & Boos 1994)

The paired test. The loss of an example is correct(last exit) - correct(rule), so 1, 0 or -1. Examples are independent,
so the numbers of worse rows (loss 1) and better rows (loss -1) are trinomial. The null hypothesis is p(worse) -
p(better) >= max_loss. It leaves one nuisance parameter, p(better).

    statistic   the score of Tango 1998 (Statistics in Medicine 17, 891): mean loss minus max_loss, in standard errors
                at the most likely nuisance for which the expected loss is max_loss
    p-value     the largest exact probability of a statistic as low or lower, over the nuisances in a confidence
                interval of level 1 - GAMMA, plus GAMMA (Berger & Boos 1994, JASA 89, 1012)

The lower tail is the one that counts: a low mean loss is evidence against the null hypothesis. The largest probability
is not searched on a grid of nuisances, which could miss it, but bounded on cells that cover the interval. Fewer worse
and more better rows lower the statistic. So the probability in a cell is at most that for the smallest p(worse) and the
largest p(better) of the cell. The test is valid for every n.

It needs fewer rows than bounds for arbitrary bounded losses. With p(worse) = p(better) = .02, max_loss .01 and power
.8 it needs 3,000; a betting test (Waudby-Smith & Ramdas 2024) needs 6,000, an empirical Bernstein bound (Maurer &
Pontil 2009) 8,000 (results/guarantees.md).
"""

import math
from bisect import bisect_left
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

GAMMA = 0.001  # probability that the interval of the nuisance does not contain it

STEP = 0.05  # width of a cell of the nuisance, in standard errors of the summed loss

SLACK = 1e-9  # bound on what windows and rounding omit

POWER = 0.8  # share of hold-outs for which `rows_needed` are enough

FEW = 200  # number of differing rows below which the normal approximation is checked


# ---- Binomial counts ----
def log_factorials(most: int) -> np.ndarray:
    """ln 0!, ln 1!, ... ln most!"""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))


def binomial_pmf(count: np.ndarray, trials: np.ndarray | int, p: float, log_factorial: np.ndarray) -> np.ndarray:
    """P(X = count) = trials! / (count! (trials - count)!) p^count (1 - p)^(trials - count), X ~ Binomial(trials, p).

    0 for a count above the trials. log_factorial: `log_factorials` up to the largest count and trials. Factorials of
    thousands overflow, so the terms are logarithms.
    """
    if p in (0, 1):  # ln p or ln(1 - p) is infinite
        return np.where(count == trials * p, 1.0, 0.0) + np.zeros(np.shape(trials))
    others = np.maximum(trials - count, 0)
    log_ways = log_factorial[trials] - log_factorial[count] - log_factorial[others]
    return np.where(count <= trials, np.exp(log_ways + count * math.log(p) + others * math.log1p(-p)), 0)


def binomial_cdf(count: np.ndarray | int, trials: int, p: float, log_factorial: np.ndarray | None = None) -> np.ndarray:
    """P(X <= count) for X ~ Binomial(trials, p), with an error of at most SLACK. The core's sums term by term, which is
    too slow for many counts or trials."""
    window = _window(p, trials)
    known = log_factorials(trials) if log_factorial is None else log_factorial
    # sums[i] is P(X < window[0] + i): index 0 is for counts below the window, the last for those at its end and above.
    sums = np.concatenate(([0.0], np.cumsum(binomial_pmf(window, trials, p, known))))
    return np.minimum(sums[np.clip(count - window[0] + 1, 0, len(window))], 1)


def _window(p: float, trials: int) -> np.ndarray:
    """The counts of Binomial(trials, p) up to 8 standard deviations: others have a probability far below SLACK."""
    spread = 8 * math.sqrt(trials * p * (1 - p) + 4) + 8
    return np.arange(max(0, math.floor(trials * p - spread)), min(trials, math.ceil(trials * p + spread)) + 1)


def binomial_tails(successes: np.ndarray, p: float) -> np.ndarray:
    """P(X_n >= x_n) for X_n ~ Binomial(n, p), n = 1..N: (N,). x_n: successes among the first n, of (N,) bool.

    The upper tail: the probability of at least as many successes as were observed. All take O(N), because each follows
    from the one before. X and x are before one more trial, X' after it:
        a failure   P(X' >= x)     = P(X >= x) + p P(X = x - 1)
        a success   P(X' >= x + 1) = P(X >= x) - (1 - p) P(X = x)
    """
    n, x = np.arange(len(successes)), np.cumsum(successes) - successes  # before the trial
    log_factorial = log_factorials(len(successes))
    rises = p * binomial_pmf(np.maximum(x - 1, 0), n, p, log_factorial) * (x > 0)
    falls = (1 - p) * binomial_pmf(x, n, p, log_factorial)
    return np.clip(1 + np.cumsum(np.where(successes, -falls, rises)), 0, 1)


def share_interval(successes: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """A confidence interval for a share, exact for every count (Clopper & Pearson 1934).

    Its ends are the shares for which as few, or as many, successes have probability (1 - level) / 2.

    >>> share_interval(0, 10)[0], round(share_interval(0, 10)[1], 4)
    (0.0, 0.3085)
    """

    def highest(successes: int) -> float:
        low, high = successes / count, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if binomial_cdf(successes, count, middle) > (1 - level) / 2 else (low, middle)
        return high

    return 1 - highest(count - successes), highest(successes)


# ---- Means of numbers in [0, 1] ----
def chernoff(mean: np.ndarray | float, limit: float, count: np.ndarray | float) -> np.ndarray:
    """A bound on P(average <= mean) for `count` independent numbers in [0, 1] with an expectation of at least `limit`.

    exp(-count KL(mean, limit)), KL(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)) (Hoeffding 1963, Theorem 1; for
    binomial counts Chernoff 1952). 1 if the mean is not below the limit, which is in (0, 1).
    """
    below = np.minimum(mean, limit)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = np.where(below > 0, below * np.log(below / limit), 0.0)  # 0 ln 0 is 0
    return np.exp(-count * (divergence + (1 - below) * np.log((1 - below) / (1 - limit))))


def agreement_p_values(agrees: np.ndarray, groups: np.ndarray, epsilon: float) -> np.ndarray:
    """p-values (N,) of the hypotheses that a share below epsilon agrees, from the first n rows, n = 1..N.

    agrees (N,) bool, in an order that does not depend on it; groups (N,): the units that were drawn independently, a
    text with all its tokens or a single row. For single rows the test is exact: the upper binomial tail at epsilon,
    where it is largest among all shares up to epsilon. Texts use the number of independent rows with the same variance.
    """
    if len(np.unique(groups)) == len(groups):
        return binomial_tails(agrees, epsilon)
    return _totals(agrees, groups).p_values(epsilon)


class _Totals(NamedTuple):
    """Sums over texts i, of which n_i rows are among the first n rows and x_i of these agree; one entry for each n."""

    rows: np.ndarray  # sum n_i
    agreeing: np.ndarray  # sum x_i
    nn: np.ndarray  # sum n_i^2
    nx: np.ndarray
    xx: np.ndarray
    longest: np.ndarray  # max n_i

    def p_values(self, epsilon: float) -> np.ndarray:
        """`chernoff` for m independent rows of which a share p agrees (Korn & Graubard 1998).

        p = sum x_i / sum n_i; m = p (1 - p) (sum n_i)^2 / sum (x_i - p n_i)^2: the size of a sample of independent rows
        in which p has the same variance. Both include one more text in which no row agrees, x = 0 and n = longest:
        without it, texts that all agree would have variance 0, and m would not be defined.
        """
        rows = self.rows + self.longest
        p = self.agreeing / rows
        # sum (x_i - p n_i)^2, multiplied out, and (0 - p longest)^2 of the text that is wrong throughout.
        spread = self.xx - 2 * p * self.nx + p**2 * (self.nn + self.longest**2)
        effective = np.minimum(p * (1 - p) * rows**2 / np.maximum(spread, 1e-12), rows)
        return chernoff(1 - p, 1 - epsilon, effective)  # a low share of disagreement is evidence for the guarantee


def _totals(agrees: np.ndarray, groups: np.ndarray) -> _Totals:
    """_Totals of the first 1, 2, .. N rows, in O(N log N)."""
    order = np.argsort(groups, kind="stable")
    _, begins, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    # Sorted by text, the rows of a text stand next to each other, in their order: a running count minus its value where
    # the text begins counts within the text.
    before = np.concatenate(([0], np.cumsum(agrees[order])))
    n, x = np.empty((2, len(order)), np.int64)  # n_i and x_i of the row's own text, up to and including the row
    n[order] = np.arange(len(order)) - np.repeat(begins, sizes) + 1
    x[order] = before[1:] - np.repeat(before[begins], sizes)
    # By how much the row makes its text's n_i^2, n_i x_i and x_i^2 grow: n^2 - (n - 1)^2 = 2 n - 1, and so on.
    nn, nx, xx = (np.cumsum(steps) for steps in (2 * n - 1, x + (n - 1) * agrees, (2 * x - 1) * agrees))
    return _Totals(np.arange(len(order)) + 1, np.cumsum(agrees), nn, nx, xx, np.maximum.accumulate(n))


def groups_needed(sizes: np.ndarray, epsilon: float, delta: float) -> int:
    """The number of groups of such sizes with which `agreement_p_values` passes at level delta if all rows agree."""
    if sizes.max() == 1:
        return math.ceil(math.log(delta) / math.log(epsilon))  # epsilon^n <= delta

    def passes(texts: int) -> bool:
        total, squares = texts * sizes.mean(), texts * (sizes**2).mean()
        return bool(_Totals(total, total, squares, squares, squares, sizes.max()).p_values(epsilon) <= delta)

    most = len(sizes)
    while not passes(most):
        most *= 2
    return bisect_left(range(most), True, key=lambda texts: passes(texts + 1)) + 1


# ---- Paired losses ----
def paired_p_values(losses: np.ndarray, max_loss: float, level: float = 1.0) -> np.ndarray:
    """p-values (R,) of the hypotheses that the expected loss is max_loss or more, from losses (R, N) in {-1, 0, 1}.

    level: as in `p_values_of_counts`. Raises ValueError for other losses, and for a max_loss outside (0, 1).
    """
    losses = np.asarray(losses)
    if losses.ndim != 2 or not np.isin(losses, (-1, 0, 1)).all():
        raise ValueError(f"expected losses (R, N) of -1, 0 and 1, found shape {losses.shape}; round them first")
    return p_values_of_counts((losses == 1).sum(axis=1), (losses == -1).sum(axis=1), losses.shape[1], max_loss, level)


def p_values_of_counts(
    worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float, level: float = 1.0
) -> np.ndarray:
    """The same from the numbers of worse and better rows, (R,) each. 1 if the mean loss is not below max_loss.

    level: when all p-values are known to be above it, lower bounds of them are returned, which saves time.
    """
    if not 0 < max_loss < 1:
        raise ValueError(f"max_loss must be above 0 and below 1 for a guarantee, got {max_loss}")
    p_values = np.ones(len(worse))
    below = worse - better < rows * max_loss
    if below.any():
        # Many rules have the same counts; each pair is computed once.
        counts, back = np.unique(np.stack((worse, better))[:, below], axis=1, return_inverse=True)
        p_values[below] = _worst_case(counts[0], counts[1], rows, max_loss, level)[back.ravel()]
    return p_values


@cache
def rows_needed(differing: float, max_loss: float, confidence: float) -> int:
    """The number of rows with which a rule without loss on average is guaranteed, for the share POWER of hold-outs.

    differing: the share of rows for which the rule is worse or better than the last exit, above 0. The normal
    approximation is differing ((z_POWER + z_confidence) / max_loss)^2. If fewer than FEW rows differ, it is increased
    until the exact test passes for a loss at the quantile POWER.
    """
    z_power, z_confidence = NormalDist().inv_cdf(POWER), NormalDist().inv_cdf(confidence)
    fewest = math.log(1 - confidence) / math.log1p(-max_loss)  # if no row differed: (1 - max_loss)^n = 1 - confidence
    rows = math.ceil(max(fewest, 1.05 * differing * ((z_power + z_confidence) / max_loss) ** 2))
    while rows * differing < FEW:
        both, more = rows * differing, z_power * math.sqrt(rows * differing)  # worse + better, and worse - better
        worse, better = math.ceil((both + more) / 2), max(0, math.floor((both - more) / 2))
        level = 1 - confidence
        if p_values_of_counts(np.array([worse]), np.array([better]), rows, max_loss, level)[0] <= level:
            break
        rows = math.ceil(1.03 * rows)
    return rows


def _worst_case(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float, level: float) -> np.ndarray:
    """p-values of counts (R,): the largest bound over the cells of the nuisance that are plausible for each rule."""
    log_factorial = log_factorials(rows)
    ends = _cells(int(better.max()), rows, max_loss)
    most_worse = max(int(worse.max()), _window(ends[-1] + max_loss, rows)[-1])
    most_better = max(int(better.max()), _window(ends[-1], rows)[-1])
    score = _score(np.arange(most_worse + 1), np.arange(most_better + 1)[:, None], rows, max_loss)
    # The bound needs a score that rises with worse rows and falls with better ones. Rounding may break this slightly;
    # the minimum over more worse rows, and over fewer better rows, restores it.
    score = np.minimum.accumulate(score[:, ::-1], axis=1)[:, ::-1]
    score = np.minimum.accumulate(score, axis=0)
    # as_low[r, b]: with b better rows, the statistic is at most that of rule r for 0, 1, .., as_low - 1 worse rows. It
    # rises with worse rows, so their number is enough.
    as_low = np.stack([(score <= score[b, w] + 1e-12).sum(axis=1) for w, b in zip(worse, better)])
    highest = np.zeros(len(worse))
    nearest_first = np.argsort(abs(ends[1:] - better.mean() / rows))  # the likely cells have the largest bounds
    for low, high in zip(ends[nearest_first], ends[1:][nearest_first]):
        if highest.min() > level:
            break
        # A cell: p(better) from low to high, and p(worse) = p(better) + max_loss.
        betters, chance = _window(high, rows), binomial_cdf(better, rows, low, log_factorial)
        of_better = binomial_pmf(betters, rows, high, log_factorial)
        # Cells in the interval of level 1 - GAMMA for the observed better rows (Clopper & Pearson): neither tail is
        # below GAMMA / 2. Each tail is taken at the end of the cell at which it is larger.
        plausible = (chance >= GAMMA / 2) & (1 - binomial_cdf(better - 1, rows, high, log_factorial) >= GAMMA / 2)
        if not plausible.any():
            continue
        # Given b better rows, the worse ones are Binomial(rows - b, p(worse) / (1 - p(better))). The bound takes the
        # smallest p(worse) = low + max_loss and the largest p(better) = high.
        worses = _window(low + max_loss, rows)
        others = (rows - betters)[:, None]
        of_worse = binomial_pmf(worses, others, min((low + max_loss) / (1 - high), 1), log_factorial)
        of_worse = np.concatenate((np.zeros((len(betters), 1)), np.cumsum(of_worse, axis=1)), axis=1)
        # of_worse[i, j] = P(fewer than worses[0] + j worse rows | betters[i]), and j = as_low - worses[0].
        count = np.clip(as_low[np.ix_(plausible, betters)] - worses[0], 0, len(worses))
        bound = of_worse[np.arange(len(betters)), count] @ of_better
        highest[plausible] = np.maximum(highest[plausible], bound)
    return np.minimum(highest + GAMMA + SLACK, 1)


def _score(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float) -> np.ndarray:
    """Tango's statistic, (worse - better - n max_loss) / sqrt(n (2 x + max_loss - max_loss^2)); its nuisance x solves
    2 n x^2 - b x - better max_loss (1 - max_loss) = 0.
    """
    b = worse * (1 + max_loss) + better * (1 - max_loss) - 2 * rows * max_loss
    nuisance = (b + np.sqrt(b**2 + 8 * rows * better * max_loss * (1 - max_loss))) / (4 * rows)
    return (worse - better - rows * max_loss) / np.sqrt(rows * (2 * nuisance + max_loss - max_loss**2))


def _cells(better: int, rows: int, max_loss: float) -> np.ndarray:
    """Ends of the cells of p(better), from 0 to beyond the interval for this number of better rows."""
    top = min((math.sqrt(better + 1) + 2) ** 2 / rows, (1 - max_loss) / 2)
    count = math.ceil(math.sqrt(2 * rows * top) / STEP)
    return top * np.linspace(0, 1, count + 1) ** 2  # widths grow with the standard error, as sqrt(p)
