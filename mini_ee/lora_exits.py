"""LoRAExit (Liu et al. 2024): each exit has its own low-rank adapters on one frozen backbone.

Paper: Jiacheng Liu, Peng Tang, Xiaofeng Hou, Chao Li, Pheng-Ann Heng: LoRAExit: Empowering Dynamic Modulation of LLMs
in Resource-limited Settings using Low-rank Adapters. Findings of EMNLP 2024, 2024.findings-emnlp.539 (ACL Anthology).

    Eq. 1   h_i = LN(FFN(LN(SA(h_{i-1}) + h_{i-1})))  layer i of the backbone: bert.py, which also adds the FFN's input
    Eq. 2   y = x (W + A B)                           a linear map: W is frozen; each exit has its A, B there: Adapters
    Eq. 3   CE(c, z^N)                                the last exit learns from labels: exit_loss,
    Eq. 4   (1 - lambda) CE(c, z^k) + lambda KL(q^t, q^k)     the others also from a teacher t: exit_loss
    Eq. 5   q^k = softmax(z^k / T)                    soft labels: log_soft_label
    Eq. 6   y_i = x_i W + x_i A_i B_i                 rows of several exits i share the product with W: sgmv, SideBySide

Symbols: A (I, m), B (m, O) with rank m; y what a linear map computes (the paper's x'); c the labels, q soft labels (its
y with a hat, a bar); k = 1 .. N the exits, here 0 .. K - 1; z^k the logits of exit k. In shapes R rows, S tokens.
SEGD, the paper's distillation: the teacher of an exit is the next one. So the last exit is trained first.

Deviations from the paper, and what it leaves open, with the test in tests/spec/test_1_lora_exits.py:
1. A B is scaled by alpha / m, as in Hu et al. 2022 (test_eq2_an_exit_computes_with_w_plus_ab).
2. The last exit has adapters too: the backbone stays as it was, without dropout (test_fit_trains_no_backbone).
3. Heads read the mean over tokens; the paper does not specify it (test_heads_read_the_mean_by_default).
4. A regression has no soft labels and learns its teacher's value (test_a_regression_follows_its_teachers_value).

Cost. The paper reports latency, mean layers and memory (Tables 3, 5, 7, 10), but neither FLOPs nor how many layers run
for a row in all its streams. Adapters differ from layer 1 on, so exit k + 1 cannot go on from the states of exit k. Two
engines (an engine computes what the loop in loop.py asks for): LoRAExits starts a row that does not stop again from the
embeddings (restart, never more arithmetic; the script, and model.onnx). SideBySide runs all exits through one product
with W (Eq. 6): early_exit(SideBySide(model), rule, inputs) gives the same logits. Layers run for a row that stops at

    exits                              3    6    9   12
    side by side                      12   21   27   30
    restart, each exit is read         3    9   18   30
    restart, only this one is read     3    6    9   12      the rules Never (the full model) and Fixed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.bert import Bert, Exits, State
from mini_ee.data import Inputs, Rows, of_all, open_task, report, score_of, usual_rules
from mini_ee.load import exits_of
from mini_ee.rules import Rule
from mini_ee.train import Options, script, task_loss, train

RANK, ALPHA, TARGETS = 8, 16.0, ("query", "value")  # the paper names the targets, but no rank and alpha
TEMPERATURE, LAMBDA = 2.0, 0.95  # the paper tries T = 2, 10 and 20
TEACHERS = ("segd", "kd", "vanilla")  # the three ways of Table 4: the next exit, the last exit, no teacher

REPORTED = """
The paper (GLUE, mean scores after layers 3, 6, 9; Table 4: SEGD, KD, vanilla; Table 1: BERT-base, the other two):
SEGD 71.7 78.6 82.1, KD 71.5 78.3 82.1, vanilla 71.1 76.7 80.9; models of that size trained alone 72.3 79.0 82.3;
exits that share their weights (PABEE) 64.2 73.4 80.7. By a threshold (Table 3): 81.5 after 6.6 layers on average; the
full model 82.8."""


# ---- Eq. 2: adapters ----
class LowRank(nn.Module):
    """The second term of Eq. 2. B starts as 0, so that training starts from the pretrained model."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.empty(inputs, rank).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.B = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        """$scale x A B$: (..., I) -> (..., O)."""
        return scale * (x @ self.A @ self.B)


class Adapters(nn.ModuleDict):
    """The adapters of one exit in one layer: the name of a linear map -> LowRank. Called as bert.Adapt."""

    def __init__(self, layer: nn.Module, targets: Sequence[str], rank: int, scale: float):
        sizes = {name: (getattr(layer, name).in_features, getattr(layer, name).out_features) for name in targets}
        super().__init__({name: LowRank(*size, rank) for name, size in sizes.items()})
        self.scale = scale

    def forward(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 2, $y = x W + x A B$; y is x W."""
        return y + self[name](x, self.scale) if name in self else y


# ---- Eq. 3 to 5: the loss of an exit ----
def exit_loss(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None,
    weight: float = LAMBDA,
    temperature: float = TEMPERATURE,
    kl_factor: float = 1.0,
) -> Tensor:
    """Eq. 4, $(1 - lambda) CE(c, z^k) + lambda KL(q^t, q^k)$; without a teacher Eq. 3, $CE(c, z^k)$. weight: lambda.

    The mean over examples. logits, teacher_logits (R, C), labels (R,). kl_factor: in the paper 1; Hinton et al. 2015
    multiply KL by T squared.
    """
    hard = task_loss(logits, labels)
    if teacher_logits is None:
        return hard
    return (1 - weight) * hard + weight * (kl_factor * distillation_loss(logits, teacher_logits, temperature))


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """$KL(q^t, q^k)$ of Eq. 4, the mean over examples; logits (R, C) of both. A squared error if C = 1."""
    if student.shape[1] == 1:
        return F.mse_loss(student.float(), teacher.float())
    log_q_t, log_q_k = log_soft_label(teacher, temperature), log_soft_label(student, temperature)
    return F.kl_div(log_q_k, log_q_t, reduction="batchmean", log_target=True)


def log_soft_label(logits: Tensor, temperature: float) -> Tensor:
    """The logarithm of Eq. 5: (R, C) -> (R, C), in float32."""
    return F.log_softmax(logits.float() / temperature, dim=-1)


# ---- Eq. 6: rows of several exits in one product ----
def sgmv(y: Tensor, x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int], scale: float = 1.0) -> Tensor:
    """Eq. 6: add to each row of y = x W the product with the adapters of its own exit; returns y, changed in place.

    Segmented Gather Matrix-Vector multiplication (Punica, Chen et al. 2023): rows starts[i] .. starts[i + 1] - 1 use
    adapter i; a row is a token here. x (R, I), y (R, O), A (n, I, m), B (n, m, O), starts (n + 1,) from 0 to R.
    Segments may be empty.
    """
    if list(starts) != sorted(starts) or len(starts) != len(A) + 1 or starts[0] != 0 or starts[-1] != len(x):
        raise ValueError(f"starts must ascend from 0 to {len(x)} with {len(A)} segments, got {list(starts)}")
    for i, (start, stop) in enumerate(zip(starts, starts[1:])):
        if start < stop:
            y[start:stop].addmm_(x[start:stop] @ A[i], B[i], alpha=scale)  # += scale (x A) B
    return y


# ---- The model ----
class LoRAExits(Exits):
    """A frozen BERT; each exit has adapters in the layers up to it, and a head. The engine with restarts."""

    def __init__(
        self, bert: Bert, exits: Sequence[int], classes: int, rank: int = RANK, targets: Sequence[str] = TARGETS
    ):
        super().__init__(bert.requires_grad_(False).eval(), exits, classes)
        self.scale = ALPHA / rank
        layers = [bert.layers[:depth] for depth in exits]
        self.adapters = nn.ModuleList(
            nn.ModuleList(Adapters(layer, targets, rank, self.scale) for layer in some) for some in layers
        )

    def logits_of(self, k: int, inputs: Inputs) -> Tensor:
        """Logits (R, C) of exit k alone."""
        return self.logits_from(k, self.bert.embed(inputs), inputs.mask)

    def logits_from(self, k: int, embedded: Tensor, mask: Tensor) -> Tensor:
        """The same from the embeddings (R, S, D): the layers 1 .. e_k with the adapters of exit k, then its head."""
        hidden = self.bert.run(embedded, mask, 0, self.exits[k], self.adapters[k])
        return self.heads[k](self.pooled(hidden, mask))

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of every exit, (R, K, C)."""
        return torch.stack([self.logits_of(k, inputs) for k in range(len(self.exits))], 1)

    def advance(self, k: int, state: State) -> State:
        return state  # the embeddings: the layers of an exit run only if it is read

    def read(self, k: int, state: State) -> np.ndarray:
        return self.logits_from(k, state.hidden, state.mask).numpy(force=True)

    def passes(self, every_head: bool) -> np.ndarray:
        return np.cumsum(self.exits) if every_head else np.array(self.exits)

    def flops(self, tokens: int, every_head: bool) -> np.ndarray:
        """With the products of the adapters."""
        weights = np.array([sum(parameter.numel() for parameter in some.parameters()) for some in self.adapters])
        return super().flops(tokens, every_head) + 2.0 * tokens * (np.cumsum(weights) if every_head else weights)


# ---- All exits side by side ----
class Streams(NamedTuple):
    """n streams of the same rows, those of the exits that were not read yet."""

    hidden: Tensor  # (n, R, S, D)
    mask: Tensor  # (R, S)

    def keep(self, rows: np.ndarray) -> "Streams":
        return Streams(self.hidden[:, rows], self.mask[rows])


class SideBySide:
    """The engine of Eq. 6: a stream for each exit, which all run through a layer together."""

    def __init__(self, model: LoRAExits):
        self.model, self.exits = model, model.exits

    def passes(self, every_head: bool) -> np.ndarray:
        """(K,): segment k is run by the streams of the exits k .. K - 1, whichever are read."""
        lengths = np.diff(self.exits, prepend=0)
        return np.cumsum(lengths * np.arange(len(self.exits), 0, -1))

    def start(self, inputs: Inputs) -> Streams:
        embedded = self.model.bert.embed(inputs)
        return Streams(embedded.expand(len(self.exits), *embedded.shape), inputs.mask)

    def advance(self, k: int, state: Streams) -> Streams:
        streams, rows = len(self.exits) - k, len(state.mask)
        adapters = [self.together(k, depth, rows) for depth in range(self.exits[k])]
        x = state.hidden[-streams:].flatten(0, 1)  # without the stream of exit k - 1, which has ended
        x = self.model.bert.run(x, state.mask.repeat(streams, 1), self.model.starts[k], self.exits[k], adapters)
        return state._replace(hidden=x.unflatten(0, (streams, rows)))

    def together(self, k: int, depth: int, rows: int):
        """The bert.Adapt of a layer for the streams k .. K - 1, `rows` rows each."""
        layers = [adapters[depth] for adapters in self.model.adapters[k:]]

        def adapt(name: str, x: Tensor, y: Tensor) -> Tensor:
            if name not in layers[0]:
                return y
            A, B = (torch.stack([getattr(layer[name], matrix) for layer in layers]) for matrix in "AB")
            starts = [i * rows * x.shape[1] for i in range(len(layers) + 1)]  # the tokens of a row are consecutive
            return sgmv(y.flatten(0, 1), x.flatten(0, 1), A, B, starts, self.model.scale).view_as(y)

        return adapt

    def read(self, k: int, state: Streams) -> np.ndarray:
        return self.model.heads[k](self.model.pooled(state.hidden[0], state.mask)).numpy(force=True)


# ---- Training ----
def teacher_of(k: int, last: int, distill: str = "segd") -> int | None:
    """Section 3.2: the index of the teacher of exit k, or None."""
    if k == last or distill == "vanilla":
        return None
    return last if distill == "kd" else k + 1


def fit(model: LoRAExits, learn: Rows, held: Rows, epochs: int, lr: float, distill: str = "segd") -> None:
    """One training per exit, the last exit first: it has to be trained before it teaches. held: chooses the epoch."""
    last = len(model.exits) - 1
    if not learn.names:  # the heads of a regression start at the mean
        for head in model.heads:
            nn.init.constant_(head[3].bias, float(learn.labels.mean()))
    for k in range(last, -1, -1):
        t = teacher_of(k, last, distill)
        # The teacher learns no more, so its logits on all examples (N, C) are computed once.
        teacher_logits = None if t is None else of_all(lambda inputs: model.logits_of(t, inputs), learn)

        def loss(rows: Tensor) -> Tensor:
            logits = model.logits_of(k, learn.batch(rows.numpy()))
            return exit_loss(logits, learn.labels[rows], None if teacher_logits is None else teacher_logits[rows])

        def score() -> float:
            return score_of(of_all(lambda inputs: model.logits_of(k, inputs), held), held.labels)

        train({model.adapters[k]: lr, model.heads[k]: lr}, len(learn), loss, epochs, score=score)


# ---- The script ----
@dataclass
class LoRAOptions(Options):
    """Options of the script."""

    rank: int = field(default=RANK, metadata={"help": "rank of the adapters"})
    lr: float = field(default=3e-3, metadata={"help": "learning rate of adapters and heads"})
    teacher: str = field(default="segd", metadata={"help": "segd: the next exit; kd: the last one; vanilla: none"})


def main(options: LoRAOptions) -> tuple[Exits, Rule, Rows]:
    """Train on four fifths of the rows; the others choose epochs."""
    if options.teacher not in TEACHERS:
        raise ValueError(f"--teacher must be one of {', '.join(TEACHERS)}, got {options.teacher!r}")
    torch.manual_seed(options.seed)
    bert = Bert.load(options.model)
    rows, test = open_task(options.task, options.model, len(bert.position.weight), options.rows, options.seed)
    learn, held = rows.split(0.8, 0.2)
    model = LoRAExits(bert, exits_of(options.exits, (3, 6, 9, 12), len(bert.layers)), rows.outputs, options.rank).eval()
    trained = sum(parameter.numel() for part in (model.adapters, model.heads) for parameter in part.parameters())
    print(f"LoRAExit: {len(learn)} training rows; {trained:,} parameters are trained, the BERT is frozen")
    fit(model, learn, held, options.epochs, options.lr, options.teacher)
    rules = usual_rules(rows)
    report(model, test, rules, "LoRAExit (layers: with restarts)", options.picture or "lora_exits.png")
    print(f"\nlayers: run with restarts; side by side (Eq. 6) the exits take {SideBySide(model).passes(True).tolist()}")
    print(REPORTED)
    return model, rules["threshold 0.8" if rows.names else "patience 2"], test  # stricter ones run more layers than 12


if __name__ == "__main__":
    script(main, LoRAOptions, __doc__)
