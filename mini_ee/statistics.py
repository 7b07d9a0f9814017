"""The statistics behind every guarantee: exact tails, bounds and tests that hold for finitely many examples. No torch.

fixed_sequence       tests in an order that was fixed before, up to the first that fails
binomial_*           exact probabilities of counts; share_interval is the interval of Clopper and Pearson
chernoff             a mean of independent numbers in [0, 1] (Hoeffding 1963, Theorem 1)
agreement_p_values   the share of rows that agree, each row alone or in texts (Korn & Graubard 1998)
paired_p_values      the loss of a rule against the last exit, example by example (Tango 1998; Berger & Boos 1994)

The paired test. An example's loss is right(last exit) - right(rule), so 1, 0 or -1. The worse rows (1) and the better
rows (-1) of n independent rows are trinomial; the test is of p(worse) - p(better), whatever the nuisance p(better) is.

    statistic   the score of Tango 1998 (Statistics in Medicine 17, 891): the mean loss below max_loss, in standard
                errors under the most likely nuisance for which the loss is max_loss
    p-value     the largest exact probability of a statistic so low or lower, over the nuisances in a confidence
                interval of level 1 - GAMMA, plus GAMMA (Berger & Boos 1994, JASA 89, 1012)

The probability is not taken at points of the nuisance but bounded over cells of it: fewer worse and more better rows
only lower the statistic, so a cell's highest probability is at most that of its least p(worse) with its highest
p(better). The test is valid for every n. It needs fewer rows than the bounds that hold for any bounded loss: for a rule
with p(worse) = p(better) = .02, max_loss .01 and four hold-outs in five, 3,000; a betting test (Waudby-Smith & Ramdas
2024) 6,000, an empirical Bernstein bound (Maurer & Pontil 2009) 8,000 (results/guarantees.md).
"""

import math
from bisect import bisect_left
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

GAMMA = 0.001  # probability that the interval of the nuisance misses it

STEP = 0.05  # width of a cell of the nuisance, in standard errors of the summed loss

SLACK = 1e-9  # for what windows and rounding omit

POWER = 0.8  # for this share of hold-outs `rows_needed` are enough

FEW = 200  # rows that differ, below which the normal approximation is checked


def fixed_sequence(p_values: np.ndarray, level: float) -> int:
    """How many hypotheses are rejected, one after the other up to the first whose p-value is above the level.

    With probability 1 - level all of them are rejected rightly (Angelopoulos et al. 2021, Learn then Test): a wrong
    rejection requires that of the first true hypothesis, which is a single test. So the order must not depend on the
    rows tested.
    """
    passes = np.asarray(p_values) <= level
    return len(passes) if passes.all() else int(passes.argmin())


# ---- Binomial counts ----
def log_factorials(most: int) -> np.ndarray:
    """ln 0!, ln 1!, ... ln most!"""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))


def binomial_pmf(count: np.ndarray, trials: np.ndarray | int, p: float, log_factorial: np.ndarray) -> np.ndarray:
    """P(X = count) = trials! / (count! (trials - count)!) p^count (1 - p)^(trials - count), X ~ Binomial(trials, p).

    0 for a count above the trials. log_factorial: as `log_factorials` gives it, for every number up to these.
    """
    if p in (0, 1):
        return np.where(count == trials * p, 1.0, 0.0) + np.zeros(np.shape(trials))
    others = np.maximum(trials - count, 0)
    log_ways = log_factorial[trials] - log_factorial[count] - log_factorial[others]
    return np.where(count <= trials, np.exp(log_ways + count * math.log(p) + others * math.log1p(-p)), 0)


def binomial_cdf(count: np.ndarray | int, trials: int, p: float, log_factorial: np.ndarray | None = None) -> np.ndarray:
    """P(X <= count) of X ~ Binomial(trials, p), to SLACK."""
    window = _window(p, trials)
    known = log_factorials(trials) if log_factorial is None else log_factorial
    sums = np.concatenate(([0.0], np.cumsum(binomial_pmf(window, trials, p, known))))
    return np.minimum(sums[np.clip(count - window[0] + 1, 0, len(window))], 1)


def _window(p: float, trials: int) -> np.ndarray:
    """The counts that Binomial(trials, p) takes but for a chance far below SLACK: 8 standard deviations and more."""
    spread = 8 * math.sqrt(trials * p * (1 - p) + 4) + 8
    return np.arange(max(0, math.floor(trials * p - spread)), min(trials, math.ceil(trials * p + spread)) + 1)


def binomial_tails(successes: np.ndarray, p: float) -> np.ndarray:
    """P(X_n >= x_n) of X_n ~ Binomial(n, p), for n = 1..N: (N,). x_n: successes among the first n, of (N,) bool.

    Each follows from the one before, so that all take O(N): one trial more, with X and x those before it,
        a failure   P(X' >= x)     = P(X >= x) + p P(X = x - 1)
        a success   P(X' >= x + 1) = P(X >= x) - (1 - p) P(X = x)
    """
    n, x = np.arange(len(successes)), np.cumsum(successes) - successes  # before the trial
    log_factorial = log_factorials(len(successes))
    rises = p * binomial_pmf(np.maximum(x - 1, 0), n, p, log_factorial) * (x > 0)
    falls = (1 - p) * binomial_pmf(x, n, p, log_factorial)
    return np.clip(1 + np.cumsum(np.where(successes, -falls, rises)), 0, 1)


def share_interval(successes: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of a share that contains the true one with this probability at least (Clopper & Pearson 1934).

    Its ends are the shares under which so few, or so many, successes have probability (1 - level) / 2.

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
    """How likely `count` independent numbers in [0, 1] average `mean` or less if their expectation is at least `limit`.

    At most exp(-count KL(mean, limit)), KL(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)) (Hoeffding 1963,
    Theorem 1; of binomial counts Chernoff 1952). 1 if the mean is not below the limit, which is in (0, 1).
    """
    below = np.minimum(mean, limit)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = np.where(below > 0, below * np.log(below / limit), 0.0)  # 0 ln 0 is 0
    return np.exp(-count * (divergence + (1 - below) * np.log((1 - below) / (1 - limit))))


def agreement_p_values(agrees: np.ndarray, groups: np.ndarray, epsilon: float) -> np.ndarray:
    """For the first n rows, n = 1..N: how likely so many agree if a share below epsilon does. (N,), at most 1.

    agrees (N,) bool, in an order that does not depend on it; groups (N,): what was drawn independently, a text with all
    its tokens or a single row. Single rows are binomial. Texts are worth as many independent rows as their spread says.
    """
    if len(np.unique(groups)) == len(groups):
        return binomial_tails(agrees, epsilon)
    return _totals(agrees, groups).p_values(epsilon)


class _Totals(NamedTuple):
    """Sums over the texts i among the first rows, n_i rows of which x_i agree; each an array over numbers of rows."""

    rows: np.ndarray  # sum n_i
    agreeing: np.ndarray  # sum x_i
    nn: np.ndarray  # sum n_i^2
    nx: np.ndarray
    xx: np.ndarray
    longest: np.ndarray  # max n_i

    def p_values(self, epsilon: float) -> np.ndarray:
        """`chernoff` for m independent rows of which a share p agrees (Korn & Graubard 1998).

        p = sum x_i / sum n_i; m = p (1 - p) (sum n_i)^2 / sum (x_i - p n_i)^2, the rows of a plain sample in which p is
        as uncertain as it is here; both with one more text that is wrong throughout, x = 0 and n = longest.
        """
        rows = self.rows + self.longest
        p = self.agreeing / rows
        # sum (x_i - p n_i)^2, multiplied out, and (0 - p longest)^2 of the text that is wrong throughout.
        spread = self.xx - 2 * p * self.nx + p**2 * (self.nn + self.longest**2)
        worth = np.minimum(p * (1 - p) * rows**2 / np.maximum(spread, 1e-12), rows)
        return chernoff(1 - p, 1 - epsilon, worth)


def _totals(agrees: np.ndarray, groups: np.ndarray) -> _Totals:
    """Of the first 1, 2, .. N rows."""
    order = np.argsort(groups, kind="stable")
    _, begins, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    # Sorted by text, the rows of a text stand next to each other, in their order: a running count minus its value where
    # the text begins counts within the text.
    before = np.concatenate(([0], np.cumsum(agrees[order])))
    n, x = np.empty((2, len(order)), np.int64)  # of the row's own text, up to the row: its n_i and x_i so far
    n[order] = np.arange(len(order)) - np.repeat(begins, sizes) + 1
    x[order] = before[1:] - np.repeat(before[begins], sizes)
    # By how much the row makes its text's n_i^2, n_i x_i and x_i^2 grow: n^2 - (n - 1)^2 = 2 n - 1, and so on.
    grown = 2 * n - 1, x + (n - 1) * agrees, (2 * x - 1) * agrees
    return _Totals(
        np.arange(len(order)) + 1, np.cumsum(agrees), *(np.cumsum(each) for each in grown), np.maximum.accumulate(n)
    )


def groups_needed(sizes: np.ndarray, epsilon: float, delta: float) -> int:
    """How many groups of such sizes would pass `agreement_p_values` at level delta if all their rows agreed."""
    if sizes.max() == 1:
        return math.ceil(math.log(delta) / math.log(epsilon))

    def passes(texts: int) -> bool:
        total, squares = texts * sizes.mean(), texts * (sizes**2).mean()
        return bool(_Totals(total, total, squares, squares, squares, sizes.max()).p_values(epsilon) <= delta)

    most = len(sizes)
    while not passes(most):
        most *= 2
    return bisect_left(range(most), True, key=lambda texts: passes(texts + 1)) + 1


# ---- Paired losses ----
def paired_p_values(losses: np.ndarray, max_loss: float) -> np.ndarray:
    """For rules with losses (R, N) in {-1, 0, 1}: (R,), how likely so little loss is if its mean is above max_loss.

    Raises ValueError for other losses, and for a max_loss outside (0, 1).
    """
    losses = np.asarray(losses)
    if losses.ndim != 2 or not np.isin(losses, (-1, 0, 1)).all():
        raise ValueError(f"expected losses (R, N) of -1, 0 and 1, found shape {losses.shape}; round them first")
    return p_values_of_counts((losses == 1).sum(axis=1), (losses == -1).sum(axis=1), losses.shape[1], max_loss)


def p_values_of_counts(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float) -> np.ndarray:
    """The same from the numbers of worse and better rows, (R,) each, among so many. 1 where the loss is not below."""
    if not 0 < max_loss < 1:
        raise ValueError(f"max_loss must be above 0 and below 1 for a guarantee, got {max_loss}")
    p_values = np.ones(len(worse))
    hopeful = worse - better < rows * max_loss
    if hopeful.any():
        counts, back = np.unique(np.stack((worse, better))[:, hopeful], axis=1, return_inverse=True)
        p_values[hopeful] = _worst_case(*counts, rows, max_loss)[back.ravel()]
    return p_values


def rows_needed(differing: float, max_loss: float, confidence: float) -> int:
    """How many rows would be enough to guarantee a rule that loses nothing on average, for POWER of all hold-outs.

    differing: the share of rows where the rule is worse or better than the last exit, above 0. By the normal
    approximation, differing ((z_POWER + z_confidence) / max_loss)^2; where few rows differ, so many that the exact test
    passes in the worst of these hold-outs.
    """
    z_power, z_confidence = NormalDist().inv_cdf(POWER), NormalDist().inv_cdf(confidence)
    fewest = math.log(1 - confidence) / math.log1p(-max_loss)  # if no row differed: (1 - max_loss)^n = 1 - confidence
    rows = math.ceil(max(fewest, 1.05 * differing * ((z_power + z_confidence) / max_loss) ** 2))
    while rows * differing < FEW:
        both, more = rows * differing, z_power * math.sqrt(rows * differing)
        worse, better = math.ceil((both + more) / 2), max(0, math.floor((both - more) / 2))
        if p_values_of_counts(np.array([worse]), np.array([better]), rows, max_loss)[0] <= 1 - confidence:
            break
        rows = math.ceil(1.03 * rows)
    return rows


def _worst_case(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float) -> np.ndarray:
    """p-values of counts (R,): for every cell of the nuisance the bound, for every rule the highest that matters."""
    log_factorial = log_factorials(rows)
    ends = _cells(int(better.max()), rows, max_loss)
    most_worse = max(int(worse.max()), _window(ends[-1] + max_loss, rows)[-1])
    most_better = max(int(better.max()), _window(ends[-1], rows)[-1])
    score = _score(np.arange(most_worse + 1), np.arange(most_better + 1)[:, None], rows, max_loss)
    # It rises with worse rows and falls with better ones, which the bound rests on: this holds with rounding too.
    score = np.minimum.accumulate(score[:, ::-1], axis=1)[:, ::-1]
    score = np.minimum.accumulate(score, axis=0)
    # as_low[r, b]: for b better rows the statistic is as low as that of rule r with 0, 1, .., as_low - 1 worse rows. It
    # rises with worse rows, so a count replaces the list of them.
    as_low = np.stack([(score <= score[b, w] + 1e-12).sum(axis=1) for w, b in zip(worse, better)])
    highest = np.zeros(len(worse))
    for low, high in zip(ends, ends[1:]):  # a cell: p(better) from low to high, and p(worse) = p(better) + max_loss
        betters, chance = _window(high, rows), binomial_cdf(better, rows, low, log_factorial)
        of_better = binomial_pmf(betters, rows, high, log_factorial)
        # The cells that the counts of better rows leave in the interval of level 1 - GAMMA (Clopper & Pearson).
        plausible = (chance >= GAMMA / 2) & (1 - binomial_cdf(better - 1, rows, high, log_factorial) >= GAMMA / 2)
        if not plausible.any():
            continue
        # Given b better rows, the worse ones are Binomial(rows - b, p(worse) / (1 - p(better))).
        worses = _window(low + max_loss, rows)
        others = (rows - betters)[:, None]
        of_worse = binomial_pmf(worses, others, min((low + max_loss) / (1 - high), 1), log_factorial)
        of_worse = np.concatenate((np.zeros((len(betters), 1)), np.cumsum(of_worse, axis=1)), axis=1)
        # of_worse[i, j] = P(fewer than worses[0] + j worse rows | betters[i]); as_low gives j, less worses[0].
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
    """Ends of cells of p(better), from 0 to beyond what so many better rows leave plausible."""
    top = min((math.sqrt(better + 1) + 2) ** 2 / rows, (1 - max_loss) / 2)
    count = math.ceil(math.sqrt(2 * rows * top) / STEP)
    return top * np.linspace(0, 1, count + 1) ** 2  # as wide as the standard error, which grows with sqrt(p)
