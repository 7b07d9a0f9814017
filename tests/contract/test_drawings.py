"""The drawings in docs/pictures/ are what docs/draw.py makes, and show the methods and files that exist."""

import importlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mini_ee.lab.registry import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def draw():
    """docs/draw.py. A drawing in which a text is longer than its room raises ValueError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("draw")


def test_every_picture_is_the_one_that_its_script_makes(draw):
    for name, drawing in draw.PICTURES.items():
        svg = drawing().svg()
        assert (draw.FOLDER / f"{name}.svg").read_text() == svg, f"{name}: run python docs/draw.py"
        elements = list(ElementTree.fromstring(svg).iter())
        assert elements[0].get("viewBox") and "prefers-color-scheme: dark" in svg
        assert not {element.tag.partition("}")[2] for element in elements} & {"script", "image", "foreignObject"}


def test_the_map_of_the_field_has_every_method_once(draw):
    places = [name for _, deciders in draw.maps.FIELD for _, methods in deciders for name, _ in methods]
    assert sorted(places) == sorted(METHODS)


def test_the_map_of_the_field_shows_what_exits(draw):
    colours = {name: colour for _, deciders in draw.maps.FIELD for _, methods in deciders for name, colour in methods}
    for name, module in METHODS.items():
        units = importlib.import_module(module).METHOD.units
        examples, tokens = bool(set(units) & {"rows", "prompts", "embeddings"}), "tokens" in units
        kinds = {(True, False): ("layer", "rule"), (True, True): ("frozen",), (False, True): ("exit",)}
        assert colours[name] in kinds[examples, tokens], name


def test_the_map_of_the_house_names_the_rings_and_the_files_of_the_core(draw):
    files = [file for _, files, _ in draw.maps.CORE for file in files]
    here = [path.name for path in (ROOT / "mini_ee").glob("*.py") if not path.name.startswith("__")]
    assert sorted(files) == sorted(here)
    assert all((ROOT / folder).is_dir() for folder, _, _ in draw.maps.RINGS)
