"""The engine that runs an export: ONNX Runtime, or one of ENGINES in the registry. No torch here."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import PROVIDERS
from mini_ee.lab.registry import ENGINES

DEFAULT = "onnxruntime"
PRECISIONS = "f32", "bf16"  # in which the engines of ENGINES compute


class Engine(NamedTuple):
    """An engine and its precision; None: that of the export's weights."""

    engine: str = DEFAULT
    precision: str | None = None

    def open(self, folder: Path, device: str | None = "cpu", threads: int = 0, **settings) -> Runtime:
        """The export in this engine. Raises WrongArguments for an engine that is not installed, or does not run it.

        device: cpu, cuda, or None for the best. settings: of Runtime.
        """
        if self.engine not in ENGINES:
            return Runtime(folder, PROVIDERS[device], threads=threads, **settings)
        if device == "cuda":
            raise WrongArguments(f"--device cuda: expected cpu for --engine {self.engine}")
        try:
            module = import_module(ENGINES[self.engine])
        except ModuleNotFoundError:
            line = f"--engine {self.engine} needs its library: pip install 'mini-ee[{self.engine}]'"
            raise WrongArguments(line) from None
        segments = module.open_segments(folder, self.precision, threads)
        return Runtime(folder, segments=segments, threads=threads, **settings)

    @property
    def options(self) -> str:
        """Of the commands that run an export."""
        return f"--engine {self.engine}" + (f" --precision {self.precision}" if self.precision else "")

    def without_guarantee(self, folder: Path, manifest: dict) -> str | None:
        """A line, if the guarantee of an export was calibrated with another engine or precision; else None."""
        calibrated = calibrated_engine(manifest)
        if not manifest.get("guarantee") or calibrated == self:
            return None
        reason = f"the guarantee was calibrated with {calibrated.options}, and none holds with {self.options}"
        return f"{folder}: {reason}: `mini-ee calibrate EXPORTED {self.options}` gives one"


def calibrated_engine(manifest: dict) -> Engine:
    """The engine that gave the guarantee of an export; of one from torch the default, which the export compared."""
    calibration = manifest.get("calibration") or {}
    return Engine(calibration.get("engine", DEFAULT), calibration.get("precision"))
