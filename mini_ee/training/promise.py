"""The test behind the default rule's promise: does a rule lose at most `max_loss` against the last exit on fresh rows?

A row's loss is paired: right(last exit) - right(rule), so 1, 0 or -1. The worse rows (1) and the better rows (-1) of n
independent rows are trinomial; the promise is about p(worse) - p(better), whatever p(better), the nuisance, is.

    statistic   the score of Tango 1998 (Statistics in Medicine 17, 891): the mean loss below max_loss, in standard
                errors under the most likely nuisance for which the loss is max_loss
    p-value     the largest exact probability of a statistic so low or lower, over the nuisances that 1 - GAMMA of
                certainty leaves, plus GAMMA (Berger & Boos 1994, JASA 89, 1012)

The probability is not taken at points of the nuisance but bounded over cells of it: fewer worse and more better rows
only lower the statistic, so a cell's highest probability is at most that of its least p(worse) with its highest
p(better). The test is valid for every n. It needs fewer rows than the bounds that hold for any bounded loss: for a rule
with p(worse) = p(better) = .02, max_loss .01 and four hold-outs in five, 3,000; a betting test (Waudby-Smith & Ramdas
2024) 6,000, an empirical Bernstein bound (Maurer & Pontil 2009) 8,000 (results/promises.md).
"""

import math
from statistics import NormalDist

import numpy as np

GAMMA = 0.001  # certainty that is spent on the nuisance

STEP = 0.05  # width of a cell of the nuisance, in standard errors of the summed loss

SLACK = 1e-9  # for what windows and rounding leave out

POWER = 0.8  # for this share of hold-outs `rows_needed` are enough

FEW = 200  # rows that differ, below which the normal approximation is checked


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
        raise ValueError(f"max_loss must be above 0 and below 1 for a promise, got {max_loss}")
    p_values = np.ones(len(worse))
    hopeful = worse - better < rows * max_loss
    if hopeful.any():
        counts, back = np.unique(np.stack((worse, better))[:, hopeful], axis=1, return_inverse=True)
        p_values[hopeful] = _worst_case(*counts, rows, max_loss)[back.ravel()]
    return p_values


def rows_needed(differing: float, max_loss: float, confidence: float) -> int:
    """How many rows would do to promise a rule that loses nothing on average, for POWER of all hold-outs.

    differing: the share of rows where the rule is worse or better than the last exit, above 0. By the normal
    approximation; where few rows differ, so many that the exact test passes in the worst of these hold-outs.
    """
    unlucky, sure = NormalDist().inv_cdf(POWER), NormalDist().inv_cdf(confidence)
    fewest = math.log(1 - confidence) / math.log1p(-max_loss)  # if no row differed
    rows = math.ceil(max(fewest, 1.05 * differing * ((unlucky + sure) / max_loss) ** 2))
    while rows * differing < FEW:
        both, more = rows * differing, unlucky * math.sqrt(rows * differing)
        worse, better = math.ceil((both + more) / 2), max(0, math.floor((both - more) / 2))
        if p_values_of_counts(np.array([worse]), np.array([better]), rows, max_loss)[0] <= 1 - confidence:
            break
        rows = math.ceil(1.03 * rows)
    return rows


# ---- The exact test ----
def _worst_case(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float) -> np.ndarray:
    """p-values of counts (R,): for every cell of the nuisance the bound, for every rule the highest that matters."""
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, rows + 1)))))
    ends = _cells(int(better.max()), rows, max_loss)
    most_worse = max(int(worse.max()), _window(ends[-1] + max_loss, rows)[-1])
    most_better = max(int(better.max()), _window(ends[-1], rows)[-1])
    score = _score(np.arange(most_worse + 1), np.arange(most_better + 1)[:, None], rows, max_loss)
    # It rises with worse rows and falls with better ones, which the bound rests on: this holds with rounding too.
    score = np.minimum.accumulate(score[:, ::-1], axis=1)[:, ::-1]
    score = np.minimum.accumulate(score, axis=0)
    # (R, better rows): for how many numbers of worse rows, from 0 on, the statistic is so low.
    as_low = np.stack([(score <= score[b, w] + 1e-12).sum(axis=1) for w, b in zip(worse, better)])
    highest = np.zeros(len(worse))
    for low, high in zip(ends, ends[1:]):
        betters, chance = _window(high, rows), _cumulative(low, rows, log_factorial, better)
        of_better = _binomial(betters, rows, high, log_factorial)
        plausible = (chance >= GAMMA / 2) & (1 - _cumulative(high, rows, log_factorial, better - 1) >= GAMMA / 2)
        if not plausible.any():
            continue
        worses = _window(low + max_loss, rows)
        left = (rows - betters)[:, None]
        of_worse = _binomial(worses, left, min((low + max_loss) / (1 - high), 1), log_factorial)
        of_worse = np.concatenate((np.zeros((len(betters), 1)), np.cumsum(of_worse, axis=1)), axis=1)
        count = np.clip(as_low[np.ix_(plausible, betters)] - worses[0], 0, len(worses))
        bound = of_worse[np.arange(len(betters)), count] @ of_better
        highest[plausible] = np.maximum(highest[plausible], bound)
    return np.minimum(highest + GAMMA + SLACK, 1)


def _score(worse: np.ndarray, better: np.ndarray, rows: int, max_loss: float) -> np.ndarray:
    """Tango's statistic; its nuisance solves 2 n x^2 - b x - better max_loss (1 - max_loss) = 0."""
    b = worse * (1 + max_loss) + better * (1 - max_loss) - 2 * rows * max_loss
    nuisance = (b + np.sqrt(b**2 + 8 * rows * better * max_loss * (1 - max_loss))) / (4 * rows)
    return (worse - better - rows * max_loss) / np.sqrt(rows * (2 * nuisance + max_loss - max_loss**2))


def _cells(better: int, rows: int, max_loss: float) -> np.ndarray:
    """Ends of cells of p(better), from 0 to beyond what so many better rows leave plausible."""
    top = min((math.sqrt(better + 1) + 2) ** 2 / rows, (1 - max_loss) / 2)
    count = math.ceil(math.sqrt(2 * rows * top) / STEP)
    return top * np.linspace(0, 1, count + 1) ** 2


def _window(p: float, rows: int) -> np.ndarray:
    """The counts that Binomial(rows, p) takes but for a chance far below SLACK."""
    spread = 8 * math.sqrt(rows * p * (1 - p) + 4) + 8
    return np.arange(max(0, math.floor(rows * p - spread)), min(rows, math.ceil(rows * p + spread)) + 1)


def _binomial(count: np.ndarray, rows: np.ndarray | int, p: float, log_factorial: np.ndarray) -> np.ndarray:
    """P(Binomial(rows, p) = count); 0 beyond the rows."""
    if p in (0, 1):
        return np.where(count == rows * p, 1.0, 0.0) + np.zeros(np.shape(rows))
    others = np.maximum(rows - count, 0)
    log_ways = log_factorial[rows] - log_factorial[count] - log_factorial[others]
    return np.where(count <= rows, np.exp(log_ways + count * math.log(p) + others * math.log1p(-p)), 0)


def _cumulative(p: float, rows: int, log_factorial: np.ndarray, count: np.ndarray) -> np.ndarray:
    """P(Binomial(rows, p) <= count)."""
    window = _window(p, rows)
    sums = np.concatenate(([0.0], np.cumsum(_binomial(window, rows, p, log_factorial))))
    return sums[np.clip(count - window[0] + 1, 0, len(window))]
