"""The drawings in docs/pictures/ are SVG files, edited by hand; they show the methods and files that exist."""

import importlib
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from chromium import CHROMIUM, Chromium

from mini_ee.lab.registry import METHODS

ROOT = Path(__file__).parents[2]
TOO_LONG = """(() => {
  const { width } = document.documentElement.viewBox.baseVal, long = [];
  const inside = (text, left, right) => text.x >= left && text.x + text.width <= right;
  let box = null;  // the rectangle whose text follows
  for (const shape of document.querySelectorAll("rect, text")) {
    if (shape.tagName == "rect") { box = shape.getBBox(); continue; }
    const text = shape.getBBox(), middle = text.y + text.height / 2, centre = text.x + text.width / 2;
    const within = box && shape.getAttribute("text-anchor") == "middle" && middle > box.y && middle < box.y + box.height
      && centre > box.x && centre < box.x + box.width;
    const fits = within ? inside(text, box.x, box.x + box.width) : inside(text, 0, width);
    if (!fits && !shape.closest("[display=none]")) long.push(shape.textContent);
  }
  return long;
})()"""
DRAWINGS = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


def elements_of(name):
    return [*ElementTree.parse(ROOT / "docs" / "pictures" / f"{name}.svg").getroot().iter()]


def boxes_of(name):
    """(class of a box, its words), in their order: a rectangle and the text that follows it."""
    pairs = [
        pair for pair in pairwise(elements_of(name)) if [at.tag.partition("}")[2] for at in pair] == ["rect", "text"]
    ]
    return [(box.get("class"), words.text) for box, words in pairs]


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_has_a_dark_mode_a_description_and_nothing_but_shapes_and_text(path):
    elements, (_, _, width, height) = elements_of(path.stem), ElementTree.parse(path).getroot().get("viewBox").split()
    tags = [element.tag.partition("}")[2] for element in elements]
    assert {"title", "desc"} <= set(tags) and "prefers-color-scheme: dark" in path.read_text()
    assert not {"script", "image", "foreignObject"} & set(tags)
    for element in elements:
        assert float(element.get("x", 0)) < float(width) and float(element.get("y", 0)) < float(height), element.attrib


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
def test_a_text_fits_into_its_box_and_its_drawing(tmp_path):
    browser, long = Chromium(tmp_path), {}
    for path in DRAWINGS:
        browser.open(path.as_uri(), f"location.href == '{path.as_uri()}' && document.readyState == 'complete'")
        long |= {path.stem: texts} if (texts := browser.value(TOO_LONG)) else {}
    browser.close()
    assert not long


def test_the_map_of_the_field_has_every_method_once_and_shows_what_exits():
    colours = [(words, colour) for colour, words in boxes_of("map-of-the-field") if words in METHODS]
    assert sorted(name for name, _ in colours) == sorted(METHODS)
    for name, colour in colours:
        units = importlib.import_module(METHODS[name]).METHOD.units
        examples, tokens = bool(set(units) & {"rows", "prompts", "embeddings"}), "tokens" in units
        kinds = {(True, False): ("layer", "rule"), (True, True): ("frozen",), (False, True): ("exit",)}
        assert colour in kinds[examples, tokens], name


def test_the_map_of_the_house_names_the_rings_and_the_files_of_the_core():
    words = [element.text or "" for element in elements_of("map-of-the-house") if element.tag.endswith("text")]
    here = [path.name for path in (ROOT / "mini_ee").glob("*.py") if not path.name.startswith("__")]
    assert sorted(word for word in words if word.endswith(".py")) == sorted(here)
    assert {word for word in words if word.endswith("/")} == {"mini_ee/", "export/", "lab/", "serve/"}
