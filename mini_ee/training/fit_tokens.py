"""Fine-tuning of a decoder with exits, and training on its tokens' states."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from mini_ee.data.files import json_sha256
from mini_ee.data.texts import Text
from mini_ee.training.fit import SAVE_SECONDS, TrainConfig, depth_weighted_sum, load_progress, save_progress
from mini_ee.units.tokens import BATCH, ExitDecoder, _forward


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
