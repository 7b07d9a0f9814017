"""The one training loop: AdamW, warm-up, linear decay, clipping, the best checkpoint; its state survives a kill.

A recipe is a list of stages (see baselines.py); a stage says which parameters learn, from which loss, and which score
decides the best checkpoint. Epochs are scored on rows held out of train; the split that is reported is never seen here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from mini_ee.backbones.hub import read_tensors, write_tensors
from mini_ee.data.tasks import Task
from mini_ee.data.tokens import Encoded, batches
from mini_ee.units.recording import exit_scores, record

STATE = "state.safetensors"

SAVE_SECONDS = 60.0  # between two saves of the training state, which holds the weights four times over


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. Raises ValueError on a value that makes no sense."""

    epochs: int = 3
    lr: float = 5e-5  # of the backbone
    head_lr: float = 5e-4
    batch_size: int = 32
    warmup: float = 0.1  # share of a stage's steps
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not np.isfinite(value) or value < 0 or (value == 0 and name in ("epochs", "batch_size", "clip")):
                raise ValueError(
                    f"{name} must be a number of at least 0, epochs, batch_size and clip above it, got {value}"
                )
        if self.warmup > 1:
            raise ValueError(f"warmup is a share of the steps, at most 1, got {self.warmup}")


class Data(NamedTuple):
    """Encoded rows with their labels: (N,) int64 class indices, float32 for regression."""

    encoded: Encoded
    labels: np.ndarray


class Batch(NamedTuple):
    """Rows of one step, on the model's device."""

    inputs: tuple[Tensor, Tensor, Tensor]  # what the model's forward takes: input_ids, attention_mask, token_type_ids
    labels: Tensor  # (B,)
    taught: Tensor | None  # (B, ...), what the stage's teacher says of these rows
    step: int = 0  # of the stage


class Stage(NamedTuple):
    """One stage of a recipe."""

    name: str
    learns: Callable[[str], bool]  # of a parameter's name in the model
    loss: Callable[[nn.Module, Batch], Tensor]  # -> scalar
    score: Callable[[np.ndarray], float] | None = None  # (K,) hold-out scores of the exits -> what the best maximises
    teacher: Callable[[nn.Module, Encoded], np.ndarray] | None = None  # asked of all train rows before the stage begins
    judge: Callable[[nn.Module, Data, np.ndarray | None], dict[str, float]] | None = None
    """In place of `score`: model, hold-out, and what the teacher said of it before the stage began -> `score`, and what
    else the epoch's record shall hold."""
    finish: Callable[[nn.Module, Data], None] | None = None  # asked of the best checkpoint and the hold-out, at the end
    settings: dict = {}  # of TrainConfig, where the stage has its own
    round: int = 0  # from 1: rounds share one best checkpoint, and one that does not better it is the last

    def config(self, config: TrainConfig) -> TrainConfig:
        """The training's settings with the stage's own."""
        return replace(config, **self.settings)

    def steps(self, config: TrainConfig, rows: int) -> tuple[int, int]:
        """Steps of an epoch and of the stage."""
        config = self.config(config)
        per_epoch = -(-rows // config.batch_size)
        return per_epoch, config.epochs * per_epoch


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy for class indices, mean squared error for float labels (C = 1); in float32."""
    if labels.is_floating_point():
        return F.mse_loss(logits.float()[:, 0], labels)
    return F.cross_entropy(logits.float(), labels)


def depth_weighted_sum(losses, exits: tuple[int, ...]):
    """ConsistentEE, Eq. 1: sum_i i l_i / sum_i i, where i is the depth of an exit.

    >>> depth_weighted_sum([1.0, 4.0], (1, 3))
    3.25
    """
    return sum(depth * loss for depth, loss in zip(exits, losses, strict=True)) / sum(exits)


def joint_loss(model: nn.Module, batch: Batch) -> Tensor:
    """All exits' losses under Eq. 1."""
    losses = [task_loss(logits, batch.labels) for logits in model(*batch.inputs)]
    return depth_weighted_sum(losses, model.exits)


class NothingToResume(FileNotFoundError):
    """--resume without a training state."""


def fit(
    model: nn.Module,
    stages: list[Stage],
    task: Task,
    train: Data,
    held: Data,
    config: TrainConfig,
    settings: dict,
    state_folder: Path,
    resume: bool = False,
) -> list[dict]:
    """Train `model` in place through all stages; returns one record an epoch: stage, epoch, loss, exit_scores, score,
    seconds (a stage's first epoch with its teacher's), and where there are classes `wrong`, the held-out rows that the
    last exit gets wrong then.

    model: its forward is what the stages' losses call, its segments() are what is scored. The training state stands
    in `state_folder` until the caller removes it. With `resume` the training found there goes on, and ends with the
    same weights as one that was never stopped; `settings` (JSON) must be the ones that it was started with. Uses
    torch's global random state. Raises NothingToResume, or ValueError for other settings and labels that are all alike.
    """
    if len(train.labels) and (train.labels == train.labels[0]).all():
        raise ValueError(
            f"{task.name}: the {len(train.labels)} rows to train on all have the label {train.labels[0]}, "
            f"there is nothing to learn; give rows with different labels"
        )
    path = state_folder / STATE
    progress = {
        "settings": settings,
        "stage": 0,
        "step": 0,
        "best": None,
        "round_best": None,
        "losses": [],
        "seconds": 0.0,  # of the epoch under way
        "history": [],
    }
    saved = {}
    if resume:
        saved = _read_state(path)
        progress |= _progress(saved, settings, state_folder)
    else:
        state_folder.mkdir(parents=True, exist_ok=True)

    steps = [stage.steps(config, len(train.labels))[1] for stage in stages]
    done = sum(steps[: progress["stage"]]) + progress["step"]
    with tqdm(total=sum(steps), initial=done, desc="training", unit="batch", delay=1) as bar:
        for number in range(progress["stage"], len(stages)):
            before = stages[number - 1].round if number else 0
            if not progress["step"] and _converged(stages[number].round, before, progress):
                break
            _run_stage(model, stages[number], number, task, train, held, config, path, progress, saved, bar)
            progress |= {"stage": number + 1, "step": 0, "losses": []}
            saved = {}
    return progress["history"]


def _converged(now: int, before: int, progress) -> bool:
    """Asked where a stage begins: whether the round that ended here bettered nothing. Says what is to be bettered."""
    if not now or not before:
        progress["best"] = progress["round_best"] = None
    elif now != before:
        if progress["best"] == progress["round_best"]:
            return True
        progress["round_best"] = progress["best"]
    return False


def _run_stage(model, stage, number, task, train, held, config, path, progress, saved, bar) -> None:
    """One stage, from progress["step"] on; leaves the model at its best epoch, or where a round's best still stands."""
    steps_per_epoch, total = stage.steps(config, len(train.labels))
    config, begin = stage.config(config), time.perf_counter() - progress["seconds"]
    optimizer = _optimizer(model, stage, config)
    best = {}
    if saved:
        best = _restore(model, optimizer, saved)
    elif progress["best"] is not None:
        best = _learned(model, stage)
    taught = stage.teacher(model, train.encoded) if stage.teacher else None
    taught_held = stage.teacher(model, held.encoded) if stage.teacher and stage.judge else None
    last_save = time.monotonic()
    for epoch in range(progress["step"] // steps_per_epoch, config.epochs):
        order = list(
            batches(train.encoded, config.batch_size, shuffle_seed=config.seed * 10_000 + number * 100 + epoch)
        )
        _train_mode(model, stage)
        for rows in order[progress["step"] - epoch * steps_per_epoch :]:
            rate = _schedule(progress["step"], total, config.warmup)
            batch = _batch(model, train, taught, rows, progress["step"])
            progress["losses"].append(_update(model, stage, optimizer, batch, rate, config.clip))
            progress["step"] += 1
            bar.update()
            recent = np.mean(progress["losses"][-50:])
            bar.set_postfix(stage=stage.name, loss=f"{recent:.3f}", held_out=progress["best"], refresh=False)
            if time.monotonic() - last_save > SAVE_SECONDS and progress["step"] < (epoch + 1) * steps_per_epoch:
                progress["seconds"] = time.perf_counter() - begin
                _write_state(path, model, optimizer, best, progress)
                last_save = time.monotonic()
        recorded = record(model.segments(), held.encoded, config.batch_size)
        scores = exit_scores(recorded, task, held.labels)
        verdict = stage.judge(model, held, taught_held) if stage.judge else {"score": stage.score(np.array(scores))}
        history = {
            "stage": stage.name,
            "epoch": epoch + 1,
            "loss": float(np.mean(progress["losses"])),
            "exit_scores": scores,
            **verdict,
            "seconds": time.perf_counter() - begin,
        }
        if not task.regression:
            history["wrong"] = np.flatnonzero(recorded.logits[:, -1].argmax(axis=1) != held.labels).tolist()
        progress["history"].append(history)
        progress |= {"losses": [], "seconds": 0.0}
        begin = time.perf_counter()
        if progress["best"] is None or verdict["score"] > progress["best"]:
            progress["best"] = verdict["score"]
            best = _learned(model, stage)
        _write_state(path, model, optimizer, best, progress)
        last_save = time.monotonic()
    model.load_state_dict(model.state_dict() | best)
    if stage.finish:
        stage.finish(model, held)


def _learned(model: nn.Module, stage: Stage) -> dict[str, Tensor]:
    """A copy of what the stage trains, as it is now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if stage.learns(name)}


def _batch(model: nn.Module, train: Data, taught: np.ndarray | None, rows: np.ndarray, step: int) -> Batch:
    device = next(model.parameters()).device
    inputs = train.encoded.batch(rows)
    arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids, train.labels[rows])
    *ids, labels = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(tuple(ids), labels, None if taught is None else torch.from_numpy(taught[rows]).to(device), step)


def _update(model: nn.Module, stage: Stage, optimizer, batch: Batch, rate: float, clip: float) -> float:
    """One step of the optimizer on the batch, at `rate` times the peak learning rates; returns the loss."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate
    loss = stage.loss(model, batch)
    if not torch.isfinite(loss):
        raise ValueError(f"the loss became {loss.item()}: the training diverged; begin anew with a smaller --lr")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
    optimizer.step()
    return loss.item()


def _schedule(step: int, total: int, warmup: float) -> float:
    """Rises to 1 over the warm-up, then falls linearly to 0."""
    rising = warmup * total
    return min((step + 1) / max(1.0, rising), (total - step) / max(1.0, total - rising), 1.0)


def _optimizer(model: nn.Module, stage: Stage, config: TrainConfig) -> torch.optim.AdamW:
    """Groups: the backbone or its adapters, and what is new on top of it; no weight decay on biases and norms."""
    groups = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage.learns(name))
        if parameter.requires_grad:
            pretrained = ".backbone." in f".{name}" or name.startswith("adapters.")
            lr = config.lr if pretrained else config.head_lr
            decay = config.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((lr, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "peak_lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
        fused=True,
    )


def _train_mode(model: nn.Module, stage: Stage) -> None:
    """Dropout only where something learns: a frozen backbone or head stays as it will be used."""
    model.train()
    for name, part in _parts(model):
        part.train(any(stage.learns(f"{name}.{parameter}") for parameter, _ in part.named_parameters()))


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The backbone, and each head or set of adapters on its own."""
    parts = []
    for name, child in model.named_children():
        lists = isinstance(child, nn.ModuleList)
        parts += [(f"{name}.{k}", each) for k, each in enumerate(child)] if lists else [(name, child)]
    return parts


def save_progress(folder: Path, part: nn.Module, optimizer: torch.optim.Optimizer, progress: dict) -> None:
    """What a training of one part of a model goes on from; progress is JSON, with the `settings` it was started with.

    Order and rates follow from settings and step: no random state is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"part.{name}": value for name, value in part.state_dict().items()} | _optimizer_tensors(optimizer)
    write_tensors(folder / STATE, tensors | {"progress": _as_tensor(progress)})


def load_progress(folder: Path, part: nn.Module, optimizer: torch.optim.Optimizer, settings: dict) -> dict:
    """Put back what save_progress wrote; returns the progress. NothingToResume; ValueError for other settings."""
    saved = _read_state(folder / STATE)
    progress = _progress(saved, settings, folder)
    part.load_state_dict(_part(saved, "part."))
    _put_back(optimizer, _part(saved, "optimizer."))
    return progress


def _write_state(path: Path, model, optimizer, best: dict[str, Tensor], progress: dict) -> None:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    tensors |= _optimizer_tensors(optimizer)
    tensors["random.cpu"] = torch.get_rng_state()
    device = next(model.parameters()).device
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    tensors["progress"] = _as_tensor(progress)
    write_tensors(path, tensors)


def _as_tensor(progress: dict) -> Tensor:
    return torch.tensor(list(json.dumps(progress).encode()), dtype=torch.uint8)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"].items()
    return {f"optimizer.{index}.{key}": value for index, state in states for key, value in state.items()}


def _read_state(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise NothingToResume(f"{path.parent}: no unfinished training here; start without --resume")
    return read_tensors(path)


def _progress(saved: dict[str, Tensor], settings: dict, folder: Path) -> dict:
    """Take the progress out of a saved state, or raise ValueError where it was started with other settings."""
    progress = json.loads(bytes(saved.pop("progress").tolist()))
    differ = [f"{key} {value}" for key, value in progress["settings"].items() if value != settings.get(key)]
    if differ:
        raise ValueError(f"{folder}: was started with {', '.join(differ)}; resume with the same settings")
    return progress


def _part(saved: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


def _put_back(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state = {}
    for name, value in tensors.items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _restore(model, optimizer, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put model, optimizer and random state back; returns the best weights so far."""
    model.load_state_dict(_part(saved, "model."))
    _put_back(optimizer, _part(saved, "optimizer."))
    torch.set_rng_state(saved["random.cpu"])
    device = next(model.parameters()).device
    if device.type == "cuda" and "random.cuda" in saved:
        torch.cuda.set_rng_state(saved["random.cuda"], device)
    return _part(saved, "best.")
