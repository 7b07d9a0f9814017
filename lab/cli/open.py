"""Opens and checks what the command line names: runs and exports."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mini_ee.lab.backbones.adapter import is_adapter, tokenizer_folder
from mini_ee.lab.backbones.hub import backbone_sha256, check_generates, load_backbone, read_config
from mini_ee.lab.cli.rule_options import refuse_settings
from mini_ee.lab.data.files import MANIFEST
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import OWN_BACKBONE, Run, check_device, is_run, load_run

OF_TOKENS = {False: ("export",), True: ("evaluate",)}  # commands that open runs that label tokens, and their exports

if TYPE_CHECKING:
    from mini_ee.lab.export.runtime import Runtime


def open_run(folder: Path, args: Namespace, plain: bool = False) -> Run:
    """A run on --device. With `plain` the folder may be a decoder's checkpoint."""
    check_device(args.device)
    if (folder / MANIFEST).is_file():
        raise WrongArguments(f"{folder}: expected a run, found an export; give the run that it came from")
    if not plain or is_run(folder) or not ((folder / "config.json").is_file() or is_adapter(folder)):
        run = load_run(folder, args.model)
        backbone = run.config["backbone"]
        if args.model and ("config" in backbone or backbone["folder"] == OWN_BACKBONE):
            raise WrongArguments("--model is for a run without its backbone; this run contains it: leave out --model")
    else:
        if args.model:
            raise WrongArguments(
                f"--model is for the backbone of a run, found a checkpoint, {folder}; leave out --model"
            )
        run = plain_decoder(folder)
    refuse_tokens(run, args)
    run.model.to(args.device)
    return _scheduled(run, args, getattr(args, "schedule", None))


def open_trained(folder: Path, args: Namespace, plain: bool = False) -> "Run | Runtime":
    """A run or an export. With `plain` the folder may be a decoder's checkpoint."""
    if not (folder / MANIFEST).is_file():
        return open_run(folder, args, plain)
    if getattr(args, "schedule", None):
        raise WrongArguments(f"{folder}: an export has one schedule; export the run with another --schedule")
    if args.device not in ("cpu", "cuda"):
        raise WrongArguments(f"--device {args.device}: expected cpu or cuda for an export")
    if args.model:
        raise WrongArguments(
            f"--model is for a run without its backbone; {folder} is an export, which contains it: leave out --model"
        )
    from mini_ee.lab.cli.engine_options import open_exported

    runtime = open_exported(args, folder)
    refuse_tokens(runtime, args)
    return runtime


def refuse_tokens(one: "Run | Runtime", args: Namespace) -> None:
    """Raise WrongArguments for a model that labels tokens, unless the command is for such models, too."""
    if one.token_task is not None and args.command not in OF_TOKENS[one.is_exported]:
        raise WrongArguments(
            f"{one.folder}: is for {one.token_task.kind}, and `mini-ee {args.command}` for one label of a text; "
            f"`mini-ee run` and `serve` take it, and `calibrate` and `evaluate` its export"
        )


def plain_decoder(folder: Path) -> Run:
    """A decoder's checkpoint as a run with only the last exit. Raises WrongArguments for another checkpoint."""
    from mini_ee.lab.exits.token_exits import TokenExits

    backbone_config = read_config(folder / "config.json")
    check_generates(folder, backbone_config.model_type)
    model = TokenExits(load_backbone(folder), (backbone_config.num_hidden_layers,))
    config = {"method": "none", "unit": "tokens", "exits": list(model.exits), "training": {}, "seed": 0}
    config["backbone"] = {"folder": str(folder.resolve()), "sha256": backbone_sha256(folder)}
    return Run(folder, config, model.eval(), Tokenizer.from_folder(tokenizer_folder(folder), None), Never())


def _scheduled(run: Run, args: Namespace, schedule: str | None) -> Run:
    if not hasattr(run.model, "streams"):
        if schedule:
            raise WrongArguments(
                f"{run.folder}: --schedule is for runs of lora-exits, found {run.config['method']}; leave it out"
            )
        return run
    if schedule == "adaptive":
        refuse_settings(args, "--schedule adaptive uses the calibrated rule", rule=run.rule.name)
        return run._replace(schedule=adaptive_schedule(run, getattr(args, "batch_size", 1)))
    return run._replace(schedule=run.model.schedule(schedule or "restart"))


def adaptive_schedule(run: Run, batch_size: int) -> list[list[int]]:
    """The cheapest schedule on this machine for examples that have the length and the exits of the held-out ones.

    Their exits are those under the run's rule, which training chose or `calibrate` wrote.
    """
    metrics = run.metrics
    if "mean_tokens" not in metrics:
        raise WrongArguments(
            f"{run.folder}: --schedule adaptive needs mean_tokens in metrics.json; train the run again"
        )
    counts = np.array(run.config.get("exit_counts", metrics["hold_out"]["exit_counts"]))
    reach = counts[::-1].cumsum()[::-1] / counts.sum()  # share of examples that reach each exit
    return run.model.cheapest_schedule(batch_size, round(metrics["mean_tokens"]), reach)


def schedule_of(one: "Run | Runtime") -> dict:
    """{"schedule": groups of streams that start together, by their exit layers}; empty without streams.

    Also empty for an export, whose graph restarts after each exit.
    """
    schedule = None if one.is_exported else one.schedule
    return {"schedule": [[one.exits[k] for k in group] for group in schedule]} if schedule else {}


def of_rows(runs: "list[Run | Runtime]") -> bool:
    """Whether these runs predict labels. Raises WrongArguments if some do and some generate text, or embed it."""
    if any(one.embeds for one in runs):
        raise WrongArguments("expected classifiers or decoders, found a sentence encoder; use mini-ee embed")
    generate = {one.generates for one in runs}
    if len(generate) > 1:
        raise WrongArguments("expected only classifiers or only decoders, found both; compare runs of one kind")
    return not generate.pop()
