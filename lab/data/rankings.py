"""Rankings of texts for a query by a number, and whether the k best stay the best. No torch here.

A row is a pair (query, text). Rows with the same first text belong to one query.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mini_ee.lab.errors import WrongArguments

RANKED = np.dtype([("score", np.float32), ("query", np.int64)])
"""Labels of rows in a ranking: the number of the full model, and the number of the row's query."""


def queries_of(texts: Sequence[Sequence[str]]) -> np.ndarray:
    """(N,) the number of each row's query, in the order in which queries first appear."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(query, len(numbers)) for query, *_ in texts], np.int64)


def ranked(scores: np.ndarray, texts: Sequence[Sequence[str]]) -> np.ndarray:
    """(N,) RANKED labels of rows with these numbers (N,)."""
    labels = np.empty(len(scores), RANKED)
    labels["score"], labels["query"] = scores, queries_of(texts)
    return labels


def rankable(texts: Sequence[Sequence[str]], k: int, say: Callable[[str], None], least: int = 1) -> np.ndarray:
    """(N,) bool: the rows of queries with more than k texts, because the top k of others cannot change.

    Says how many are left out.

    Raises WrongArguments for rows of single texts, and for fewer than `least` such queries.
    """
    if len(texts[0]) != 2:
        raise WrongArguments("--top-k needs pairs of a query and a text, found single texts; give two columns")
    numbers = queries_of(texts)
    sizes = np.bincount(numbers)
    if (large := int((sizes > k).sum())) < least:
        actual = f"found {large} of {len(sizes)}; a query is the first text of a pair"
        raise WrongArguments(f"expected at least {least} queries with more than {k} texts, {actual}")
    if large < len(sizes):
        say(f"{len(sizes) - large:,} of {len(sizes):,} queries are left out: they have at most {k} texts.")
    return sizes[numbers] > k


def best_first(scores: np.ndarray) -> np.ndarray:
    """(N,) indices of the texts of one query, the largest number first; of equal ones the earlier text."""
    return np.argsort(-scores, kind="stable")


def top_k_kept(scores: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """For each query, whether its k best texts by `scores` are its k best by the labels: (..., N) -> (..., Q) bool.

    The order among the k does not count. labels: (N,) RANKED. Queries are in ascending order of their numbers.
    """
    _, query, sizes = np.unique(labels["query"], return_inverse=True, return_counts=True)
    starts = np.cumsum(sizes) - sizes
    first = np.arange(len(query)) - np.repeat(starts, sizes) < k  # of rows that are sorted by query and rank

    def is_top(numbers: np.ndarray) -> np.ndarray:
        top = np.empty(len(query), bool)
        top[np.lexsort((-numbers, query))] = first  # stable, as best_first
        return top

    flat, expected = scores.reshape(-1, len(query)), is_top(labels["score"])
    moved = np.array([np.bincount(query, is_top(query_scores) != expected, len(sizes)) for query_scores in flat])
    return (moved == 0).reshape(*scores.shape[:-1], len(sizes))
