"""Text from a decoder, token by token: in full, with exits, or with exits and yet the full model's own text.

    generate            greedy or sampled; each token is one run of `early_exit`, and each row leaves where the rule
                        says. Without heads it is plain decoding.
    generate_lossless   greedy; an exit drafts, the full model verifies in one pass (self-speculative decoding). It does
                        not run `early_exit`: no rule decides.

A token that leaves at exit k has no keys and values in the layers above, and later tokens that go higher read them:

    copy_state  its hidden state at exit k stands in for the deeper ones (Elbayad et al. 2020; ConsistentEE)
    recompute   the deeper layers catch up on it: exact, as if every token had run to the end

Both are done late, when a token first goes above exit k, for all tokens that wait there, in one block. What no token
asks for is never computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_ee.backbones.backbone import LayerContext
from mini_ee.backbones.cache import Cache
from mini_ee.backbones.generative import GenerativeBackbone
from mini_ee.backbones.shapes import check_finite
from mini_ee.data.decoder_texts import Text
from mini_ee.data.progress import tqdm
from mini_ee.exits.decoding import (
    MISSING_KV,
    CachedSegments,
    Step,
    Tokens,
    TokenState,
    Weights,
    aligned,
    check_ids,
    check_prompts,
    decode,
    gather,
    vocabulary_reading,
)
from mini_ee.exits.row_exits import check_exits
from mini_ee.rules import NeverExit, Rule
from mini_ee.segments import Reading

SMALLEST = 1e-6  # number that a logit may be divided by
CONFIDENCE_THRESHOLD = 0.6  # of a draft: the fastest of 0, .6, .8, .9 after layer 4 of a half-trained built-in decoder

Head = Callable[[Tensor], Tensor]
"""An exit's vocabulary head: hidden (B, D) -> logits (B, V)."""

ExitPolicy = Callable[[Tensor], Tensor]
"""What decides at an exit: hidden (B, D) -> exit_logit (B,)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits, in the order and with the meaning of transformers' generate.

    repetition_penalty: logits of tokens that the row holds already, prompt included, are divided by it where they are
    positive, multiplied where negative (Keskar et al. 2019). temperature: 0 is greedy, and ignores top_k and top_p.
    top_k: the k likeliest tokens, and those level with the k-th. top_p: the fewest likeliest that hold p of the
    probability (Holtzman et al. 2020). Raises ValueError on a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if self.temperature != 0 and not SMALLEST <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or at least {SMALLEST}, got {self.temperature}")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, got {self.top_k!r}")
        if self.top_p is not None and not SMALLEST <= self.top_p <= 1:
            raise ValueError(f"top_p must be from {SMALLEST} to 1, got {self.top_p}")
        if not SMALLEST <= self.repetition_penalty <= 1 / SMALLEST:
            raise ValueError(
                f"repetition_penalty must be from {SMALLEST} to {1 / SMALLEST:.0f}, got {self.repetition_penalty}"
            )

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """What is drawn from, at a temperature above 0. logits (B, V), seen (B, V) bool; returns (B, V) float32."""
        logits = self.penalised(logits, seen) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            ordered, index = probabilities.sort(descending=True, stable=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the likelier ones hold p already
            probabilities = probabilities.masked_fill(beyond.scatter(-1, index, beyond), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits (B, V) after the repetition penalty. seen (B, V) is true for tokens that the row holds."""
        if seen is None or self.repetition_penalty == 1.0:
            return logits
        weakened = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
        return torch.where(seen, weakened, logits)

    def choose(self, logits: Tensor, uniform: Tensor | None, seen: Tensor | None = None) -> Tensor:
        """The next tokens, (B,) int64: the likeliest, or at uniform (B,) in [0, 1) of the cumulated probability."""
        if self.temperature == 0:
            return self.penalised(logits, seen).argmax(-1)
        cumulated = self.probabilities(logits, seen).double().cumsum(-1)
        return torch.searchsorted(cumulated, uniform.double()[:, None] * cumulated[:, -1:], right=True)[:, 0]


GREEDY = Sampling()


# ---- Decoding, with exits ----
def generate(
    decoder: GenerativeBackbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    exits: tuple[int, ...] | None = None,
    heads: Sequence[Head] = (),
    policies: Sequence[ExitPolicy] = (),
    rule: Rule = NeverExit(),
    missing_kv: str = "copy_state",
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[Step]:
    """Continue prompts, a step a token, until every row has max_new_tokens or a token of `stop`.

    prompts: token ids of each row, of any lengths. exits: in layers, the last is L, where the LM head is; heads: one
    for each exit before it; policies: as many, for the rule policy. missing_kv: "copy_state" or "recompute".
    The prompt itself runs through all layers. A row's text does not depend on the other rows, but for rounding; when
    sampled, not on when they end.
    Raises ValueError for a prompt that is empty, not of this vocabulary, or too long for the context.
    """
    exits = check_exits(exits or (decoder.config.num_hidden_layers,), decoder.config.num_hidden_layers)
    if len(heads) != len(exits) - 1:
        raise ValueError(f"expected a head for each of the {len(exits) - 1} exits before the last, got {len(heads)}")
    if len(policies) not in (0, len(heads)):
        raise ValueError(f"expected a policy for each of the {len(heads)} heads, got {len(policies)}")
    if missing_kv not in MISSING_KV:
        raise ValueError(f"missing_kv must be one of {', '.join(MISSING_KV)}, got {missing_kv!r}")
    rule.check(len(exits))
    capacity = _check_prompts(decoder, prompts, max_new_tokens)
    segments = TokenSegments(decoder, exits, heads, missing_kv, len(prompts), capacity, policies)
    return _generate(segments, prompts, max_new_tokens, rule, sampling, frozenset(stop), seed)


@torch.inference_mode()
def _generate(segments, prompts, max_new_tokens, rule, sampling, stop, seed) -> Iterator[Step]:
    device = segments.pending_states.device
    generator = torch.Generator().manual_seed(seed)
    seen = _seen(prompts, segments.decoder).to(device) if sampling.repetition_penalty != 1.0 else None

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        uniform = None
        if sampling.temperature:  # a number for each prompt: who has ended changes no other row's
            uniform = torch.rand(len(prompts), generator=generator)[rows].to(device)
        chosen = sampling.choose(torch.from_numpy(logits).to(device), uniform, None if seen is None else seen[rows])
        if seen is not None:
            seen[rows, chosen] = True
        return chosen.tolist()

    yield from decode(segments, prompts, max_new_tokens, rule, choose, stop)


def _check_prompts(decoder: GenerativeBackbone, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """How many tokens the longest row comes to; of what is read apart none."""
    sizes = decoder.config.vocab_size, decoder.max_written
    check_ids(prompts, sizes[0])
    return check_prompts(decoder.decoder_start_tokens(prompts), max_new_tokens, *sizes)


def _seen(prompts: Sequence[Sequence[int]], decoder: GenerativeBackbone) -> Tensor:
    seen = torch.zeros(len(prompts), decoder.config.vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(decoder.decoder_start_tokens(prompts)):
        seen[row, list(prompt)] = True
    return seen


def token_weights(decoder: GenerativeBackbone) -> Weights:
    """How many weights a token is multiplied with."""
    config = decoder.config
    return Weights(
        decoder.token_weights, config.num_attention_heads * config.head_width, config.hidden_size * config.vocab_size
    )


class TokenSegments(CachedSegments):
    """Those of a backbone that writes, in torch."""

    engine = "torch"
    any_rule = False  # where there are policies, for rules that ask them alone

    def __init__(
        self,
        decoder: GenerativeBackbone,
        exits: tuple[int, ...],
        heads: Sequence[Head],
        missing_kv: str,
        num_rows: int,
        capacity: int,
        policies: Sequence[ExitPolicy] = (),
    ):
        super().__init__(exits, missing_kv, num_rows, capacity)
        self.decoder, self.heads, self.policies = decoder, heads, policies
        self.cache = Cache(decoder, num_rows, capacity)
        weight = decoder.embeddings.weight
        self.pending_states = weight.new_zeros(num_rows, capacity + 1 if heads else 0, weight.shape[1])
        self.weights = token_weights(decoder)

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        self.decoder.read_prompts(prompts, self.cache)
        return Tokens.of(self.decoder.decoder_start_tokens(prompts))

    def array(self, numbers: list) -> Tensor:
        return torch.tensor(numbers, device=self.pending_states.device)

    def join(self, earlier: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((earlier, hidden), dim=1)

    def embed(self, ids: Tensor, positions: list[list[int]]) -> Tensor:
        return self.decoder.embed_written(ids, self.array(positions))

    def block(self, rows: list[int], positions: list[list[int]]) -> LayerContext:
        every = len(rows) == self.num_rows
        if every and aligned(positions):
            return self.decoder.aligned_block(positions[0][0], len(positions[0]), self.cache)
        return self.decoder.block(self.array(positions), self.cache, None if every else rows)

    def run(self, k: int, hidden: Tensor, block: LayerContext) -> Tensor:
        return self.decoder.run_layers(hidden, block, *self._layers(k))

    def copy_state(self, k: int, hidden: Tensor, block: LayerContext) -> None:
        self.decoder.copy_state(hidden, block, *self._layers(k))

    def run_all(self, hidden: Tensor, block: LayerContext) -> None:
        self.decoder.run_layers(hidden, block, 0, self.exits[-1])

    def _layers(self, k: int) -> tuple[int, int]:
        return self.exits[k - 1] if k else 0, self.exits[k]

    def read_logits(self, k: int, state: TokenState) -> Reading:
        hidden = state.hidden[:, -1]
        if k == len(self.heads):
            return Reading(check_finite(self.decoder.lm_logits(hidden).numpy(force=True)))
        logits = self.heads[k](hidden).float()
        return vocabulary_reading(
            check_finite(logits.numpy(force=True)), logits.softmax(-1).topk(2).values.numpy(force=True)
        )

    def read_state(self, k: int, state: TokenState) -> Reading:
        """What the policy says; without one, or under any rule, how far the state still moves. No head is read."""
        hidden = state.hidden[:, -1]
        said = self.policies[k](hidden).float().numpy(force=True) if self.policies else None
        if said is not None and not self.any_rule:
            return Reading(None, said)
        cosine = torch.cosine_similarity(hidden.float(), state.before[:, -1].float())
        return Reading(None, said, saturation=cosine.numpy(force=True))


def token_segments(model, missing_kv: str, num_rows: int, capacity: int) -> TokenSegments:
    """The segments of a decoder with exits, `heads` and it may be `policies`, for a batch of texts, under any rule."""
    segments = TokenSegments(
        model.backbone, model.exits, model.heads, missing_kv, num_rows, capacity, tuple(model.policies)
    )
    segments.any_rule = True
    return segments


# ---- Lossless: an exit drafts, the full model verifies ----
def generate_lossless(
    decoder: GenerativeBackbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    exit_layer: int,
    head: Head,
    draft: int = 4,
    confidence_threshold: float = CONFIDENCE_THRESHOLD,
    stop: Sequence[int] = (),
) -> Iterator[Step]:
    """The full model's greedy text, in fewer passes through its upper layers.

    Source: self-speculative decoding as in LayerSkip (Elhoushi et al. 2024). A round: the layers up to exit_layer and
    its head draft `draft` tokens, one at a time; the layers above run in one block on the token before them and on all
    of them; the LM head says what the full model would have written after each. Kept are the drafts up to the first
    that differs, and the full model's own token there: from one token a round to draft + 1. The layers below are not
    run again: their cache is shared. A round drafts fewer where the head's largest probability, in the mean of the
    rows, is below confidence_threshold, as transformers' assisted decoding does; 0: never, as in the paper.

    Steps come a round at a time; layers_run is exit_layer for a kept draft and L for a token of the full model.
    Arguments and errors as in `generate`.
    """
    last = decoder.config.num_hidden_layers
    if not 1 <= exit_layer < last:
        raise ValueError(f"exit_layer must be from 1 to {last - 1}, below the last layer, got {exit_layer}")
    if draft < 1:
        raise ValueError(f"draft must be at least 1 token, got {draft}")
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold must be a probability, got {confidence_threshold}")
    capacity = _check_prompts(decoder, prompts, max_new_tokens)
    segments = TokenSegments(decoder, (last,), (), "recompute", len(prompts), capacity)
    return _generate_lossless(
        segments, prompts, max_new_tokens, exit_layer, head, (draft, confidence_threshold), frozenset(stop)
    )


@torch.inference_mode()
def _generate_lossless(segments, prompts, max_new_tokens, exit_layer, head, limits, stop) -> Iterator[Step]:
    first = segments.prefill(segments.begin(prompts))
    rows, tokens, positions = first.rows, [ids[0] for ids in first.ids], [some[0] for some in first.positions]
    room = [max_new_tokens] * len(prompts)  # tokens that each of `rows` may still get
    while rows:
        most = min(limits[0], min(room) - 1), limits[1]
        drafted, true = _draft_and_verify(segments, rows, tokens, positions, most, exit_layer, head)
        new = [_accepted(*pair, stop) for pair in zip(drafted, true)]
        for column in range(max(map(len, new))):
            reached = [i for i, some in enumerate(new) if column < len(some)]
            kept = [drafted[i][column : column + 1] == [new[i][column]] for i in reached]
            layers = [exit_layer if each else segments.exits[-1] for each in kept]
            yield Step([rows[i] for i in reached], [new[i][column] for i in reached], layers)
        room = [left - len(some) for left, some in zip(room, new)]
        on = [i for i, some in enumerate(new) if room[i] and some[-1] not in stop]
        rows, room = [rows[i] for i in on], [room[i] for i in on]
        tokens, positions = [new[i][-1] for i in on], [positions[i] + len(new[i]) for i in on]


def _draft_and_verify(segments, rows, tokens, positions, limits, exit_layer, head) -> tuple[list, list]:
    """What the exit drafts, (B, S), and what the full model would have written there and next, (B, S + 1).

    limits: the largest S, and how sure the head must be of a token.
    """
    decoder, last = segments.decoder, segments.exits[-1]
    token, states, drafted = torch.tensor(tokens, device=segments.pending_states.device), [], []
    while True:
        at = [[position + len(drafted)] for position in positions]
        hidden, block = segments.embed(token[:, None], at), segments.block(rows, at)
        states.append(decoder.run_layers(hidden, block, 0, exit_layer))
        if len(drafted) == limits[0]:
            break
        logits = head(states[-1][:, 0])
        if limits[1] and logits.softmax(-1).amax(-1).mean() < limits[1]:
            break
        token = logits.argmax(-1)
        drafted.append(token)
    if drafted:
        block = segments.block(rows, [list(range(position, position + len(states))) for position in positions])
    hidden = decoder.run_layers(torch.cat(states, dim=1), block, exit_layer, last)
    drafts = torch.stack(drafted, dim=1).tolist() if drafted else [[] for _ in rows]
    logits = check_finite(decoder.lm_logits(hidden).numpy(force=True))
    return drafts, logits.argmax(-1).tolist()


def _accepted(drafted: list[int], true: list[int], stop: frozenset[int]) -> list[int]:
    """The full model's tokens as far as it was asked about its own text: to the first draft that differs, or a stop.

    >>> _accepted([5, 6, 7], [5, 8, 9, 4], frozenset())
    [5, 8]
    """
    for count, (guess, token) in enumerate(zip(drafted, true), start=1):
        if guess != token or token in stop:
            return true[:count]
    return true


# ---- The text that heads learn from ----
def generated_texts(
    decoder: GenerativeBackbone,
    prompts: Sequence[Sequence[int]],
    count: int,
    new_tokens: int,
    *,
    greedy: bool = False,
    stop: Sequence[int] = (),
    batch_size: int = 32,
    seed: int = 0,
) -> list[Text]:
    """`count` texts that the full model writes from the prompts (token ids), which take turns.

    Drawn from its whole distribution; greedy: its likeliest token each time, so that one prompt gives one text.
    """
    texts = []
    sampling = GREEDY if greedy else Sampling(temperature=1.0)
    for begin in tqdm(range(0, count, batch_size), desc="generating", unit="batch", delay=2):
        chosen = [list(prompts[row % len(prompts)]) for row in range(begin, min(begin + batch_size, count))]
        steps = generate(decoder, chosen, max_new_tokens=new_tokens, sampling=sampling, stop=stop, seed=seed + begin)
        for prompt, written in zip(chosen, gather(steps, len(chosen))):
            texts.append(Text(prompt + written.tokens[:-1], len(prompt) - 1))
    return texts
