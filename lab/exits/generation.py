"""Text generation with a decoder, in full or with early exits; with exits that only draft, see lossless.py.

`generate` is greedy or sampled. Each token is one run of `early_exit`, and the rule decides for each row at which exit
it stops. Without heads it is plain decoding.

A token that exits at exit k has no keys and values in the layers above, but later tokens that go higher need them:

    copy_state  its hidden state at exit k is the input of all deeper layers (Elbayad et al. 2020; ConsistentEE)
    recompute   the deeper layers run on it later: exact, as if every token had run through all layers

Both happen when a later token first goes above exit k, for all tokens that are pending there, in one block
(decoding.CachedSegments). What no token needs is never computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import LayerContext
from mini_ee.lab.backbones.cache import Cache
from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.exits.decoding import (
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
)
from mini_ee.lab.exits.lens import LensHead
from mini_ee.lab.exits.row_exits import check_exits
from mini_ee.lab.rules import Never, Rule
from mini_ee.lab.segments import check_finite
from mini_ee.rules import breaking_ties

SMALLEST = 1e-6  # least number by which logits may be divided

Head = Callable[[Tensor], Tensor]
"""An exit's vocabulary head: hidden (B, D) -> logits (B, V)."""

ExitPolicy = Callable[[Tensor], Tensor]
"""The policy of an exit: hidden (B, D) -> exit_logit (B,)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from logits, in the order and with the meaning of transformers' generate.

    repetition_penalty: logits of tokens that the row contains, prompt included, are divided by it if positive, and
    multiplied if negative (Keskar et al. 2019). temperature: 0 is greedy, and ignores top_k and top_p. top_k: the k
    most likely tokens, and those with the same logit as the k-th. top_p: the fewest most likely tokens whose
    probabilities add up to p (Holtzman et al. 2020). Raises ValueError if a value is outside its range.
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
        """The distribution to draw from, if temperature > 0. logits (B, V), seen (B, V) bool -> (B, V) float32."""
        logits = self.penalised(logits, seen) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            ordered, index = probabilities.sort(descending=True, stable=True)
            # Sorted by probability, a token is excluded if those before it add up to p; so the first never is. The
            # scatter returns the mask from sorted order to token order.
            excluded = ordered.cumsum(-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(excluded.scatter(-1, index, excluded), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits (B, V) after the repetition penalty. seen (B, V) bool: the tokens that each row contains."""
        if seen is None or self.repetition_penalty == 1.0:
            return logits
        lower = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
        return torch.where(seen, lower, logits)

    def choose(self, logits: Tensor, uniform: Tensor | None, seen: Tensor | None = None) -> Tensor:
        """The next tokens, (B,) int64: the most likely, or drawn by inverse transform from uniform (B,) in [0, 1)."""
        if self.temperature == 0:
            return self.penalised(logits, seen).argmax(-1)
        # The first token whose cumulated probability exceeds uniform times the total, in float64: with right=True a
        # token of probability 0 is never drawn, and the total corrects rounding of the sum.
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
    rule: Rule = Never(),
    missing_kv: str = "copy_state",
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    seed: int = 0,
    segments_class: "type[TokenSegments] | None" = None,
) -> Iterator[Step]:
    """Continue prompts, one token per step, until every row has max_new_tokens or a token of `stop`.

    prompts: token ids of each row, of any lengths. exits: in layers; the last is L, with the LM head. heads: one for
    each exit before the last. policies: as many, for the rule policy, or none. missing_kv: "copy_state" or "recompute".
    segments_class: if the exits have layers of their own.
    The prompt runs through all layers. Except for rounding, a greedy text does not depend on the other rows of the
    batch; a sampled text does not depend on when they end.
    Raises ValueError if a prompt is empty, or contains a token outside the vocabulary, WrongArguments if a prompt and
    its continuation are too long for the context.
    """
    exits = check_exits(exits or (decoder.config.num_hidden_layers,), decoder.config.num_hidden_layers)
    if len(heads) != len(exits) - 1:
        raise ValueError(f"expected a head for each of the {len(exits) - 1} exits before the last, got {len(heads)}")
    if len(policies) not in (0, len(heads)):
        raise ValueError(f"expected a policy for each of the {len(heads)} heads, got {len(policies)}")
    if missing_kv not in MISSING_KV:
        raise ValueError(f"missing_kv must be one of {', '.join(MISSING_KV)}, got {missing_kv!r}")
    rule.check(len(exits))
    capacity = capacity_for(decoder, prompts, max_new_tokens)
    make = segments_class or TokenSegments
    segments = make(decoder, exits, heads, missing_kv, len(prompts), capacity, policies)
    return _generate(segments, prompts, max_new_tokens, rule, sampling, frozenset(stop), seed)


@torch.inference_mode()
def _generate(
    segments: "TokenSegments",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    rule: Rule,
    sampling: Sampling,
    stop: frozenset[int],
    seed: int,
) -> Iterator[Step]:
    device = segments.pending_states.device
    generator = torch.Generator().manual_seed(seed)
    seen = _seen(prompts, segments.decoder).to(device) if sampling.repetition_penalty != 1.0 else None

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        uniform = None
        if (
            sampling.temperature
        ):  # a number for every prompt, so a row's number does not depend on which rows have ended
            uniform = torch.rand(len(prompts), generator=generator)[rows].to(device)
        chosen = sampling.choose(torch.from_numpy(logits).to(device), uniform, None if seen is None else seen[rows])
        if seen is not None:
            seen[rows, chosen] = True
        return chosen.tolist()

    yield from decode(segments, prompts, max_new_tokens, rule, choose, stop)


def capacity_for(decoder: GenerativeBackbone, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Number of tokens of the longest row with its continuation; the prompt of an encoder does not count."""
    sizes = decoder.config.vocab_size, decoder.max_written
    check_ids(prompts, sizes[0])
    return check_prompts(decoder.decoder_start_tokens(prompts), max_new_tokens, *sizes)


def _seen(prompts: Sequence[Sequence[int]], decoder: GenerativeBackbone) -> Tensor:
    """(B, V) bool: the tokens of each prompt."""
    seen = torch.zeros(len(prompts), decoder.config.vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(decoder.decoder_start_tokens(prompts)):
        seen[row, list(prompt)] = True
    return seen


def token_weights(decoder: GenerativeBackbone) -> Weights:
    """Number of weights that a token is multiplied with."""
    config = decoder.config
    return Weights(
        decoder.token_weights, config.num_attention_heads * config.head_width, config.hidden_size * config.vocab_size
    )


class TokenSegments(CachedSegments):
    """CachedSegments of a decoder in torch."""

    engine = "torch"

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
        self.has_policy = bool(policies)
        self.cache = Cache(decoder, num_rows, capacity)
        weight = decoder.embeddings.weight
        self.pending_states = weight.new_zeros(num_rows, capacity + 1 if heads else 0, weight.shape[1])
        self.weights = token_weights(decoder)
        self._likely_rows: list[Tensor] = []  # of all lenses, once they were read
        self.short_flops = heads[0].short_flops if heads and isinstance(heads[0], LensHead) else 0.0

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

    def read(self, k: int, state: TokenState) -> np.ndarray:
        hidden = state.hidden[:, -1]
        logits = self.decoder.lm_logits(hidden) if k == len(self.heads) else self.heads[k](hidden).float()
        return check_finite(logits.numpy(force=True))

    def draft_logits(self, k: int, hidden: Tensor, block: LayerContext) -> Tensor:
        """The logits (B, V) of exit k, before the last, at the last of the tokens (B, T, D) that ran to it."""
        return self.heads[k](hidden[:, -1])

    def exit_logit(self, k: int, state: TokenState) -> np.ndarray:
        if not self.policies:
            return super().exit_logit(k, state)
        return self.policies[k](state.hidden[:, -1]).float().numpy(force=True)

    def short_list(self, k: int, state: TokenState) -> np.ndarray:
        if not isinstance(self.heads[k], LensHead):
            return super().short_list(k, state)
        self._likely_rows = self._likely_rows or self.heads[k].likely_rows()
        return breaking_ties(self.heads[k].short_logits(state.hidden[:, -1], self._likely_rows).numpy(force=True))

    def saturation(self, k: int, state: TokenState) -> np.ndarray:
        cosine = torch.cosine_similarity(state.hidden[:, -1].float(), state.before[:, -1].float())
        return cosine.numpy(force=True)


def token_segments(model: nn.Module, missing_kv: str, num_rows: int, capacity: int) -> TokenSegments:
    """The segments of a token_exits.TokenExits for a batch of texts, under any rule."""
    make, policies = model.segments_class, tuple(model.policies)
    return make(model.backbone, model.exits, model.heads, missing_kv, num_rows, capacity, policies)


# ---- Text for training and calibration ----
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
    """`count` texts that the full model generates from the prompts (token ids), which take turns.

    Tokens are sampled from its whole distribution, or greedy: then a prompt always gives the same text.
    """
    texts = []
    sampling = GREEDY if greedy else Sampling(temperature=1.0)
    for begin in tqdm(range(0, count, batch_size), desc="generating", unit="batch", delay=2):
        chosen = [list(prompts[row % len(prompts)]) for row in range(begin, min(begin + batch_size, count))]
        steps = generate(decoder, chosen, max_new_tokens=new_tokens, sampling=sampling, stop=stop, seed=seed + begin)
        for prompt, written in zip(chosen, gather(steps, len(chosen))):
            texts.append(Text(prompt + written.tokens[:-1], len(prompt) - 1))
    return texts
