"""A decoder fine-tuned with exits: what ConsistentEE (decoder_policies.py) and CALM (calm.py) both begin from.

Sources: Zeng et al. 2024, ConsistentEE, "Experimental Settings": LoRA in the initialisation step, then the backbone is
frozen; Schuster et al. 2022, Confident Adaptive Language Modeling, which trains its exits under such a sum too.

    fine_tune    the initialisation: adapters and heads learn, under Eq. 1; then the adapters are folded in for good
    instances    every token is an instance: its states at the exits, which the frozen backbone gives once

Symbols:   K exits, the last is the LM head, which is never trained; N instances; D hidden size, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

from mini_ee.bert import StackedLinear
from mini_ee.checkpoint import backbone_sha256, load_backbone, load_strict, read_tensors, write_tensors
from mini_ee.decoder import Decoder
from mini_ee.exits import VocabularyHead, check_exits
from mini_ee.files import atomic_folder, file_sha256, json_sha256, read_json, write_bytes, write_json
from mini_ee.fitting import SAVE_SECONDS, TrainConfig, depth_weighted_sum, load_progress, save_progress
from mini_ee.generation import Text
from mini_ee.lora_exits import LowRank, check_lora
from mini_ee.rules import Policy, Rule, Threshold, rule_from_dict
from mini_ee.tasks import Tokenizer

FORMAT_VERSION = 1
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


class ExitDecoder(nn.Module):
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


# ---- Initialisation: Eq. 1 ----


def fine_tune(
    model: ExitDecoder,
    texts: Sequence[Text],
    config: TrainConfig,
    state_folder: Path | None = None,
    resume: bool = False,
    about: dict | None = None,
) -> list[float]:
    """Step 1, in place: adapters (config.lr) and heads (config.head_lr) under Eq. 1; the mean loss of each epoch.

    texts: of each, the tokens behind position `start` are learned. Every exit learns every token, the last one through
    the adapters. With a state_folder, which the caller removes, a killed training can be resumed, to the same weights:
    same texts and settings, and the same `about`, which is what else the caller wants to be the same (JSON). Raises
    NothingToResume, or ValueError for other settings, and where the loss becomes no number.
    """
    groups = ((model.adapters, config.lr), (model.heads, config.head_lr))
    optimizer = torch.optim.AdamW(
        [{"params": part.parameters(), "peak_lr": lr} for part, lr in groups],
        weight_decay=config.weight_decay,
        fused=True,
    )
    per_epoch, losses = -(-len(texts) // config.batch_size), []
    total, last_save = config.epochs * per_epoch, time.monotonic()
    settings = asdict(config) | {"exits": list(model.exits), "rank": model.rank, "texts": json_sha256(texts)[:12]}
    settings |= about or {}
    if resume:
        losses = load_progress(state_folder, model.own, optimizer, settings)["losses"]
    model.unfold()
    with tqdm(total=total, initial=len(losses), desc="fine-tuning", unit="batch", delay=2) as bar:
        while len(losses) < total:
            epoch, at = divmod(len(losses), per_epoch)
            order = np.random.default_rng((config.seed, epoch)).permutation(len(texts))
            states, labels = _forward(model, [texts[row] for row in np.array_split(order, per_epoch)[at]])
            each = (F.cross_entropy(model.classify(k, state), labels) for k, state in enumerate(states[1:]))
            losses.append(step(optimizer, depth_weighted_sum(each, model.exits), len(losses), total, config))
            bar.update()
            if state_folder and (len(losses) == total or time.monotonic() - last_save > SAVE_SECONDS):
                save_progress(state_folder, model.own, optimizer, {"settings": settings, "losses": losses})
                last_save = time.monotonic()
    model.fold()
    return np.mean(np.reshape(losses, (config.epochs, per_epoch)), axis=1).tolist()


def step(optimizer: torch.optim.Optimizer, loss: Tensor, done: int, total: int, config: TrainConfig) -> float:
    """One step at the rate that its place among all gives: warm-up, then linearly to 0. Returns the loss.

    Groups name their own `peak_lr`. Raises ValueError for a loss that is no number.
    """
    if not torch.isfinite(loss):
        raise ValueError(f"the loss became {loss.item()}: the training diverged; begin anew with a smaller --lr")
    rising = config.warmup * total
    rate = min((done + 1) / max(1.0, rising), (total - done) / max(1.0, total - rising), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], config.clip)
    optimizer.step()
    return loss.item()


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


def fit_instances(
    part: nn.Module, count: int, loss: Callable[[Tensor], Tensor], epochs: int, lr: float, config: TrainConfig
) -> None:
    """Train a part of a model on `count` instances. loss: of some of them, an index (B,); of config, decay and clip.

    Their order comes from torch's global random state.
    """
    groups = [{"params": part.parameters(), "peak_lr": lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=True)
    config, total = replace(config, warmup=0.0), epochs * -(-count // BATCH)
    drawn = (rows for _ in range(epochs) for rows in torch.randperm(count).split(BATCH))
    for done, rows in enumerate(tqdm(drawn, total=total, desc="learning", unit="batch", delay=2)):
        step(optimizer, loss(rows), done, total, config)


# ---- On disk ----


def save_decoder_run(
    model: ExitDecoder, folder: str | Path, backbone_folder: str | Path, rule: Rule, about: dict, metrics: dict
) -> None:
    """Write heads, adapters and what decides as a folder, whole or not at all; the backbone is named, not copied.

    about: `method`, and what else config.json is to say. Raises FileExistsError where the folder is there.
    """
    with atomic_folder(folder) as partial:
        digests = {"model.safetensors": write_tensors(partial / "model.safetensors", model.own.state_dict())}
        write_bytes(partial / "tokenizer.json", (Path(backbone_folder) / "tokenizer.json").read_bytes())
        write_json(partial / "metrics.json", metrics)
        digests |= {name: file_sha256(partial / name) for name in ("tokenizer.json", "metrics.json")}
        config = about | {
            "format_version": FORMAT_VERSION,
            "backbone": {
                "folder": str(Path(backbone_folder).resolve()),
                "sha256": backbone_sha256(backbone_folder),
            },
            "exits": list(model.exits),
            "lora": {"rank": model.rank, "alpha": model.alpha},
            "rule": rule.to_dict(),
            "files": digests,
        }
        write_json(partial / "config.json", config)


class DecoderRun(NamedTuple):
    """A loaded run of a decoder."""

    config: dict
    model: ExitDecoder
    tokenizer: Tokenizer
    rule: Rule


def load_decoder_run(
    folder: str | Path, models: dict[str, type[ExitDecoder]], backbone_folder: str | Path | None = None
) -> DecoderRun:
    """Read what save_decoder_run wrote, with its backbone. models: method -> class of the model.

    backbone_folder: where the backbone is now, if not where it was. Raises FileNotFoundError where a folder is missing,
    ValueError for damage, for another method, and for the run of another backbone.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", signed="format_version")
    if config.get("format_version") != FORMAT_VERSION or config.get("method") not in models:
        raise ValueError(
            f"{folder}: expected a decoder's run of format_version {FORMAT_VERSION} and method "
            f"{' or '.join(models)}, found {config.get('format_version')!r} and {config.get('method')!r}"
        )
    for name in ("tokenizer.json", "metrics.json"):
        if not (folder / name).is_file() or file_sha256(folder / name) != config["files"][name]:
            raise ValueError(f"{folder / name}: missing or damaged; train the run again")
    source = config["backbone"]
    backbone_folder = Path(backbone_folder or source["folder"])
    if not backbone_folder.is_dir():
        raise FileNotFoundError(f"{folder}: its backbone was in {backbone_folder}, nothing is there; say where it is")
    if backbone_sha256(backbone_folder) != source["sha256"]:
        raise ValueError(
            f"{folder}: was trained on another backbone than the one in {backbone_folder}; give that one with --model"
        )
    model = models[config["method"]](load_backbone(backbone_folder), tuple(config["exits"]), **config["lora"])
    tensors = read_tensors(folder / "model.safetensors", config["files"]["model.safetensors"])
    load_strict(model.own, tensors, {name: (name,) for name in model.own.state_dict()}, folder / "model.safetensors")
    model.unfold()
    model.fold()
    rule = rule_from_dict(config["rule"])
    rule.check(len(model.exits))
    tokenizer = Tokenizer.from_folder(folder, model.decoder.config.max_tokens)
    return DecoderRun(config, model.eval(), tokenizer, rule)
