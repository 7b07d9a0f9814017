"""Tokens exit: a decoder predicts the next token after chosen layers.

TokenExits      a frozen decoder with a vocabulary head after each exit before the last, which has the LM head; some
                methods add adapters of query and value in all layers, or a policy
SharedExits     a decoder that is trained, and whose own LM head is used at every exit
TextData        texts as training data; a unit is a token that counts
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.backbones.layers import StackedLinear
from mini_ee.lab.backbones.lora import check_lora
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.exits.decoding import Generated, Step, gather
from mini_ee.lab.exits.generation import TokenSegments, generate
from mini_ee.lab.exits.heads import OwnHead, VocabularyHead, load_vocabulary_head
from mini_ee.lab.exits.lens import EPS, fit_in_closed_form
from mini_ee.lab.exits.lossless import DRAFT, generate_lossless
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.row_exits import ExitModel, Fork, RunLayers, States, check_exits
from mini_ee.lab.exits.state_store import Allocate, in_memory
from mini_ee.lab.rules import Never, Rule
from mini_ee.lora_exits import LowRank

TEXTS_BATCH = 16  # texts in a batch without training
TOKENS_A_STEP = 256  # tokens at least, if a stage learns from states: a token is much less than a text
CLOSED_FORM_TOKENS = 40_960  # from which the maps of lenses are fitted, unless all states are known
PART = 512  # tokens whose logits are computed together, of known states
OWN_HEADS = "own", "dense"  # `head` of a model with its method's heads; "dense" in runs of earlier versions
NO_LABEL = -100  # label of the last position of a text; torch's cross_entropy ignores it


class QueryValueAdapter(nn.Module):
    """Adds alpha / rank (A B) to the query and the value of a stacked projection (LoRA, Hu et al. 2022)."""

    def __init__(self, linear: StackedLinear, rank: int, alpha: float):
        super().__init__()
        query, self.key, value = linear.sizes
        self.query, self.value = (LowRank(linear.in_features, size, rank) for size in (query, value))
        self.scale = alpha / rank

    def delta(self) -> Tensor:
        """The update of the projection's weight: (Q + K + V, D), 0 for the key."""
        query, value = ((pair.A @ pair.B).T for pair in (self.query, self.value))
        return self.scale * torch.cat((query, query.new_zeros(self.key, query.shape[1]), value))

    def adapt(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The output for x of the projection `name`, with the update; y is the output without it."""
        return y + x @ self.delta().T if name == "qkv" else y


class TokenExits(ExitModel):
    """A decoder with exits. Only heads, adapters and policy are trained; the decoder stays as it was pretrained.

    init: of the heads, "scratch" or "copy" (of the LM head). rank, alpha: of the adapters; rank None: no adapters.
    policy: as in RowExits; it reads the state after the norm of the exit's head, and no gradient flows back.
    With a single exit, L, this is a plain decoder. Raises ValueError if exits do not end at L, or if rank or alpha are
    invalid.
    """

    unit = "tokens"
    head = "own"  # or a name in registry.VOCABULARY_HEADS
    holds_backbone = False  # a run on disk contains its name
    missing_kv = "copy_state"  # default of how keys and values of skipped layers are filled in
    segments_class = TokenSegments  # what decodes with its exits
    chooses_drafter = False  # whether lossless decoding chooses the exit that drafts, if none is named
    own_layers = False  # whether each exit before the last has a transformer layer, with a cache, of its own
    gated = False  # whether its policy is a gate, which learns when all else is trained

    def __init__(
        self,
        backbone: GenerativeBackbone,
        exits: tuple[int, ...],
        init: str = "copy",
        policy: Callable[[int, tuple[int, ...]], nn.Module] | None = None,
        rank: int | None = None,
        alpha: float = 16.0,
    ):
        super().__init__()
        self.exits = check_exits(tuple(exits), backbone.config.num_hidden_layers)
        self.init, self.rank, self.alpha, self.pool = init, rank, alpha, None
        self.backbone = backbone.eval().requires_grad_(False)
        self.heads = nn.ModuleList(VocabularyHead(backbone, init) for _ in self.exits[:-1])
        self.adapters = None
        if rank is not None:
            check_lora(rank, alpha)
            self.adapters = nn.ModuleList(QueryValueAdapter(layer.qkv, rank, alpha) for layer in backbone.layers)
        self.policy = policy and policy(backbone.config.hidden_size, self.exits)
        self.folded: dict[str, Tensor] = {}  # adapters that were added to the decoder's weights

    def use_heads(self, name: str) -> None:
        """Replace the heads by those of this kind, and give the model a gate unless its method has a policy."""
        if name in OWN_HEADS:
            return
        kind = load_vocabulary_head(name)
        self.heads, self.head = nn.ModuleList(kind(self.backbone) for _ in self.exits[:-1]), name
        self.gated = self.policy is None
        if self.gated:
            self.policy = PolicyNetworks(self.backbone.config.hidden_size, self.exits).to(self.backbone.device)

    def begin(self, train: "TextData") -> None:
        """Fit lenses in closed form, before they are trained, and choose their short list."""
        if self.head == "lens":
            self.eval()
            tokens = train if train.known else train.first(CLOSED_FORM_TOKENS)
            fit_in_closed_form(self.heads, (states for states, _ in tokens.state_batches(self)))
            followed = torch.tensor([token for text in train.texts for token in text.ids[text.start + 1 :]])
            for head in self.heads:
                head.shorten(followed.to(head.likely.device))

    @property
    def num_labels(self) -> int:
        """V, the width of the logits."""
        return self.backbone.config.vocab_size

    def each_state(
        self, input_ids: Tensor, counted: Tensor, fork: Fork | None = None, run: RunLayers | None = None
    ) -> list[Tensor]:
        """The state of every exit at the tokens that count, (N, D) each. Padding is on the right.

        input_ids (B, T) int64, counted (B, T) bool. fork, run: as in RowExits.each_state.
        """
        inputs, counted = self.backbone.read_texts(input_ids, counted)
        context, hidden, depth, states = self.backbone.context(inputs), self.backbone.embed(inputs), 0, []
        adapt = None if self.adapters is None else lambda layer, *at: self.adapters[layer].adapt(*at)
        run = run or self.backbone.run_layers
        for k, layer in enumerate(self.exits):
            hidden, depth = run(hidden, context, depth, layer, adapt), layer
            read, hidden = fork(k, hidden) if fork else (hidden, hidden)
            states.append(self.head_input(k, read, context)[counted])
        return states

    def head_input(self, k: int, hidden: Tensor, context: Any) -> Tensor:
        """What the head of exit k reads, (B, T, D), of the states at this exit: the states themselves, unless the
        exit has a layer of its own."""
        return hidden

    def write_exit_keys(self, k: int, hidden: Tensor, context: Any) -> None:
        """Write the keys and values of the states at exit k, if the exit has a layer of its own."""

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(..., D) -> logits (..., V) float32 of exit k; the last exit has the LM head."""
        return self.heads[k](state) if k < len(self.heads) else self.backbone.lm_logits(state)

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """The policy's exit_logits at all exits but the last: (N, K - 1) float32."""
        return torch.stack([decide(state) for decide, state in zip(self.policies, states)], dim=1).float()

    @property
    def whole(self) -> "TokenExits":
        """The full model, against which saved layers are counted: this one, or the model that it was made from."""
        return self

    @property
    def policies(self) -> list[Callable[[Tensor], Tensor]]:
        """The policy of each exit but the last, as `generate` takes it: (..., D) -> exit_logit (...)."""
        if self.policy is None:
            return []
        return [
            lambda state, k=k, norm=head.norm: self.policy.exit_logit(k, norm(state).detach())
            for k, head in enumerate(self.heads)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], rule: Rule, **settings: Any) -> Iterator[Step]:
        """Continue prompts (token ids), one token per step, under a rule. settings: of `generate`."""
        policies = self.policies if rule.needs == "exit_logit" else ()
        exits = {"exits": self.exits, "heads": self.heads, "policies": policies, "rule": rule}
        exits["segments_class"] = self.segments_class
        exits = {} if isinstance(rule, Never) else exits
        defaults = {"stop": self.backbone.config.stop_tokens, "missing_kv": self.missing_kv}
        return generate(self.backbone, prompts, **exits, **defaults | settings)

    def generate_lossless(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        exit_layer: int | None = None,
        draft: int | None = None,
        stop: Sequence[int] | None = None,
    ) -> Iterator[Step]:
        """The full model's greedy text, as `lossless.generate_lossless`. exit_layer: which drafts; None: the first."""
        k = 0 if exit_layer is None else self.exits.index(exit_layer)
        exits = {"exit_layer": self.exits[k], "head": self.heads[k], "segments_class": self.segments_class}
        settings = {"max_new_tokens": max_new_tokens, "draft": draft or DRAFT}
        stop = self.backbone.config.stop_tokens if stop is None else stop
        return generate_lossless(self.backbone, prompts, stop=stop, **exits, **settings)

    def write(
        self, texts: Sequence[Text], rule: Rule, batch_size: int = TEXTS_BATCH, seed: int = 0, **settings: Any
    ) -> list[Generated]:
        """Continuations of the beginning of each text (up to its `start`), generated in batches."""
        written = []
        for begin in range(0, len(texts), batch_size):
            prompts = [text.ids[: text.start + 1] for text in texts[begin : begin + batch_size]]
            written += gather(self.generate(prompts, rule, seed=seed + begin, **settings), len(prompts))
        return written

    @torch.no_grad()
    def fold(self) -> None:
        """Add the adapters to the decoder's weights permanently: then they cost no time."""
        if self.adapters is None:
            return
        for layer, adapter in zip(self.backbone.layers, self.adapters):
            layer.qkv.weight += adapter.delta()
        self.folded, self.adapters = self.adapters.state_dict(), None

    def own_state(self) -> dict[str, Tensor]:
        """Also the adapters that were folded."""
        return super().own_state() | {f"adapters.{name}": value for name, value in self.folded.items()}


class SharedExits(TokenExits):
    """A decoder that is trained, with its own norm and LM head at every exit. Raises ValueError like TokenExits."""

    holds_backbone = True  # as a checkpoint in the run's folder

    def __init__(self, backbone: GenerativeBackbone, exits: tuple[int, ...]):
        super().__init__(backbone, (backbone.config.num_hidden_layers,))
        self.exits = check_exits(tuple(exits), backbone.config.num_hidden_layers)
        self.heads = nn.ModuleList(OwnHead(backbone) for _ in self.exits[:-1])

    def own_state(self) -> dict[str, Tensor]:
        """What is not in the checkpoint: nothing, unless other heads were chosen."""
        return {name: value for name, value in super().own_state().items() if not name.startswith("backbone.")}


# ---- Training data ----


class TextData(NamedTuple):
    """Texts whose tokens are learned: those after position `start` of each, or with `every` all positions."""

    texts: Sequence[Text]
    every: bool = False
    known: States | None = None  # of a model that stays as it is

    def __len__(self) -> int:
        return len(self.texts)

    def sizes(self) -> np.ndarray:
        """Of each text the number of tokens that count."""
        return np.array([len(text.ids) - (0 if self.every else text.start + 1) for text in self.texts])

    def first(self, tokens: int) -> "TextData":
        """The first texts, as many as have this number of tokens together; all, if they have fewer."""
        ends = np.cumsum(self.sizes())
        count = int(np.searchsorted(ends, tokens)) + 1
        known = self.known and token_states(*(tensor[: ends[:count][-1]] for tensor in self.known[:2]))
        return TextData(self.texts[:count], self.every, known)

    def order(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        """Indices of the texts of each batch; every text once, in an order drawn with the seed."""
        drawn = np.random.default_rng(seed).permutation(len(self.texts))
        return iter(np.array_split(drawn, self.steps(batch_size)))

    def steps(self, batch_size: int) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.texts) // batch_size)

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The inputs of TokenExits.states, and the labels (N,): the token after each token that counts."""
        texts = [self.texts[row] for row in rows]
        longest = max(len(text.ids) for text in texts)
        ids = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in texts])
        lengths = torch.tensor([[len(text.ids)] for text in texts])
        starts = torch.tensor([[0 if self.every else text.start] for text in texts])
        # Counted positions predict the next token, so without `every` the last position, which has none, is left out.
        at = torch.arange(longest)[None]
        counted = (at >= starts) & (at < lengths - (0 if self.every else 1))
        labels = ids.roll(-1, dims=1).masked_fill(at >= lengths - 1, NO_LABEL)[counted]
        return (ids.to(device), counted.to(device)), labels.to(device)

    @torch.no_grad()
    def scores(self, model: TokenExits, batch_size: int) -> tuple[list[float], dict]:
        """For each exit: the share of tokens for which the most likely token is the label.

        With `every` the label is the prediction of the last exit. The dict is empty, see RowData.scores.
        """
        model.eval()
        right, total = np.zeros(len(model.exits)), 0
        for states, labels in self.state_batches(model, batch_size=batch_size):
            predictions = [model.classify(k, state).argmax(-1) for k, state in enumerate(states.unbind(dim=1))]
            labels = predictions[-1] if self.every else labels
            right += [int((exit_predictions == labels).sum()) for exit_predictions in predictions]
            total += len(labels)
        return (right / total).tolist(), {}

    @torch.no_grad()
    def state_batches(self, model: TokenExits, batch_size: int = TEXTS_BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        """The states of all exits at every token that counts, (n, K, D) float32, and the labels (n,), in parts."""
        device = next(model.parameters()).device
        for states, labels in zip(*(part.split(PART) for part in self.known[:2])) if self.known else ():
            yield states.to(device).float(), labels.to(device)
        for rows in () if self.known else _in_turn(len(self.texts), batch_size):
            inputs, labels = self.batch(rows, device)
            yield torch.stack(model.states(*inputs), dim=1), labels

    @torch.no_grad()
    def states(self, model: TokenExits, allocate: Allocate | None = None) -> States:
        """The states of all exits, in eval mode, at every token that counts.

        allocate: room for them. It may be of half precision, so each is divided by its root mean square then. The norm
        of a head makes the same of both, but the largest numbers of a state, beyond 65,504, would be infinite.
        """
        if self.known is not None:
            return self.known
        model.eval()
        device, stored, labels, end = next(model.parameters()).device, None, [], 0
        batched = _in_turn(len(self.texts), TEXTS_BATCH)
        for number, rows in enumerate(tqdm(batched, desc="reading", unit="batch", delay=2)):
            inputs, following = self.batch(rows, device)
            labels.append(following.cpu())
            begin, end = end, end + len(following)
            if stored is not None and number < stored.done:
                continue
            states = torch.stack(model.states(*inputs), dim=1)
            states = states if allocate is None else F.rms_norm(states, states.shape[-1:], eps=EPS)
            stored = stored or (allocate or in_memory)((int(self.sizes().sum()), *states.shape[1:]))
            stored.states[begin:end] = states.cpu()
            stored.wrote(number + 1, last=number + 1 == len(batched))
        return token_states(stored.states, torch.cat(labels))


def token_states(states: Tensor, labels: Tensor) -> States:
    """The States of tokens: (N, K, D), (N,)."""

    def steps(batch_size: int) -> int:
        return -(-len(labels) // max(batch_size, TOKENS_A_STEP))

    def order(batch_size: int, seed: int) -> Iterator[np.ndarray]:
        return iter(np.array_split(np.random.default_rng(seed).permutation(len(labels)), steps(batch_size)))

    return States(states, labels, order, steps)


def _in_turn(count: int, size: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), -(-count // size))
