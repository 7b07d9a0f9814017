"""Examples exit: a sentence or a pair (a row) becomes one vector after chosen layers of a backbone.

RowExits        a backbone with a head at each exit; some methods add a policy
RowSegments     the same model as segments for early_exit
RowData         encoded rows with their labels, as training data
States          the states of every exit, computed once, for a stage that trains with a frozen backbone
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone, LayerContext, Tensors, tensor_on
from mini_ee.lab.data.tokenizer import Encoded, Inputs, batches
from mini_ee.lab.exits.heads import ExitHead, exit_heads, load_head
from mini_ee.lab.recording import Record, predictions, record
from mini_ee.lab.segments import Segments
from mini_ee.lab.token_tasks import FAR, SPAN, TokenTask

if TYPE_CHECKING:
    from mini_ee.lab.data.tasks import Task
    from mini_ee.lab.exits.state_store import Allocate

TRAINED_TOKENS = 16  # of each row, from which heads for tokens learn

STATES_BATCH = 64  # rows in a batch without training

PART = 8192  # rows whose heads are read together

Fork = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(k, hidden) -> the input of exit k, and that of the layers above: equal values, whose gradients may differ."""

RunLayers = Callable[..., Tensor]
"""A replacement of Backbone.run_layers, for a training that observes layers or skips some."""


def even_exits(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` exits as evenly spread as whole layers allow, the last at num_layers.

    >>> even_exits(12, 4), even_exits(6, 4)
    ((3, 6, 9, 12), (2, 3, 4, 6))
    """
    count = min(count, num_layers)
    return tuple(sorted({round(num_layers * (i + 1) / count) for i in range(count)}))


def check_exits(exits: tuple[int, ...], num_layers: int, least: int = 1) -> tuple[int, ...]:
    """The same exits, or ValueError: they must ascend within least..L and end at L. Exit 0 reads the embeddings."""
    ascending = all(isinstance(b, int) and a < b for a, b in zip((least - 1, *exits), exits))
    if not exits or not ascending or exits[-1] != num_layers:
        raise ValueError(
            f"exits must ascend from at least {least} and end at the last layer, {num_layers}, "
            f"got {','.join(map(str, exits)) or 'none'}"
        )
    return exits


class ExitModel(nn.Module):
    """The interface of models with exits for training and for runs on disk. They have `backbone`, `exits`, `pool`."""

    unit = "rows"
    head = "dense"  # kind of its heads, see registry.HEADS
    multi_label = False  # whether an input may have several labels at once: each logit is of a sigmoid
    token_task: TokenTask | None = None  # if tokens have labels; then states are (B, T, D), logits (B, T, C)
    holds_backbone = True  # a run on disk contains the backbone, because it is fine-tuned; else only its name

    def use_heads(self, name: str) -> None:
        """Replace the initialised heads by another kind, before they are trained or loaded."""
        kind = load_head(name)
        for module in list(self.modules()):
            for place, child in list(module.named_children()):
                if isinstance(child, ExitHead) and child.replaceable:
                    setattr(module, place, kind(child))
            if isinstance(module, ExitModel):  # this model, or one in a cascade
                module.head = name

    def begin(self, train: Any) -> None:
        """Called before the first step of a training, with its training data."""

    def is_trainable(self, name: str) -> bool:
        """Whether a training may change the parameter of this name."""
        return self.holds_backbone or not name.startswith("backbone.")

    def states(self, *inputs: Tensor, **hooks: Any) -> list[Tensor]:
        """The state of every exit, (N, D) each, which its head and its policy read. Arguments as in `each_state`."""
        return list(self.each_state(*inputs, **hooks))

    def forward(self, *inputs: Tensor, **hooks: Any) -> list[Tensor]:
        """Logits (N, C) of every exit. Arguments as in `each_state`. Dropout is drawn in the order of depth."""
        return [self.classify(k, state) for k, state in enumerate(self.each_state(*inputs, **hooks))]

    def own_state(self) -> dict[str, Tensor]:
        """The content of a run's model.safetensors."""
        return {name: value for name, value in self.state_dict().items() if self.is_trainable(name)}

    def save_parts(self, folder: Path, backbone: str) -> dict[str, str]:
        """Write further files of a run; returns their checksums by name. Most models have none."""
        return {}

    def load_parts(self, folder: Path, digests: dict[str, str]) -> None:
        """Read the files of save_parts."""

    def segments(self) -> Segments:
        """The segments for early_exit."""
        raise NotImplementedError


class RowExits(ExitModel):
    """A backbone with a head after each layer in `exits`; 0 is before the first layer. num_labels is 1 for regression.

    policy: (width, exits) -> a module with exit_logit(k, state (N, D)) -> (N,) for every exit but the last, above 0 if
    the row should exit at k; and with `flops`, the FLOPs of one such decision.
    """

    def __init__(
        self,
        backbone: Backbone,
        exits: tuple[int, ...],
        num_labels: int,
        pool: str = "mean",
        policy: Callable[[int, tuple[int, ...]], nn.Module] | None = None,
    ):
        super().__init__()
        self.exits = check_exits(exits, backbone.config.num_hidden_layers, least=0)
        self.num_labels, self.pool = num_labels, pool
        self.backbone = backbone
        self.heads = exit_heads(backbone, exits, num_labels, pool)
        self.policy = policy and policy(backbone.config.hidden_size, self.exits)

    def each_state(self, *inputs: Tensor, fork: Fork | None = None, run: RunLayers | None = None) -> Iterator[Tensor]:
        """The state of every exit, (B, D) each. inputs: the fields of `Tensors`: ids, mask and token types.

        fork: separates the gradients of an exit from those of the layers above, see Fork. run: see RunLayers.
        """
        inputs = Tensors(*inputs)
        context, hidden, depth = self.backbone.context(inputs), self.backbone.embed(inputs), 0
        run = run or self.backbone.run_layers
        for k, (layer, head) in enumerate(zip(self.exits, self.heads)):
            hidden, depth = run(hidden, context, depth, layer), layer
            read, hidden = fork(k, hidden) if fork else (hidden, hidden)
            yield head.state(read, context.padding)

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C) of exit k."""
        return self.heads[k].classify(state)

    def some_tokens(self, states: Tensor, inputs: Inputs) -> Tensor:
        """States (B, K, T, D) of a token_task -> those of TRAINED_TOKENS counted tokens of each row, (B, K, S, D).

        They are evenly spread over the row; for a span, the other half is where the full model sees the likeliest ends.
        """
        counted = self.token_task.counted(inputs.input_ids, inputs.attention_mask)
        rows = [places if len(places := np.flatnonzero(row)) else np.zeros(1, int) for row in counted]
        even = TRAINED_TOKENS // 2 if self.token_task.kind == SPAN else TRAINED_TOKENS
        chosen = np.stack([places[np.arange(even) * len(places) // even] for places in rows])
        if self.token_task.kind == SPAN:
            device = next(self.parameters()).device
            ends = self.classify(len(self.exits) - 1, states[:, -1].to(device)).float().numpy(force=True)
            likely = np.argsort(-np.where(counted[:, :, None], ends, FAR), axis=1)
            likely = likely[:, np.arange(TRAINED_TOKENS // 4) % likely.shape[1]].reshape(len(likely), -1)
            chosen = np.concatenate((chosen, likely), axis=1)
        return torch.stack([row[:, some] for row, some in zip(states, torch.from_numpy(chosen))])

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """The policy's exit_logits at all exits but the last: (B, K - 1) float32."""
        return torch.stack([self.policy.exit_logit(k, state) for k, state in enumerate(states[:-1])], dim=1).float()

    def segments(self) -> "RowSegments":
        return RowSegments(self)


# ---- Segments ----


class RowState(NamedTuple):
    """The rows that have not exited."""

    hidden: Tensor  # (B, T, D)
    context: LayerContext

    def keep(self, rows: np.ndarray) -> "RowState":
        index = tensor_on(self.hidden.device, rows)
        return RowState(self.hidden[index], self.context.keep(index))


class TokenState(NamedTuple):
    """The same of a token_task."""

    hidden: Tensor
    context: LayerContext
    counted: np.ndarray  # (B, T) bool

    def keep(self, rows: np.ndarray) -> "TokenState":
        index = tensor_on(self.hidden.device, rows)
        return TokenState(self.hidden[index], self.context.keep(index), self.counted[rows])


class RowSegments(Segments):
    """The segments of a RowExits in eval mode."""

    engine = "torch"
    carried: str | None = None  # a field of the state, besides `hidden`, that the next segment needs

    def __init__(self, model: RowExits):
        self.model = model.eval()
        self.exits = model.exits
        self.starts = (0, *model.exits)
        self.has_policy, self.token_task = model.policy is not None, model.token_task

    def running(self) -> torch.inference_mode:
        """Without gradients. Entered once per batch: once per call would take noticeable time at batch size 1."""
        return torch.inference_mode()

    def start(self, inputs: Inputs) -> RowState | TokenState:
        state = RowState(self.model.backbone.embed(inputs), self.model.backbone.context(inputs))
        if self.token_task is None:
            return state
        return TokenState(*state, self.token_task.counted(inputs.input_ids, inputs.attention_mask))

    def advance(self, k: int, state: RowState) -> RowState:
        hidden = self.model.backbone.run_layers(state.hidden, state.context, self.starts[k], self.exits[k])
        return state._replace(hidden=hidden)

    def read(self, k: int, state: RowState) -> np.ndarray:
        vector = self.model.heads[k].state(state.hidden, state.context.padding)
        return self.model.heads[k].classify(vector).float().numpy(force=True)

    def counted(self, state: TokenState) -> np.ndarray:
        return state.counted

    def exit_logit(self, k: int, state: RowState) -> np.ndarray:
        if not self.has_policy:
            return super().exit_logit(k, state)
        return self.decided(k, self.model.heads[k].state(state.hidden, state.context.padding))

    def decided(self, k: int, state: Tensor) -> np.ndarray:
        """The policy's exit_logit of what it reads."""
        return self.model.policy.exit_logit(k, state).float().numpy(force=True)

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        tokens = inputs.input_ids.shape[1]
        layers = self.layer_passes(k) * self.model.backbone.layer_flops(tokens)
        layers += 0.0 if k else self.model.backbone.start_flops(tokens)
        return layers, self.model.heads[k].flops(tokens)

    def state_flops(self, k: int, needs: str) -> float | None:
        if self.token_task is not None:  # the rule reads the logits
            return None
        return self.model.policy.flops if self.has_policy and k < len(self.exits) - 1 else 0.0


# ---- Training data ----


class RowData(NamedTuple):
    """Encoded rows with their labels: (N,) int64 class indices, float32 for regression, RANKED for a ranking."""

    encoded: Encoded
    labels: np.ndarray
    task: "Task"
    known: "Known | None" = None

    def __len__(self) -> int:
        return len(self.labels)

    def order(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        """Row indices (B,) of each batch; every row once, in an order drawn with the seed."""
        return batches(self.encoded, batch_size, shuffle_seed=seed)

    def steps(self, batch_size: int) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.labels) // batch_size)

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs of a model's `states`, and the labels (B,)."""
        inputs = self.encoded.batch(rows)
        arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids, self.targets()[rows])
        *ids, labels = (torch.from_numpy(array).to(device) for array in arrays)
        return tuple(ids), labels

    def scores(self, model: RowExits, batch_size: int) -> tuple[list[float], dict]:
        """The task's score at every exit; for classes also the rows for which the last exit is `wrong`."""
        return self.scores_of(record(model.segments(), self.encoded, batch_size).logits)

    def scores_of(self, logits: np.ndarray) -> tuple[list[float], dict]:
        """The same of logits (N, K, C)."""
        predicted = predictions(logits, self.task)
        scores = [self.task.score(exit_predictions, self.labels)["score"] for exit_predictions in predicted.T]
        more = {} if self.task.regression else {"wrong": np.flatnonzero(predicted[:, -1] != self.labels).tolist()}
        return scores, more

    @torch.no_grad()
    def states(self, model: RowExits, allocate: "Allocate | None" = None) -> "States":
        """The states of all exits of every row, in eval mode. allocate: room for them; None: in memory."""
        if self.known is not None:
            columns, states = [self.known.layers.index(layer) for layer in model.exits], self.known.states
            states = states if len(columns) == states.shape[1] else states[:, columns]
            return States(states, torch.from_numpy(self.targets()), *self._training_fields())
        from mini_ee.lab.data.progress import tqdm  # imported here because only a training needs it

        if allocate is None:
            from mini_ee.lab.exits.state_store import in_memory as allocate
        device, stored = next(model.parameters()).device, None
        model.eval()
        batched = list(batches(self.encoded, STATES_BATCH))
        for number, rows in enumerate(tqdm(batched, desc="states", unit="batch", delay=2)):
            if stored is not None and number < stored.done:
                continue
            batch_states = torch.stack(
                [state.float().cpu() for state in model.states(*self.batch(rows, device)[0])], dim=1
            )
            if model.token_task is not None:
                batch_states = model.some_tokens(batch_states, self.encoded.batch(rows))
            stored = stored or allocate((len(self), *batch_states.shape[1:]))
            stored.states[rows] = batch_states
            stored.wrote(number + 1, last=number + 1 == len(batched))
        return States(stored.states, torch.from_numpy(self.targets()), *self._training_fields())

    def targets(self) -> np.ndarray:
        """The labels that a loss reads: those of a ranking without their queries."""
        return self.labels["score"].copy() if self.labels.dtype.names else self.labels

    def _training_fields(self) -> tuple:
        return self.order, self.steps, self.scores_of

    def recorded(self, model: RowExits, batch_size: int, progress: str) -> Record:
        """The logits of all exits, and the labels. Nothing runs but the heads, if the states are known.

        Those of a token_task are not: its states are of some tokens. Its labels are what the last exit decides of all.
        """
        segments, known = model.segments(), self.known is not None and model.token_task is None
        logits = self.states(model).logits(model) if known else None
        recorded = record(segments, self.encoded, batch_size, progress, segments.whole(), logits)
        return recorded._replace(labels=self.labels if model.token_task is None else recorded.logits[:, -1, 0])


class Known(NamedTuple):
    """The states of these rows after some layers of a model that stays as it is."""

    layers: tuple[int, ...]
    states: Tensor  # (N, len(layers), D)


class States(NamedTuple):
    """The states of every exit for N units (rows or tokens), computed once."""

    states: Tensor  # (N, K, D)
    labels: Tensor  # (N,)
    order: Callable[[int, int], Iterator[np.ndarray]]  # as RowData.order
    steps: Callable[[int], int]
    scores_of: Callable[[np.ndarray], tuple[list[float], dict]] | None = None  # of examples: as RowData.scores_of

    def __len__(self) -> int:
        return len(self.labels)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> tuple[list[float], dict]:
        """As RowData.scores, without running the backbone again. model: in eval mode."""
        return self.scores_of(self.logits(model))

    @torch.no_grad()
    def logits(self, model: nn.Module, exits: Sequence[int] | None = None) -> np.ndarray:
        """(N, K, C) float32: the logits of every exit, or of those at some places. model: in eval mode."""
        device, parts = next(model.parameters()).device, []
        for states in self.states.split(PART):
            pairs = zip(exits or range(states.shape[1]), states.to(device)[:, exits or slice(None)].unbind(dim=1))
            parts.append(np.stack([model.classify(k, state).float().numpy(force=True) for k, state in pairs], axis=1))
        return np.concatenate(parts)

    def batch(self, units: np.ndarray, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The states of every exit, (N, D) each, and the labels (N,)."""
        states, labels = self.states[units].to(device).float(), self.labels[units].to(device)
        return list(states.unbind(dim=1)), labels
