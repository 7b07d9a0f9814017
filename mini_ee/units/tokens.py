"""A decoder fine-tuned with exits: what ConsistentEE (decoder_policies.py) and CALM (calm.py) both begin from.

Sources: Zeng et al. 2024, ConsistentEE, "Experimental Settings": LoRA in the initialisation step, then the backbone is
frozen; Schuster et al. 2022, Confident Adaptive Language Modeling, which trains its exits under such a sum too.

    fine_tune    the initialisation: adapters and heads learn, under Eq. 1; then the adapters are folded in for good
    instances    every token is an instance: its states at the exits, which the frozen backbone gives once

Symbols:   K exits, the last is the LM head, which is never trained; N instances; D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

from mini_ee.backbones.bert import StackedLinear
from mini_ee.backbones.llama import Decoder
from mini_ee.backbones.lora import LowRank, check_lora
from mini_ee.data.texts import Text
from mini_ee.rules import Policy, Threshold
from mini_ee.units.heads import VocabularyHead
from mini_ee.units.rows import check_exits

PASSING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)  # of all readings, under the rules of a sweep

BATCH = 256  # instances of a step: a token is far less than a text


class QueryValueAdapter(nn.Module):
    """W + alpha / rank (A B)^T in the query and the value rows of a stacked projection (Hu et al. 2022)."""

    def __init__(self, linear: StackedLinear, rank: int, alpha: float):
        super().__init__()
        query, self.key, value = linear.sizes
        self.query, self.value = LowRank(linear.in_features, rank, query), LowRank(linear.in_features, rank, value)
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """(Q + K + V, D) -> the same."""
        query, value = ((pair.A @ pair.B).T for pair in (self.query, self.value))
        return weight + self.scale * torch.cat((query, query.new_zeros(self.key, query.shape[1]), value))


class TokenGraphs:
    """The ONNX graphs of a decoder with exits, which has `decoder`, `exits`, `heads`, and may have policies.

    One segment serves the prompt (T tokens), the step (T = 1) and the block that catches up. A head is a graph of its
    own: it costs as much as a layer or more, and neither a prompt, nor a block that catches up, nor a planned exit
    reads it.
    """

    policies = ()

    def facts(self) -> dict:
        """What an exported folder says of the model beside its graphs."""
        config = self.decoder.config
        return {
            "unit": "tokens",
            "vocab_size": config.vocab_size,
            "max_tokens": config.max_tokens,
            "stop": config.stop_tokens,
            "width": config.hidden_size,
            "cache_width": config.key_value_heads * config.head_width,
            "decides": bool(self.policies),
        }

    def graphs(self) -> dict[str, Callable]:
        """Name -> what writes the graph."""
        made = {}
        for k, layer in enumerate(self.exits):
            made |= {f"segment_{layer}": partial(self._graph_segment, k), f"head_{layer}": partial(self._graph_head, k)}
            if k:
                made[f"fill_{layer}"] = partial(self._graph_fill, k)
            if self.policies and k < len(self.exits) - 1:
                made[f"policy_{layer}"] = partial(self._graph_policy, k)
        return made

    def _graph_segment(self, k: int, g) -> None:
        """input_ids or hidden, positions, rows, caches -> hidden_out, caches: the layers between two exits."""
        start, width = self.exits[k - 1] if k else 0, self.decoder.config.hidden_size
        hidden = self._graph_hidden(g) if k else self.decoder.graph_embed(g)
        hidden = self.decoder.graph_layers(g, hidden, self.decoder.graph_block(g, start), start, self.exits[k])
        g.output("hidden_out", hidden, "batch", "tokens", width)

    def _graph_fill(self, k: int, g) -> None:
        """hidden, positions, rows, caches -> caches: keys and values alone, from a state that stands in for the input
        of all these layers. To recompute needs no graph of its own: it is the segment on those tokens."""
        start = self.exits[k - 1]
        block = self.decoder.graph_block(g, start)
        self.decoder.graph_propagate(g, self._graph_hidden(g), block, start, self.exits[k])

    def _graph_hidden(self, g) -> str:
        return g.input("hidden", "batch", "tokens", self.decoder.config.hidden_size, dtype=g.dtype)

    def _graph_head(self, k: int, g) -> None:
        """hidden (B, D) -> logits (B, V); below the last layer `largest` (B, 2), its two largest probabilities."""
        config, last = self.decoder.config, k == len(self.exits) - 1
        hidden = g.input("hidden", "batch", config.hidden_size, dtype=g.dtype)
        logits = g.float32(self.decoder.graph_lm_logits(g, hidden) if last else self.heads[k].graph(g, hidden))
        g.output("logits", logits, "batch", config.vocab_size, dtype=np.float32)
        if not last:
            largest, _ = g.several(2, "TopK", g.op("Softmax", logits, axis=1), g.integers(2), axis=1)
            g.output("largest", largest, "batch", 2, dtype=np.float32)

    def _graph_policy(self, k: int, g) -> None:
        """hidden (B, D) -> exit_logit (B,)."""
        hidden = g.input("hidden", "batch", self.decoder.config.hidden_size, dtype=g.dtype)
        g.output("exit_logit", g.float32(self.graph_exit_logit(g, k, hidden)), "batch", dtype=np.float32)


class WithoutExits(TokenGraphs, nn.Module):
    """A plain decoder, as a model whose only exit is the last."""

    def __init__(self, decoder: Decoder, exits: tuple[int, ...]):
        super().__init__()
        self.decoder, self.exits, self.heads = decoder, exits, ()


class ExitDecoder(TokenGraphs, nn.Module):
    """A decoder, a vocabulary head after each exit but the last, and adapters of query and value in all layers.

    Heads begin as copies of the final norm and the LM head. Raises ValueError for exits that do not end at L, for a
    single one, and for a rank or alpha that cannot be.
    """

    def __init__(self, decoder: Decoder, exits: tuple[int, ...], *, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        check_lora(rank, alpha)
        self.exits = check_exits(tuple(exits), decoder.config.num_hidden_layers)
        if len(self.exits) < 2:
            raise ValueError(f"expected exits before the last layer, got only {self.exits[0]}")
        self.rank, self.alpha = rank, alpha
        self.decoder = decoder.eval().requires_grad_(False)
        self.heads = nn.ModuleList(VocabularyHead(decoder, "copy") for _ in self.exits[:-1])
        self.adapters = nn.ModuleList(QueryValueAdapter(layer.qkv, rank, alpha) for layer in decoder.layers)

    def unfold(self) -> None:
        """Let the adapters act on the decoder's weights, so that they can learn."""
        for layer, adapter in zip(self.decoder.layers, self.adapters):
            parametrize.register_parametrization(layer.qkv, "weight", adapter)

    def fold(self) -> None:
        """Add the adapters to the decoder's weights, for good."""
        for layer in self.decoder.layers:
            parametrize.remove_parametrizations(layer.qkv, "weight")

    def classify(self, k: int, state: Tensor) -> Tensor:
        """The internal classifier of exit k, in the end the LM head: (..., D) -> logits (..., V) float32."""
        return self.heads[k](state) if k < len(self.heads) else self.decoder.lm_logits(state)

    def all_logits(self, states: Tensor) -> Tensor:
        """Of every exit: (N, K, D) -> (N, K, V)."""
        return torch.stack([self.classify(k, state) for k, state in enumerate(states.unbind(1))], dim=1)

    @property
    def policies(self) -> list[Callable[[Tensor], Tensor]]:
        """What decides at each exit but the last, as `generate` takes it: (..., D) -> exit_logit (...)."""
        raise NotImplementedError

    def exit_logits(self, states: Tensor) -> Tensor:
        """(N, K, D) -> (N, K - 1)."""
        return torch.stack([policy(states[:, k]) for k, policy in enumerate(self.policies)], dim=1)

    @property
    def own(self) -> nn.ModuleDict:
        """What is trained, and stands in a run on disk."""
        return nn.ModuleDict({name: part for name, part in self.named_children() if name != "decoder"})


def _forward(model: ExitDecoder, texts: Sequence[Text]) -> tuple[list[Tensor], Tensor]:
    """States of the tokens that count, (N, D), of the embeddings and of every exit; and the tokens that follow, (N,).

    Padding stands on the right, where no token looks.
    """
    device = model.decoder.embeddings.weight.device
    longest = max(len(text.ids) for text in texts)
    ids = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in texts], device=device)
    counted = torch.tensor([[text.start <= at < len(text.ids) - 1 for at in range(longest)] for text in texts])
    hidden = model.decoder.hidden_states(ids)
    labels = ids.roll(-1, dims=1)[counted]
    return [hidden[layer][counted] for layer in (0, *model.exits)], labels


# ---- Instances ----
class Instances(NamedTuple):
    """Each token of some texts, with what the frozen backbone makes of it."""

    states: Tensor  # (N, K, D), hidden at every exit
    labels: Tensor  # (N,), the token that follows
    saturation: Tensor  # (N, K - 1), cosine of the state with that of the exit before, at first of the embeddings


@torch.no_grad()
def instances(model: ExitDecoder, texts: Sequence[Text], batch_size: int = 16) -> Instances:
    """One forward pass over the texts, of the tokens that count."""
    found = []
    for begin in tqdm(range(0, len(texts), batch_size), desc="reading", unit="batch", delay=2):
        states, labels = _forward(model, texts[begin : begin + batch_size])
        pairs = zip(states[:-2], states[1:-1])
        moved = torch.stack([torch.cosine_similarity(before.float(), now.float()) for before, now in pairs], dim=1)
        found.append((torch.stack(states[1:], dim=1), labels, moved.clamp(-1, 1)))  # rounding would pass the ends
    return Instances(*(torch.cat(parts) for parts in zip(*found)))


@torch.no_grad()
def confidence(model: ExitDecoder, some: Instances, rule: Policy | Threshold) -> Tensor:
    """What the rule compares with its threshold, of every instance at every exit but the last: (N, K - 1).

    A Policy compares the probability of leaving; a Threshold must be on saturation or breaking_ties.
    """
    if isinstance(rule, Policy):
        return model.exit_logits(some.states).double().sigmoid()
    if rule.measure == "saturation":
        return some.saturation
    parts = (model.all_logits(states)[:, :-1].softmax(-1).topk(2).values for states in some.states.split(BATCH))
    return torch.cat([top[..., 0] - top[..., 1] for top in parts])


def sweep(model: ExitDecoder, some: Instances, rule: Policy | Threshold) -> list[Policy | Threshold]:
    """The rule with other thresholds, the strictest first: such as these shares of what it compares would pass."""
    found = np.quantile(confidence(model, some, rule).numpy(force=True), 1 - np.array(PASSING))
    name = "cut" if isinstance(rule, Policy) else "threshold"
    return [replace(rule, **{name: float(value)}) for value in found]
