"""mini_ee: early-exit transformers from scratch. See README.md.

A public name is imported when it is first used, so a program that runs an export never loads torch.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.2.0"

PUBLIC = {
    "load_backbone": "mini_ee.backbones.hub",
    "save_backbone": "mini_ee.backbones.hub",
    "train": "mini_ee.training.train_run",
    "load_run": "mini_ee.training.run_folder",
    "add_exits": "mini_ee.export.add_exits",
    "WrongArguments": "mini_ee.errors",
    "NeverExit": "mini_ee.rules",
    "FixedExit": "mini_ee.rules",
    "Threshold": "mini_ee.rules",
    "Patience": "mini_ee.rules",
    "PatienceConfidence": "mini_ee.rules",
    "Policy": "mini_ee.rules",
}
"""Name -> the module that defines it."""
CALLABLE = ("early_exit", "export")  # modules that have the name of their main function


class CallableModule(ModuleType):
    """A module that can be called like its main function, which has its name: `mini_ee.early_exit(...)`."""

    def __call__(self, *args, **settings):
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **settings)


def __getattr__(name: str):
    if name in CALLABLE:
        return import_module(f"mini_ee.{name}")
    if name not in PUBLIC:
        raise AttributeError(f"module 'mini_ee' has no attribute {name!r}; it has {', '.join(__dir__())}")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*PUBLIC, *CALLABLE, "__version__"]
