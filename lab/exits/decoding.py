"""Decoding with early exits and a key/value cache, on any engine: the loop over tokens, and the keys and values that
early exits leave missing.

generation.py is the engine in torch, lab/export/token_segments.py the one in ONNX Runtime. No torch here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.data.values import is_whole
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.rules import Rule
from mini_ee.lab.segments import Segments, check_finite

MISSING_KV = ("copy_state", "recompute")


class Step(NamedTuple):
    """The next token of some rows."""

    rows: list[int]  # index of the prompt
    tokens: list[int]
    layers_run: list[int]  # depth of the exit whose head predicted the token, 1..L


class Generated(NamedTuple):
    """The continuation of one row, without its prompt. If there is a stop token, it is the last."""

    tokens: list[int]
    layers_run: list[int]


def gather(steps: Iterator[Step], num_rows: int) -> list[Generated]:
    """The continuation of every row, from all steps."""
    texts = [Generated([], []) for _ in range(num_rows)]
    for step in steps:
        for row, token, layers in zip(*step, strict=True):
            texts[row].tokens.append(token)
            texts[row].layers_run.append(layers)
    return texts


Choose = Callable[[np.ndarray, list[int]], list[int]]
"""(logits (B, V), index of the prompt of each) -> the next token of each."""


def greedy(logits: np.ndarray, rows: list[int]) -> list[int]:
    """The most likely tokens. Raises ValueError if a logit is not finite."""
    return check_finite(logits).argmax(-1).tolist()


def decode(
    segments: "DecoderSegments",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rule: Rule,
    choose: Choose = greedy,
    stop: Sequence[int] = (),
) -> Iterator[Step]:
    """Continue prompts, one token per step, until every row has max_new_tokens or a token of `stop`.

    Each step is one run of `early_exit`. If there are early exits, all tokens of the prompts except the last run
    through all layers first. Segments serve one call: their caches contain these texts.
    """
    inputs = segments.begin(prompts)
    if len(segments.exits) > 1:
        inputs = segments.prefill(inputs)
    for _ in range(max_new_tokens):
        rows, result = inputs.rows, early_exit(segments, rule, inputs)
        tokens = choose(result.logits, rows)
        yield Step(rows, tokens, result.layers_run.tolist())
        running = [i for i, token in enumerate(tokens) if token not in stop]
        if not running:
            return
        positions = [[inputs.positions[i][-1] + 1] for i in running]
        inputs = Tokens([[tokens[i]] for i in running], [rows[i] for i in running], positions)


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, max_tokens: int) -> int:
    """Number of tokens of the longest row with its continuation.

    Raises ValueError if a model of these sizes cannot read the prompts, WrongArguments if max_tokens is too few.
    """
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}")
    check_ids(prompts, vocab_size)
    longest = max(map(len, prompts))
    if longest + max_new_tokens > max_tokens:
        raise WrongArguments(
            f"expected at most {max_tokens} tokens, prompt and continuation together, got {longest} and "
            f"{max_new_tokens}: shorten the prompt or ask for fewer tokens"
        )
    return longest + max_new_tokens


def check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError if a prompt is empty or contains a token that is not in the vocabulary."""
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ValueError("expected prompts of at least one token each, got an empty one: begin with the bos token")
    unknown = next((token for prompt in prompts for token in prompt if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {unknown}: is this the model's tokenizer?")


@dataclass(frozen=True)
class Tokens:
    """The inputs of one step: the newest token of each running row; in the first step its prompt."""

    ids: list[list[int]]  # (B, T)
    rows: list[int]  # (B,), index of the prompt
    positions: list[list[int]]  # (B, T), -1 for padding

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "Tokens":
        """Whole prompts, padded on the left."""
        padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
        ids = [[0] * count + list(prompt) for count, prompt in zip(padding, prompts)]
        positions = [[-1] * count + list(range(len(prompt))) for count, prompt in zip(padding, prompts)]
        return cls(ids, list(range(len(prompts))), positions)

    def __len__(self) -> int:
        return len(self.ids)


def aligned(positions: list[list[int]]) -> bool:
    """Whether all rows have the same consecutive positions without padding. Then slices can index the caches.

    >>> aligned([[4, 5], [4, 5]]), aligned([[4], [5]]), aligned([[4, 6]]), aligned([[-1, 0]])
    (True, False, False, False)
    """
    first = positions[0]
    return first[0] >= 0 and first[-1] - first[0] == len(first) - 1 and all(row == first for row in positions[1:])


class TokenState(NamedTuple):
    """The rows whose token has not exited. Arrays are those of the engine.

    `rows` are the numbers by which the caches are indexed: `keep` selects rows of this state and moves no cache.
    """

    hidden: Any  # (B, T, D)
    rows: list[int]
    positions: list[list[int]]
    block: Any  # the result of CachedSegments.block for these rows, once it was needed; None after `keep`
    before: Any  # (B, T, D), hidden at the exit before, at first the embeddings

    def keep(self, index: np.ndarray) -> "TokenState":
        index = index.tolist()
        rows, positions = [self.rows[i] for i in index], [self.positions[i] for i in index]
        return TokenState(self.hidden[index], rows, positions, None, self.before[index])


class Weights(NamedTuple):
    """Number of weights that a token is multiplied with."""

    layer: int  # in one layer
    attention: int  # width of all query heads: the products with each token that is attended to
    head: int


def short_flops(width: int, tokens: int) -> float:
    """FLOPs of a lens that reads so many tokens of its short list: a map (D, D), and their rows of the LM head."""
    return 2.0 * width * (width + tokens)


class DecoderSegments(Segments):
    """Segments of a decoder on any engine; here is the cost of a token. Inputs are Tokens."""

    weights: Weights
    own_layers = False  # whether each exit before the last has a layer of its own
    short_flops = 0.0  # of one short_list

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """The prompts as the inputs of the first step."""
        return Tokens.of(prompts)

    def prefill(self, prompts: Tokens) -> Tokens:
        """Run all tokens of the prompts except the last through all layers. Returns the last tokens."""
        ids, positions = ([row[:-1] for row in numbers] for numbers in (prompts.ids, prompts.positions))
        if ids[0]:
            self.run_through(ids, prompts.rows, positions)
        return Tokens([row[-1:] for row in prompts.ids], prompts.rows, [row[-1:] for row in prompts.positions])

    def run_through(self, ids: list[list[int]], rows: list[int], positions: list[list[int]]) -> None:
        """Fill the caches of all layers with these tokens."""
        raise NotImplementedError

    def forget(self, row: int) -> None:
        """Prepare a row for another prompt. The caches need no reset: each slot is written before it is read."""

    def wipe(self, row: int) -> None:
        """Set the caches of a row to 0, if the engine uses rows again: masks do not hide NaN, since 0 x NaN is NaN."""

    def flops(self, k: int, inputs: Tokens) -> tuple[np.ndarray, np.ndarray | float]:
        """FLOPs of the row's own tokens. Filling in keys and values of earlier tokens is not counted."""
        # A token at position p attends to p + 1 tokens; padding, at position -1, to none. Scores and the weighted sum
        # of values are two products with each of them.
        attended = np.asarray(inputs.positions) + 1  # (B, T)
        products = self.weights.layer * (attended > 0).sum(axis=1) + 2 * self.weights.attention * attended.sum(axis=1)
        own_layer = self.own_layers and k < len(self.exits) - 1
        head = 2.0 * (self.weights.head + products) if own_layer else 2.0 * self.weights.head
        return self.layer_passes(k) * 2.0 * products, head

    def state_flops(self, k: int, needs: str) -> float:
        return self.short_flops if needs == "short_list" else 0.0


class CachedSegments(DecoderSegments):
    """Segments with a key/value cache, which fill in the missing keys and values of tokens that exited early.

    A token that exits at exit k has no keys and values in the layers above. It is pending there until a later token of
    its row runs the next segment; then the keys and values of all pending tokens are computed in one block. What no
    later token needs is never computed.

    pending_positions[row][k]   positions of the tokens that have run to exit k and not further
    pending_states              (rows, capacity + 1, D): slot p has the state of the token at position p, at the exit at
                                which it is pending; the last slot takes padding, which has position -1

    An engine defines pending_states, weights and the methods from `array` to `run_all`.
    """

    pending_states: Any

    def __init__(self, exits: tuple[int, ...], missing_kv: str, num_rows: int, capacity: int):
        self.exits, self.missing_kv = exits, missing_kv
        self.num_rows, self.capacity = num_rows, capacity
        self.pending_positions: list[list[list[int]]] = [[[] for _ in exits[:-1]] for _ in range(num_rows)]

    def array(self, numbers: list) -> Any:
        """An array of the engine, from nested lists of whole numbers."""
        raise NotImplementedError

    def join(self, earlier: Any, hidden: Any) -> Any:
        """(B, S, D), (B, T, D) -> (B, S + T, D)."""
        raise NotImplementedError

    def embed(self, ids: Any, positions: list[list[int]]) -> Any:
        """The embeddings (B, T, D), or the ids if the first segment contains the embeddings."""
        raise NotImplementedError

    def block(self, rows: list[int], positions: list[list[int]]) -> Any:
        """The layers' context for tokens at these positions. It is not None."""
        raise NotImplementedError

    def run(self, k: int, hidden: Any, block: Any) -> Any:
        """The layers of segment k: (B, T, D) -> (B, T, D). Writes their caches."""
        raise NotImplementedError

    def copy_state(self, k: int, hidden: Any, block: Any) -> None:
        """Write the caches of the layers of segment k, with the same hidden states as the input of each layer."""
        raise NotImplementedError

    def run_all(self, hidden: Any, block: Any) -> None:
        """All layers. Writes their caches."""
        raise NotImplementedError

    def forget(self, row: int) -> None:
        self.pending_positions[row] = [[] for _ in self.exits[:-1]]

    def run_through(self, ids: list[list[int]], rows: list[int], positions: list[list[int]]) -> None:
        self.run_all(self.embed(self.array(ids), positions), self.block(rows, positions))

    def start(self, inputs: Tokens) -> TokenState:
        hidden = self.embed(self.array(inputs.ids), inputs.positions)
        return TokenState(hidden, inputs.rows, inputs.positions, None, hidden)

    def advance(self, k: int, state: TokenState) -> TokenState:
        hidden, rows, positions, block, _ = state
        block = block or self.block(rows, positions)
        # The last position at exit k - 1 is that of the current token, which advance(k - 1) has added.
        pending = [self.pending_positions[row][k - 1][:-1] if k else [] for row in rows]
        width = max(map(len, pending))
        if not width:
            hidden = self.run(k, hidden, block)
        else:
            padded = [[-1] * (width - len(earlier)) + earlier for earlier in pending]
            at = self._slots(rows, padded)
            if self.missing_kv == "copy_state":  # the pending state also stands for the state at exit k
                self.copy_state(k, self.pending_states[at], self.block(rows, padded))
                hidden = self.run(k, hidden, block)
            else:
                # Pending tokens and the current one run as one block, in which each attends to those before it. So the
                # result is exact, and pending_states gets the states at exit k. A row has one current token here.
                together = self.block(rows, [earlier + current for earlier, current in zip(padded, positions)])
                hidden = self.run(k, self.join(self.pending_states[at], hidden), together)
                self.pending_states[at], hidden = hidden[:, :-1], hidden[:, -1:]
        # Now all of them have run to exit k. Above the last exit there is nothing to fill in.
        for row in rows if k else ():
            self.pending_positions[row][k - 1] = []
        if k < len(self.exits) - 1:
            self.pending_states[self._slots(rows, positions)] = hidden
            for row, current, earlier in zip(rows, positions, pending):
                self.pending_positions[row][k] += earlier + current
        return TokenState(hidden, rows, positions, block, state.hidden)

    def _slots(self, rows: list[int], positions: list[list[int]]) -> tuple:
        """The index of these positions (B, T) in pending_states; padding has the last slot."""
        # Slices avoid a copy. Rows ascend, so as many rows as there are means all of them in order.
        if len(rows) == self.num_rows and aligned(positions):
            return slice(None), slice(positions[0][0], positions[0][-1] + 1)
        slots = [[self.capacity if position < 0 else position for position in row] for row in positions]
        return self.array(rows)[:, None], self.array(slots)  # (B, 1) and (B, T) are broadcast
