"""The rule similarity: a text exits if its embedding is close to that of the exit before. No import of torch.

CALM's confidence measure `saturation` compares a decoder's states at two exits. This rule compares the embeddings that
the maps of embedding_maps.py return at two exits. results/embeddings.md compares it with a fixed depth.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_ee.lab.data.settings import option
from mini_ee.lab.rule_inputs import INPUTS
from mini_ee.lab.rules import RULES, Rule
from mini_ee.lab.sweep import KNOBS, Knob

LEAST_LENGTH = np.float32(1e-12)  # of an embedding that is divided by its length


@dataclass(frozen=True)
class Similarity(Rule):
    """Exit if the cosine of the embedding and that of the exit before is at least `least_cosine`. inf means never.

    Raises ValueError for a value that is no cosine. At the first exit no text stops.
    """

    least_cosine: float | tuple[float, ...] = option(
        help="least cosine of the embeddings of two exits, for the rule similarity"
    )
    name = "similarity"
    needs_embeddings = True

    def __post_init__(self):
        value = self.least_cosine
        value = tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
        object.__setattr__(self, "least_cosine", value)
        for number in np.atleast_1d(value):
            if not (-1 <= number <= 1 or np.isinf(number)):
                raise ValueError(f"least_cosine must be from -1 to 1, or inf, got {number}")

    def check(self, num_exits: int) -> None:
        if isinstance(self.least_cosine, tuple) and len(self.least_cosine) != num_exits:
            raise ValueError(f"expected one cosine or {num_exits}, one per exit, got {len(self.least_cosine)}")

    def stop(self, k: int, read: np.ndarray, memory: dict[str, np.ndarray]) -> np.ndarray:
        least = self.least_cosine[k] if isinstance(self.least_cosine, tuple) else self.least_cosine
        length = np.sqrt((read * read).sum(axis=1, keepdims=True))
        scaled = read / np.maximum(length, LEAST_LENGTH)
        # Before the first exit there is no embedding: the cosine is then -inf.
        cosine = (scaled * memory["scaled"]).sum(axis=1) if "scaled" in memory else scaled[:, 0] - np.float32(np.inf)
        memory["scaled"] = scaled
        return cosine >= least

    def flops(self, classes: int) -> float:
        return 4.0 * classes  # squares, a division, products, their sum


def cosines(rule: Similarity, recorded: Any) -> np.ndarray:
    """(N, K - 1): the cosine at every exit but the last; at the first exit -1."""
    scaled = recorded.logits / np.linalg.norm(recorded.logits, axis=2, keepdims=True)
    cosines = (scaled[:, 1:-1] * scaled[:, :-2]).sum(axis=2)
    return np.concatenate((np.full((len(cosines), 1), -1.0), cosines), axis=1)


RULES[Similarity.name] = Similarity
KNOBS[Similarity] = Knob("least_cosine", cosines, limits=lambda rule: (-1.0, 1.0))
INPUTS[Similarity] = {"threshold": ("least_cosine", "least_cosine")}
