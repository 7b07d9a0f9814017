"""Decoding with exits and a key/value cache, on any engine: the loop over tokens, and what exits leave for later.

generation.py gives it torch, export/token_segments.py ONNX Runtime. No torch here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mini_ee.backbones.shapes import check_finite
from mini_ee.data.values import is_whole
from mini_ee.early_exit import early_exit
from mini_ee.errors import WrongArguments
from mini_ee.rules import Rule
from mini_ee.segments import Reading, Segments

MISSING_KV = ("copy_state", "recompute")


class Step(NamedTuple):
    """One more token for each of some rows."""

    rows: list[int]  # index of the prompt
    tokens: list[int]
    layers_run: list[int]  # depth of the exit whose head gave the token, 1..L


class Generated(NamedTuple):
    """One row's continuation, without its prompt; a stop token is its last."""

    tokens: list[int]
    layers_run: list[int]


def gather(steps: Iterator[Step], num_rows: int) -> list[Generated]:
    """Run the steps to their end: the continuation of every row."""
    texts = [Generated([], []) for _ in range(num_rows)]
    for step in steps:
        for row, token, layers in zip(*step, strict=True):
            texts[row].tokens.append(token)
            texts[row].layers_run.append(layers)
    return texts


Choose = Callable[[np.ndarray, list[int]], list[int]]
"""(logits (B, V), which prompts they belong to) -> the next token of each."""


def greedy(logits: np.ndarray, rows: list[int]) -> list[int]:
    """The likeliest tokens. Raises ValueError where a logit is not finite."""
    return check_finite(logits).argmax(-1).tolist()


def decode(
    segments: "DecoderSegments",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rule: Rule,
    choose: Choose = greedy,
    stop: Sequence[int] = (),
) -> Iterator[Step]:
    """Continue prompts, a step a token, until every row has max_new_tokens or a token of `stop`.

    Each step is one run of `early_exit`; where there are exits, the prompts but for their last tokens run through all
    layers before. The segments are used up: their caches hold these texts.
    """
    inputs = segments.begin(prompts)
    if len(segments.exits) > 1:
        inputs = segments.prefill(inputs)
    for _ in range(max_new_tokens):
        rows, result = inputs.rows, early_exit(segments, rule, inputs)
        tokens = choose(result.logits, rows)
        yield Step(rows, tokens, result.layers_run.tolist())
        on = [i for i, token in enumerate(tokens) if token not in stop]
        if not on:
            return
        inputs = Tokens([[tokens[i]] for i in on], [rows[i] for i in on], [[inputs.positions[i][-1] + 1] for i in on])


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, max_tokens: int) -> int:
    """How many tokens the longest row comes to.

    Raises ValueError if a model of these sizes cannot read the prompts, WrongArguments if it cannot write that much.
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
    """Raise ValueError for a prompt that is empty or not of this vocabulary."""
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ValueError("expected prompts of at least one token each, got an empty one: begin with the bos token")
    strange = next((token for prompt in prompts for token in prompt if not 0 <= token < vocab_size), None)
    if strange is not None:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {strange}: is this the model's tokenizer?")


@dataclass(frozen=True)
class Tokens:
    """The inputs of one step: the newest token of each row that goes on, at first with the prompt before it."""

    ids: list[list[int]]  # (B, T)
    rows: list[int]  # (B,), index of the prompt
    positions: list[list[int]]  # (B, T), -1 for padding

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "Tokens":
        """Whole prompts, padded on the left."""
        gaps = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
        ids = [[0] * gap + list(prompt) for gap, prompt in zip(gaps, prompts)]
        positions = [[-1] * gap + list(range(len(prompt))) for gap, prompt in zip(gaps, prompts)]
        return cls(ids, list(range(len(prompts))), positions)

    def __len__(self) -> int:
        return len(self.ids)


def aligned(positions: list[list[int]]) -> bool:
    """Whether all rows stand at the same places, one behind the other, none of them padding. Rows ascend.

    >>> aligned([[4, 5], [4, 5]]), aligned([[4], [5]]), aligned([[4, 6]]), aligned([[-1, 0]])
    (True, False, False, False)
    """
    first = positions[0]
    return first[0] >= 0 and first[-1] - first[0] == len(first) - 1 and all(some == first for some in positions[1:])


class TokenState(NamedTuple):
    """The rows whose token is still in the model. The caches are named by row, and stay where they are.

    Arrays are the engine's.
    """

    hidden: Any  # (B, T, D)
    rows: list[int]
    positions: list[list[int]]
    block: Any  # what CachedSegments.block made where it was first needed, or None
    before: Any  # (B, T, D), hidden at the exit before, at first the embeddings

    def keep(self, index: np.ndarray) -> "TokenState":
        index = index.tolist()
        rows, positions = [self.rows[i] for i in index], [self.positions[i] for i in index]
        return TokenState(self.hidden[index], rows, positions, None, self.before[index])


def vocabulary_reading(logits: np.ndarray, largest: np.ndarray) -> Reading:
    """What a head says: logits (B, V), and its two largest probabilities (B, 2), descending, from the engine.

    On a vocabulary the softmax is felt, and engines are quicker at it than numpy.
    """
    return Reading(logits, max_probability=largest[:, 0], breaking_ties=largest[:, 0] - largest[:, 1])


class Weights(NamedTuple):
    """How many weights a token is multiplied with."""

    layer: int  # in one layer
    attention: int  # numbers of all query heads, for each token that is read
    head: int


class DecoderSegments(Segments):
    """What all engines of a decoder have in common: what a token costs. Inputs are Tokens."""

    weights: Weights

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """The prompts as the inputs of the first step."""
        return Tokens.of(prompts)

    def prefill(self, prompts: Tokens) -> Tokens:
        """Run all tokens of the prompts but the last through all layers. Returns the last."""
        ids, positions = ([some[:-1] for some in numbers] for numbers in (prompts.ids, prompts.positions))
        if ids[0]:
            self.run_through(ids, prompts.rows, positions)
        return Tokens([ids[-1:] for ids in prompts.ids], prompts.rows, [some[-1:] for some in prompts.positions])

    def run_through(self, ids: list[list[int]], rows: list[int], positions: list[list[int]]) -> None:
        """Fill the caches of all layers with these tokens."""
        raise NotImplementedError

    def forget(self, row: int) -> None:
        """Another prompt takes the place of this one: what was filled is overwritten, and never read before it is."""

    def wipe(self, row: int) -> None:
        """What was filled for this row may be NaN, which no mask hides: 0 x NaN is NaN. For engines whose rows are used
        again.
        """

    def flops(self, k: int, inputs: Tokens) -> tuple[np.ndarray, float]:
        """The token's own way. What fills the gaps behind it is not counted: it belongs to tokens before."""
        reads = np.asarray(inputs.positions) + 1  # (B, T): tokens that attention reads, 0 for padding
        products = self.weights.layer * (reads > 0).sum(axis=1) + 2 * self.weights.attention * reads.sum(axis=1)
        return self.layer_passes(k) * 2.0 * products, 2.0 * self.weights.head


class CachedSegments(DecoderSegments):
    """The segments of one token's way through a decoder, with what earlier tokens left behind. Inputs are Tokens.

    waiting[row][k]: positions of the tokens that have run to exit k, and not above; their hidden states at exit k stand
    in `left`, (rows, capacity + 1, D), the last slot for padding. Above it their keys and values are yet to be filled.

    An engine brings its arrays, weights and caches:

    left, weights               see above
    array(numbers)              lists of whole numbers as its array
    join(earlier, hidden)       (B, S, D), (B, T, D) -> (B, S + T, D)
    embed(ids, positions)       hidden[0], or what the first segment takes for it
    block(rows, positions)      what run and copy_state need to know of where tokens stand, None being no block
    run(k, hidden, block)       the layers of segment k: (B, T, D) -> (B, T, D), filling their caches
    copy_state(k, hidden, block) hidden stands in for the input of all these layers; their caches alone are filled
    run_all(hidden, block)      all layers, filling their caches
    """

    def __init__(self, exits: tuple[int, ...], missing_kv: str, num_rows: int, capacity: int):
        self.exits, self.missing_kv = exits, missing_kv
        self.num_rows, self.capacity = num_rows, capacity
        self.pending_positions = [[[] for _ in exits[:-1]] for _ in range(num_rows)]

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
        behind = [self.pending_positions[row][k - 1][:-1] if k else [] for row in rows]  # without this token itself
        width = max(map(len, behind))
        if not width:
            hidden = self.run(k, hidden, block)
        else:
            padded = [[-1] * (width - len(some)) + some for some in behind]
            at = self._slots(rows, padded)
            if self.missing_kv == "copy_state":
                self.copy_state(k, self.pending_states[at], self.block(rows, padded))
                hidden = self.run(k, hidden, block)
            else:
                together = self.block(rows, [some + own for some, own in zip(padded, positions)])
                hidden = self.run(k, self.join(self.pending_states[at], hidden), together)
                self.pending_states[at], hidden = hidden[:, :-1], hidden[:, -1:]
        for row in rows if k else ():
            self.pending_positions[row][k - 1] = []
        if k < len(self.exits) - 1:
            self.pending_states[self._slots(rows, positions)] = hidden
            for row, own, some in zip(rows, positions, behind):
                self.pending_positions[row][k] += some + own
        return TokenState(hidden, rows, positions, block, state.hidden)

    def read(self, k: int, state: TokenState) -> Reading:
        """All that exit k says: its head, and before the last exit what rules that need the state alone are given."""
        reading = self.read_logits(k, state)
        if k == len(self.exits) - 1:
            return reading
        told = self.read_state(k, state)
        return reading._replace(exit_logit=told.exit_logit, saturation=told.saturation)

    def _slots(self, rows: list[int], positions: list[list[int]]) -> tuple:
        """Where in `left` the hidden states of these positions stand; padding in the last slot."""
        if len(rows) == self.num_rows and aligned(positions):
            return slice(None), slice(positions[0][0], positions[0][-1] + 1)
        slots = [[self.capacity if position < 0 else position for position in some] for some in positions]
        return self.array(rows)[:, None], self.array(slots)
