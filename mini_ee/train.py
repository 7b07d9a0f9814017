"""What the four scripts share: a training loop, a picture, and options."""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

WARMUP, WEIGHT_DECAY, CLIP = 0.1, 0.01, 1.0


# ---- Training ----
def train(
    rates: Mapping[nn.Module, float],
    count: int,
    loss: Callable[[Tensor], Tensor],
    epochs: int,
    size: int = 32,
    score: Callable[[], float] | None = None,
    to_beat: float = -math.inf,
) -> float:
    """AdamW with linear warm-up and decay; returns the best score. Only the modules in `rates` learn and have dropout.

    rates: module -> learning rate. count: number of examples, in batches of `size`, in a random order each epoch (seed:
    torch.manual_seed). loss: row numbers (B,) -> scalar; ValueError if not finite. score: after each epoch, larger is
    better; the modules get the weights of the best epoch, or those from before, if no epoch is above `to_beat`.
    """
    groups, last = list[dict](), epochs * math.ceil(count / size)
    for module, rate in rates.items():
        matrices, vectors = ([p for p in module.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups += [{"params": matrices, "peak": rate, "weight_decay": WEIGHT_DECAY}]
        groups += [{"params": vectors, "peak": rate, "weight_decay": 0.0}]
    learned = [parameter.requires_grad_() for group in groups for parameter in group["params"]]
    optimizer, step, best = torch.optim.AdamW(groups, lr=0.0), 0, to_beat
    saved = [parameter.detach().clone() for parameter in learned]
    with tqdm(total=last, unit="batch", delay=2, leave=False, disable=None) as bar:  # None: not into a log file
        for _ in range(epochs):
            for module in rates:
                module.train()
            for rows in torch.randperm(count).split(size):
                share = min((step + 1) / max(1.0, WARMUP * last), (last - step) / (last - WARMUP * last), 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = share * group["peak"]
                optimizer.zero_grad()
                value = loss(rows)
                if not torch.isfinite(value):
                    raise ValueError(f"the loss became {value.item()}: the training diverged; lower the learning rate")
                value.backward()
                nn.utils.clip_grad_norm_(learned, CLIP)
                optimizer.step()
                step += 1
                bar.update()
            for module in rates:
                module.eval()
            epoch_score = score() if score else float(step)  # without a score, each epoch is better than the last
            if epoch_score > best:
                best, saved = epoch_score, [parameter.detach().clone() for parameter in learned]
    with torch.no_grad():
        for parameter, value in zip(learned, saved):
            parameter.copy_(value)
    return best


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, C), (B,) -> scalar, in float32: the cross-entropy of classes, the squared error of float labels (C = 1)."""
    if labels.is_floating_point():
        return F.mse_loss(logits.float()[:, 0], labels)
    return F.cross_entropy(logits.float(), labels)


# ---- Scripts ----
def draw(path: str, title: str, metric: str, exits: list[tuple], rules: Mapping[str, tuple]) -> None:
    """A picture of points (mean layers, score): of each exit alone, and of each rule. Without matplotlib, none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
    axes.plot(*zip(*exits), "o--", color="0.6", label="one exit for all")
    for (name, point), marker in zip(rules.items(), "*sD^vPX<>d"):
        axes.plot(*point, marker, markersize=9, label=name)
    axes.set(xlabel="mean layers run", ylabel=metric, title=title)
    axes.grid(color="0.9")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))  # beside the points
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


@dataclass
class Options:
    """Options of every script."""

    model: str = field(default="bert", metadata={"help": "folder of a BERT of Hugging Face, or the built-in one"})
    task: str = field(default="", metadata={"help": "TSV, CSV or JSONL file, or a folder with train and dev files"})
    rows: int = field(default=2000, metadata={"help": "most training rows, drawn with the seed"})
    exits: tuple[int, ...] = field(default=(), metadata={"help": "exit layers, up to the last (spread over all)"})
    epochs: int = field(default=4, metadata={"help": "epochs of a training"})
    seed: int = field(default=0, metadata={"help": "random seed"})
    picture: str = field(default="", metadata={"help": "file of the picture; by default, one named after the paper"})
    out: str = field(default="", metadata={"help": "new folder, for model.onnx, which stops by itself"})


def layers(text: str) -> tuple[int, ...]:
    """The layers in a text such as 4,8,12."""
    return tuple(map(int, text.split(",")))


def script(run: Callable, kind: type, doc: str) -> None:
    """Parse the fields of a dataclass from the command line, and run. A mistake is one line, with status 2."""
    shape, first = functools.partial(argparse.HelpFormatter, max_help_position=28, width=110), doc.split("\n\n")[0]
    parser = argparse.ArgumentParser(description=first, usage=argparse.SUPPRESS, formatter_class=shape)
    for option in fields(kind):
        default = option.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        text, convert = f" ({shown})" * bool(shown), layers if isinstance(default, tuple) else type(default)
        parser.add_argument(f"--{option.name}", type=convert, default=default, help=option.metadata["help"] + text)
    try:
        options = kind(**vars(parser.parse_args()))
        for name, value in vars(options).items():
            least = 0 if name == "seed" or isinstance(value, float) else 1
            if isinstance(value, int | float) and not value >= least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
        if not Path(options.picture).absolute().parent.is_dir():  # before the training
            raise FileNotFoundError(f"--picture {options.picture}: its folder is not there; make it first")
        if options.out:
            from mini_ee.export.writer import run_and_export  # of the ring around the core

            run = functools.partial(run_and_export, run)
        run(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
