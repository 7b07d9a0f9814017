"""A token: read after chosen layers of a decoder, which says what comes next.

TokenExits      a frozen decoder with a vocabulary head after each exit but the last, where its own LM head is; adapters
                of query and value in all layers, where a method fine-tunes; and a policy, where a method has one
SharedExits     a decoder that learns itself, and whose own head is every exit's
TextData        texts as training takes them: every token that counts is a unit
record_texts    what every exit says at every token that counts, recorded once, so that any rule can be replayed on it
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.backbones.layers import StackedLinear
from mini_ee.backbones.lora import LowRank, check_lora
from mini_ee.confidence import MEASURES
from mini_ee.data.decoder_texts import Text
from mini_ee.data.progress import tqdm
from mini_ee.exits.decoding import Step, gather
from mini_ee.exits.generation import generate, token_weights
from mini_ee.exits.heads import OwnHead, VocabularyHead
from mini_ee.exits.row_exits import ExitModel, Fork, RunLayers, States, check_exits
from mini_ee.recording import Record, Recorded
from mini_ee.rules import NeverExit, Rule

TEXTS_BATCH = 16  # texts that are read together where nothing learns
TOKENS_A_STEP = 256  # at least, where a stage learns from states: a token is far less than a text
NO_LABEL = -100  # of a position that no token follows, as torch's cross_entropy passes it over


class QueryValueAdapter(nn.Module):
    """alpha / rank (A B) on the query and the value of a stacked projection (Hu et al. 2022)."""

    def __init__(self, linear: StackedLinear, rank: int, alpha: float):
        super().__init__()
        query, self.key, value = linear.sizes
        self.query, self.value = LowRank(linear.in_features, rank, query), LowRank(linear.in_features, rank, value)
        self.scale = alpha / rank

    def delta(self) -> Tensor:
        """What is added to the projection's weight: (Q + K + V, D)."""
        query, value = ((pair.A @ pair.B).T for pair in (self.query, self.value))
        return self.scale * torch.cat((query, query.new_zeros(self.key, query.shape[1]), value))

    def adapt(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """What the projection `name` makes of x, with what the adapter adds."""
        return y + x @ self.delta().T if name == "qkv" else y


class TokenExits(ExitModel):
    """A decoder with exits. Only heads, adapters and policy learn: the decoder stays as it was pretrained.

    init: of the heads, "scratch" or "copy" (of the model's own). rank, alpha: of the adapters; None: there are none.
    policy: as in RowExits; it sees the state as the exit's head does, behind its norm, and no gradient flows back.
    A single exit, L, makes a plain decoder. Raises ValueError for exits that do not end at L, and for adapters that
    cannot be.
    """

    unit = "tokens"
    holds_backbone = False  # a run on disk names it
    missing_kv = "copy_state"  # default: keys and values of the layers that a token skipped

    def __init__(
        self,
        backbone,
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
        self.folded: dict[str, Tensor] = {}  # adapters that the decoder's weights have taken in

    @property
    def num_labels(self) -> int:
        """V, the width of the logits."""
        return self.backbone.config.vocab_size

    def each_state(
        self, input_ids: Tensor, counted: Tensor, fork: Fork | None = None, run: RunLayers | None = None
    ) -> list[Tensor]:
        """The state of every exit at the tokens that count, (N, D) each. Padding stands on the right.

        input_ids (B, T) int64, counted (B, T) bool. fork, run: as of rows.
        """
        inputs, counted = self.backbone.read_texts(input_ids, counted)
        context, hidden, depth, states = self.backbone.context(inputs), self.backbone.embed(inputs), 0, []
        adapt = None if self.adapters is None else lambda layer, *at: self.adapters[layer].adapt(*at)
        run = run or self.backbone.run_layers
        for k, layer in enumerate(self.exits):
            hidden, depth = run(hidden, context, depth, layer, adapt), layer
            read, hidden = fork(k, hidden) if fork else (hidden, hidden)
            states.append(read[counted])
        return states

    def classify(self, k: int, state: Tensor) -> Tensor:
        """What exit k says, in the end the LM head: (..., D) -> logits (..., V) float32."""
        return self.heads[k](state) if k < len(self.heads) else self.backbone.lm_logits(state)

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """What the policy says at all exits but the last: (N, K - 1)."""
        return torch.stack([decide(state) for decide, state in zip(self.policies, states)], dim=1).float()

    @property
    def whole(self) -> "TokenExits":
        """What layers are saved of: this model without its exits, or the one that it was made of."""
        return self

    @property
    def policies(self) -> list[Callable[[Tensor], Tensor]]:
        """What decides at each exit but the last, as `generate` takes it: (..., D) -> exit_logit (...)."""
        if self.policy is None:
            return []
        return [
            lambda state, k=k, norm=head.norm: self.policy.exit_logit(k, norm(state).detach())
            for k, head in enumerate(self.heads)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], rule: Rule, **settings) -> Iterator[Step]:
        """Continue prompts (token ids), a step a token, each leaving where the rule says. settings: of `generate`."""
        policies = self.policies if rule.needs_policy else ()
        exits = {"exits": self.exits, "heads": self.heads, "policies": policies, "rule": rule}
        exits = {} if isinstance(rule, NeverExit) else exits
        usual = {"stop": self.backbone.config.stop_tokens, "missing_kv": self.missing_kv}
        return generate(self.backbone, prompts, **exits, **usual | settings)

    def write(self, texts: Sequence[Text], rule: Rule, batch_size: int = TEXTS_BATCH, seed: int = 0, **settings):
        """What comes behind what each text gives (up to its `start`), in batches: a list of Generated."""
        written = []
        for begin in range(0, len(texts), batch_size):
            prompts = [text.ids[: text.start + 1] for text in texts[begin : begin + batch_size]]
            written += gather(self.generate(prompts, rule, seed=seed + begin, **settings), len(prompts))
        return written

    @torch.no_grad()
    def fold(self) -> None:
        """Add the adapters to the decoder's weights, for good: it then runs at its own speed."""
        if self.adapters is None:
            return
        for layer, adapter in zip(self.backbone.layers, self.adapters):
            layer.qkv.weight += adapter.delta()
        self.folded, self.adapters = self.adapters.state_dict(), None

    def own_state(self) -> dict[str, Tensor]:
        """Adapters too, after they were folded."""
        return super().own_state() | {f"adapters.{name}": value for name, value in self.folded.items()}


class SharedExits(TokenExits):
    """A decoder that learns itself, with its own norm and head after every exit. Raises ValueError as TokenExits."""

    holds_backbone = True  # as a checkpoint of its own in the run's folder

    def __init__(self, backbone, exits: tuple[int, ...]):
        super().__init__(backbone, (backbone.config.num_hidden_layers,))
        self.exits = check_exits(tuple(exits), backbone.config.num_hidden_layers)
        self.heads = nn.ModuleList(OwnHead(backbone) for _ in self.exits[:-1])

    def own_state(self) -> dict[str, Tensor]:
        """Nothing: all that learns is in the checkpoint."""
        return {}


# ---- What training takes ----


class TextData(NamedTuple):
    """Texts whose tokens are learned: those behind position `start` of each, or with `every` all positions."""

    texts: Sequence[Text]
    every: bool = False

    def __len__(self) -> int:
        return len(self.texts)

    def order(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        """Indices of texts of one batch after the other, every text once, drawn with the seed."""
        drawn = np.random.default_rng(seed).permutation(len(self.texts))
        return iter(np.array_split(drawn, self.steps(batch_size)))

    def steps(self, batch_size: int) -> int:
        """Batches in an epoch."""
        return -(-len(self.texts) // batch_size)

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What TokenExits.states takes, and the labels (N,): the token that follows each one that counts."""
        texts = [self.texts[row] for row in rows]
        longest = max(len(text.ids) for text in texts)
        ids = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in texts])
        lengths = torch.tensor([[len(text.ids)] for text in texts])
        starts = torch.tensor([[0 if self.every else text.start] for text in texts])
        at = torch.arange(longest)[None]
        counted = (at >= starts) & (at < lengths - (0 if self.every else 1))
        labels = ids.roll(-1, dims=1).masked_fill(at >= lengths - 1, NO_LABEL)[counted]
        return (ids.to(device), counted.to(device)), labels.to(device)

    @torch.no_grad()
    def scores(self, model: TokenExits, batch_size: int) -> tuple[list[float], dict]:
        """The share of tokens at which each exit's likeliest token is the label; of all positions the last exit's."""
        model.eval()
        device, right, total = next(model.parameters()).device, np.zeros(len(model.exits)), 0
        for rows in _in_turn(len(self.texts), batch_size):
            inputs, labels = self.batch(rows, device)
            said = [logits.argmax(-1) for logits in model(*inputs)]
            labels = said[-1] if self.every else labels
            right += [int((each == labels).sum()) for each in said]
            total += len(labels)
        return (right / total).tolist(), {}

    @torch.no_grad()
    def states(self, model: TokenExits) -> States:
        """What the exits of a model in eval mode make of every token that counts."""
        model.eval()
        device, states, labels = next(model.parameters()).device, [], []
        for rows in tqdm(_in_turn(len(self.texts), TEXTS_BATCH), desc="reading", unit="batch", delay=2):
            inputs, following = self.batch(rows, device)
            states.append(torch.stack(model.states(*inputs), dim=1))
            labels.append(following)
        states, labels = torch.cat(states), torch.cat(labels)

        def steps(batch_size: int) -> int:
            return -(-len(labels) // max(batch_size, TOKENS_A_STEP))

        def order(batch_size: int, seed: int) -> Iterator[np.ndarray]:
            return iter(np.array_split(np.random.default_rng(seed).permutation(len(labels)), steps(batch_size)))

        return States(states, labels, order, steps)


def _in_turn(count: int, size: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), -(-count // size))


# ---- Recorded texts ----


@torch.inference_mode()
def record_texts(
    model: TokenExits,
    texts: Sequence[Text],
    batch_size: int = TEXTS_BATCH,
    progress: str = "reading",
    last: bool = True,
) -> Record:
    """Read every exit at the tokens of each text from its `start` on; a text is a group.

    Each token has seen all layers of those before it, as a prompt has, and as decoding has if its missing_kv is
    "recompute". The record's logits are (N, K, 2): ln p of the token that follows (nan where none does), and 1 where
    that token is the exit's likeliest. Its measures are all that a rule may ask for. Tokens stand in the order of the
    texts. last: the last token of a text, which none follows, is read too.
    """
    device, parts = next(model.parameters()).device, []
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].ids))
    for begin in tqdm(range(0, len(order), batch_size), desc=progress, unit="batch", delay=2):
        rows = order[begin : begin + batch_size]
        whole = [texts[row].ids for row in rows]
        reads = [tuple(ids if last else ids[:-1]) for ids in whole]
        pairs = [(some, texts[row].start) for some, row in zip(reads, rows)]
        unique = {pair: at for at, pair in enumerate(dict.fromkeys(pairs))}  # MMLU's letters all follow one text
        ids = nn.utils.rnn.pad_sequence([torch.tensor(some) for some, _ in unique], batch_first=True).to(device)
        at = torch.arange(ids.shape[1])[None]
        lengths, starts = (torch.tensor(numbers)[:, None] for numbers in zip(*((len(some), s) for some, s in unique)))
        inputs, counted = model.backbone.read_texts(ids, ((at >= starts) & (at < lengths)).to(device))
        following = [token for row, some in zip(rows, whole) for token in some[texts[row].start + 1 :]]
        if last:
            following = [token for row, some in zip(rows, whole) for token in (*some[texts[row].start + 1 :], NO_LABEL)]
        which = torch.tensor([unique[pair] for pair in pairs], device=device)
        counted = counted[which]
        said = _said(model, inputs, (which, counted), torch.tensor(following, device=device))
        said["groups"] = np.repeat(rows, counted.sum(1).numpy(force=True))
        said["position"] = counted.nonzero()[:, 1].numpy(force=True)
        parts.append(said)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    back = np.argsort(found["groups"], kind="stable")
    found = {name: values[back] for name, values in found.items()}
    groups, position, answers = (found.pop(name) for name in ("groups", "position", "answers"))
    passes = np.diff(model.exits, prepend=0).tolist()
    layer, attention, head = token_weights(model.backbone)
    layers = 2.0 * (layer + 2 * attention * (position + 1))
    flops = np.stack([np.outer(layers, passes), np.full((len(groups), len(passes)), 2.0 * head)], axis=2)
    recorded = Recorded(model.exits, answers, flops, passes, found)
    return Record(recorded, answers, float(flops[:, :, 0].sum(1).mean() + 2.0 * head), groups)


def _said(model: TokenExits, inputs, places: tuple[Tensor, Tensor], following: Tensor) -> dict[str, np.ndarray]:
    """What every exit says at the tokens that count, as a record holds it; logits of one exit at a time.

    places: which of the read texts each text is, (B,), and which of its tokens count, (B, T) bool.
    """
    which, counted = places
    context, hidden = model.backbone.context(inputs), model.backbone.embed(inputs)
    before, columns = hidden[which][counted], {}
    for k, (start, stop) in enumerate(zip((0, *model.exits), model.exits)):
        hidden = model.backbone.run_layers(hidden, context, start, stop)
        state = hidden[which][counted]
        log_p = model.classify(k, state).log_softmax(-1)
        said = log_p.argmax(-1)
        of_next = log_p.gather(-1, following.clamp(min=0)[:, None])[:, 0].masked_fill(following < 0, torch.nan)
        found = {"answers": torch.stack((of_next, (said == following).float()), dim=1), "prediction": said}
        if k < len(model.exits) - 1:
            found |= _measures(log_p)
            cosine = torch.cosine_similarity(before.float(), state.float())
            found["saturation"] = cosine.clamp(-1, 1)  # rounding would pass the ends
            if model.policy is not None:
                found["exit_logit"] = model.policies[k](state).float()
        before = state
        for name, values in found.items():
            columns.setdefault(name, []).append(values.numpy(force=True))
    return {name: np.stack(values, axis=1) for name, values in columns.items()}


def _measures(log_p: Tensor) -> dict[str, Tensor]:
    """confidence.MEASURES of ln p (N, V), on the model's device: (N,) each."""
    first, second = log_p.topk(2).values.unbind(-1)
    entropy = (log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    found = {
        "max_probability": first.exp(),
        "entropy": entropy,
        "normalised_entropy": (entropy / np.log(log_p.shape[-1])).clamp(min=-1),
        "breaking_ties": first.exp() - second.exp(),
        "breaking_ties_logits": first - second,
    }
    return {name: found[name] for name in MEASURES}
