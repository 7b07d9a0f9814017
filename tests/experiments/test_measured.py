"""Pages of measurements: parts that are measured, their JSON, and when a page is written."""

import json
from types import SimpleNamespace

import pytest

from mini_ee.experiments import measured, pages
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import file_sha256, json_sha256, read_json, write_json


@pytest.fixture
def measured_page(monkeypatch, tmp_path):
    """A page of two parts in place of shards; the first one counts the letters of a file of the data."""

    def first(sources, work):
        assert sources.find("weights", "model").exists()
        return {"first": len((sources.find("data", "one") / "a.txt").read_text())}

    parts = {
        "first": first,
        "second": lambda *_: {"second": 2},
    }
    module = SimpleNamespace(PARTS=parts, page_figures=lambda figures: {"sum": figures["first"] + figures["second"]})
    monkeypatch.setattr(measured, "import_module", lambda name: module)
    monkeypatch.setattr(pages, "TEMPLATES", tmp_path / "templates")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "shards.md").write_text("# Two parts\n\n{{ first }} {{ second }} {{ sum }}\n")
    return module


def test_hours_of_an_interrupted_measurement_count(measured_page, tmp_path, monkeypatch):
    clock = iter((0.0, 3600.0, 5000.0, 5000.0 + 7200.0))
    monkeypatch.setattr(measured.os, "times", lambda: (next(clock), 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setitem(measured_page.PARTS, "second", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured.make_page("shards", ["second"], tmp_path, tmp_path)
    assert not (tmp_path / "shards.json").exists()
    monkeypatch.setitem(measured_page.PARTS, "second", lambda *_: {"second": 2})
    measured.make_page("shards", ["second"], tmp_path, tmp_path)
    assert read_json(tmp_path / "shards.json")["measured"]["second"]["core_hours"] == 3.0


def test_a_page_is_not_written_from_parts_of_which_nothing_says_how_they_were_measured(measured_page, tmp_path):
    lines = []
    write_json(tmp_path / "shards.json", {"first": 1, "second": 2})
    assert measured.make_page("shards", out=tmp_path, say=lines.append)["page"] is None
    assert lines == [f"{tmp_path / 'shards.md'} is not written yet; missing parts: first, second"]


def test_a_measured_page_is_written_once_all_parts_are_measured(measured_page, tmp_path, capsys):
    (one := tmp_path / "here" / "data" / "one").mkdir(parents=True)
    (tmp_path / "here" / "weights" / "model").mkdir(parents=True)
    (one / "a.txt").write_text("a")
    command = ["reproduce", "shards", "--out", str(tmp_path), "--sources", str(tmp_path / "here"), "--json"]
    assert main(command) == 2 and "`mini-ee reproduce shards --measure` writes it" in capsys.readouterr().err
    assert main([*command, "--measure", "third"]) == 2
    assert "--measure: expected some of first, second; found third" in capsys.readouterr().err
    assert main([*command, "--measure", "first"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["page"] is None and answer["measured"] == ["first"] and not (tmp_path / "shards.md").exists()
    assert main([*command, "--measure", "second"]) == 0
    made = read_json(tmp_path / "shards.json", signed="first")
    how_measured = made.pop("measured")
    assert made == {"first": 1, "second": 2} and set(how_measured) == {"first", "second"}
    sums = {"one": json_sha256({"a.txt": file_sha256(one / "a.txt")})}
    assert [how_measured[part]["data"] for part in how_measured] == [sums, {}]
    assert how_measured["first"]["core_hours"] < 0.1
    text = (tmp_path / "shards.md").read_text()
    assert text == "# Two parts\n\n1 2 3\n"
    capsys.readouterr()
    for measure, parts in (([], []), (["--measure"], ["first", "second"])):
        assert main([*command, *measure]) == 0
        assert json.loads(capsys.readouterr().out)["measured"] == parts


def test_a_measured_page_does_not_replace_another_file(measured_page, tmp_path, capsys):
    (tmp_path / "shards.md").write_text("# Notes\n")
    assert main(["reproduce", "shards", "--out", str(tmp_path), "--measure"]) == 2
    assert (
        "expected a page of `mini-ee reproduce`" in capsys.readouterr().err and not (tmp_path / "shards.json").exists()
    )


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["shards", "--quick"], "--only, --quick, --seeds and --device are for papers; shards has --measure PART"),
        (
            ["shards", "--only", "Table 1"],
            "--only, --quick, --seeds and --device are for papers; shards has --measure PART",
        ),
        (["raee", "--measure"], "raee runs what is missing; leave it out"),
    ],
)
def test_papers_and_measured_pages_have_options_of_their_own(command, error, capsys):
    assert main(["reproduce", *command]) == 2 and error in capsys.readouterr().err
