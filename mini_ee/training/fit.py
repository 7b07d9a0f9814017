"""The one training loop: AdamW, warm-up, linear decay, clipping, the best checkpoint; its state survives a kill.

A recipe is a list of stages; a stage says which parameters learn, from which loss, and which score decides the best
checkpoint. It knows units alone: rows and tokens bring their own data (exits/rows.py, exits/tokens.py). Epochs are
scored on held-out units; those that test the default rule, and the split that is reported, are never seen here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.hub import read_tensors, write_tensors
from mini_ee.data.progress import tqdm
from mini_ee.training import ranks
from mini_ee.training.options import TrainConfig

STATE = "state.safetensors"
SAVE_SECONDS = 60.0  # between two saves of the training state, which holds the weights four times over
CURVE_POINTS = 20  # of what a stage watches


class Batch(NamedTuple):
    """What a step learns from, on the model's device."""

    inputs: tuple[Tensor, ...]  # what the model's forward takes; empty where the stage learns from states
    labels: Tensor  # (N,)
    states: list[Tensor] | None  # (N, D) of every exit, where the stage learns from states
    taught: Tensor | None  # (N, ...), what the stage's teacher says of these units
    step: int = 0  # of the stage
    steps: int = 1  # that the stage has in all


class Stage(NamedTuple):
    """One stage of a recipe."""

    name: str
    learns: Callable[[str], bool]  # of a parameter's name in the model
    loss: Callable[[nn.Module, Batch], Tensor]  # -> scalar
    score: Callable[[np.ndarray], float] | None = None  # (K,) hold-out scores of the exits -> what the best maximises
    on_states: bool = False  # nothing below the states learns: they are computed once, and batches are units
    teacher: Callable[[nn.Module, object], np.ndarray | Tensor] | None = None
    """(model, train data or States) -> (N, ...), asked once before the stage begins."""
    judge: Callable[[nn.Module, object], dict[str, float]] | None = None
    """In place of `score`: (model, States of the hold-out) -> `score`, and what else the epoch's record shall hold."""
    watch: Callable[[nn.Module, object], dict] | None = None
    """(model, held data) -> figures, before the first step and CURVE_POINTS times on the way."""
    begin: Callable[[nn.Module, object], None] | None = None  # (model, train data), before the first step
    finish: Callable[[nn.Module, object], None] | None = None  # (best model, held data), at the end
    settings: dict = {}  # of TrainConfig, where the stage has its own
    round: int = 0  # from 1: rounds share one best checkpoint, and the first that does not improve it is the last

    def config(self, config: TrainConfig) -> TrainConfig:
        """The training's settings with the stage's own."""
        return replace(config, **self.settings)


class NothingToResume(FileNotFoundError):
    """--resume without a training state."""


class Diverged(ValueError):
    """The loss, or what the exits say, became no numbers."""


class Saved(NamedTuple):
    """Where the state of a training stands until the caller removes it, and what it was started with (JSON)."""

    folder: Path
    settings: dict
    resume: bool = False  # go on with the state that is there


class Fitted(NamedTuple):
    """What a training measured."""

    epochs: list[dict]
    """One record an epoch: stage, epoch, loss, exit_scores, score, seconds (a stage's first epoch with its teacher's),
    and what data and judge add to it."""
    watched: list[dict]  # stage, step, loss since the one before, and what the stage watches


def fit(model: nn.Module, stages: list[Stage], train, held, config: TrainConfig, saved: Saved) -> Fitted:
    """Train `model` in place through all stages.

    model: its forward or `states` is what the stages' losses call; `learns(name)` says what may change at all. train,
    held: units of one kind (RowData, TextData). With `saved.resume` the training found there goes on, and ends with the
    same weights as one that was never stopped; the settings must be the ones that it was started with. Uses torch's
    global random state. Raises NothingToResume, or ValueError for other settings, and where the loss becomes no number.
    """
    training = _Training(model, stages, train, held, config, saved)
    tensors = training.resume() if saved.resume else {}
    ranks.wait()  # until all have read what is resumed
    progress = training.progress
    with tqdm(total=sum(training.steps), initial=training.done, desc="training", unit="batch", delay=1) as bar:
        for number in range(progress["stage"], len(stages)):
            if not progress["step"] and training.converged(number):
                break
            training.run_stage(number, tensors, bar)
            progress |= {"stage": number + 1, "step": 0, "losses": []}
            tensors = {}
    return Fitted(progress["history"], progress["watched"])


class _Training:
    """A training under way: what is fixed, and its progress, which is JSON and stands in its saved state."""

    def __init__(self, model: nn.Module, stages: list[Stage], train, held, config: TrainConfig, saved: Saved):
        self.model, self.stages, self.train, self.held = model, stages, train, held
        self.config, self.saved = config, saved
        self.device = next(model.parameters()).device
        self.progress = {
            "settings": saved.settings,
            "stage": 0,
            "step": 0,
            "best": None,
            "round_best": None,
            "losses": [],  # of the epoch under way
            "unwatched": [],  # losses since the stage was last watched
            "seconds": 0.0,  # of the epoch under way
            "history": [],
            "watched": [],
        }
        self.steps = [self._sizes(stage, train)[1] for stage in stages]

    @property
    def done(self) -> int:
        """Steps that lie behind."""
        return sum(self.steps[: self.progress["stage"]]) + self.progress["step"]

    def _sizes(self, stage: Stage, data) -> tuple[int, int]:
        """Steps of an epoch and of the stage; of one on states an estimate, until they are there."""
        config = stage.config(self.config)
        per_epoch = data.steps(config.batch_size)
        return per_epoch, config.epochs * per_epoch

    def resume(self) -> dict[str, Tensor]:
        """Take up the saved progress; returns the saved tensors."""
        path = self.saved.folder / STATE
        if not path.exists():
            raise NothingToResume(f"{path.parent}: no unfinished training here; start without --resume")
        try:
            tensors = read_tensors(path, signed=True)
        except ValueError as error:
            found = str(error).removesuffix("; fetch or write it again")
            raise ValueError(f"{found}; remove {path.parent} and begin anew") from None
        progress = json.loads(bytes(tensors.pop("progress").tolist()))
        settings = self.saved.settings
        differ = [f"{key} {value}" for key, value in progress["settings"].items() if value != settings.get(key)]
        if differ:
            raise ValueError(
                f"{self.saved.folder}: was started with {', '.join(differ)}; resume with the same settings"
            )
        self.progress |= progress
        return tensors

    def converged(self, number: int) -> bool:
        """Whether the round that ended before this stage did not improve. Else notes what the next one must."""
        progress, now = self.progress, self.stages[number].round
        before = self.stages[number - 1].round if number else 0
        if not now or not before:
            progress["best"] = progress["round_best"] = None
        elif now != before:
            if progress["best"] == progress["round_best"]:
                return True
            progress["round_best"] = progress["best"]
        return False

    def run_stage(self, number: int, tensors: dict[str, Tensor], bar) -> None:
        """One stage, from progress["step"] on; leaves the model at its best epoch, or where a round's best stands."""
        stage, progress = self.stages[number], self.progress
        config, begin = stage.config(self.config), time.perf_counter() - progress["seconds"]
        if stage.begin and not tensors:
            stage.begin(self.model, self.train)
        optimizer = self._optimizer(stage, config)
        best = self._restore(optimizer, tensors) if tensors else {}
        if not tensors and progress["best"] is not None:
            best = self._learned(stage)
        train, held = (data.states(self.model) if stage.on_states else data for data in (self.train, self.held))
        self.model.eval()
        taught = stage.teacher(self.model, train) if stage.teacher else None
        per_epoch, total = self._sizes(stage, train)
        every, last_save = max(1, total // CURVE_POINTS), time.monotonic()
        scores = None
        if stage.watch and not progress["step"]:
            self._watch(stage)
        for epoch in range(progress["step"] // per_epoch, config.epochs):
            order = list(train.order(config.batch_size, config.seed * 10_000 + number * 100 + epoch))
            self._train_mode(stage)
            for units in order[progress["step"] - epoch * per_epoch :]:
                batch = self._batch(stage, train, taught, ranks.share(units))
                rate = _schedule(progress["step"], total, config.warmup)
                progress["losses"].append(self._update(stage, optimizer, batch, rate, config))
                progress["step"] += 1
                progress["unwatched"] += progress["losses"][-1:] if stage.watch else []
                bar.update()
                bar.set_postfix(self._shown(stage), refresh=False)
                if stage.watch and (progress["step"] % every == 0 or progress["step"] == total):
                    self._watch(stage)
                    self._train_mode(stage)
                if time.monotonic() - last_save > SAVE_SECONDS and progress["step"] < (epoch + 1) * per_epoch:
                    progress["seconds"] = time.perf_counter() - begin
                    self._write_state(optimizer, best)
                    begin, last_save = time.perf_counter() - progress["seconds"], time.monotonic()
            ranks.as_first(self._own_state().values())
            if scores is None or self._says_more(stage):
                scores = self.held.scores(self.model, config.batch_size)
            better = self._judge(stage, epoch, held, scores, begin)
            if better:
                best = self._learned(stage)
            self._write_state(optimizer, best)
            begin, last_save = time.perf_counter(), time.monotonic()  # what is written is no training
        self.model.load_state_dict(self.model.state_dict() | best)
        if stage.finish:
            stage.finish(self.model, self.held)

    def _judge(self, stage: Stage, epoch: int, held, scores: tuple[list[float], dict], begin: float) -> bool:
        """Record an epoch; returns whether it is the best so far."""
        progress, (exit_scores, more) = self.progress, scores
        if stage.judge:
            self.model.eval()
            verdict = stage.judge(self.model, held if stage.on_states else self.held.states(self.model))
        else:
            verdict = {"score": stage.score(np.array(exit_scores))}
        score = torch.tensor(verdict["score"], dtype=torch.float64, device=self.device)
        ranks.as_first([score])
        verdict["score"] = score.item()
        progress["history"].append(
            {
                "stage": stage.name,
                "epoch": epoch + 1,
                "loss": float(np.mean(progress["losses"])),
                "exit_scores": exit_scores,
                **verdict,
                "seconds": time.perf_counter() - begin,
                **more,
            }
        )
        progress |= {"losses": [], "seconds": 0.0}
        better = progress["best"] is None or verdict["score"] > progress["best"]
        if better:
            progress["best"] = verdict["score"]
        return better

    def _says_more(self, stage: Stage) -> bool:
        """Whether an epoch changes what exits say: what is below the states stays, but heads may learn."""
        names = (name for name, _ in self.model.named_parameters() if name.startswith("heads."))
        return not stage.on_states or any(stage.learns(name) for name in names)

    def _watch(self, stage: Stage) -> None:
        self.model.eval()
        progress = self.progress
        loss = float(np.mean(progress["unwatched"])) if progress["unwatched"] else None
        told = {"stage": stage.name, "step": progress["step"], "loss": loss}
        progress["watched"].append(told | stage.watch(self.model, self.held))
        progress["unwatched"] = []

    def _shown(self, stage: Stage) -> dict:
        """What the progress bar says."""
        shown = {"stage": stage.name, "loss": f"{np.mean(self.progress['losses'][-50:]):.3f}"}
        best = self.progress["best"]
        return shown if best is None else shown | {"best": f"{best:.3f}"}

    def _batch(self, stage: Stage, data, taught, units: np.ndarray) -> Batch:
        inputs, labels = data.batch(units, self.device)
        if taught is not None:
            taught = torch.as_tensor(taught[units]).to(self.device)
        states, inputs = (inputs, ()) if stage.on_states else (None, inputs)
        return Batch(inputs, labels, states, taught, self.progress["step"], self._sizes(stage, data)[1])

    def _update(self, stage: Stage, optimizer, batch: Batch, rate: float, config: TrainConfig) -> float:
        """One step of the optimizer on the batch, at `rate` times the peak learning rates; returns the loss."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        ranks.draw_apart(config.seed, self.done)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = stage.loss(self.model, batch)
        optimizer.zero_grad()
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        loss = ranks.average(parameters, loss, len(batch.labels))
        if not torch.isfinite(loss):
            raise Diverged(f"the loss became {loss.item()}: the training diverged; begin anew with a smaller --lr")
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        return loss.item()

    def _optimizer(self, stage: Stage, config: TrainConfig) -> torch.optim.AdamW:
        """Groups: the backbone or its adapters, and what is new on top of it; no weight decay on biases and norms."""
        groups = {}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(stage.learns(name) and self.model.learns(name))
            if parameter.requires_grad:
                pretrained = ".backbone." in f".{name}" or name.startswith("adapters.")
                lr = config.lr if pretrained else config.head_lr
                decay = config.weight_decay if parameter.dim() > 1 else 0.0
                groups.setdefault((lr, decay), []).append(parameter)
        return torch.optim.AdamW(
            [{"params": params, "peak_lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
            fused=True,
        )

    def _train_mode(self, stage: Stage) -> None:
        """Dropout only where something learns: a frozen backbone or head stays as it will be used."""
        self.model.train()
        for name, part in _parts(self.model):
            names = (f"{name}.{parameter}" for parameter, _ in part.named_parameters())
            part.train(any(stage.learns(each) and self.model.learns(each) for each in names))

    # ---- The saved state ----

    def _learned(self, stage: Stage) -> dict[str, Tensor]:
        """A copy of what the stage trains, as it is now."""
        state = self._own_state().items()
        return {name: value.detach().clone() for name, value in state if stage.learns(name)}

    def _own_state(self) -> dict[str, Tensor]:
        """All that some stage may change: a frozen backbone is not saved again and again."""
        return {name: value for name, value in self.model.state_dict().items() if self.model.learns(name)}

    def _write_state(self, optimizer, best: dict[str, Tensor]) -> None:
        if ranks.rank():
            return
        tensors = {f"model.{name}": value for name, value in self._own_state().items()}
        tensors |= {f"best.{name}": value for name, value in best.items()}
        states = optimizer.state_dict()["state"].items()
        tensors |= {f"optimizer.{index}.{key}": value for index, state in states for key, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        tensors["progress"] = torch.tensor(list(json.dumps(self.progress).encode()), dtype=torch.uint8)
        self.saved.folder.mkdir(parents=True, exist_ok=True)  # not before: a training that fails at once leaves nothing
        write_tensors(self.saved.folder / STATE, tensors)

    def _restore(self, optimizer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put model, optimizer and random state back; returns the best weights so far."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(self.model.state_dict() | part("model."))
        state = {}
        for name, value in part("optimizer.").items():
            index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        return part("best.")


def _schedule(step: int, total: int, warmup: float) -> float:
    """Rises to 1 over the warm-up, then falls linearly to 0."""
    rising = warmup * total
    return min((step + 1) / max(1.0, rising), (total - step) / max(1.0, total - rising), 1.0)


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The backbone, and each head or set of adapters on its own."""
    parts = []
    for name, child in model.named_children():
        lists = isinstance(child, nn.ModuleList)
        parts += [(f"{name}.{k}", each) for k, each in enumerate(child)] if lists else [(name, child)]
    return parts


# ---- Losses and stages that several recipes share ----


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy for class indices, mean squared error for float labels (C = 1); in float32."""
    if labels.is_floating_point():
        return F.mse_loss(logits.float()[:, 0], labels)
    return F.cross_entropy(logits.float(), labels)


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The same of each row: (N, C), (N,) -> (N,) float32."""
    if labels.is_floating_point():
        return (logits.float()[:, 0] - labels) ** 2
    return F.cross_entropy(logits.float(), labels, reduction="none")


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


def joint_stage(model: nn.Module, **own) -> Stage:
    """All exits and what may change of the backbone at once, under Eq. 1. own: fields of the Stage that differ."""
    stage = Stage("joint", lambda name: True, joint_loss, lambda scores: float(depth_weighted_sum(scores, model.exits)))
    return stage._replace(**own)


def heads_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of all exits but the last."""
    return sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs)[:-1])


def fine_tune_then_heads(
    model: nn.Module, heads_loss: Callable[[nn.Module, Batch], Tensor] = heads_loss
) -> list[Stage]:
    """First the backbone and the last head, as any fine-tuning; then the other heads, by a loss of their own."""
    last = f"heads.{len(model.exits) - 1}."
    stages = [
        Stage(
            name="fine-tune",
            learns=lambda name: name.startswith(("backbone.", "adapters.", last)),
            loss=lambda model, batch: task_loss(model(*batch.inputs)[-1], batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]
    if len(model.exits) > 1:
        stages.append(
            Stage(
                name="heads",
                learns=lambda name: name.startswith("heads.") and not name.startswith(last),
                loss=heads_loss,
                score=lambda scores: float(np.mean(scores[:-1])),
            )
        )
    return stages
