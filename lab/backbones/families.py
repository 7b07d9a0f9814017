"""The class and the Layout of each model_type: registry.py names the module of its family."""

from importlib import import_module
from types import ModuleType

from mini_ee.lab.backbones.backbone import Backbone, Layout
from mini_ee.lab.data.values import shortened
from mini_ee.lab.registry import BACKBONES


def backbone_class(model_type: object) -> type[Backbone]:
    """The class for a model_type of config.json. Raises ValueError if it is not in registry.py."""
    return _module(model_type).BACKBONE


def generates(model_type: object) -> bool:
    """Whether this is the model_type of a backbone that generates text; False if it is not in registry.py."""
    return isinstance(model_type, str) and model_type in BACKBONES and backbone_class(model_type).generates


def layout_of(model_type: str) -> Layout:
    """The Layout of this model_type. Raises ValueError if it is not in registry.py."""
    return _module(model_type).LAYOUTS[model_type]


def _module(model_type: object) -> ModuleType:
    if not isinstance(model_type, str) or model_type not in BACKBONES:
        raise ValueError(f"model_type must be one of {', '.join(BACKBONES)}, found {shortened(model_type)}")
    return import_module(BACKBONES[model_type])
