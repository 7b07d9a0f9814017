"""Records of a leaderboard that nobody trained: exits are right with known probabilities, and confident if right."""

import numpy as np

from mini_ee.experiments.records import SeedRecord, write_record
from mini_ee.lab.recording import Record, Recorded

EXITS = (1, 2, 3, 4, 5, 6)


def drawn_record(chances, rows, random, easy=None, classes=2, exits=EXITS, labels=None, again=False):
    """Exit k of each row is right with the probability chances[k]; the same uniform number counts at all exits, so that
    a row is easy or hard. A right exit has a larger gap between its logits. again: every exit starts again from the
    embeddings, so more layers run than the exit layer says.
    """
    labels = random.integers(0, classes, rows) if labels is None else labels
    hard = random.random(rows) if easy is None else easy
    noise = random.normal(size=(rows, len(exits)))
    right = np.clip(hard[:, None] + 0.05 * noise, 0, 1) < np.array(chances)
    gap = np.abs(random.normal(1, 0.5, right.shape)) + np.where(right, 2.0, 0.1)
    predicted = np.where(right, labels[:, None], (labels[:, None] + 1) % classes)
    logits = np.where(np.arange(classes) == predicted[..., None], gap[..., None], 0)
    flops = np.stack((np.full(right.shape, 1000.0), np.full(right.shape, 10.0)), axis=2)
    measures = {"exit_logit": (gap[:, :-1] - 2).astype(np.float32)}
    passes = list(exits) if again else [1] * len(exits)
    segments = Recorded(tuple(exits), logits.astype(np.float16).astype(np.float32), flops, passes, measures)
    return Record(segments, segments.logits, 1000.0 * len(exits) + 10, labels=labels)


def write_leaderboard(folder, tasks, methods, seeds, rows=300, held_out=200):
    """A file for each method and task. methods: name -> what is added to the probabilities."""
    for number, task in enumerate(tasks):
        labels = np.random.default_rng(number).integers(0, 2, rows)
        easy = np.random.default_rng(number + 50).random(rows)
        exits = tuple(range(1, 13)) if task == "reviews" else EXITS
        for place, (method, more) in enumerate(methods.items()):
            for seed in range(seeds):
                random = np.random.default_rng((number, place, seed))
                held_random = np.random.default_rng((number, seed))  # the same held-out labels for all methods
                chances = np.linspace(0.6, 0.9, len(exits)) + more + random.normal(0, 0.01)
                training = {"seconds": 10.0 + place, "parameters": 100}
                metadata = {
                    "half": {"speedup": 1.9},
                    "training": training,
                    "megabytes_added": 0.5,
                    "trained_as": next(iter(methods)),
                    "made": {"processor": "a"},
                }
                made = SeedRecord(
                    drawn_record(chances, rows, random, easy, labels=labels, exits=exits),
                    drawn_record(chances, held_out, random, labels=held_random.integers(0, 2, held_out), exits=exits),
                    metadata,
                )
                write_record(folder / task / f"{method}.npz", seed, made)
