"""Self-supervised exits: vocabulary heads on a frozen decoder that learn from what the decoder itself says.

Source: Valade 2024, Accelerating Large Language Model Inference with Self-Supervised Early Exits. Section 3.2 (heads,
batches, Eq. 1) and the measures of Fig. 1 are here; 3.3, the thresholds, is calibration.py; inference generation.py.

Symbols:   p_theta: the full model; p_k: head k (exits.VocabularyHead), after layer e_k; penalty = lambda of Eq. 1;
           init: "scratch" draws norm and linear map, "copy" takes the model's own. K counts exits, the last of which is
           the LM head: K - 1 heads.

Deviations, each from a point that the paper leaves open (see the tests of the same names):
1. The printed CE takes the softmax of what is a probability already; here it takes that of the logits.
2. The target is p_theta itself, as printed ("soft"); the released code takes its likeliest token ("hard").
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mini_ee.backbones.hub import backbone_sha256, load_backbone, load_strict, read_tensors, write_tensors
from mini_ee.backbones.llama import Decoder
from mini_ee.calibration import Observed, TooFew, broken_promises, calibrate, exit_indices, report
from mini_ee.data.files import atomic_folder, file_sha256, json_sha256, read_json, write_bytes, write_json
from mini_ee.data.texts import Text
from mini_ee.early_exit import Reading
from mini_ee.rules import NeverExit, Rule, Threshold, confidence, rule_from_dict
from mini_ee.training.fit import SAVE_SECONDS, TrainConfig, load_progress, save_progress
from mini_ee.units.heads import VocabularyHead
from mini_ee.units.rows import check_exits
from mini_ee.units.tokens import TokenGraphs

FORMAT_VERSION = 1

TARGETS = ("soft", "hard")

TRAINING_PROMPTS = ("This is an example script:", "My name is", "I am a", "Welcome to", "what is a")

CALIBRATION_PROMPTS = (
    "A cat is",
    "In Python, a list is",
    "In C, we can define a function",
    "The capital of France is",
    "The derivative of x^2 is",
)
"""Table 1."""


# ---- The heads ----
class SelfSupervised(TokenGraphs, nn.Module):
    """A frozen decoder with a head after each layer of `exits` but the last, where its own LM head is."""

    def __init__(self, decoder: Decoder, exits: tuple[int, ...], init: str = "scratch"):
        super().__init__()
        self.exits = check_exits(tuple(exits), decoder.config.num_hidden_layers)
        if len(self.exits) < 2:
            raise ValueError(f"expected exits before the last layer, got only {self.exits[0]}")
        self.heads = nn.ModuleList(VocabularyHead(decoder, init) for _ in self.exits[:-1])
        self.decoder = decoder.eval().requires_grad_(False)

    def forward(self, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Logits of every head, K - 1 times (B, T, V), and of the full model, (B, T, V).

        input_ids: (B, T) int64, padded on the right if at all: no token looks there. Gradients reach the heads only.
        """
        with torch.no_grad():
            states = self.decoder.hidden_states(input_ids)
            full = self.decoder.lm_logits(states[-1])
        return [head(states[layer]) for layer, head in zip(self.exits, self.heads)], full


# ---- Eq. 1 ----
def head_loss(logits: Tensor, full_logits: Tensor, penalty: float, target: str = "soft") -> Tensor:
    """(1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k) at each position: (..., V), (..., V) -> (...).

    In nats and in float32. target: "soft", p_theta itself, or "hard", its likeliest token.
    """
    log_p = logits.float().log_softmax(-1)
    if target == "soft":
        cross_entropy = -(full_logits.float().softmax(-1) * log_p).sum(-1)
    else:
        cross_entropy = -log_p.gather(-1, full_logits.argmax(-1, keepdim=True))[..., 0]
    return (1 - penalty) * cross_entropy - penalty * entropy(log_p)


def entropy(log_p: Tensor) -> Tensor:
    """-sum p ln p, in nats: (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


def _padded(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids, and which of them are no padding: (B, T) int64 and bool, padded on the right."""
    longest = max(len(text.ids) for text in texts)
    ids = [text.ids + [0] * (longest - len(text.ids)) for text in texts]
    real = [[position < len(text.ids) for position in range(longest)] for text in texts]
    return torch.tensor(ids, device=device), torch.tensor(real, device=device)


# ---- Training ----
@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """Settings of a training of heads. Raises ValueError on a value that makes no sense."""

    penalty: float = 0.95  # lambda; the paper tries 0, .1 and .95
    target: str = "soft"
    epochs: int = 3
    lr: float = 1e-3
    batch_size: int = 16
    warmup: float = 0.1  # share of the steps
    clip: float = 1.0  # largest norm of the gradient
    measure_every: int = 50  # steps, Fig. 1
    seed: int = 0

    def __post_init__(self):
        TrainConfig(epochs=self.epochs, lr=self.lr, batch_size=self.batch_size, warmup=self.warmup, clip=self.clip)
        if not 0 <= self.penalty <= 1:
            raise ValueError(f"penalty (lambda) must be from 0 to 1, got {self.penalty}")
        if self.target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {self.target!r}")
        if self.measure_every < 1:
            raise ValueError(f"measure_every must be at least 1 step, got {self.measure_every}")


class Measured(NamedTuple):
    """What Fig. 1 draws: for each head, over all positions."""

    agreement: list[float]  # share of positions where its likeliest token is the full model's
    entropy: list[float]  # mean, in nats


def train_heads(
    model: SelfSupervised,
    texts: Sequence[Text],
    held: Sequence[Text],
    how: HeadTraining,
    state_folder: Path | None = None,
    resume: bool = False,
    about: dict | None = None,
) -> list[dict]:
    """Train the heads in place by Eq. 1, all at once; returns Fig. 1: step, loss, and Measured on `held`.

    Measured before the first step, every `measure_every` steps and after the last. The loss is the mean since then.
    With a state_folder, which the caller removes, a killed training can be resumed, to the same weights: same exits,
    texts and settings, and the same `about`, which is what else the caller wants to be the same (JSON). Raises
    NothingToResume, or ValueError for other settings and a loss that is no number.
    """
    told = json_sha256({"texts": [text.ids for text in texts], "held": [text.ids for text in held]})
    settings = asdict(how) | {"exits": list(model.exits), "texts": told[:12]} | (about or {})
    parameters = list(model.heads.parameters())
    optimizer = torch.optim.Adam(parameters, fused=True)
    per_epoch = -(-len(texts) // how.batch_size)
    total, step, losses, history = how.epochs * per_epoch, 0, [], []
    if resume:
        progress = load_progress(state_folder, model.heads, optimizer, settings)
        step, losses, history = (progress[key] for key in ("step", "losses", "history"))
    if not history:
        history.append({"step": 0, "loss": None} | watch(model, held, how.batch_size)._asdict())
    last_save = time.monotonic()
    with tqdm(total=total, initial=step, desc="training heads", unit="batch", delay=2) as bar:
        while step < total:
            epoch, at = divmod(step, per_epoch)
            order = np.random.default_rng((how.seed, epoch)).permutation(len(texts))
            rows = order[at * how.batch_size : (at + 1) * how.batch_size]
            rising = how.warmup * total
            rate = min((step + 1) / max(1.0, rising), (total - step) / max(1.0, total - rising), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = how.lr * rate
            losses.append(_update(model, [texts[row] for row in rows], how, optimizer, parameters))
            step += 1
            bar.update()
            if step % how.measure_every == 0 or step == total:
                measured = watch(model, held, how.batch_size)
                history.append({"step": step, "loss": float(np.mean(losses))} | measured._asdict())
                losses = []
            if state_folder is not None and time.monotonic() - last_save > SAVE_SECONDS:
                progress = {"settings": settings, "step": step, "losses": losses, "history": history}
                save_progress(state_folder, model.heads, optimizer, progress)
                last_save = time.monotonic()
    return history


def _update(model, texts: list[Text], how: HeadTraining, optimizer, parameters: list[Tensor]) -> float:
    """One step on one batch; returns the loss: Eq. 1, the mean over all positions."""
    ids, real = _padded(texts, model.decoder.embeddings.weight.device)
    each_logits, full = model(ids)
    loss = sum(head_loss(logits, full, how.penalty, how.target)[real].mean() for logits in each_logits)
    if not torch.isfinite(loss):
        raise ValueError(f"the loss became {loss.item()}: the training diverged; begin anew with a smaller lr")
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, how.clip)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def watch(model: SelfSupervised, texts: Sequence[Text], batch_size: int = 16) -> Measured:
    """Agreement and entropy of every head over all positions of some texts."""
    positions, totals = 0, np.zeros((2, len(model.heads)))
    for begin in range(0, len(texts), batch_size):
        ids, real = _padded(texts[begin : begin + batch_size], model.decoder.embeddings.weight.device)
        each_logits, full = model(ids)
        said = full.argmax(-1)
        positions += int(real.sum())
        for k, logits in enumerate(each_logits):
            totals[0, k] += float((logits.argmax(-1) == said)[real].sum())
            totals[1, k] += float(entropy(logits.log_softmax(-1))[real].sum())
    return Measured(*(totals / positions).tolist())


@torch.inference_mode()
def observe_texts(
    model: SelfSupervised, texts: Sequence[Text], measure: str = "breaking_ties", batch_size: int = 16
) -> Observed:
    """What calibration asks of every head, at the positions of each text that count; a text is a group.

    measure: one of confidence.MEASURES. Each token has seen all layers of those before it, as without exits, and as
    with them when generation's fill is "recompute".
    """
    sure, agrees, groups = [], [], []
    for begin in tqdm(range(0, len(texts), batch_size), desc="observing", unit="batch", delay=2):
        some = texts[begin : begin + batch_size]
        ids, real = _padded(some, model.decoder.embeddings.weight.device)
        counted = real.clone()
        for row, text in enumerate(some):
            counted[row, : text.start] = False
        each_logits, full = model(ids)
        said = full[counted].argmax(-1)
        chosen = [logits[counted] for logits in each_logits]
        sure.append(np.stack([confidence(Reading(logits.numpy(force=True)), measure) for logits in chosen], axis=1))
        agrees.append(torch.stack([logits.argmax(-1) == said for logits in chosen], dim=1).numpy(force=True))
        groups.append(begin + np.repeat(np.arange(len(some)), counted.sum(1).numpy(force=True)))
    return Observed(*(np.concatenate(parts) for parts in (sure, agrees, groups)))


def calibrate_heads(
    model: SelfSupervised,
    texts: Sequence[Text],
    epsilon: float,
    delta: float | None = None,
    measure: str = "breaking_ties",
    seed: int = 0,
    sets: int = 0,
) -> tuple[Threshold, dict]:
    """Thresholds of all heads, and the JSON answer; see calibration.py for epsilon, delta and sets.

    A seeded half of the texts gives the thresholds, the other half says what they keep. Raises ValueError where there
    are too few for both, with the numbers of texts and tokens that would do.
    """
    if len(texts) < 2:
        raise ValueError(f"expected at least 2 texts, some to calibrate on and some to check, got {len(texts)}")
    observed = observe_texts(model, texts, measure)
    chosen = np.random.default_rng(seed).permutation(len(texts))[: len(texts) // 2]
    drawn = np.isin(observed.groups, chosen)
    try:
        rule = calibrate(observed.take(drawn), epsilon, delta, measure)
    except TooFew as error:
        tokens = math.ceil(2 * error.needed * len(observed.groups) / len(texts))
        raise ValueError(
            f"too little text to promise epsilon {epsilon} with delta {delta}: at least {2 * error.needed} texts like "
            f"these are needed, {tokens} tokens (half of them to check), got {len(texts)} texts, "
            f"{len(observed.groups)} tokens; give more, or lower epsilon, or leave delta out"
        ) from None
    fresh = observed.take(~drawn)
    layers = np.array(model.exits)[exit_indices(fresh, rule)]
    answer = report(observed.take(drawn), fresh, rule, epsilon, delta) | {"mean_layers": float(layers.mean())}
    if sets:
        answer["broken"] = broken_promises(observed, epsilon, delta, measure, sets, seed)
    return rule, answer


# ---- On disk ----
class LoadedHeads(NamedTuple):
    """Heads on their backbone, with the rule that they are read with."""

    model: SelfSupervised
    rule: Rule
    config: dict


def save_heads(
    model: SelfSupervised,
    folder: str | Path,
    backbone_folder: str | Path,
    *,
    rule: Rule = NeverExit(),
    about: dict | None = None,
    metrics: dict | None = None,
) -> None:
    """Write the heads as a folder, whole or not at all: config.json, model.safetensors, metrics.json, tokenizer.json.

    about: what else config.json is to say, such as `training`; metrics: what was measured. The tokenizer is the
    backbone's, where its folder has one.
    Raises FileExistsError where the folder is there.
    """
    with atomic_folder(folder) as partial:
        digests = {"model.safetensors": write_tensors(partial / "model.safetensors", model.heads.state_dict())}
        write_json(partial / "metrics.json", metrics or {})
        tokenizer = Path(backbone_folder) / "tokenizer.json"
        if tokenizer.is_file():
            write_bytes(partial / "tokenizer.json", tokenizer.read_bytes())
        copied = (name for name in ("metrics.json", "tokenizer.json") if (partial / name).is_file())
        digests |= {name: file_sha256(partial / name) for name in copied}
        config = {
            "format_version": FORMAT_VERSION,
            "method": "self-supervised",
            "backbone": {
                "folder": str(Path(backbone_folder).resolve()),
                "sha256": backbone_sha256(backbone_folder),
            },
            "exits": list(model.exits),
            "rule": rule.to_dict(),
            "files": digests,
        }
        write_json(partial / "config.json", {"training": {}} | (about or {}) | config)


def load_heads(folder: str | Path, backbone_folder: str | Path | None = None) -> LoadedHeads:
    """Read what `save_heads` wrote, with its backbone. backbone_folder: where that is now, if not where it was.

    Raises FileNotFoundError where either is missing, ValueError for damage, and for the heads of another backbone.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", signed="format_version")
    if (config.get("format_version"), config.get("method")) != (FORMAT_VERSION, "self-supervised"):
        raise ValueError(
            f"{folder}: expected heads of format_version {FORMAT_VERSION} and method self-supervised, found "
            f"{config.get('format_version')!r} and {config.get('method')!r}"
        )
    source = config["backbone"]
    backbone_folder = Path(backbone_folder or source["folder"])
    if not backbone_folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: its backbone was in {backbone_folder}, nothing is there; say where it is with --model"
        )
    if backbone_sha256(backbone_folder) != source["sha256"]:
        raise ValueError(
            f"{folder}: these heads were trained on another backbone than the one in {backbone_folder}; "
            f"give that one with --model"
        )
    for name, digest in config["files"].items():
        if name != "model.safetensors" and (not (folder / name).is_file() or file_sha256(folder / name) != digest):
            raise ValueError(f"{folder / name}: missing or damaged; train the run again")
    model = SelfSupervised(load_backbone(backbone_folder), tuple(config["exits"]))
    tensors = read_tensors(folder / "model.safetensors", config["files"]["model.safetensors"])
    names = {name: (name,) for name in model.heads.state_dict()}
    load_strict(model.heads, tensors, names, folder / "model.safetensors")
    rule = rule_from_dict(config["rule"])
    rule.check(len(model.exits))
    return LoadedHeads(model.eval(), rule, config)
