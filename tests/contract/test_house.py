"""The plan of the house: what stands where, imports that go down the floors, and sizes that a reader can take in."""

import ast
import functools
import json
import re
from pathlib import Path

import pytest

from mini_ee.lab.registry import METHODS

ROOT = Path(__file__).parents[2]
GROUND = (
    "errors",
    "early_exit",
    "segments",
    "recording",
    "row_thresholds",
    "threshold_curve",
    "top_k",
    "token_tasks",
    "rules",
    "rule_inputs",
    "sweep",
    "confidence",
    "calibration",
    "statistics",
    "registry",
    "data",
)
FLOORS = (  # what stands in one line may not import each other, but for the ground floor
    ("core",),
    ("", "__init__", *GROUND),
    ("backbones",),
    ("exits",),
    ("training",),
    ("methods", "baselines"),
    ("evaluation",),
    ("export",),
    ("cli",),
    ("serve",),
    ("weights",),
    ("experiments",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = (  # with everything that they import: what is exported runs on these alone
    "__init__",
    "export.__init__",
    "export.manifest",
    "export.runtime",
    "lab.errors",
    "lab.early_exit",
    "lab.recording",
    "lab.row_thresholds",
    "lab.threshold_curve",
    "lab.top_k",
    "lab.token_tasks",
    "lab.segments",
    "lab.rules",
    "lab.rule_inputs",
    "lab.sweep",
    "lab.confidence",
    "lab.calibration",
    "lab.statistics",
    "lab.registry",
    "lab.data.columns",
    "lab.data.files",
    "lab.data.glue",
    "lab.data.lines",
    "lab.data.metrics",
    "lab.data.sentence_files",
    "lab.data.multiple_choice",
    "lab.data.settings",
    "lab.data.progress",
    "lab.data.prompt_templates",
    "lab.data.rankings",
    "lab.data.reviews",
    "lab.data.sentence_prompts",
    "lab.data.table_files",
    "lab.data.tasks",
    "lab.data.text_files",
    "lab.data.token_metrics",
    "lab.data.decoder_texts",
    "lab.data.tokenizer",
    "lab.data.values",
    "lab.evaluation.failure_prediction",
    "lab.evaluation.gold_labels",
    "lab.exits.decoding",
    "lab.exits.trial_answers",
    "lab.methods.embedding_maps_rule",
    "lab.methods.raee",
    "lab.methods.raee_controls",
    "lab.methods.raee_datastore",
    "lab.baselines.adainfer",
    "lab.training.train_settings",
    "lab.export.calibrated",
    "lab.export.engine",
    "lab.export.card",
    "lab.export.manifest",
    "lab.export.sessions",
    "lab.export.row_segments",
    "lab.export.token_segments",
    "lab.export.runtime",
    "serve.batch",
    "serve.batch_parts",
    "serve.__init__",
    "serve.app",
    "serve.canary",
    "serve.engines",
    "serve.request_thresholds",
    "serve.formats",
    "serve.http_messages",
    "serve.replicas",
    "serve.server",
    "serve.monitoring",
    "serve.worker",
    "lab.cli.calibrate",
    "lab.cli.calibrate_export",
    "lab.cli.engine_options",
    "lab.cli.guarantee_options",
    "lab.cli.main",
    "lab.cli.run",
    "serve.command_batch",
    "serve.command_serve",
)
HEAVY = ("torch", "safetensors", "hnswlib", "onnx", "openvino", "matplotlib")  # of which the runtime loads none at once
OUTSIDE = ("export", "lab", "serve", "experiments")  # of mini_ee/, and installed into it
MODULES = [path for room in ("mini_ee", *OUTSIDE) for path in sorted((ROOT / room).rglob("*.py"))]
MOST_LINES, LONGEST_FUNCTION, MOST_PARAMETERS = 450, 60, 7
WIDE = {  # functions with more parameters than that
    "export": "the parts of an exported folder are named one by one, as the options of the command",
    "write_graphs": "as export, which calls it",
    "kernel": "a Triton kernel takes pointers and sizes one by one",
    "generate": "the ways to decode are named one by one, as in transformers' generate",
    "generate_lossless": "as generate",
    "generated_texts": "as generate, which it calls",
    "reproduce": "as the options of the command",
}


def name_of(path):
    """As it is imported, after `mini_ee.`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] in OUTSIDE else parts[1:])


def room_of(name):
    """The folder of a module, in the lab that below lab/; all files of mini_ee/ but __main__.py are the core."""
    ring, _, inside = name.partition(".")
    return inside.split(".")[0] if ring == "lab" else ring if ring in ("__main__", "weights", *OUTSIDE) else "core"


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


NAMES = set(map(name_of, MODULES))


@functools.cache
def imported(path, inside=True):
    """Names of the modules that a file imports; `inside` its functions too."""
    return tuple(_imported(path, inside))


def _imported(path, inside):
    for node in nodes_of(path) if inside else tree_of(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            package = node.module.removeprefix("mini_ee").lstrip(".")
            for alias in node.names:
                if f"{package}.{alias.name}".lstrip(".") in NAMES:
                    yield f"{node.module}.{alias.name}"


def functions():
    """(file, function) of every function there is."""
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def test_imports_go_down_the_floors():
    for path in MODULES:
        importer = room_of(name_of(path))
        for name in imported(path):
            if (name_of(path), name) == ("train", "mini_ee.export.writer"):
                continue  # --out of the core's scripts, in a function
            if name.startswith("mini_ee."):
                room = room_of(name.removeprefix("mini_ee."))
                level = room == importer or importer in GROUND and room in GROUND
                assert level or FLOOR[room] < FLOOR[importer], f"{name_of(path)} imports {name}, which is not below it"


def test_methods_do_not_import_each_other():
    for module in METHODS.values():
        (path,) = [path for path in MODULES if f"mini_ee.{name_of(path)}" == module]
        assert not set(imported(path)) & set(METHODS.values()) - {module}, f"{module} imports another method"


def test_the_torch_free_floor_imports_no_torch():
    """At once, by itself or through what it imports."""
    paths, requested = {name_of(path): path for path in MODULES}, [*WITHOUT_TORCH]
    for module in requested:
        for other in imported(paths[module], inside=False):
            assert other.split(".")[0] not in HEAVY, f"{module}, which must be free of it, imports {other}"
            other = other.removeprefix("mini_ee.")
            requested += [other] if other in paths and other not in requested else []


def test_every_bar_is_one_that_spares_log_files():
    """See data/progress.py."""
    assert {name_of(path) for path in MODULES if "tqdm" in imported(path)} == {"train", "lab.data.progress"}
    assert not {name_of(path) for path in MODULES if "tqdm.auto" in path.read_text()}


def test_there_are_no_circles():
    """Of what is imported at once. Between folders the floors see to it."""
    loads = {name_of(path): imported(path, inside=False) for path in MODULES}
    graph = {
        module: {name.removeprefix("mini_ee.") for name in imports if name.startswith("mini_ee.")} & NAMES
        for module, imports in loads.items()
    }
    done = set()
    while len(done) < len(graph):
        ready = {name for name in graph if name not in done and graph[name] <= done}
        assert ready, f"these import each other: {sorted(set(graph) - done)}"
        done |= ready


def test_what_leaves_and_when_do_not_ask_which_backbone_it_is():
    """A family is asked for what it offers: no isinstance of a backbone, no list of families, no family's file."""
    families = ast.parse((ROOT / "lab" / "registry.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in families.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "BACKBONES"
    ]
    for path in MODULES:
        if path.parent.name in ("backbones", "bench", "mini_ee", "measured") or path.name == "registry.py":
            continue
        if path == ROOT / "experiments" / "data.py":  # writes a checkpoint of a family
            continue
        if path.parent == ROOT / "export":  # exports the core's BERT, and leaves other families to the lab
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = ast.unparse(node.args[1])
                assert not re.search("Bert|Llama|Backbone|Decoder|Encoder", kinds), f"{path}: isinstance of {kinds}"
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{path}: names the family {node.value}"


def test_files_and_functions_are_of_a_size_to_read():
    long = {name_of(path): lines for path in MODULES if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long
    for path, node in functions():
        length = node.end_lineno - node.lineno + 1
        assert length <= LONGEST_FUNCTION, f"{name_of(path)}: {node.name} has {length} lines"
        given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(set(given) - {"self", "cls"})
        assert count <= MOST_PARAMETERS or node.name in WIDE, f"{name_of(path)}: {node.name} takes {count}"


def test_the_loop_is_on_a_page_and_a_file_of_the_lab_names_what_goes_round_it():
    """Whoever takes rows out of a batch calls the loop, one turn of it (at_exit), or keep_in_graph."""
    tree = ast.parse((ROOT / "mini_ee" / "loop.py").read_text())
    (loop,) = [node for node in tree.body if getattr(node, "name", "") == "early_exit"]
    assert loop.end_lineno - loop.lineno < 30
    head = ast.get_docstring(ast.parse((ROOT / "lab" / "early_exit.py").read_text()))
    named = set(re.findall(r"([\w/]+)\.py", head.split("\n\n", 1)[1]))
    files = {name_of(path).removeprefix("lab.").replace(".", "/"): path.read_text() for path in MODULES}
    round_it = {name for name, text in files.items() if re.search(r"import at_exit|segments\.keep_in_graph\(", text)}
    assert named <= set(files) and round_it | {"exits/generation"} == named


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "tutorial.md",
        "CONTRIBUTING.md",
        "weights/README.md",
        "export/README.md",
        "serve/README.md",
    ],
)
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:mini_ee|lab|serve|tests|weights|experiments|results)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_the_figures_of_the_weights_are_those_of_their_recipes():
    page = " ".join((ROOT / "weights" / "README.md").read_text().split())
    bert, llama = (
        json.loads((ROOT / f"weights/{name}/recipe.json").read_text()) for name in ("bert-12x128", "llama-12x256")
    )
    output, texts = bert["held_out"], bert["texts"]
    assert f"{bert['parameters']:,} parameters" in page and f"{llama['parameters']:,} parameters" in page
    assert f"Kept: {sum(texts.values()):,} texts, of which {texts['held_out']:,}, drawn by seed" in page
    assert f"loss {output['mlm']:.2f} nats (by token frequency alone: {output['unigram_loss']:.2f})" in page
    assert f"{output['right'] * 100:.1f}% of the masked tokens guessed" in page
    cosines = (f"{output[key]:.3f}".removeprefix("0") for key in ("cosine", "pooler_cosine"))
    assert "{} from the mean of the last layer and {} from the pooler".format(*cosines) in page
    output, stories = llama["held_out"], llama["stories"]
    assert f"({stories['train']:,}, {llama['tokens_of_all_stories']:,} tokens)" in page
    alone = f"(by token frequency alone: {output['unigram_loss']:.2f} nats)"
    assert f"{output['loss']:.2f} nats a token, perplexity {output['perplexity']:.1f} {alone}" in page


def test_the_package_ships_nothing_above_20_megabytes():
    assert all(path.stat().st_size < 20e6 for path in (ROOT / "weights").rglob("*") if path.is_file())


def test_nothing_is_unpickled_and_public_things_are_explained():
    for path in (*MODULES, *sorted((ROOT / "weights").glob("*.py"))):
        source = path.read_text()
        assert not re.search(r"\bpickle|torch\.load\(|strict=False|TODO|FIXME", source), path
        assert ast.get_docstring(tree_of(path)) or not source, path
        for node in tree_of(path).body:
            of_command = path.parent.name == "cli" or path.stem.startswith("command_")
            explained = of_command and getattr(node, "name", "") == "add"  # by the HELP of the command
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not explained:
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
