"""The ONNX graphs of a TokenExits: one that stops by itself, for a step of decoding, and one graph per segment.

Every graph takes positions (B, T) int64, -1 for padding; rows (B,) int64, the prompt of each row; and the caches, see
decoder_blocks.py. The head reads the last of the T tokens. If exit k has a layer of its own, its
caches are keys_exit_k and values_exit_k.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export.decoder_blocks import GraphBlock, MemoryBlock
from mini_ee.lab.segments import Segments
from mini_ee.rules import breaking_ties


class GraphTokens(NamedTuple):
    """The tokens that have not exited, as values of a graph."""

    hidden: Tensor  # (B', T, D)
    before: Tensor  # (B', T, D), at the previous exit; at first the embeddings
    block: GraphBlock  # the context of these tokens
    whole: GraphBlock  # the context of all B rows
    here: Tensor | None = None  # (B',): which of the B rows they are; None: all
    exited: Tensor | None = None  # (M,): the rows that have exited
    states: Tensor | None = None  # (M, T, D): their hidden states at their exits

    @property
    def newest(self) -> Tensor:
        """(B', D), the last token of each row."""
        return self.hidden[:, -1]


class TokenGraphs(Segments):
    """The segments of the one graph (model_graph.py), and `graphs()`: one graph per segment."""

    def __init__(self, model: TokenExits):
        self.model, self.exits = model, model.exits
        backbone, config = model.backbone, model.backbone.config
        apart = {"begins_with": backbone.decoder_start_tokens([()])[0]} if backbone.is_encoder_decoder else {}
        self.metadata = apart | {
            "unit": "tokens",
            "missing_kv": model.missing_kv,
            "vocab_size": config.vocab_size,
            "max_tokens": backbone.max_written,
            "stop": config.stop_tokens,
            "width": config.hidden_size,
            "cache_width": config.key_value_heads * config.head_width,
            "decides": model.policy is not None,
            "head": model.head,
        }
        if model.own_layers:
            self.metadata["own_layers"] = True
        if self.shares_head and len(self.exits) > 1:
            self.metadata["short_list"] = model.heads[0].likely.nonzero()[:, 0].tolist()

    # ---- One graph ----
    def start(self, inputs) -> GraphTokens:
        backbone, block = self.model.backbone, self._block(inputs.g, 0)
        hidden = backbone.embed_written(inputs.input_ids, block.at)
        return GraphTokens(hidden, hidden, block, block)

    def advance(self, k: int, state: GraphTokens) -> GraphTokens:
        start = self.exits[k - 1] if k else 0
        hidden = self.model.backbone.run_layers(state.hidden, state.block, start, self.exits[k])
        self.model.write_exit_keys(k, hidden, state.block)
        return state._replace(hidden=hidden, before=state.hidden)

    def read(self, k: int, state: GraphTokens) -> np.ndarray:
        return self.model.classify(k, self.model.head_input(k, state.hidden, state.block)[:, -1]).numpy()

    @property
    def shares_head(self) -> bool:
        """Whether all exits have the LM head, each after a map of its own."""
        return self.model.head == "lens"

    def mapped(self, k: int, state: GraphTokens) -> np.ndarray:
        """What the shared LM head reads at exit k, (B, D)."""
        hidden = self.model.head_input(k, state.hidden, state.block)[:, -1]
        return (self.model.heads[k].mapped(hidden) if k < len(self.model.heads) else hidden).numpy()

    def exit_logit(self, k: int, state: GraphTokens) -> np.ndarray:
        if self.model.policy is None:
            return super().exit_logit(k, state)
        return self.model.policies[k](state.newest).float().numpy()

    def saturation(self, k: int, state: GraphTokens) -> np.ndarray:
        return torch.cosine_similarity(state.before[:, -1].float(), state.newest.float()).clamp(-1, 1).numpy()

    def short_list(self, k: int, state: GraphTokens) -> np.ndarray:
        return self._short_list(k, state.newest)

    def _short_list(self, k: int, state: Tensor) -> np.ndarray:
        if not self.shares_head:
            return super().short_list(k, state)
        head = self.model.heads[k]
        return breaking_ties(head.short_logits(state, head.likely_rows()).numpy())

    def keep_in_graph(self, state: GraphTokens, rows: Tensor, exits: Tensor) -> GraphTokens:
        """The tokens of these rows. The others exit here, where `exits` (N,) is true.

        Their states are passed on: every layer above writes their keys and values into its cache.
        """
        exiting = exits.nonzero()[:, 0]
        hidden, states, here, exited = state.hidden[rows], state.hidden[exiting], rows, exiting
        if state.here is not None:
            here, exited = state.here[rows], torch.cat((state.here[exiting], state.exited))
            states = torch.cat((states, state.states))
        return GraphTokens(hidden, hidden, state.whole.of_rows(here, exited, states), state.whole, here, exited, states)

    def written(self, state: GraphTokens) -> list:
        """The caches after the layers of this segment, for later calls."""
        return _caches(state.hidden.g, state.block)

    def filled(self, k: int, state: GraphTokens) -> list:
        """The caches of all layers above exit k, if all tokens exit there."""
        block = state.block.unwritten()
        for above in range(k + 1, len(self.exits)):
            self._copy_state(above, state.hidden, block)
        return _caches(state.hidden.g, block)

    def _copy_state(self, k: int, hidden: Tensor, block: GraphBlock) -> None:
        """Write the caches of segment k, and of the own layer of exit k, with the same states at each layer."""
        self.model.backbone.copy_state(hidden, block, self.exits[k - 1], self.exits[k])
        self.model.write_exit_keys(k, hidden, block)

    def prompt_graphs(self) -> dict[str, Callable]:
        """As `graphs`: the graph of the encoder, if an encoder reads the prompts."""
        backbone = self.model.backbone
        return {"memory": partial(MemoryBlock.write_memory, backbone)} if backbone.is_encoder_decoder else {}

    # ---- By segment ----
    def graphs(self) -> dict[str, Callable]:
        """Name of a graph -> the function that writes it, given a Graph."""
        made = {}
        for k, layer in enumerate(self.exits):
            made[f"segment_{layer}"] = partial(self._graph_segment, k)
            made[f"head_{layer}"] = partial(self._graph_head, k)
            if k:
                made[f"fill_{layer}"] = partial(self._graph_fill, k)
            if self.model.policy is not None and k < len(self.exits) - 1:
                made[f"policy_{layer}"] = partial(self._graph_policy, k)
            if self.shares_head and k < len(self.exits) - 1:
                made[f"short_list_{layer}"] = partial(self._graph_short_list, k)
        return made

    def _graph_segment(self, k: int, g) -> None:
        """input_ids or hidden, positions, rows, caches -> hidden_out, caches: the layers between two exits."""
        backbone, start = self.model.backbone, self.exits[k - 1] if k else 0
        with g.tracing():
            block = self._block(g, start)
            hidden = self._hidden(g, block) if k else backbone.embed_written(g.inputs().input_ids, block.at)
            hidden = backbone.run_layers(hidden, block, start, self.exits[k])
            self.model.write_exit_keys(k, hidden, block)
        g.output("hidden_out", hidden.name, "batch", "tokens", backbone.config.hidden_size)
        output_caches(g, _caches(g, block), block.written)

    def _graph_fill(self, k: int, g) -> None:
        """hidden, positions, rows, caches -> caches: copies the state of an exited token to all layers of the segment.

        Only keys and values are computed. With "recompute" the segment itself runs on those tokens.
        """
        with g.tracing():
            block = self._block(g, self.exits[k - 1])
            self._copy_state(k, self._hidden(g, block), block)
        output_caches(g, _caches(g, block), block.written)

    def _block(self, g, first: int | str) -> GraphBlock:
        kind = MemoryBlock if self.model.backbone.is_encoder_decoder else GraphBlock
        return kind.over_caches(g, self.model.backbone, first)

    def _hidden(self, g, block: GraphBlock) -> Tensor:
        width = self.model.backbone.config.hidden_size
        return g.tensor(g.input("hidden", "batch", "tokens", width, dtype=g.dtype), *block.dims, width)

    def _graph_head(self, k: int, g) -> None:
        """hidden (B, D) -> logits (B, V).

        An exit with a layer of its own takes hidden (B, T, D), positions, rows and its caches.
        """
        config = self.model.backbone.config
        with g.tracing():
            if self.model.own_layers and k < len(self.exits) - 1:
                block = self._block(g, f"exit_{k}")
                state = self.model.head_input(k, self._hidden(g, block), block)[:, -1]
            else:
                state = self._state(g)
            logits = self.model.classify(k, state)
            g.output("logits", logits.name, "batch", config.vocab_size, dtype=np.float32)

    def _graph_policy(self, k: int, g) -> None:
        """hidden (B, D) -> exit_logit (B,)."""
        with g.tracing():
            exit_logit = self.model.policies[k](self._state(g)).float()
        g.output("exit_logit", exit_logit.name, "batch", dtype=np.float32)

    def _graph_short_list(self, k: int, g) -> None:
        """hidden (B, D) -> short_list (B,)."""
        with g.tracing():
            confidence = self._short_list(k, self._state(g))
        g.output("short_list", confidence.name, "batch", dtype=np.float32)

    def _state(self, g) -> Tensor:
        width = self.model.backbone.config.hidden_size
        return g.tensor(g.input("hidden", "batch", width, dtype=g.dtype), "batch", width)


def _caches(g, block: GraphBlock) -> list:
    return [g.value(name, "prompts", "slots", block.width) for name in block.written.values()]


def output_caches(g, values: list, names) -> None:
    """Declare caches as outputs: keys_3 becomes keys_3_out."""
    for name, value in zip(names, values, strict=True):
        g.output(f"{name}_out", value.name, *value.axes)
