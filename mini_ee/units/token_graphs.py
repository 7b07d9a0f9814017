"""The ONNX graphs of a TokenExits: one that stops by itself, for a step of decoding, and graphs by segment.

Every graph takes positions (B, T) int64, -1 for padding, rows (B,) int64, which prompts the tokens belong to, and
caches: see backbones/cache.py. The head is read at the last of the T tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mini_ee.backbones.cache import GraphBlock
from mini_ee.early_exit import Reading, Segments
from mini_ee.units.tokens import TokenExits


class GraphTokens(NamedTuple):
    """The tokens still in the model, as names of values."""

    hidden: str  # (B', T, D)
    before: str  # (B', T, D), at the exit before, at first the embeddings
    block: GraphBlock  # of these tokens
    whole: GraphBlock  # of all
    here: str | None = None  # (B',): which of the B rows they are; None: all
    left: str | None = None  # (M,): which have left
    gone: str | None = None  # (M, T, D): with what


class TokenGraphs(Segments):
    """What export writes of a model: `graphs()` by segment; the others are what model_graph.py asks for."""

    def __init__(self, model: TokenExits):
        self.model, self.exits = model, model.exits

    def facts(self) -> dict:
        """What an exported folder says of the model beside its graphs."""
        backbone, config = self.model.backbone, self.model.backbone.config
        apart = {"begins_with": backbone.begins_with([()])[0]} if backbone.reads_apart else {}
        return apart | {
            "unit": "tokens",
            "fill": self.model.fill,
            "vocab_size": config.vocab_size,
            "max_tokens": self.model.backbone.max_written,
            "stop": config.stop_tokens,
            "width": config.hidden_size,
            "cache_width": config.key_value_heads * config.head_width,
            "decides": self.model.policy is not None,
        }

    # ---- One graph ----
    def graph_start(self, g) -> GraphTokens:
        block, hidden = self.model.backbone.graph_block(g, 0), self.model.backbone.graph_embed_written(g)
        return GraphTokens(hidden, hidden, block, block)

    def graph_advance(self, k: int, g, state: GraphTokens) -> GraphTokens:
        start = self.exits[k - 1] if k else 0
        hidden = self.model.backbone.graph_layers(g, state.hidden, state.block, start, self.exits[k])
        return state._replace(hidden=hidden, before=state.hidden)

    def graph_read(self, k: int, g, state: GraphTokens) -> str:
        """Logits (B', V) of the next token."""
        return self._logits(k, g, _newest(g, state.hidden))

    def graph_read_state(self, k: int, g, state: GraphTokens) -> Reading:
        """exit_logit (B',), where the model has a policy."""
        return Reading(None, self.model.policy and self._exit_logit(k, g, _newest(g, state.hidden)))

    def graph_read_saturation(self, k: int, g, state: GraphTokens) -> Reading:
        newest, before = (g.float32(_newest(g, hidden)) for hidden in (state.hidden, state.before))
        return Reading(None, saturation=_cosine(g, newest, before))

    def graph_keep(self, g, state: GraphTokens, index: str, leaves: str) -> GraphTokens:
        out = g.op("Squeeze", g.op("NonZero", leaves), g.integers(0))
        hidden, gone = (g.op("Gather", state.hidden, each) for each in (index, out))
        here, left = index, out
        if state.here is not None:
            here, left = (g.op("Gather", state.here, each) for each in (index, out))
            left, gone = g.op("Concat", left, state.left, axis=0), g.op("Concat", gone, state.gone, axis=0)
        block = state.whole.of_rows(g, here, left, gone)
        return GraphTokens(hidden, hidden, block, state.whole, here, left, gone)

    def graph_written(self, k: int, g, state: GraphTokens) -> list:
        return _caches(g, state.block)

    def graph_fill(self, k: int, g, state: GraphTokens) -> list:
        block = state.block.unwritten()
        self.model.backbone.graph_propagate(g, state.hidden, block, self.exits[k], self.exits[-1])
        return _caches(g, block)

    def _logits(self, k: int, g, newest: str) -> str:
        last = k == len(self.exits) - 1
        return self.model.backbone.graph_lm_logits(g, newest) if last else self.model.heads[k].graph(g, newest)

    def _exit_logit(self, k: int, g, newest: str) -> str:
        return g.float32(self.model.policy.graph_exit_logit(g, k, g.apply(self.model.heads[k].norm, newest)))

    def prompt_graphs(self) -> dict[str, Callable]:
        """What stands beside the one graph, where prompts are read apart."""
        return self.model.backbone.prompt_graphs()

    # ---- By segment ----
    def graphs(self) -> dict[str, Callable]:
        """Name -> what writes the graph."""
        made = {}
        for k, layer in enumerate(self.exits):
            made[f"segment_{layer}"] = partial(self._graph_segment, k)
            made[f"head_{layer}"] = partial(self._graph_head, k)
            if k:
                made[f"fill_{layer}"] = partial(self._graph_fill, k)
            if self.model.policy is not None and k < len(self.exits) - 1:
                made[f"policy_{layer}"] = partial(self._graph_policy, k)
        return made

    def _graph_segment(self, k: int, g) -> None:
        """input_ids or hidden, positions, rows, caches -> hidden_out, caches: the layers between two exits."""
        backbone, start = self.model.backbone, self.exits[k - 1] if k else 0
        hidden, block = self._hidden(g) if k else backbone.graph_embed_written(g), backbone.graph_block(g, start)
        hidden = backbone.graph_layers(g, hidden, block, start, self.exits[k])
        g.output("hidden_out", hidden, "batch", "tokens", backbone.config.hidden_size)
        output_caches(g, _caches(g, block), block.written)

    def _graph_fill(self, k: int, g) -> None:
        """hidden, positions, rows, caches -> caches: keys and values alone, from a state that stands in for the input
        of all these layers. To recompute needs no graph of its own: it is the segment on those tokens."""
        start = self.exits[k - 1]
        block = self.model.backbone.graph_block(g, start)
        self.model.backbone.graph_propagate(g, self._hidden(g), block, start, self.exits[k])
        output_caches(g, _caches(g, block), block.written)

    def _hidden(self, g) -> str:
        return g.input("hidden", "batch", "tokens", self.model.backbone.config.hidden_size, dtype=g.dtype)

    def _graph_head(self, k: int, g) -> None:
        """hidden (B, D) -> logits (B, V); below the last layer `largest` (B, 2), its two largest probabilities."""
        config = self.model.backbone.config
        logits = g.float32(self._logits(k, g, g.input("hidden", "batch", config.hidden_size, dtype=g.dtype)))
        g.output("logits", logits, "batch", config.vocab_size, dtype=np.float32)
        if k < len(self.exits) - 1:
            largest, _ = g.several(2, "TopK", g.op("Softmax", logits, axis=1), g.integers(2), axis=1)
            g.output("largest", largest, "batch", 2, dtype=np.float32)

    def _graph_policy(self, k: int, g) -> None:
        """hidden (B, D) -> exit_logit (B,)."""
        hidden = g.input("hidden", "batch", self.model.backbone.config.hidden_size, dtype=g.dtype)
        g.output("exit_logit", self._exit_logit(k, g, hidden), "batch", dtype=np.float32)


def _newest(g, hidden: str) -> str:
    """(B, T, D) -> (B, D), the last token."""
    return g.op("Gather", hidden, g.constant("scalar_-1", np.array(-1)), axis=1)


def _cosine(g, a: str, b: str) -> str:
    """(B, D) twice -> (B,), from -1 to 1."""
    product, *norms = (
        g.op("ReduceSum", g.op("Mul", x, y), g.integers(1), keepdims=0) for x, y in ((a, b), (a, a), (b, b))
    )
    cosine = g.op("Div", product, g.op("Sqrt", g.op("Mul", *norms)))
    return g.op("Clip", cosine, *(g.constant(f"float_{end}", np.float32(end).reshape(())) for end in (-1, 1)))


def _caches(g, block: GraphBlock) -> list:
    return [g.value(name, "prompts", "slots", block.width) for name in block.written.values()]


def output_caches(g, values: list, names) -> None:
    """Declare caches as outputs: keys_3 becomes keys_3_out."""
    for name, value in zip(names, values, strict=True):
        g.output(f"{name}_out", value.name, *value.axes)
