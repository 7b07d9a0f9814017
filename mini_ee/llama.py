"""Llama from scratch (Touvron et al. 2023): pre-norm layers, rotary positions, grouped queries; exits; decoding.

A token that stops at exit k has no keys and values in the layers above, but later tokens that go deeper read them:

    copy_state   its state at exit k is taken as the input of all deeper layers (Elbayad et al. 2020)
    recompute    the deeper layers run on it when a later token first goes there: exact, and slower

Shapes: B rows, T tokens, D width, H heads, G key/value heads, d = D / H, V tokens in the vocabulary, K exits.
"""

import copy
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from mini_ee.load import check_exits, folder_of, load_weights, read_config
from mini_ee.loop import early_exit
from mini_ee.rules import Rule

SIZES = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings vocab_size".split()
FIXED: dict[str, tuple] = {"hidden_act": ("silu",), "rope_scaling": (None,), "attention_bias": (False,)}
FIXED |= {"mlp_bias": (False,), "partial_rotary_factor": (1.0,), "attention_dropout": (0.0,), "rope_parameters": ()}
FIXED |= {"rope_theta": (), "head_dim": (), "num_key_value_heads": (), "rms_norm_eps": (), "tie_word_embeddings": ()}
PARTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
PARTS |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
PARTS |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def theirs(ours: str) -> str:
    """`layers.3.q.weight` -> `model.layers.3.self_attn.q_proj.weight`; of "" the prefix."""
    if not ours.startswith("layers."):
        return ours if ours.startswith("lm_head") else f"model.{ours}"
    _, depth, part, leaf = ours.split(".")
    return f"model.layers.{depth}.{PARTS[part]}.{leaf}"


# ---- The cache ----
class Cache:
    """Keys and values of N prompts in every layer, (L, N, G, S, d) each. Slot p is of the token at position p.

    A token reads the slots 0 .. p. Prompts are padded on the right: what padding writes lies after the prompt, is not
    read, and is replaced when a token of the row gets there. So no mask of padding is needed.
    """

    def __init__(self, config: dict, prompts: int, slots: int):
        G, d = config["num_key_value_heads"], config["head_dim"]
        self.keys, self.values = (torch.zeros(config["num_hidden_layers"], prompts, G, slots, d) for _ in range(2))


class Place(NamedTuple):
    """Which tokens run: their positions, and where their keys and values are."""

    at: Tensor  # (B, T)
    cache: Cache | None = None  # None: a text by itself, whose tokens read each other
    rows: Tensor | None = None  # (B,), the number of each row in the cache

    def read_and_write(self, depth: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v (B, G, T, d) of these tokens -> all that they may read, (B, G, S, d), and the mask (B, 1, T, S)."""
        if self.cache is None or self.rows is None:
            return k, v, None
        rows, slots = self.rows, int(self.at.max()) + 1
        for cached, new in ((self.cache.keys, k), (self.cache.values, v)):
            cached[depth][rows[:, None], :, self.at] = new.transpose(1, 2)
        readable = torch.arange(slots) <= self.at[:, None, :, None]
        return self.cache.keys[depth][rows, :, :slots], self.cache.values[depth][rows, :, :slots], readable


# ---- The model ----
def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): x (B, H, T, d), angle (B, T, d / 2) -> (B, H, T, d)."""
    (a, b), cos, sin = x.chunk(2, -1), angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Attention and gated MLP, each on a normed input and added to the state."""

    def __init__(self, config: dict):
        super().__init__()
        D, d, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        H, G, inner = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
        self.head_dim = d
        self.q, self.o = nn.Linear(D, H * d, bias=False), nn.Linear(H * d, D, bias=False)
        self.k, self.v = (nn.Linear(D, G * d, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(D, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, D, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D, eps), nn.RMSNorm(D, eps)

    def keys(self, x: Tensor, angle: Tensor, place: Place, depth: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values that tokens with normed input x (B, T, D) may read; their own are written to the cache."""
        k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.k, self.v))
        return place.read_and_write(depth, rotate(k, angle), v)

    def forward(self, x: Tensor, angle: Tensor, place: Place, depth: int) -> Tensor:
        """x (B, T, D) -> (B, T, D). depth: of this layer, from 0."""
        normed = self.attention_norm(x)
        k, v, mask = self.keys(normed, angle, place, depth)
        q = rotate(self.q(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2), angle)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Embeddings, L layers, the final norm and the LM head, which is tied to the embeddings or not."""

    def __init__(self, config: dict):
        super().__init__()
        D, H, rope = config["hidden_size"], config["num_attention_heads"], config.get("rope_parameters") or {}
        if (kind := rope.get("rope_type", "default")) != "default":
            raise ValueError(f"config.json: rope_type must be 'default', found {kind!r}; the core implements no other")
        defaults = {"num_key_value_heads": H, "head_dim": D // H, "rms_norm_eps": 1e-6}
        self.config = config = defaults | {key: value for key, value in config.items() if value is not None}
        self.embed_tokens = nn.Embedding(config["vocab_size"], D)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(D, config["rms_norm_eps"])
        tied = config.get("tie_word_embeddings", False)
        self.lm_head = None if tied else nn.Linear(D, config["vocab_size"], bias=False)
        theta, d = config.get("rope_theta", rope.get("rope_theta", 10000.0)), config["head_dim"]
        self.frequency = theta ** -(torch.arange(0, d, 2) / d)  # (d / 2,)

    @classmethod
    def load(cls, name: str = "llama") -> Self:
        """From a folder in Hugging Face's layout, or the built-in one. Raises FileNotFoundError, or ValueError."""
        folder = folder_of(name)
        model = cls(read_config(folder, "llama", SIZES, FIXED))
        load_weights(model, folder, theirs, ("rotary_emb.",) if model.lm_head else ("rotary_emb.", "lm_head."))
        return model.eval()

    def run(self, x: Tensor, place: Place, start: int, stop: int) -> Tensor:
        """The layers start + 1 .. stop: (B, T, D) -> (B, T, D)."""
        angle = place.at[..., None] * self.frequency
        for depth in range(start, stop):
            x = self.layers[depth](x, angle, place, depth)
        return x

    def copy_state(self, x: Tensor, place: Place, start: int, stop: int) -> None:
        """Write keys and values to the layers start + 1 .. stop, as if x (B, T, D) were the input of each of them."""
        angle = place.at[..., None] * self.frequency
        for depth in range(start, stop):
            self.layers[depth].keys(self.layers[depth].attention_norm(x), angle, place, depth)

    def vocabulary(self, normed: Tensor) -> Tensor:
        """Normed states (..., D) -> logits (..., V)."""
        return F.linear(normed, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    def flops(self, position: float) -> float:
        """Of one layer on the token at this position, which attends to position + 1 tokens."""
        width = self.config["num_attention_heads"] * self.config["head_dim"]
        weights = sum(parameter.numel() for parameter in self.layers[0].parameters() if parameter.dim() == 2)
        return 2.0 * weights + 4.0 * width * (position + 1)


class Head(nn.Module):
    """An exit before the last: a norm and a linear map onto the vocabulary, copied from the end of the model."""

    def __init__(self, llama: Llama):
        super().__init__()
        self.norm = copy.deepcopy(llama.norm)
        weight = (llama.embed_tokens if llama.lm_head is None else llama.lm_head).weight
        self.linear = nn.Linear(*reversed(weight.shape), bias=False)
        self.linear.weight.data.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class TokenExits(nn.Module):
    """A Llama with a head after each layer in `exits`; the last exit, L, is its LM head."""

    def __init__(self, llama: Llama, exits: Sequence[int]):
        super().__init__()
        check_exits(exits, len(llama.layers))
        self.llama, self.exits, self.starts = llama, tuple(exits), (0, *exits)
        self.heads = nn.ModuleList(Head(llama) for _ in exits[:-1])
        self.policies = nn.ModuleList()  # of consistent.py, if it trains some

    def decide(self, k: int, x: Tensor) -> Tensor:
        """The logit of the policy's probability of stopping at exit k: (B, D) -> (B,)."""
        return self.policies[k](self.heads[k].norm(x).detach())[:, 0]

    def logits(self, k: int, x: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return self.heads[k](x) if k < len(self.heads) else self.llama.vocabulary(self.llama.norm(x))

    def states(self, ids: Tensor) -> Tensor:
        """The states of every exit at every position of whole texts, (B, T) -> (B, T, K, D)."""
        x, states = self.llama.embed_tokens(ids), []
        for start, stop in zip(self.starts, self.exits):
            x = self.llama.run(x, Place(torch.arange(ids.shape[1])[None]), start, stop)
            states.append(x)
        return torch.stack(states, 2)

    def classify(self, states: Tensor) -> Tensor:
        """(..., K, D) -> (..., K, V)."""
        return torch.stack([self.logits(k, x) for k, x in enumerate(states.unbind(-2))], -2)

    def flops(self, position: float, every_head: bool) -> np.ndarray:
        """(K,): of a token at this position that stops at exit k; see bert.Exits."""
        heads = np.arange(1, len(self.exits) + 1) if every_head else 1
        layers = np.array(self.exits) * self.llama.flops(position)
        return layers + heads * 2.0 * self.llama.embed_tokens.weight.numel()


# ---- Decoding ----
class Tokens(NamedTuple):
    """The newest token of some rows; len() is their number."""

    ids: Tensor  # (B,)
    at: Tensor  # (B,), positions
    rows: Tensor  # (B,), the number of each row in the cache

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, rows: np.ndarray) -> "Tokens":
        return Tokens(*(tensor[rows] for tensor in self))


class TokenState(NamedTuple):
    """The tokens that have not stopped."""

    hidden: Tensor  # (B, 1, D)
    tokens: Tokens

    def keep(self, rows: np.ndarray) -> "TokenState":
        return TokenState(self.hidden[rows], self.tokens.keep(rows))


class Decoding:
    """The engine of loop.py for the tokens of N prompts: a cache, and the states of tokens that stopped early.

    depth (N, S): the exit that the token of each slot has reached, as a number of segments; `hidden` (N, S, D): its
    state there. Before a segment runs, tokens of the same rows that are still waiting below it are brought up to it.
    """

    def __init__(self, model: TokenExits, prompts: int, slots: int, missing: str = "copy_state"):
        if missing not in ("copy_state", "recompute"):
            raise ValueError(f"missing must be copy_state or recompute, got {missing!r}")
        self.model, self.missing = model, missing
        self.exits: Sequence[int] = model.exits
        self.cache = Cache(model.llama.config, prompts, slots)
        self.hidden = torch.zeros(prompts, slots, model.llama.config["hidden_size"])
        self.depth = torch.full((prompts, slots), len(self.exits))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run all tokens of the prompts but their last through all layers."""
        if (length := max(map(len, prompts)) - 1) > 0:
            ids = torch.tensor([[*prompt, *[0] * length][:length] for prompt in prompts])
            place = Place(torch.arange(length).expand(len(prompts), -1), self.cache, torch.arange(len(prompts)))
            self.model.llama.run(self.model.llama.embed_tokens(ids), place, 0, self.exits[-1])

    def start(self, inputs: Tokens) -> TokenState:
        return TokenState(self.model.llama.embed_tokens(inputs.ids[:, None]), inputs)

    def advance(self, k: int, state: TokenState) -> TokenState:
        (_, at, rows), segment = state.tokens, (self.model.starts[k], self.exits[k])
        for row, position in zip(rows, at):
            slots = (self.depth[row, :position] == k).nonzero()[:, 0]  # of tokens that stopped at exit k - 1
            if len(slots):
                x, place = self.hidden[row, slots][None], Place(slots[None], self.cache, row[None])
                if self.missing == "copy_state":
                    self.model.llama.copy_state(x, place, *segment)
                else:  # one block, in which each token reads those before it
                    self.hidden[row, slots] = self.model.llama.run(x, place, *segment)[0]
                self.depth[row, slots] = k + 1
        x = self.model.llama.run(state.hidden, Place(at[:, None], self.cache, rows), *segment)
        self.hidden[rows, at], self.depth[rows, at] = x[:, 0], k + 1
        return state._replace(hidden=x)

    def read(self, k: int, state: TokenState) -> np.ndarray:
        return self.model.logits(k, state.hidden[:, 0]).numpy(force=True)

    def exit_logit(self, k: int, state: TokenState) -> np.ndarray:
        """(B,): see consistent.py."""
        return self.model.decide(k, state.hidden[:, 0]).numpy(force=True)


class Text(NamedTuple):
    """The continuation of a prompt, and the layer at which each of its tokens stopped."""

    ids: list[int]
    layers: list[int]


@torch.inference_mode()
def generate(
    model: TokenExits,
    rule: Rule,
    prompts: Sequence[Sequence[int]],
    count: int,
    missing: str = "copy_state",
    stop: Collection[int] = (),
) -> list[Text]:
    """Continue prompts of any lengths greedily, each by `count` tokens, or until a token of `stop`.

    Each step is one run of early_exit. Raises ValueError for an empty prompt, an unknown token, or too many tokens.
    """
    config, most = model.llama.config, max(map(len, prompts), default=0) + count
    known = all(0 <= token < config["vocab_size"] for prompt in prompts for token in prompt)
    if not known or not prompts or not all(prompts):
        raise ValueError(f"expected prompts of at least one token each, from 0 to {config['vocab_size'] - 1}")
    if most > config["max_position_embeddings"]:
        raise ValueError(f"expected at most {config['max_position_embeddings']} tokens, prompt included, got {most}")
    engine, texts = Decoding(model, len(prompts), most, missing), [Text([], []) for _ in prompts]
    engine.prefill(prompts)
    tokens = Tokens(*map(torch.tensor, ([p[-1] for p in prompts], [len(p) - 1 for p in prompts], range(len(prompts)))))
    for _ in range(count):
        result = early_exit(engine, rule, tokens)
        new = result.logits.argmax(1)
        for row, token, layers in zip(tokens.rows.tolist(), new.tolist(), result.layers.tolist()):
            texts[row].ids.append(token)
            texts[row].layers.append(layers)
        running = np.flatnonzero(~np.isin(new, list(stop)))
        if not len(running):
            break
        tokens = Tokens(torch.from_numpy(new), tokens.at + 1, tokens.rows).keep(running)
    return texts


# ---- Texts ----
def read_texts(path: str | Path) -> list[str]:
    """The texts of a UTF-8 file, separated by <|endoftext|> or, without it, by blank lines."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}; expected texts in UTF-8") from None
    parts = content.split("<|endoftext|>") if "<|endoftext|>" in content else re.split(r"\n\s*\n", content)
    texts = [part.strip() for part in parts if part.strip()]
    if len(texts) < 2:
        raise ValueError(f"{path}: expected texts separated by <|endoftext|> or blank lines, found {len(texts)}")
    return texts


def pieces(texts: Sequence[str], tokenizer: Tokenizer, first: int, length: int) -> Tensor:
    """The first `length` tokens of each text after the token `first`, (N, length); shorter texts are left out."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    rows = [[first, *encoding.ids[: length - 1]] for encoding in encodings if len(encoding.ids) >= length - 1]
    if len(rows) < 2:
        raise ValueError(f"expected at least 2 texts of {length - 1} tokens or more, found {len(rows)}")
    return torch.tensor(rows)
