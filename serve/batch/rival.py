"""A linear classifier on hashed n-grams, as fastText's (Joulin et al. 2016, arXiv 1607.01759) without its hidden layer.

It learns from the job's own answers on a sample, so that its time and its agreement can be compared with the model's.
If it agrees often enough, no transformer is needed. numpy only.
"""

import random
import re
from time import process_time
from zlib import crc32

import numpy as np

BUCKETS = 1 << 18
EPOCHS, RATE, BATCH = 10, 1.0, 32
TEST_SHARE = 0.2
LEAST = 50  # texts to learn from and to test on
REPEATS = 3  # of the measurement of time

_WORD = re.compile(r"\w+|[^\w\s]")
_NEXT = np.uint64(116049371)  # fastText's factor in the hash of two words


class NgramClassifier:
    """Softmax regression on the mean of the weights of a text's words and pairs of words. Adagrad; seeded."""

    def __init__(self, labels: list[str]):
        self.labels = sorted(set(labels))
        self._weights = np.zeros((BUCKETS, len(self.labels)), np.float32)

    def fit(self, texts: list[str], labels: list[str], seed: int = 0) -> "NgramClassifier":
        """Learn from texts and their labels."""
        target = np.array([self.labels.index(label) for label in labels])
        features = [ngrams([text])[0] for text in texts]
        squares, order = np.full_like(self._weights, 1e-6), np.random.default_rng(seed)
        for _ in range(EPOCHS):
            shuffled = order.permutation(len(texts))
            for begin in range(0, len(texts), BATCH):
                rows = shuffled[begin : begin + BATCH]
                sizes = np.array([len(features[row]) for row in rows])
                found = np.concatenate([features[row] for row in rows])
                starts = np.concatenate([[0], sizes.cumsum()[:-1]])
                error = _softmax(self._logits(found, starts, sizes))
                error[np.arange(len(rows)), target[rows]] -= 1
                used, at = np.unique(found, return_inverse=True)
                gradient = np.zeros((len(used), len(self.labels)), np.float32)
                np.add.at(gradient, at, np.repeat(error / sizes[:, None], sizes, axis=0))
                squares[used] += gradient**2
                self._weights[used] -= RATE * gradient / np.sqrt(squares[used])
        return self

    def predict(self, texts: list[str]) -> list[str]:
        """The label of each text."""
        found, sizes = ngrams(texts)
        starts = np.concatenate([[0], sizes.cumsum()[:-1]])
        return [self.labels[best] for best in self._logits(found, starts, sizes).argmax(axis=1)]

    def _logits(self, found: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.add.reduceat(self._weights[found], starts) / sizes[:, None]


def ngrams(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Buckets of the words and pairs of neighbours of all texts, one text after the other; the number of each text."""
    words, counts = [], []
    for text in texts:
        own = _WORD.findall(text.lower()) or [""]
        words += own
        counts.append(len(own))
    hashes = np.fromiter((crc32(word.encode("utf-8", "replace")) for word in words), np.uint64, len(words))
    sizes = np.array(counts)
    before = np.concatenate([[np.uint64(0)], hashes[:-1]])
    before[np.concatenate([[0], sizes.cumsum()[:-1]])] = 0  # the first word of a text follows its beginning
    pairs = before * _NEXT + hashes
    return (np.stack([hashes, pairs], axis=1).ravel() % np.uint64(BUCKETS)).astype(np.int64), 2 * sizes


def measure_rival(sample: list[tuple[tuple[str, ...], str]]) -> dict | None:
    """Train on the answers of a sample: seconds of CPU per row to predict, and agreement on texts that were held out.

    None if the sample is too small or has one label.
    """
    distinct = list({texts: label for texts, label in sample}.items())  # no text is learned and tested
    random.Random(0).shuffle(distinct)
    size = int(len(distinct) * TEST_SHARE)
    test, train = distinct[:size], distinct[size:]
    if size < LEAST or len({label for _, label in train}) < 2:
        return None
    texts = {"train": [" ".join(each) for each, _ in train], "test": [" ".join(each) for each, _ in test]}
    model = NgramClassifier([label for _, label in train]).fit(texts["train"], [label for _, label in train])
    begin = process_time()
    for _ in range(REPEATS):
        predicted = model.predict(texts["test"])
    seconds = (process_time() - begin) / (REPEATS * size)
    agreement = sum(found == label for found, (_, label) in zip(predicted, test)) / size
    return {"agreement": agreement, "test_rows": size, "train_rows": len(train), "seconds_per_row": seconds}


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
