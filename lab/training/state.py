"""The saved state of a training. A resumed training ends with exactly the weights of one that was not interrupted.

RUN.training/state.safetensors contains the trainable weights, the best weights, the states of the optimizer and of the
random generators, and `progress` (JSON as bytes): the position, the records, and the settings of the training.
"""

import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.data.model_files import changed_files
from mini_ee.lab.training import ranks

STATE = "state.safetensors"
SAVE_SECONDS = 60.0  # between two saves within an epoch; a state contains the weights four times


class NothingToResume(FileNotFoundError):
    """--resume without a training state."""


class Saved(NamedTuple):
    """The folder of the state, which the caller removes at the end, and the settings of the training (JSON)."""

    folder: Path
    settings: dict
    resume: bool = False  # continue from the state that is there


class State:
    """The state of one training, in memory and on disk. `progress` is JSON."""

    def __init__(self, model: nn.Module, saved: Saved):
        self.model, self.saved = model, saved
        self.device = next(model.parameters()).device
        self.progress = {
            "settings": saved.settings,
            "stage": 0,
            "step": 0,  # of the stage; 0 only before its first
            "best": None,  # score of the stage's best epoch
            "losses": [],  # of this epoch
            "unwatched": [],  # losses since the last log_metrics
            "seconds": 0.0,  # of this epoch
            "history": [],  # a record an epoch
            "watched": [],  # what log_metrics returned
        }
        self.tensors = self._read() if saved.resume else {}
        self.written = time.monotonic()

    def _read(self) -> dict[str, Tensor]:
        """Read the saved progress; return the saved tensors."""
        path = self.saved.folder / STATE
        if not path.exists():
            raise NothingToResume(f"{path.parent}: no unfinished training here; start without --resume")
        try:
            tensors = read_tensors(path, signed=True)
        except ValueError as error:
            problem = str(error).removesuffix("; fetch or write it again")
            raise ValueError(f"{problem}; remove {path.parent} and begin anew") from None
        progress = json.loads(bytes(tensors.pop("progress").tolist()))
        settings, begun_with = self.saved.settings, dict(progress["settings"])
        files = begun_with.pop("files", settings.get("files", {}))  # states of 0.1.0 have none
        differ = [f"another {name}" for name in changed_files(files, settings.get("files", {}))]
        differ += [f"{key} {value}" for key, value in begun_with.items() if value != settings.get(key)]
        if differ:
            raise ValueError(
                f"{self.saved.folder}: was started with {', '.join(differ)}; resume with the same settings"
            )
        self.progress |= progress
        return tensors

    # ---- The seconds of an epoch, without those of a save ----

    def start_clock(self) -> None:
        """Continue to count the seconds of the epoch."""
        self.begun = time.perf_counter() - self.progress["seconds"]

    def stop_clock(self) -> float:
        """The seconds of the epoch so far."""
        self.progress["seconds"] = time.perf_counter() - self.begun
        return self.progress["seconds"]

    # ---- Saving and restoring ----

    def is_due(self) -> bool:
        """Whether the last save was long ago."""
        return time.monotonic() - self.written > SAVE_SECONDS

    def save(self, optimizer: torch.optim.Optimizer, best: dict[str, Tensor]) -> None:
        """Write the state, on rank 0 only."""
        self.stop_clock()
        if ranks.rank() == 0:
            tensors = {f"model.{name}": value for name, value in own_state(self.model).items()}
            tensors |= {f"best.{name}": value for name, value in best.items()}
            states = optimizer.state_dict()["state"].items()
            tensors |= {f"optimizer.{at}.{key}": value for at, state in states for key, value in state.items()}
            tensors["random.cpu"] = torch.get_rng_state()
            if self.device.type == "cuda":
                tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
            tensors["progress"] = torch.tensor(list(json.dumps(self.progress).encode()), dtype=torch.uint8)
            self.saved.folder.mkdir(
                parents=True, exist_ok=True
            )  # only here, so that a training that fails at once makes no folder
            write_tensors(self.saved.folder / STATE, tensors)
        self.start_clock()
        self.written = time.monotonic()

    def restore(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Put the saved weights, optimizer and random state back; return the best weights."""
        tensors, self.tensors = self.tensors, {}

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


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that some stage may change, without a frozen backbone."""
    return {name: value for name, value in model.state_dict().items() if model.is_trainable(name)}
