"""The training loop: epochs, batches, a step of AdamW, validation, the best epoch.

It trains every method. A recipe is the list of a method's stages (stages.py). A recipe with its own control flow is a
generator of stages: it receives the best score of each stage and yields the next one (methods/consistent.py). The loop
is the same for rows and tokens; their data classes differ (exits/row_exits.py, exits/token_exits.py). Epochs are scored
on held-out units. The loop never reads the units that test the default rule, nor the split on which we report.

The core has a loop of its own, of the same steps (mini_ee/train.py): resumption, ranks, stages and records, which this
one adds between them, would hide what the core's shows in thirty lines.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.training import ranks
from mini_ee.lab.training.stages import Batch, Stage
from mini_ee.lab.training.state import Saved, State, own_state
from mini_ee.lab.training.train_settings import TrainConfig

CURVE_POINTS = 20  # of a stage's log_metrics


class Diverged(ValueError):
    """The loss, or the logits, became NaN or infinite."""


class Fitted(NamedTuple):
    """The records of a training."""

    epochs: list[dict]
    """One per epoch: stage, epoch, loss, exit_scores, score, seconds (in the first epoch of a stage including those of
    its targets), and the fields of the data's `scores` and of the stage's `validate`."""
    metrics: list[dict]  # stage, step, mean loss since the record before, and the fields of log_metrics


def fit(model: nn.Module, recipe: Iterable[Stage], train, held, config: TrainConfig, saved: Saved) -> Fitted:
    """Train `model` in place through all stages.

    model: the losses of the stages call its forward or `states`; the parameters for which `is_trainable(name)` is False
    never change. train, held: units of one kind (RowData, TextData), the second ones held out. With `saved.resume` the
    training found there continues. It ends with the same weights as one that was never stopped, and its settings must
    be the same. Uses torch's global random state. Raises NothingToResume, ValueError for other settings, and Diverged.
    """
    state = State(model, saved)
    ranks.wait()  # until all ranks have read the state
    loop = Loop(model, train, held, config, state)
    if not saved.resume:
        model.begin(train)
    for number, stage in enumerate(in_turn(recipe, state.progress["history"])):
        if number >= state.progress["stage"]:
            loop.run(number, stage)
            state.progress |= {"stage": number + 1, "step": 0, "losses": []}
        loop.steps_before += stage.config(config).epochs * train.steps(stage.config(config).batch_size)
    return Fitted(state.progress["history"], state.progress["watched"])


def in_turn(recipe: Iterable[Stage], epochs: list[dict]) -> Iterator[Stage]:
    """The stages of a recipe. A generator receives the best score of each stage, from the records of the epochs."""
    if not isinstance(recipe, Generator):
        yield from recipe
        return
    stage = next(recipe, None)
    while stage is not None:
        yield stage
        scores = [epoch["score"] for epoch in epochs if epoch["stage"] == stage.name]
        try:
            stage = recipe.send(max(scores if stage.to_beat is None else [stage.to_beat, *scores]))
        except StopIteration:
            return


class Loop:
    """The loop over the epochs and batches of a stage."""

    def __init__(self, model: nn.Module, train, held, config: TrainConfig, state: State):
        self.model, self.train, self.held, self.config, self.state = model, train, held, config, state
        self.steps_before = 0  # steps of all stages before; an estimate for stages on states

    def run(self, number: int, stage: Stage) -> None:
        """Train one stage, from the step that it has reached. The model gets the weights of the best epoch."""
        model, state, progress, config = self.model, self.state, self.state.progress, stage.config(self.config)
        state.start_clock()
        optimizer = make_optimizer(model, stage, config)
        if progress["step"]:
            best = state.restore(optimizer)
        else:
            progress["best"], best = stage.to_beat, trained_weights(model, stage)
            if stage.begin:
                stage.begin(model, self.train)
        train = self.train if stage.most is None else self.train.first(stage.most)
        train, held = (data.states(model) if stage.on_states else data for data in (train, self.held))
        model.eval()
        targets = stage.make_targets(model, train) if stage.make_targets else None
        per_epoch, scores = train.steps(config.batch_size), None
        total = config.epochs * per_epoch
        if not progress["step"]:
            self.log(stage, total)
        with tqdm(total=total, initial=progress["step"], desc=stage.name, unit="batch", delay=1) as bar:
            for epoch in range(progress["step"] // per_epoch, config.epochs):
                batches = list(train.order(config.batch_size, config.seed * 10_000 + number * 100 + epoch))
                set_modes(model, stage)
                for units in batches[progress["step"] - epoch * per_epoch :]:
                    batch = self.batch(stage, train, targets, ranks.share(units), total)
                    progress["losses"].append(self.step(stage, optimizer, batch, config))
                    progress["step"] += 1
                    bar.update()
                    bar.set_postfix(shown(progress), refresh=False)
                    self.log(stage, total)
                    if state.is_due() and progress["step"] % per_epoch:
                        state.save(optimizer, best)
                ranks.as_first(own_state(model).values())
                if scores is None or changes_logits(model, stage):
                    model.eval()
                    of_states = stage.on_states and held.scores_of
                    scores = held.scores(model) if of_states else self.held.scores(model, config.batch_size)
                if self.validate(stage, epoch, held, scores):
                    best = trained_weights(model, stage)
                state.save(optimizer, best)
        model.load_state_dict(model.state_dict() | best)
        if stage.finish:
            stage.finish(model, self.held)

    def batch(self, stage: Stage, data, targets, units: np.ndarray, total: int) -> Batch:
        """The inputs or states of these units, their labels and targets."""
        inputs, labels = data.batch(units, self.state.device)
        if targets is not None:
            targets = torch.as_tensor(targets[units]).to(self.state.device)
        states, inputs = (inputs, ()) if stage.on_states else (None, inputs)
        return Batch(inputs, labels, states, targets, self.state.progress["step"], total)

    def step(self, stage: Stage, optimizer, batch: Batch, config: TrainConfig) -> float:
        """One step of the optimizer, with scheduled learning rates. Returns the loss."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * schedule(batch.step, batch.steps, config.warmup)
        ranks.draw_apart(config.seed, self.steps_before + batch.step)
        with torch.autocast(self.state.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = stage.loss(self.model, batch)
        optimizer.zero_grad()
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        loss = ranks.average(parameters, loss, len(batch.labels))
        if not torch.isfinite(loss):
            raise Diverged(f"the loss became {loss.item()}: the training diverged; train again with a smaller --lr")
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        return loss.item()

    def log(self, stage: Stage, total: int) -> None:
        """Record the stage's metrics, if it has some, CURVE_POINTS times."""
        progress, step = self.state.progress, self.state.progress["step"]
        if not stage.log_metrics:
            return
        progress["unwatched"] += progress["losses"][-1:]
        if step % max(1, total // CURVE_POINTS) and step != total:
            return
        self.model.eval()
        loss = float(np.mean(progress["unwatched"])) if progress["unwatched"] else None
        metrics = {"stage": stage.name, "step": step, "loss": loss} | stage.log_metrics(self.model, self.held)
        progress["watched"].append(metrics)
        progress["unwatched"] = []
        set_modes(self.model, stage)

    def validate(self, stage: Stage, epoch: int, held, scores: tuple[list[float], dict]) -> bool:
        """Record an epoch; returns whether it is the best so far."""
        progress, (exit_scores, more) = self.state.progress, scores
        if stage.validate:
            self.model.eval()
            validation = stage.validate(self.model, held if stage.on_states else self.held.states(self.model))
        else:
            validation = {"score": stage.score(np.array(exit_scores))}
        score = torch.tensor(validation["score"], dtype=torch.float64, device=self.state.device)
        ranks.as_first([score])
        validation["score"] = score.item()
        record = {"stage": stage.name, "epoch": epoch + 1, "loss": float(np.mean(progress["losses"]))}
        record |= {"exit_scores": exit_scores, **validation, "seconds": self.state.stop_clock(), **more}
        progress["history"].append(record)
        progress |= {"losses": [], "seconds": 0.0}
        self.state.start_clock()
        better = progress["best"] is None or validation["score"] > progress["best"]
        if better:
            progress["best"] = validation["score"]
        return better


def make_optimizer(model: nn.Module, stage: Stage, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with learning rates for the backbone (or its adapters) and for new parts; biases and norms do not decay."""
    groups = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage.trainable(name) and model.is_trainable(name))
        if parameter.requires_grad:
            pretrained = ".backbone." in f".{name}" or name.startswith("adapters.")
            lr = config.lr if pretrained else config.head_lr
            decay = config.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((lr, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "peak_lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
        fused=True,
    )


def schedule(step: int, total: int, warmup: float) -> float:
    """Rises to 1 over the warm-up, then falls linearly to 0."""
    rising = warmup * total
    return min((step + 1) / max(1.0, rising), (total - step) / max(1.0, total - rising), 1.0)


def set_modes(model: nn.Module, stage: Stage) -> None:
    """Train mode only for the parts that are trained, so a frozen backbone or head has no dropout."""
    model.train()
    for name, child in model.named_children():
        parts = [(f"{name}.{k}", part) for k, part in enumerate(child)] if isinstance(child, nn.ModuleList) else None
        for prefix, part in parts or [(name, child)]:
            names = (f"{prefix}.{parameter}" for parameter, _ in part.named_parameters())
            part.train(any(stage.trainable(parameter) and model.is_trainable(parameter) for parameter in names))


def trained_weights(model: nn.Module, stage: Stage) -> dict[str, Tensor]:
    """A copy of the weights that the stage trains."""
    return {name: value.detach().clone() for name, value in own_state(model).items() if stage.trainable(name)}


def changes_logits(model: nn.Module, stage: Stage) -> bool:
    """Whether an epoch changes the logits of the exits. With frozen states only trained heads change them."""
    heads = (name for name, _ in model.named_parameters() if name.startswith("heads."))
    return not stage.on_states or any(map(stage.trainable, heads))


def shown(progress: dict) -> dict:
    """The figures next to the progress bar."""
    best = {} if progress["best"] is None else {"best": f"{progress['best']:.3f}"}
    return {"loss": f"{np.mean(progress['losses'][-50:]):.3f}"} | best
