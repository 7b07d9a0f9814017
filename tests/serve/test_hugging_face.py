"""An exported folder is one of Hugging Face: its files, and the answers of the clients that load it.

The clients are not installed with mini_ee. MINI_EE_HUGGING_FACE: a Python with optimum-onnx and sentence-transformers
5. MINI_EE_TRANSFORMERS_JS: a folder in which `npm install @huggingface/transformers` was called.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from chromium import CHROMIUM, Chromium
from conftest import ENCODED

from mini_ee import load_run, train
from mini_ee.export import graph
from mini_ee.export.graph import tensors_of
from mini_ee.export.manifest import MODEL, WEIGHTS
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.export.hugging_face import named_by
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training import holdout

SAME = 1e-5  # of a probability, or a number of an embedding
COUNT = 200  # texts
PYTHON, NODE = os.environ.get("MINI_EE_HUGGING_FACE"), os.environ.get("MINI_EE_TRANSFORMERS_JS")
in_python = pytest.mark.skipif(not PYTHON, reason="needs MINI_EE_HUGGING_FACE, see the head of this file")
in_javascript = pytest.mark.skipif(not NODE, reason="needs MINI_EE_TRANSFORMERS_JS, see the head of this file")


# ---- The files ----
@pytest.fixture(scope="module")
def run(classifier):
    """The run of `classifier`."""
    return load_run(classifier.folder.parent / "run")


def external(folder):
    """The places of weights that are not in model.onnx."""
    tensors = tensors_of(onnx.load(folder / MODEL, load_external_data=False).graph)
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def test_one_graph_has_its_weights_and_several_share_a_file_that_clients_know(classifier, tmp_path, run):
    settings = read_json(classifier.folder / "config.json")["transformers.js_config"]
    assert settings == {"dtype": "fp32", "use_external_data_format": False}
    assert not external(classifier.folder) and not (classifier.folder / WEIGHTS).exists()
    export(run, tmp_path / "several", segments=True)
    settings = read_json(tmp_path / "several" / "config.json")["transformers.js_config"]
    assert settings == {"dtype": "fp32", "use_external_data_format": True}
    assert external(tmp_path / "several") == {"model.onnx_data"} and (tmp_path / "several" / WEIGHTS).exists()


def test_a_large_graph_has_its_weights_beside_it(run, tmp_path, monkeypatch):
    """ONNX Runtime needs several times the memory for weights in branches, and a file of ONNX has at most 2 GiB."""
    export(run, tmp_path / "small")
    monkeypatch.setattr(graph, "MOST_INSIDE", 1000)
    export(run, tmp_path / "large")
    assert external(tmp_path / "large") == {"model.onnx_data"} and (tmp_path / "large" / MODEL).stat().st_size < 200_000
    small, large = ([answer.logits for answer in Runtime(tmp_path / name).run(ENCODED)] for name in ("small", "large"))
    np.testing.assert_array_equal(small, large)


def test_the_configuration_names_labels_and_special_tokens_are_the_originals(run, tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "special_tokens_map.json").write_text('{"unk_token": "[UNK]"}')
    config = run.config | {"backbone": {"folder": str(tmp_path / "original")}}
    export(run._replace(config=config), tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert list(config["id2label"].values()) == list(config["label2id"]) == run.label_names
    assert json.loads((tmp_path / "out" / "special_tokens_map.json").read_text()) == {"unk_token": "[UNK]"}


def test_an_encoder_is_two_modules_with_its_prompts(encoder, embedding_run):
    modules = json.loads((encoder.folder / "modules.json").read_text())
    assert [(module["path"], module["type"].rpartition(".")[2]) for module in modules] == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
    ]
    pooling = json.loads((encoder.folder / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 16
    config = json.loads((encoder.folder / "config_sentence_transformers.json").read_text())
    assert config["prompts"] == embedding_run.config["prompts"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model", {"license": "apache-2.0"}),
        ("# A model\nlicense: mit", {}),
        ("---\nlanguage: en\n---\nlicense: mit\n", {}),
        (None, {}),
    ],
)
def test_the_license_is_the_one_that_the_originals_card_names(tmp_path, text, named):
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert named_by(tmp_path) == named
    cached = tmp_path / "models--org--a-model" / "snapshots" / "0123"
    assert named_by(cached) == {"base_model": "org/a-model"}


def test_the_card_begins_with_what_the_hub_reads(classifier, encoder):
    for runtime, task, library, loads in (
        (classifier, "text-classification", "transformers.js", "ORTModelForSequenceClassification"),
        (encoder, "sentence-similarity", "sentence-transformers", 'SentenceTransformer("DIR", backend="onnx")'),
    ):
        text = (runtime.folder / "README.md").read_text()
        assert text.startswith(f"---\npipeline_tag: {task}\nlibrary_name: {library}\n") and loads in text


# ---- The clients ----
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the built-in BERT, whose threshold lets texts exit at many layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdout, "TEST_ROWS", 30)
        run = train("joint", out=tmp_path_factory.mktemp("hub") / "run", epochs=1, max_train=60)
    values, _, layers = zip(*read_json(run.folder / "metrics.json")["curves"][0]["points"])
    threshold = float(np.float32(values[np.searchsorted(layers, 6)]))
    for name, segments in (("one", False), ("several", True)):
        export(load_run(run.folder)._replace(rule=Threshold(threshold)), run.folder.parent / name, segments=segments)
    return run.folder.parent


def texts():
    return [text for (text,) in toy_task().split("test").texts[:COUNT]]


def check(predictions, folder):
    """Label, score and milliseconds of each text, against `mini-ee run`; texts that exit early take less time."""
    expected = Runtime(folder, threads=1).run(texts(), batch_size=1)
    assert [label for label, *_ in predictions] == [answer.label for answer in expected]
    difference = max(abs(score - answer.confidence) for (_, score, _), answer in zip(predictions, expected))
    layers, times = np.array([answer.layers for answer in expected]), np.array([ms for *_, ms in predictions])
    half = np.median(layers)
    early, late = np.median(times[layers < half]), np.median(times[layers > half])
    print(f"{len(predictions)} texts, scores differ by at most {difference:.2g}, early / late {early / late:.2f}")
    assert difference < SAME and early < 0.9 * late


def output_of(command, folder, given):
    """What a program in another environment prints last, as JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*command, str(folder)], input=json.dumps(given), capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OPTIMUM = """
import json, sys, time
import onnxruntime
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoConfig, AutoTokenizer, pipeline

folder, options = sys.argv[1], onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
assert AutoConfig.from_pretrained(folder).id2label == {0: "negative", 1: "positive"}
model = ORTModelForSequenceClassification.from_pretrained(folder, session_options=options)
classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
found = []
for text in ["warm up", *json.load(sys.stdin)]:
    begin = time.perf_counter()
    (answer,) = classify(text, truncation=True)
    found.append((answer["label"], answer["score"], 1e3 * (time.perf_counter() - begin)))
print(json.dumps(found[1:]))
"""

SENTENCE_TRANSFORMERS = """
import json, sys
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], backend="onnx")
model.tokenizer.pad_token = "[PAD]"  # of the small tokenizer of these tests no token is special
print(json.dumps(model.encode(json.load(sys.stdin)).tolist()))
"""

TRANSFORMERS_JS = """
const asked = async (classify, texts) => {
  const found = [];
  for (const text of ["warm up", ...texts]) {
    const begin = performance.now();
    const [{ label, score }] = await classify(text);
    found.push([label, score, performance.now() - begin]);
  }
  return found.slice(1);
};
"""

IN_NODE = """
import { readFileSync } from "node:fs";
import { basename, dirname } from "node:path";
import { pipeline, env } from "@huggingface/transformers";

const folder = process.argv[2];
Object.assign(env, { allowRemoteModels: false, localModelPath: dirname(folder) });
const options = { session_options: { intraOpNumThreads: 1 } };
const given = JSON.parse(readFileSync(0, "utf8"));
"""

CLASSIFY = """
console.log(JSON.stringify(await asked(await pipeline("text-classification", basename(folder), options), given)));
"""

EMBED = """
const embed = await pipeline("feature-extraction", basename(folder), options);
const found = [];
for (const text of given) found.push(Array.from((await embed(text, { pooling: "mean" })).data));
console.log(JSON.stringify(found));
"""


def in_node(folder, program):
    """The command that runs a program where its library is installed."""
    path = folder / "client.mjs"
    path.write_text(program)
    (folder / "node_modules").symlink_to(Path(NODE).resolve() / "node_modules")
    return ["node", str(path)]


@pytest.mark.slow
@in_python
@pytest.mark.parametrize("name", ["one", "several"])
def test_optimum_and_the_pipeline_of_transformers(trained, name):
    check(output_of([PYTHON, "-c", OPTIMUM], trained / name, texts()), trained / name)


@pytest.mark.slow
@in_python
def test_sentence_transformers(encoder):
    given = [*ENCODED, *texts()][:COUNT]
    embeddings = output_of([PYTHON, "-c", SENTENCE_TRANSFORMERS], encoder.folder, given)
    np.testing.assert_allclose(embeddings, encoder.embed(given), rtol=0, atol=SAME)


@pytest.mark.slow
@in_javascript
@pytest.mark.parametrize("name", ["one", "several"])
def test_transformers_js_in_node(trained, tmp_path, name):
    command = in_node(tmp_path, IN_NODE + TRANSFORMERS_JS + CLASSIFY)
    check(output_of(command, trained / name, texts()), trained / name)


@pytest.mark.slow
@in_javascript
def test_transformers_js_embeds(encoder, tmp_path):
    given = list(ENCODED[:50])
    embeddings = output_of(in_node(tmp_path, IN_NODE + EMBED), encoder.folder, given)
    np.testing.assert_allclose(embeddings, encoder.embed(given), rtol=0, atol=SAME)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` is, quietly."""

    def log_message(self, *_):
        pass


@pytest.mark.slow
@in_javascript
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
def test_transformers_js_in_a_browser(trained, tmp_path):
    """WebAssembly reads weights of a branch from model.onnx alone."""
    shutil.copytree(trained / "one", tmp_path / "models" / "one")
    (tmp_path / "js").symlink_to(Path(NODE).resolve() / "node_modules")
    (tmp_path / "index.html").write_text("<title>A page of one's own</title>")
    handler = functools.partial(Quiet, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser, address = Chromium(tmp_path / "profile"), f"http://127.0.0.1:{server.server_port}"
    try:
        browser.open(f"{address}/index.html", "document.title")
        predictions = browser.value(f"""(async () => {{
            {TRANSFORMERS_JS}
            const {{ pipeline, env }} = await import("/js/@huggingface/transformers/dist/transformers.min.js");
            Object.assign(env, {{ allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/" }});
            env.backends.onnx.wasm.wasmPaths = "{address}/js/onnxruntime-web/dist/";
            env.backends.onnx.wasm.numThreads = 1;
            return await asked(await pipeline("text-classification", "one"), {json.dumps(texts())});
        }})()""")
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
    check(predictions, trained / "one")


# ---- The lines of export/README.md ----
PAGE = (Path(__file__).parents[2] / "export" / "README.md").read_text().partition("### Clients")[2]
LINES = {
    name: next(block for block in re.findall(r"^```(?:python|js)\n(.*?)^```$", PAGE, re.M | re.S) if name in block)
    for name in ("onnxruntime.InferenceSession", "mini_ee.export.runtime", "ORTModel", "@huggingface")
}


def printed_by(command, folder, tmp_path):
    """What the lines print beside a folder with the name that they have."""
    (tmp_path / "exported").symlink_to(folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["onnxruntime.InferenceSession", "mini_ee.export.runtime"])
def test_the_pages_lines_without_other_packages(classifier, tmp_path, monkeypatch, capsys, name):
    (tmp_path / "exported").symlink_to(classifier.folder)
    monkeypatch.chdir(tmp_path)
    exec(LINES[name], {})
    printed = capsys.readouterr().out.splitlines()
    texts = re.findall(r'"([^"]+\.)"', LINES[name])
    for line, text, answer in zip(printed, texts, classifier.run(texts, batch_size=1), strict=True):
        by_graph = f"[{classifier.label_names.index(answer.label)}]", f"[{answer.layers}]"
        ours = f"{answer.label} ", f"after {answer.layers} layers: {text}"
        assert all(part in line for part in (by_graph if name.startswith("onnx") else ours)), line


@pytest.mark.slow
@in_python
def test_the_pages_lines_for_optimum(trained, tmp_path):
    labels = [
        answer.label for answer in Runtime(trained / "one").run(re.findall(r'"([A-Z][^"]+\.)"', LINES["ORTModel"]))
    ]
    printed = printed_by([PYTHON, "-c", LINES["ORTModel"]], trained / "one", tmp_path)
    assert re.findall(r"'label': '(\w+)'", printed) == labels and len(labels) == 2


@pytest.mark.slow
@in_javascript
def test_the_pages_lines_for_transformers_js(trained, tmp_path):
    command = in_node(tmp_path, LINES["@huggingface"])
    labels = [
        answer.label for answer in Runtime(trained / "one").run(re.findall(r'"([A-Z][^"]+\.)"', LINES["ORTModel"]))
    ]
    assert re.findall(r"label: '(\w+)'", printed_by(command, trained / "one", tmp_path)) == labels
