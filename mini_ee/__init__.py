"""mini_ee: early-exit transformers from scratch. This folder is the core: four papers, a BERT and a Llama."""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.3.0"
LAB = {"train": "training.train_run", "load_run": "training.run_folder"}
LAB |= {"add_exits": "export.add_exits", "export": "export.writer"}


class Package(ModuleType):
    """mini_ee.train and the other names in LAB are functions of the lab, which is imported when one is first used."""

    def __getattr__(self, name: str):
        if name not in LAB:
            raise AttributeError(f"module 'mini_ee' has no attribute {name!r}; it has {', '.join(LAB)}")
        return getattr(import_module(f"mini_ee.lab.{LAB[name]}"), name)

    def __setattr__(self, name: str, value):
        if name not in LAB:  # from mini_ee.train import ... would bind the module train to this name
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package
