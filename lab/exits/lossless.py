"""Lossless decoding: an exit drafts tokens, and the full model verifies them in one pass (self-speculative decoding).

The text is the full model's greedy text. It does not run `early_exit`: there is no rule. In each round
1. the layers up to an exit and its head draft some tokens, one at a time;
2. the layers above run in one block on the last accepted token and all drafts, and the LM head predicts the next token
   after each of them. The layers below are not run again: their cache is shared;
3. the drafts before the first wrong one are accepted, and then the full model's own token: 1 to drafts + 1 tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.exits.decoding import Step
from mini_ee.lab.exits.generation import Head, TokenSegments, capacity_for
from mini_ee.lab.segments import check_finite

CONFIDENCE_THRESHOLD = 0.6  # the fastest of 0, .6, .8, .9 after layer 4 of a half-trained built-in decoder
DRAFT = 4


def generate_lossless(
    decoder: GenerativeBackbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    exit_layer: int,
    head: Head,
    draft: int = DRAFT,
    confidence_threshold: float = CONFIDENCE_THRESHOLD,
    stop: Sequence[int] = (),
    segments_class: type[TokenSegments] = TokenSegments,
) -> Iterator[Step]:
    """The full model's greedy text, in fewer passes through its upper layers.

    Source: self-speculative decoding as in LayerSkip (Elhoushi et al. 2024): in each round the head after exit_layer
    drafts `draft` tokens. Drafting ends early if the head's largest probability, averaged over rows, is below
    confidence_threshold, as in transformers' assisted decoding; 0: never, as in the paper.

    After each round all its steps are yielded. layers_run is exit_layer for an accepted draft, and L for a token of the
    full model. Arguments and errors as in `generate`.
    """
    last = decoder.config.num_hidden_layers
    if not 1 <= exit_layer < last:
        raise ValueError(f"exit_layer must be from 1 to {last - 1}, below the last layer, got {exit_layer}")
    if draft < 1:
        raise ValueError(f"draft must be at least 1 token, got {draft}")
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must be a probability, got {confidence_threshold}")
    capacity = capacity_for(decoder, prompts, max_new_tokens)
    segments = segments_class(decoder, (exit_layer, last), (head,), "recompute", len(prompts), capacity)
    return draft_and_verify(segments, prompts, max_new_tokens, Drafter(draft, confidence_threshold), frozenset(stop))


class Drafter:
    """Which exit drafts, and when it stops: here always the first one.

    A subclass may choose anew in each round (`choose`), from what all exits would have predicted (`observe`).
    """

    def __init__(self, most: int, confidence_threshold: float = CONFIDENCE_THRESHOLD):
        self.exit, self.most = 0, most  # index of the exit, tokens at most
        self.confidence_threshold = confidence_threshold
        self.layers_loaded = 0  # by all rounds: those of the exit for each draft, and L

    def choose(self) -> None:
        """Before each round: set `exit` and `most`."""

    def limit(self, logits: Tensor, drafted: int, most: int) -> int:
        """The number of tokens of this draft, at most. logits (B, V): of the next one, after `drafted` tokens."""
        unsure = self.confidence_threshold and logits.softmax(-1).amax(-1).mean() < self.confidence_threshold
        return drafted if unsure else most

    def observe(self, segments: TokenSegments, states: list[Tensor], true: Tensor, read: Tensor) -> None:
        """After each round. states: (B, S + 1, D) of each exit but the last, at the last accepted token and S drafts;
        true (B, S + 1): the full model's next tokens; read (B, S + 1) bool: where the full model has read its own text.
        """


@torch.inference_mode()
def draft_and_verify(
    segments: TokenSegments,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    drafter: Drafter,
    stop: frozenset[int],
) -> Iterator[Step]:
    """The steps of all rounds. The exits of the segments are those that can draft, and the last layer."""
    first = segments.prefill(segments.begin(prompts))
    rows, tokens, positions = first.rows, [ids[0] for ids in first.ids], [row[0] for row in first.positions]
    room = [max_new_tokens] * len(prompts)  # number of tokens that each of `rows` may still get
    while rows:
        drafter.choose()
        # One less than the room of every row, because the full model adds a token of its own.
        most = min(drafter.most, min(room) - 1)
        drafts, true = _round(segments, (rows, tokens, positions), drafter, most)
        new = [_accepted(*pair, stop) for pair in zip(drafts, true)]
        for column in range(max(map(len, new))):  # rows may get different numbers of tokens
            reached = [i for i, row in enumerate(new) if column < len(row)]
            # The last token of a row may be beyond its drafts: then the slice is empty.
            accepted = [drafts[i][column : column + 1] == [new[i][column]] for i in reached]
            layers = [segments.exits[drafter.exit if is_draft else -1] for is_draft in accepted]
            yield Step([rows[i] for i in reached], [new[i][column] for i in reached], layers)
        room = [count - len(row) for count, row in zip(room, new)]
        running = [i for i, row in enumerate(new) if room[i] and row[-1] not in stop]
        rows, room = [rows[i] for i in running], [room[i] for i in running]
        # The next round begins at the last accepted token. Rejected drafts have written to the caches after it: those
        # slots are masked until they are written again.
        tokens, positions = [new[i][-1] for i in running], [positions[i] + len(new[i]) for i in running]


def _round(
    segments: TokenSegments, at: tuple[list[int], list[int], list[int]], drafter: Drafter, most: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The drafts, (B, S), and the full model's tokens at the same places and after them, (B, S + 1).

    at: rows (B,), and the token and the position of the last accepted token of each.
    """
    rows, tokens, positions = at
    token, drafted = torch.tensor(tokens, device=segments.pending_states.device), list[Tensor]()
    states = [list[Tensor]() for _ in segments.exits[:-1]]
    while True:
        place = [[position + len(drafted)] for position in positions]
        hidden, block = segments.embed(token[:, None], place), segments.block(rows, place)
        # Before the check: the last draft needs keys and values in the lower layers, and its state for the upper ones.
        for k in range(drafter.exit + 1):
            hidden = segments.run(k, hidden, block)
            states[k].append(hidden)
        if len(drafted) == most:
            break
        logits = segments.draft_logits(drafter.exit, hidden, block)
        most = drafter.limit(logits, len(drafted), most)
        if len(drafted) == most:
            break
        token = logits.argmax(-1)
        drafted.append(token)
    if drafted:  # else the block of the one token is right
        block = segments.block(rows, [list(range(at, at + len(drafted) + 1)) for at in positions])
    hidden = torch.cat(states[drafter.exit], dim=1)
    for k in range(drafter.exit + 1, len(segments.exits)):
        hidden = segments.run(k, hidden, block)
        if k < len(states):
            states[k].append(hidden)
    drafter.layers_loaded += segments.exits[drafter.exit] * len(drafted) + segments.exits[-1]
    logits = segments.decoder.lm_logits(hidden)
    check_finite(logits.numpy(force=True))
    true, draft = logits.argmax(-1), torch.stack(drafted, dim=1) if drafted else token.new_zeros(len(rows), 0)
    right = (draft == true[:, :-1]).cumprod(1).bool()  # a draft is text if it and those before it are right
    read = torch.cat((right.new_ones(len(rows), 1), right), dim=1)
    drafter.observe(segments, [torch.cat(exit_states, dim=1) for exit_states in states], true, read)
    return draft.tolist(), true.tolist()


def _accepted(drafted: list[int], true: list[int], stop: frozenset[int]) -> list[int]:
    """The full model's tokens up to and including the first that differs from the draft, or that stops.

    After it the full model has read a wrong draft, so its tokens there are not its own text.

    >>> _accepted([5, 6, 7], [5, 8, 9, 4], frozenset())
    [5, 8]
    """
    for count, (guess, token) in enumerate(zip(drafted, true), start=1):
        if guess != token or token in stop:
            return true[:count]
    return true
