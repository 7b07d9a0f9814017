"""The page of an exported folder: in a real headless Chromium it says what Python says, and what fails is said."""

import functools
import http.server
import inspect
import json
import os
import re
import shutil
import threading
import time
from copy import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from chromium import CHROMIUM, Chromium

import mini_ee.lab.export.web_page as page
import mini_ee.lab.rules as rules
from mini_ee import load_run, train
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, load_backbone, save_backbone
from mini_ee.lab.baselines.adainfer import Svm
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import verification
from mini_ee.lab.export.builder import branches_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rule_inputs import runtime_inputs
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Policy, Threshold
from mini_ee.lab.training import holdout
from mini_ee.lab.training.run_folder import Run

ROOT = Path(__file__).parents[2]
in_chromium = pytest.mark.skipif(
    not CHROMIUM or not (page.SOURCES / page.VENDOR).is_dir(),
    reason="needs Debian's chromium, and lab/export/web/vendor/, which `sh lab/export/web/vendor.sh` makes",
)
SENTENCES = 50
ATOL = 1e-4  # of a confidence, WebAssembly against Python; measured at most 1.2e-7
ODD = [
    "Señor Café’s naïve œuvre, 5 stars… (really!)",
    "東京 is great, 很好",
    "word " * 300,
    "x" * 150,
    "good\tfilm\n\nbad\u200bfilm \ufffd",
    "I said [SEP] and [MASK]",
    "🎬👍🏽 e\u0301t\u00e9 İstanbul",
]


class Handler(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` is, quietly."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def serve():
    """serve(folder): its address, as `python -m http.server -d folder` gives it."""
    servers = []

    def started(folder):
        handler = functools.partial(Handler, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/index.html"

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the built-in reviews, hardly trained, under a rule with which examples exit at many layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdout, "TEST_ROWS", 100)
        run = train("joint", out=tmp_path_factory.mktemp("web") / "run", epochs=1, max_train=300)
    (curve,) = read_json(run.folder / "metrics.json")["curves"]
    values, _, layers = zip(*curve["points"])
    return run._replace(rule=Threshold(values[np.searchsorted(layers, 6)]))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "exported"
    export(run, folder, web=True)
    return folder


@pytest.fixture(scope="module")
def small_run(checkpoint_folder, task_folder, tmp_path_factory):
    """A run with three layers, for what does not depend on the model; its default rule exits early."""
    quick = {"epochs": 2, "batch_size": 8, "lr": 3e-3, "head_lr": 1e-2, "max_loss": 0.9}
    return train("joint", checkpoint_folder, task_folder, tmp_path_factory.mktemp("web") / "small", **quick)


@pytest.fixture(scope="module")
def small_exported(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "small-exported"
    export(small_run, folder, web=True)
    return folder


OPENED = "import('./model.js').then((module) => module.openModel())"
LOADED = "document.querySelector('main:not([hidden]) .verdict strong')"


def answers(browser, rows, settings=None):
    """What the folder that is open says of rows of texts, of each: label, layers, confidence, token ids."""
    settings = "model.about.settings" if settings is None else json.dumps(settings)
    return browser.value(f"""{OPENED}.then(async (model) => {{
        const all = [];
        for (const texts of {json.dumps(rows)}) {{
            const {{label, layers, confidence}} = await model.decide(texts, {settings});
            all.push([label, layers, confidence, model.encode(texts).ids]);
        }}
        return all;
    }})""")


def assert_says_what_python_says(browser, folder, rows, settings=None, rule=None):
    """Returns the layers."""
    runtime, rows = Runtime(folder), [(row,) if isinstance(row, str) else row for row in rows]
    expected, encoded = runtime.run(rows, batch_size=1, rule=rule), runtime.encode(rows)
    shown = answers(browser, rows, settings)
    assert [ids for *_, ids in shown] == [ids.tolist() for ids in encoded.ids]
    assert [row[:2] for row in shown] == [[answer.label, answer.layers] for answer in expected]
    if runtime.label_names:
        expected = [answer.confidence for answer in expected]
        np.testing.assert_allclose([row[2] for row in shown], expected, rtol=0, atol=ATOL)
    return [row[1] for row in shown]


def reviews():
    return [text for (text,) in toy_task().split("test").texts[:SENTENCES]]


@in_chromium
def test_fifty_sentences_have_pythons_labels_and_layers(browser, serve, exported):
    browser.open(serve(exported), LOADED)
    layers = assert_says_what_python_says(browser, exported, reviews())
    assert len(layers) == SENTENCES and len(set(layers)) > 2, "the rows should leave at several exits"


@in_chromium
def test_every_value_of_the_slider_exits_as_pythons_rule_does(browser, serve, exported):
    browser.open(serve(exported), LOADED)
    page_data, means = read_json(exported / "web.json"), []
    for value, *_ in page_data["curve"]["points"][::4]:
        given_inputs = page_data["settings"] | {"threshold": {"dtype": "float32", "values": [value] * 11}}
        layers = assert_says_what_python_says(browser, exported, reviews()[:10], given_inputs, Threshold(value))
        means.append(np.mean(layers))
    assert means == sorted(means) and means[0] < means[2] < means[-1]


@in_chromium
def test_texts_that_are_odd_or_too_long_have_pythons_tokens(browser, serve, exported):
    browser.open(serve(exported), LOADED)
    assert_says_what_python_says(browser, exported, ODD)


def test_the_page_of_the_built_in_reviews_begins_with_the_sentences_of_the_first_picture(exported, small_exported):
    drawn = re.findall(r">([^<]+[.!])</text>", (ROOT / "docs" / "pictures" / "loop.svg").read_text())[1:]
    first, small = (read_json(folder / "web.json")["examples"] for folder in (exported, small_exported))
    assert [row["texts"] for row in first][:3] == [[text] for text in drawn]
    assert len(first) == len(small) == page.EXAMPLES
    assert not set(drawn) & {text for row in small for text in row["texts"]}


def test_the_page_names_a_fixed_exit_by_its_layer():
    assert page._rule_text(Fixed(1), (2, 4, 6))["fixed"] == {"exit": 4}


@in_chromium
@pytest.mark.parametrize(
    "rule",
    [
        Patience(2),
        PatienceConfidence(2, 0.55),
        Fixed(3),
        Never(),
        Threshold(-0.68, "entropy"),
        Threshold((0.55, 0.53, 0.52) * 4),
        Svm((1.0,) * 11, (1.0,) * 11, (-0.65,) * 11),
    ],
    ids=["patience", "patience-confidence", "fixed", "never", "entropy", "exit by exit", "adainfer"],
)
def test_each_rule_has_its_page(browser, serve, run, tmp_path, rule):
    export(run._replace(rule=rule), tmp_path / "exported", web=True)
    browser.open(serve(tmp_path / "exported"), LOADED)
    assert_says_what_python_says(browser, tmp_path / "exported", reviews()[:10])
    assert_shows_what_is_compared(browser, run, rule, read_json(tmp_path / "exported" / "web.json"))
    assert text_of(browser, "#rule-text").startswith(" ".join(inspect.getdoc(rule).split("\n\n")[0].split()))


def assert_shows_what_is_compared(browser, run, rule, page_data):
    """Of the first example, at every exit that it reaches: what `stop` compares, and what with."""
    texts = [tuple(page_data["examples"][0]["texts"])]
    inputs, segments = run.encode(texts).batch([0]), run.segments()
    (at,) = early_exit(segments, rule, inputs).exit_index
    logits, _, _ = read_every_exit(segments, inputs)
    shown = browser.value("Array.from(document.querySelectorAll('article:first-child .reason'), (e) => e.textContent)")
    memory, last = {}, len(run.exits) - 1
    for k, words in enumerate(shown):
        if k in (last, *range(at + 1, last)):
            assert words == (
                "not run; it would predict this" if k > at else "the last exit: every text that reaches it exits"
            )
            continue
        assert words.endswith("it exits" if k == at else "it continues")
        if not runtime_inputs(rule):
            assert words.startswith("the rule compares nothing here")
            continue
        noted = copy(rule)
        wanted = {name: Asked(getattr(rule, name), k) for name in runtime_inputs(rule).values()}
        for name, value in wanted.items():
            object.__setattr__(noted, name, value)
        noted.stop(k, logits[:, k], memory)
        for part, (name, value) in zip(words.split(":")[0].split("; "), wanted.items(), strict=True):
            number, setting = part.split(f", {name} ")
            assert float(number) == pytest.approx(value.compared, abs=6e-4)
            assert float(setting) == pytest.approx(value.value, abs=6e-4)


class Asked:
    """A setting of a rule that takes down what it is compared with."""

    def __init__(self, setting, k):
        self.value = setting[k] if isinstance(setting, tuple) else setting

    def __array_ufunc__(self, ufunc, method, *given, **_):
        (self.compared,) = given[0].tolist()
        return ufunc(given[0], self.value)


class Mine(Threshold):
    """A rule that a method brings itself. The page has these words of it."""

    name = "mine"


@in_chromium
def test_a_rule_of_ones_own_has_its_page(browser, serve, run, tmp_path, monkeypatch):
    monkeypatch.setitem(rules.RULES, "mine", Mine)
    test_each_rule_has_its_page(browser, serve, run, tmp_path, Mine(0.55))
    words = "A rule that a method brings itself. The page has these words of it. Here: threshold 0.550; measure "
    assert text_of(browser, "#rule-text") == f"{words}max_probability."


@in_chromium
def test_a_late_answer_is_not_shown_under_another_text(browser, serve, exported):
    browser.open(serve(exported), LOADED)
    browser.value(f"""(() => {{
        const card = document.querySelector("article"), field = card.querySelector("textarea");
        const enter = () => field.dispatchEvent(new KeyboardEvent("keydown", {{key: "Enter", cancelable: true}}));
        field.value = {json.dumps(reviews()[3])};
        enter();
        field.value = "";
        enter();
    }})()""")
    time.sleep(1.5)  # longer than twelve exits take
    assert browser.value("document.querySelector('article .verdict').textContent") == "Write a sentence first."


@in_chromium
def test_the_page_shows_each_exit_and_follows_the_slider(browser, serve, exported):
    browser.events.clear()
    browser.ask("Runtime.enable"), browser.ask("Network.enable")
    address = serve(exported)
    browser.open(address, LOADED)
    text = reviews()[7]
    (answer,) = Runtime(exported).run([text])
    browser.value(f"""(() => {{
        const card = document.querySelector("article"), field = card.querySelector("textarea");
        card.querySelector(".verdict").textContent = "";
        field.value = {json.dumps(text)};
        field.dispatchEvent(new KeyboardEvent("keydown", {{key: "Enter", bubbles: true, cancelable: true}}));
    }})()""")
    browser.wait("document.querySelector('article .verdict strong')")
    assert browser.value("document.querySelector('article .verdict').textContent").startswith(answer.label)
    assert browser.value("document.querySelector('article').querySelectorAll('.exits li').length") == 12
    exit_line = browser.value("document.querySelector('article .exited .prediction').textContent")
    assert exit_line.startswith(f"Layer {answer.layers}: {answer.label}")
    before = browser.value("document.querySelector('#rule-score').textContent")
    browser.value("""(() => {
        const slider = document.querySelector("#slider");
        slider.value = slider.max;
        slider.dispatchEvent(new Event("input"));
    })()""")
    browser.wait("document.querySelector('article .verdict').textContent.includes('after layer 12 of 12')")
    summary = browser.value("document.querySelector('#rule-score').textContent")
    full = read_json(exported / "web.json")["curve"]["points"][-1]
    assert summary != before and f"{full[1]:.3f}" in summary and "12.00 of 12 layers" in summary
    assert not [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]
    requests = [
        event["params"]["request"]["url"] for event in browser.events if event.get("method", "").endswith("BeSent")
    ]
    folder_address = address.removesuffix("index.html")
    assert len(requests) > 9 and all(url.startswith((folder_address, "data:")) for url in requests), requests


@in_chromium
def test_an_example_goes_into_the_card_that_was_used_last(browser, serve, exported):
    browser.open(serve(exported), LOADED)
    examples = [row["texts"] for row in read_json(exported / "web.json")["examples"]]
    browser.value("""(() => {
        document.querySelectorAll("textarea")[1].focus();
        document.querySelectorAll("#examples button")[3].click();
    })()""")
    values = browser.value("Array.from(document.querySelectorAll('textarea'), (field) => field.value)")
    assert values == [examples[0][0], examples[3][0]]


@in_chromium
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vendor", "vendor.sh"),
        ("web.json", "web.json"),
        ("onnx/model.onnx_data", "expected the exported file, found another one"),
    ],
)
def test_missing_or_damaged_files_are_reported_on_the_page(browser, serve, exported, tmp_path, name, says):
    folder = tmp_path / "exported"
    shutil.copytree(exported, folder)
    if name == "vendor":
        shutil.rmtree(folder / name)
    elif name == "web.json":
        (folder / name).unlink()
    else:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
    browser.open(serve(folder), "document.querySelector('#status.failed')")
    assert says in browser.value("document.querySelector('#status').textContent")


def byte_level_checkpoint(folder):
    """A random RoBERTa, whose tokenizer splits bytes, puts two tokens between sentences and has no types."""
    backend = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(PAIRS, vocab_size=400, special_tokens=special, show_progress=False)
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(model_type="roberta", vocab_size=400, max_position_embeddings=24, pad_token_id=1, **shape)
    save_backbone(Bert(config), folder)
    backend.save(str(folder / "tokenizer.json"))
    return folder


PAIRS = ["good film", "the bad bad meal was very poor", "the song and " * 8]


@in_chromium
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_of_sentences_have_two_fields_and_are_cut_as_in_python(browser, serve, checkpoint_folder, tmp_path, kind):
    checkpoint = checkpoint_folder if kind == "bert" else byte_level_checkpoint(tmp_path / "roberta")
    (tmp_path / "task").mkdir()
    texts = [(one, other) for one in PAIRS for other in PAIRS]
    rows = [{"sentence1": one, "sentence2": other, "label": str(one == other)} for one, other in texts]
    for split in ("train", "dev"):
        (tmp_path / "task" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    run = train("joint", model=checkpoint, task=tmp_path / "task", out=tmp_path / "run", epochs=1)
    export(run, tmp_path / "exported", texts=texts, web=True)
    browser.open(serve(tmp_path / "exported"), LOADED)
    assert browser.value("document.querySelectorAll('article textarea').length") == 4
    assert_says_what_python_says(browser, tmp_path / "exported", [*texts, ("naïve 🎬 it’s", "x\ty  z")])


# ---- The page of a decoder ----


@pytest.fixture(scope="module")
def decoder():
    """The built-in decoder with copies of its head, under a rule that lets tokens leave at every exit."""
    model = TokenExits(load_backbone(BUILT_IN_DECODER), (3, 6, 9, 12), "copy").eval()
    return decoder_run(model, Tokenizer.from_folder(BUILT_IN_DECODER), Threshold(0.5))


def decoder_run(model, tokenizer, rule):
    config = {"method": "self-supervised", "unit": "tokens", "settings": {}}
    return Run(Path("run"), config, model, tokenizer, rule)


def export_decoder(run, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 3)  # the pages below write more
        patch.setattr(page, "CURVE_TOKENS", 16)
        export(run, folder, PROMPTS, web=True)
    return folder


@pytest.fixture(scope="module")
def exported_decoder(decoder, tmp_path_factory):
    return export_decoder(decoder, tmp_path_factory.mktemp("decoder") / "exported")


PROMPTS = ["Once upon a time", "The dog", "Tom had a red ball and"]
ODD_PROMPTS = ["x", "Señor Café’s 🎬 said: “東京”", " two\n\nlines\t", "the <|endoftext|> of [it]", "word " * 90]
NEW = 24


def written(browser, prompts, settings=None, count=NEW):
    """What the folder that is open writes behind each prompt: text, tokens, layers."""
    settings = "model.about.settings" if settings is None else json.dumps(settings)
    return browser.value(f"""{OPENED}.then(async (model) => {{
        const all = [];
        for (const prompt of {json.dumps(prompts)}) {{
            let text = "", tokens = [], layers = [];
            for await (const each of model.generate(prompt, {count}, {settings})) {{
                text = each.text, tokens.push(each.id), layers.push(each.layers);
            }}
            all.push([text, tokens, layers]);
        }}
        return all;
    }})""")


def assert_writes_what_python_writes(browser, folder, prompts, settings=None, rule=None, count=NEW):
    """Returns the layers."""
    expected = Runtime(folder, threads=1).run(prompts, batch_size=1, rule=rule, max_new_tokens=count)
    texts_written = written(browser, prompts, settings, count)
    assert texts_written == [[answer.text, answer.tokens, answer.layers] for answer in expected]
    return [layer for *_, layers in texts_written for layer in layers]


@in_chromium
def test_a_decoder_writes_pythons_text_with_pythons_layers(browser, serve, exported_decoder):
    browser.open(serve(exported_decoder), LOADED)
    layers = assert_writes_what_python_writes(browser, exported_decoder, PROMPTS + ODD_PROMPTS, count=60)
    assert set(layers) == {3, 6, 9, 12}


@in_chromium
def test_every_value_of_a_decoders_slider_exits_as_pythons_rule_does(browser, serve, exported_decoder):
    browser.open(serve(exported_decoder), LOADED)
    page_data, means = read_json(exported_decoder / "web.json"), []
    values = [float(value) for value, *_ in page_data["curve"]["points"]]
    between = (np.array(values[1:]) + values[:-1]) / 2  # a point itself is what some token's confidence is
    for value in [*between[::6].tolist(), "inf"]:
        given_inputs = page_data["settings"] | {"threshold": {"dtype": "float32", "values": [value] * 3}}
        rule = Threshold(float(value))
        means.append(np.mean(assert_writes_what_python_writes(browser, exported_decoder, PROMPTS, given_inputs, rule)))
    assert means[0] < means[2] < means[-1] == 12


@in_chromium
@pytest.mark.parametrize(
    "rule",
    [
        Patience(1),
        PatienceConfidence(2, 0.4),
        Fixed(1),
        Never(),
        Threshold((0.3, 0.4, 0.2, 0.0), "breaking_ties"),
        Threshold(0.9, "saturation"),
    ],
    ids=["patience", "patience-confidence", "fixed", "never", "exit by exit", "saturation"],
)
def test_a_decoder_has_its_page_under_each_rule(browser, serve, decoder, tmp_path, rule):
    export_decoder(decoder._replace(rule=rule), tmp_path / "exported")
    browser.open(serve(tmp_path / "exported"), LOADED)
    layers = assert_writes_what_python_writes(browser, tmp_path / "exported", PROMPTS)
    assert len(set(layers)) > (rule.needs is not None), "some should leave early, and some later"
    assert text_of(browser, "#rule-text").startswith(" ".join(inspect.getdoc(rule).split("\n\n")[0].split()))
    point = (read_json(tmp_path / "exported" / "web.json")["curve"] or {}).get("own")
    assert not point or f"after {point[1]:.2f} of 12 layers" in text_of(browser, "#rule-score")


@in_chromium
def test_a_policy_decides_in_the_page_of_a_decoder(browser, serve, decoder_checkpoint, tmp_path):
    """Its tokenizer is one of whole words, which has no decoder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(load_backbone(decoder_checkpoint), (1, 2, 3), "copy", PolicyNetworks).eval()
        for network in model.policy.networks:
            torch.nn.init.normal_(network[2].weight, std=0.5)
    folder, prompts = tmp_path / "exported", ["the film was", "a meal", "the"]
    export(decoder_run(model, Tokenizer.from_folder(decoder_checkpoint), Policy()), folder, prompts, web=True)
    browser.open(serve(folder), LOADED)
    assert len(set(assert_writes_what_python_writes(browser, folder, prompts))) > 1


@in_chromium
def test_a_checkpoint_without_exits_has_its_page(browser, serve, decoder_checkpoint, tmp_path):
    """Its tokenizer is BERT's, which joins pieces and tidies up when it decodes."""
    assert main(["export", str(decoder_checkpoint), "--out", str(tmp_path / "exported"), "--web"]) == 0
    browser.open(serve(tmp_path / "exported"), LOADED)
    assert_writes_what_python_writes(browser, tmp_path / "exported", ["the good film", "a bad song!"], count=12)
    assert not browser.value("document.querySelector('#knob').checkVisibility()")


def press(browser, key, text=None):
    """Press a key in the prompt's field, in which there is another text now."""
    text = "field.value" if text is None else json.dumps(text)
    browser.value(f"""(() => {{
        const field = document.querySelector("textarea");
        field.value = {text};
        field.dispatchEvent(new KeyboardEvent("keydown", {{key: "{key}", bubbles: true, cancelable: true}}));
    }})()""")


def text_of(browser, selector):
    return browser.value(f"document.querySelector('{selector}').textContent")


DONE = "document.querySelector('.verdict strong') && document.querySelector('form button').textContent === 'Generate'"


@in_chromium
def test_the_page_colours_each_token_and_sums_the_layers_up(browser, serve, exported_decoder):
    browser.events.clear()
    browser.ask("Runtime.enable")
    browser.open(serve(exported_decoder), DONE)
    short, expected = Runtime(exported_decoder, threads=1).run(["x", PROMPTS[2]], max_new_tokens=60)
    assert len(short.tokens) < 60, "this prompt's text should come to its end"
    press(browser, "Enter", "x")
    browser.wait(DONE)
    assert browser.value("document.querySelectorAll('.generated .token').length") == len(short.tokens)
    assert browser.value("document.querySelector('.generated').lastChild.classList.contains('end')"), "a stop token"
    press(browser, "Enter", PROMPTS[2])
    browser.wait(DONE)
    assert text_of(browser, ".generated") == PROMPTS[2] + expected.text
    tokens = browser.value("Array.from(document.querySelectorAll('.generated .token'), (token) => token.title)")
    assert tokens == [f"layer {layer}" for layer in expected.layers]
    colour = "(token) => token.title + getComputedStyle(token).backgroundColor"
    colours = browser.value(f"Array.from(document.querySelectorAll('.generated .token'), {colour})")
    assert len(set(colours)) == len({of_token.split("oklch")[1] for of_token in colours}) == 4
    counts = [f"layer {layer} {expected.layers.count(layer)}" for layer in (3, 6, 9, 12)]
    legend = browser.value("Array.from(document.querySelectorAll('.legend li'), (entry) => entry.textContent)")
    assert [entry.split(",")[0] for entry in legend] == counts
    saved = 1 - np.mean(expected.layers) / 12
    assert text_of(browser, ".verdict").startswith(f"{100 * saved:.0f}% of the layers saved: ")
    browser.value("""(() => {
        const slider = document.querySelector("#slider");
        slider.value = slider.max;
        slider.dispatchEvent(new Event("input"));
    })()""")
    browser.wait(f"{DONE} && document.querySelector('.verdict').textContent.startsWith('0%')")
    assert not [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]


@in_chromium
@pytest.mark.parametrize("way", ["button", "Escape"])
def test_writing_can_be_stopped_and_begun_anew(browser, serve, exported_decoder, way):
    browser.open(serve(exported_decoder), DONE)
    browser.value("document.querySelector('input[type=number]').value = 400")
    press(browser, "Enter", PROMPTS[1])
    browser.wait("document.querySelectorAll('.generated .token').length > 2")
    assert text_of(browser, "form button") == "Stop"
    if way == "button":
        browser.value("document.querySelector('form button').click()")
    else:
        press(browser, way)
    browser.wait(DONE)
    assert text_of(browser, ".verdict").startswith("Stopped. ")
    count = browser.value("document.querySelectorAll('.generated .token').length")
    assert 2 < count < 400
    browser.value("document.querySelector('input[type=number]').value = 5")
    browser.value("document.querySelector('form button').click()")
    browser.wait(DONE)
    assert browser.value("document.querySelectorAll('.generated .token').length") == 5


@in_chromium
def test_a_prompt_that_cannot_be_continued_is_reported_on_the_page(browser, serve, exported_decoder):
    browser.open(serve(exported_decoder), DONE)
    for prompt, says in (
        (" ", "Write a prompt first."),
        ("word " * 600, "Prompt and text may have 512 tokens together"),
    ):
        press(browser, "Enter", prompt)
        browser.wait("document.querySelector('.verdict.failed')")
        assert text_of(browser, ".verdict").startswith(says) and text_of(browser, "form button") == "Generate"
        press(browser, "Enter", "The dog")
        browser.wait(DONE)


# ---- The folder, without a browser ----


def test_a_decoders_curve_ends_with_the_full_model(exported_decoder):
    page_data = read_json(exported_decoder / "web.json")
    values, agreement, layers = zip(*page_data["curve"]["points"])
    assert (values[-1], agreement[-1], layers[-1]) == ("inf", 1, 12) and list(layers) == sorted(layers)
    place = values.index(0.5)
    assert [agreement[place], layers[place]] == page_data["curve"]["own"] and min(agreement) < 1


def test_the_folder_is_whole_and_the_graph_is_the_same_with_plain_inputs(small_exported):
    manifest = read_json(small_exported / "manifest.json")
    files = {str(path.relative_to(small_exported)) for path in small_exported.rglob("*") if path.is_file()}
    assert files - {"manifest.json", "README.md"} == set(manifest["files"])
    page_data = read_json(small_exported / "web.json")
    assert page_data["settings"].keys() == {"threshold", "exit_at"}
    inputs, outputs = (manifest["graphs"]["model"][name] for name in ("inputs", "outputs"))
    web = manifest["graphs"]["model_web"]
    assert web["inputs"] == inputs and web["outputs"].keys() == {*outputs, "compared_threshold"}
    graph = onnx.load(small_exported / "onnx/model_web.onnx", load_external_data=False).graph
    assert not {initializer.name for initializer in graph.initializer} & inputs.keys()
    for branch in branches_of(graph):
        assert all(initializer.data_location == onnx.TensorProto.DEFAULT for initializer in branch.initializer)


def test_the_curve_is_that_of_the_run_and_ends_with_the_full_model(small_run, small_exported):
    curve = read_json(small_exported / "web.json")["curve"]
    metrics = read_json(small_run.folder / "metrics.json")
    values, scores, layers = zip(*curve["points"])
    assert curve["of"] == f"{metrics['rows_held']} held-out rows" and values[-1] == "inf"
    assert layers[-1] == 3 and scores[-1] == metrics["per_exit_accuracy"][-1]
    assert list(layers) == sorted(layers)
    place = values.index(float(np.float32(load_run(small_run.folder).rule.threshold)))
    assert (scores[place], layers[place]) == (metrics["hold_out"]["accuracy"], metrics["hold_out"]["mean_layers"])


@pytest.mark.parametrize("rule", [Threshold(-0.5, "entropy"), Svm((1.0,) * 2, (1.0,) * 2, (-0.65,) * 2)], ids=str)
def test_a_rule_that_was_not_measured_has_no_curve(small_run, tmp_path, rule):
    export(small_run._replace(rule=rule), tmp_path / "exported", web=True)
    assert read_json(tmp_path / "exported" / "web.json")["curve"] is None


def test_a_run_that_a_page_cannot_show_is_refused(small_run, checkpoint_folder, task_folder, tmp_path):
    class Retrieving(Never):
        plans_from_texts = True

    for run, message in (
        (small_run._replace(config=small_run.config | {"unit": "prompts"}), "a decoder, .* is read through a prompt"),
        (train("hashee", checkpoint_folder, task_folder, tmp_path / "run", epochs=1), "tokens exit within a row"),
        (small_run._replace(rule=Retrieving()), "retrieves texts"),
    ):
        with pytest.raises(WrongArguments, match=message):
            page.check_page(run)


PACKAGES = {  # what npm would fetch
    "onnxruntime-web/dist": ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"),
    "@huggingface/tokenizers/dist": ("tokenizers.min.mjs",),
    "@huggingface/tokenizers": ("LICENSE",),
}


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """A program of this name, which writes its arguments down and makes the packages, or says what it is given."""
    monkeypatch.setattr(page, "VENDOR", "vendor of a test")  # lab/export/web has none of this name

    def install(fails=""):
        made = [f'mkdir -p "$3/node_modules/{folder}"' for folder in PACKAGES]
        made += [f'echo {name} > "$3/node_modules/{at}/{name}"' for at, names in PACKAGES.items() for name in names]
        lines = [f"echo '{fails}' >&2", "exit 1"] if fails else made
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "npm"
        program.write_text("\n".join(["#!/bin/sh", f'echo "$@" > {tmp_path}/given', *lines]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return install


def export_page(run, folder, capsys):
    assert main(["export", str(run.folder), "--out", str(folder), "--web"]) == 0
    assert (folder / "index.html").is_file() and Runtime(folder, threads=1)
    return capsys.readouterr().out.splitlines()


def test_the_libraries_are_fetched_if_npm_is_installed(small_run, tmp_path, npm, capsys):
    npm()
    *_, fetching, last = export_page(small_run, tmp_path / "exported", capsys)
    assert fetching == "Downloading the libraries of the page with npm."
    assert last == f"Page: python -m http.server -d {tmp_path / 'exported'}"
    fetched = tmp_path / "exported" / page.VENDOR
    names = {name for at in PACKAGES.values() for name in at} - {"LICENSE"} | {"LICENSE.tokenizers"}
    assert {path.name: path.read_text().strip() for path in fetched.iterdir()} == {
        name: name.removesuffix(".tokenizers") for name in names
    }
    assert (tmp_path / "given").read_text().startswith("ci --prefix")  # with the checksums of package-lock.json


def test_an_error_of_npm_is_printed_with_the_command(small_run, tmp_path, npm, capsys):
    npm(fails="npm error code ENOTFOUND")
    last = export_page(small_run, tmp_path / "exported", capsys)[-1]
    command = page.vendor_command(tmp_path / "exported")
    assert last == f"Page, without its libraries (npm error code ENOTFOUND): run {command}"
    assert not list((tmp_path / "exported").glob("vendor*"))


def test_without_npm_the_command_for_the_libraries_is_printed(small_run, tmp_path, npm, monkeypatch, capsys):
    monkeypatch.setattr(page.shutil, "which", lambda name: None)
    *_, before, last = export_page(small_run, tmp_path / "exported", capsys)
    command = page.vendor_command(tmp_path / "exported")
    assert before == f"Exported: {tmp_path / 'exported'}"
    assert last == f"Page, without its libraries (npm is not installed): run {command}" and "vendor.sh" in command
