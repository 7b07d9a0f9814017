"""What --help and --help-all print: one screen, the options that fit, and the defaults that apply."""

import argparse
import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from mini_ee.lab.backbones.hub import read_config
from mini_ee.lab.cli.main import COMMANDS, main, parser
from mini_ee.lab.data.settings import flag_of
from mini_ee.lab.registry import METHODS
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.train_run import exits_of, make_request
from mini_ee.lab.training.train_settings import OPTIONS, TrainOptions

BESIDE = {"--help", "--help-all", "--json", "--seed", "--threads", "--model", "--task", "--out", "--resume"}
TASK_OF = {"rows": "reviews", "tokens": "continue", "embeddings": "reviews", "prompts": "reviews"}


def shown(capsys, *words):
    """What a command prints that ends with --help or --help-all."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_of(text):
    """The options that a help lists."""
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.M))


@pytest.mark.parametrize("method", METHODS)
def test_help_of_a_method_shows_its_own_options_and_the_common_ones_alone(capsys, method):
    """On each unit: of a classifier no options of a decoder's text, which are parsed all the same."""
    made = load_method(method)
    for unit in made.units:
        text = shown(capsys, "train", method, "--task", TASK_OF[unit], "--help-all")
        parts = [made.config, TrainOptions, *OPTIONS[unit]]
        options = {field.name: field.metadata for part in parts for field in fields(part) if field.metadata}
        flags = {flag_of(name, metadata) for name, metadata in options.items() if name not in made.lacks}
        assert flags_of(text) | BESIDE == flags | BESIDE
        others = [other for other in made.units if other in ("rows", "tokens") and other != unit != "prompts"]
        commands = [f"  mini-ee train {method} --task {TASK_OF[other]} --help-all" for other in others]
        assert [line for line in text.splitlines() if line.endswith("--help-all")] == commands
    argv = ["train", method, "--out", "run", *["--rank", "4"] * ("tokens" in made.units and "rank" not in made.lacks)]
    assert parser(argv).parse_args(argv)


@pytest.mark.parametrize("method", ["consistent", "free", "joint", "lora-exits", "tr-bert", "embedding-maps"])
def test_help_shows_the_defaults_of_this_training(capsys, checkpoint_folder, decoder_checkpoint, task_folder, method):
    """Those that differ between examples and tokens, and for the built-in models."""
    models = {"rows": (None, checkpoint_folder), "tokens": (None, decoder_checkpoint), "embeddings": (None,)}
    for unit, model in ((unit, model) for unit in load_method(method).units for model in models[unit]):
        task = task_folder if model and unit == "rows" else TASK_OF[unit]
        named = ["--model", model] if model else []
        text = " ".join(shown(capsys, "train", method, *named, "--task", task, "--help-all").split())
        request = make_request(method, model, task, Path("run"), False, {})
        numbers = [
            (part, field.name, field.metadata) for part in (request.config, request.train) for field in fields(part)
        ]
        for part, name, metadata in numbers:
            value = getattr(part, name)
            if metadata and type(value) in (int, float) and name not in ("seed", *request.method.lacks):
                default = text.partition(f" {flag_of(name, metadata)} ")[2].partition("(default ")[2].partition(")")[0]
                assert default == str(value), name
        layers = 12 if model is None else read_config(model / "config.json").num_hidden_layers
        exits = ",".join(map(str, exits_of(request, layers)))
        assert "exits" in request.method.lacks or f"(default {exits})" in text


MOST_LINES, MOST_USUAL = 40, 4  # of a screen; the methods alone are a line each
HELPS = [[], *([command] for command in COMMANDS if command != "train"), *(["train", method] for method in METHODS)]


@pytest.mark.parametrize("words", HELPS, ids=lambda words: "-".join(words) or "mini-ee")
def test_help_is_one_screen_and_help_all_has_the_rest(capsys, monkeypatch, words):
    """The required options come first, and then a few; --help-all has every option, and each of them once."""
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, *words, "--help")
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES and lines[2].startswith(f"usage: {' '.join(['mini-ee', *words])} ")
    if words:
        every = shown(capsys, *words, "--help-all")
        first, _, others = text.partition("\noptions:\n")
        assert len(flags_of(others)) <= MOST_USUAL + 1 and flags_of(text) < flags_of(every)
        count = int(re.search(r"--help-all +show (\d+) more options", text)[1])
        assert count == len(flags_of(every) - flags_of(text)) - 1  # --help
        assert all(flag in lines[2] for flag in flags_of(first))
        listed = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", every, re.M)
        assert len(listed) == len(set(listed))


FIRST_LINE = re.compile(r"(?P<paper>[^:(]+ \([A-Z][^:()]* (19|20)\d\d, (arXiv:\d{4}\.\d{5}[^()]*|[^:()]+)\)): .+\.")


def test_the_help_of_train_lists_each_method_on_one_line_with_its_paper_and_year(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, module in METHODS.items():
        first = FIRST_LINE.fullmatch(import_module(module).__doc__.partition("\n")[0])
        assert first, module
        assert [line for line in lines if line.split()[:1] == [name]] == [f"  {name:<16} {first['paper']}"]
    assert max(map(len, lines)) <= 80


def parser_of(*argv):
    """The parser of a command, or of a method of `train`."""
    branch = parser([*argv])
    for name in argv:
        branch = branch._subparsers._group_actions[0].choices[name]
    return branch


def every_parser():
    """The parsers of all commands, and of `train` with each method."""
    yield from (parser_of(command) for command in COMMANDS)
    yield from (parser_of("train", method) for method in METHODS)


def test_every_command_has_help_with_an_example(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0 and f"example:\n  mini-ee {command}" in capsys.readouterr().out


def test_the_help_of_the_demo_shows_the_defaults_of_its_model(capsys):
    for model, epochs in ((), 4), (("--model", "mine"), 3):
        assert f"no option of its own (default {epochs})" in " ".join(
            shown(capsys, "demo", *model, "--help-all").split()
        )


def test_the_help_of_every_option_with_a_default_ends_with_it_and_says_it_once():
    for sub in every_parser():
        for action in sub._actions:
            text, has_default = sub._get_formatter()._get_help_string(action), action.default is not argparse.SUPPRESS
            if has_default and action.default not in (None, []) and not isinstance(action.default, bool):
                assert text.endswith("(default %(default)s)") and text.count("default") == 2, (sub.prog, text)


NO_NOUN = set(
    "a an also as at behind by for from how in instead it like of or other so some that the to what when where "
    "which whose with".split()
)


def test_the_help_of_every_option_and_of_its_default_is_whole():
    """It begins with what the option sets, or with a verb for a switch; a default stands at the end, once."""
    for sub in every_parser():
        for action in sub._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            text = sub._get_formatter()._get_help_string(action)
            assert text, (sub.prog, action.dest)
            is_switch = action.nargs == 0 and not isinstance(action, argparse._HelpAction | argparse._VersionAction)
            first = re.split(r"[ ,:]", text)[0]
            assert first not in NO_NOUN or (is_switch and first == "also"), (sub.prog, action.dest, text)
            assert text.count("(default ") <= 1 and ("(default" not in text or text.endswith(")")), (sub.prog, text)
            assert not re.search(r"default:|by default|usually", text), (sub.prog, text)


def test_the_help_lists_every_command_once_in_its_group_and_begins_with_a_first_step(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "First step: mini-ee demo" in text
    listed = re.findall(r"^(?:(\w+):|  ([a-z-]+) .+)$", text.partition("\ntrain:")[2], re.M)
    assert [name for _, name in listed if name] == list(COMMANDS)
    assert [group for group, _ in listed if group] == ["measure", "deploy"]


def test_the_examples_in_the_help_parse():
    commands = parser([])._subparsers._group_actions[0].choices
    methods = commands["train"]._subparsers._group_actions[0].choices
    for sub in (*commands.values(), *methods.values()):
        argv = shlex.split(sub.epilog.partition("mini-ee ")[2].partition("\n")[0])
        parser(argv).parse_args(argv)
