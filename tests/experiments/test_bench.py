"""mini-ee bench: every case runs, is held to its bar, and is timed warm. The ratios themselves are measured by hand."""

import json
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import refused, save_small_llama, words_tokenizer

from mini_ee.experiments.bench import common, decoders, encoders, one_decoder, retrieval, serving, streams
from mini_ee.experiments.bench import onnx as exported
from mini_ee.experiments.measured import onnx_page, serving_page
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.backbones.hub import save_backbone
from mini_ee.lab.backbones.llama import DecoderConfig
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.heads import VocabularyHead
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import build_model

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "results"
OF_ENCODERS = ("backbone", "exit-tax", "batch")
MODULES = (common, encoders, streams, decoders, one_decoder, retrieval, exported, serving)


def rows_and_lines(capsys, *argv):
    """The rows of `mini-ee bench` by case, and the lines that it prints meanwhile."""
    assert main(["bench", *argv, "--json"]) == 0
    printed = capsys.readouterr()
    return {row["case"]: row for row in json.loads(printed.out)["rows"]}, printed.err


def rows_of(capsys, *argv):
    return rows_and_lines(capsys, *argv)[0]


def put(monkeypatch, **values):
    """Give names of the benchmarks other values, in all files that use them."""
    for name, value in values.items():
        having = [module for module in MODULES if hasattr(module, name)]
        assert having, name
        for module in having:
            monkeypatch.setattr(module, name, value)


def quickly(monkeypatch):
    """Small models, each run once."""
    for name in ("MINILM", "BERT_BASE"):
        small = replace(getattr(common, name), hidden_size=24, num_attention_heads=2, intermediate_size=32)
        put(monkeypatch, **{name: small})
    put(monkeypatch, medians=lambda runs, *_, **settings: [float(run() is not run) for run in runs])
    put(monkeypatch, measure_costs=partial(streams.measure_costs, rounds=1))


def stories(**changes):
    """The shape of stories260K, with changes."""
    return DecoderConfig.from_hugging_face(decoders.STORIES.to_dict() | changes)


def test_a_million_rows_are_for_the_benchmark_that_builds_datastores(capsys, monkeypatch):
    sizes, filled = [], retrieval._filled
    quickly(monkeypatch)
    put(
        monkeypatch,
        _groups=lambda backbone, seed: iter(()),
        medians=lambda runs, name: [1.0] * len(runs),
        SST2_ROWS=11_000,
        LARGE=12_000,
        _filled=lambda rows, seed: sizes.append(len(rows)) or filled(rows[:50], seed),
    )
    cases = rows_of(capsys, "retrieval", "--large")
    assert [case for case in cases if "build" in case] == [f"{size} build" for size in ("1k", "10k", "67k", "1m")]
    assert sizes[-4:] == [1_000, 10_000, 11_000, 12_000]


def test_earlier_datastores_are_freed_when_others_are_built(monkeypatch):
    filled, stores = retrieval._filled, []
    quickly(monkeypatch)
    put(
        monkeypatch,
        _groups=lambda backbone, seed: iter(()),
        SST2_ROWS=300,
        _filled=lambda rows, seed: stores.append(weakref.ref(store := filled(rows, seed))) or store,
        _building=lambda *_: iter([sum(store() is not None for store in stores)]),
    )
    *_, remaining = retrieval.bench_retrieval(None, 0)
    assert len(stores) == 2 and remaining == 0


def test_retrieval_takes_an_encoder_of_fewer_words(capsys, monkeypatch, tmp_path):
    quickly(monkeypatch)
    save_backbone(common.random_encoder(replace(common.MINILM, vocab_size=90), 0), tmp_path / "m")
    put(monkeypatch, SST2_ROWS=300, _building=lambda *_: iter(()))
    assert "67k t32 encoder" in rows_of(capsys, "retrieval", "--model", str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *(((name, "--model", "LLAMA"), "holds a llama; this benchmark takes an encoder") for name in OF_ENCODERS),
        (("serve", "--model", "EXPORTED"), "contains a decoder; this benchmark takes a classifier, or no --model"),
        (("exit-tax", "--large"), "--large is for retrieval; exit-tax has no larger case"),
        (("decode", "--device", "cuda"), "--device cuda is for onnx and sgmv; decode runs on a CPU"),
        (("exit-tax", "--task", "x"), "--task and --picture are for serve"),
        (("exit-tax", "--picture", "x.png"), "--task and --picture are for serve"),
        (("decode", "--gguf", "x"), "--gguf is for decode with --model; leave it out"),
        (("sgmv", "--model", "x"), "--model: sgmv measures adapters of a random BERT-base; leave it out"),
    ],
)
def test_an_option_that_a_benchmark_does_not_take_is_refused(capsys, decoder_checkpoint, decoder, argv, message):
    names = {"LLAMA": decoder_checkpoint, "EXPORTED": decoder.folder}
    assert message in refused(capsys, "bench", *(names.get(word, word) for word in argv))


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        (
            "exit-tax",
            [
                "minilm b32 t32 e2",
                "bert-base b1 t32 e12",
                "bert-base b1 t32 hashee",
                "minilm b32 t32 tr-bert",
                "bert-base b1 t32 cat e6",
            ],
        ),
        ("batch", ["minilm b32 t32 mixed"]),
        (
            "onnx",
            [
                "minilm b1 t32 never graph",
                "minilm b32 t32 mixed graph",
                "bert-base b1 t128 e6 graph",
                "bert-base b1 t128 int8",
                "stories260k b1 step transformers",
                "llama-12x256 b8 step chain",
            ],
        ),
    ],
)
def test_a_benchmark_runs_its_cases_and_compares_each_with_its_limit(capsys, monkeypatch, tmp_path, name, cases):
    quickly(monkeypatch)
    save_backbone(decoders.random_decoder(stories(num_hidden_layers=12), seed=0), tmp_path / "llama")
    put(monkeypatch, NEW_TOKENS=4, generate_of_transformers=lambda *decoding: int, load_transformers=lambda: None)
    put(monkeypatch, BUILT_IN_DECODER=tmp_path / "llama")
    rows, lines = rows_and_lines(capsys, name)
    assert set(cases) <= rows.keys()
    for row in rows.values():
        assert row["ratio"] == row["seconds"] / row["against_seconds"] > 0
        assert row["holds"] == (row["ratio"] <= row["bar"])
        if name == "exit-tax":
            assert row["holds"] == (row["excess"] <= row["excess_bar"])
    exits = [case for case in rows if name == "exit-tax" and "head_share" in rows[case]]
    assert lines.count("one head and its rule") == len(exits)


def test_a_given_decoder_is_measured_by_precision_with_and_without_exits(capsys, monkeypatch, tmp_path):
    folder = save_small_llama(tmp_path / "small", words_tokenizer(), max_position_embeddings=64)
    called = []

    def of_transformers(decoder, prompt):
        plain = TokenExits(decoder, (3,)).eval()
        return lambda **more: called.append(more) or one_decoder._written(plain, prompt, 4)

    quickly(monkeypatch)
    put(monkeypatch, NEW_TOKENS=4, LONGER=8, _of_transformers=of_transformers)
    rows, lines = rows_and_lines(capsys, "decode", "--model", str(folder))
    cases = (
        "swift",
        "clasp",
        "torch",
        "float32",
        "float16",
        "int8",
        "int4",
        "int8 never",
        "int8 e2",
        "assistant_early_exit 2",
    )
    assert [*rows] == [f"small {case}" for case in cases] and {"assistant_early_exit": 2} in called
    float32, int8, int4 = (rows[f"small {case}"]["bytes"] for case in ("float32", "int8", "int4"))
    assert float32 > int8 > int4 and "opened in" in lines
    drafted = [rows[f"small {chooser}"] for chooser in ("swift", "clasp")]
    assert all(row["loaded"] > 0.5 and row["accepted_per_round"] >= 0 for row in drafted)
    assert lines.count("drafts accepted per round: ") == 2
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    argv = ("bench", "decode", "--model", str(folder), "--gguf", "x.gguf")
    assert "--gguf needs llama.cpp, which is not installed: pip install xllamacpp" in refused(capsys, *argv)
    put(monkeypatch, _of_transformers=lambda decoder, prompt: lambda **more: [0] * 4)
    assert "expected the same greedy text of torch, transformers, float32" in refused(capsys, *argv[:-2])


@pytest.mark.parametrize("name", ["backbone", "decode", "onnx"])
def test_a_benchmark_that_needs_transformers_says_so_before_it_measures(capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "transformers", None)
    put(monkeypatch, medians=lambda *_, **__: pytest.fail("measured"))
    assert "transformers, which is not installed: pip install 'mini-ee[hf]'" in refused(capsys, "bench", name)


def test_a_model_of_another_depth_has_exits_after_its_own_thirds(capsys, monkeypatch, tmp_path):
    quickly(monkeypatch)
    put(monkeypatch, _own_heads_tax=lambda *_: iter(()))
    save_backbone(common.random_encoder(replace(common.MINILM, vocab_size=90, num_hidden_layers=3), 0), tmp_path / "m")
    rows = rows_of(capsys, "exit-tax", "--model", str(tmp_path / "m"))
    assert {"minilm b1 t32 e1", "minilm b32 t32 e2", "minilm b32 t32 e3"} <= rows.keys()
    with pytest.raises(ValueError, match="three layers or more, or no --model; found 2"):
        common.three_exits(common.random_encoder(replace(common.MINILM, num_hidden_layers=2), 0))


@pytest.mark.parametrize("method", encoders.OWN_HEADS)
def test_a_methods_rule_is_evaluated_at_each_exit_and_its_decision_is_not_used(method, random_model, padded_inputs):
    backbone = random_model().backbone
    shape = {"exits": (1, 2, 4, 6), "settings": {}, "pool": "first", "num_labels": 2}
    model = build_model(load_method(method), "rows", backbone, shape).eval()
    rule, exits = encoders.OWN_HEADS[method], []
    judged = encoders._ForcedExits(SimpleNamespace(stop=None, needs=rule.needs), [1] * len(padded_inputs))
    judged.rule.stop = lambda k, read, memory: exits.append(k) or rule.stop(k, read, memory)
    result = early_exit(model.segments(), judged, padded_inputs)
    assert exits == [0, 1] and set(result.exit_index.tolist()) == {1}


def test_a_benchmark_runs_each_twice_in_its_turn_in_changing_order_and_times_it_warm(monkeypatch):
    calls, now = [], [0.0]
    costs = {"a": (5.0, 1.0), "b": (50.0, 20.0)}  # of the first call of a turn, and of the second one

    def run(name):
        calls.append(name)
        now[0] += costs[name][calls[-2:] == [name, name]]

    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(common.time, "sleep", lambda seconds: calls.append("-"))
    medians = common.medians([partial(run, "a"), partial(run, "b")], "case", seconds_a_case=0.0)
    assert medians == [1.0, 20.0]
    first, text = 2 * common.WARM_ROUNDS, "".join(calls)
    rounds = [text[at : at + 6] for at in range(first, len(text), 6)]
    assert text[:first] == "ab" * common.WARM_ROUNDS and len(rounds) == common.MIN_ROUNDS
    assert set(rounds) == {"-aa-bb", "-bb-aa"}


def test_bench_sgmv_measures_time_and_weights(capsys, monkeypatch):
    quickly(monkeypatch)
    rows, lines = rows_and_lines(capsys, "sgmv")
    assert {"bert-base b1 t16 loop", "bert-base b1 t128 backbone", "operator r8 ragged gather"} <= rows.keys()
    assert {"bert-base b1 t16 adapters", "bert-base b8 t16 ragged"} <= rows.keys()
    memory, models = rows["bert-base memory"], rows["bert-base b1 t16 multi-model"]
    assert 0 < memory["ratio"] < 1 and models["bytes"] < models["against_bytes"]
    assert f"weights: {models['bytes'] / 1e6:.1f} MB, {models['against_bytes'] / 1e6:.1f} MB" in lines


def test_forced_decoding_exits_early_except_for_the_last_token():
    decoder = decoders.random_decoder(stories(num_hidden_layers=3), seed=0)
    settings = {"exits": (2, 3), "heads": [VocabularyHead(decoder, "copy")], "rule": decoders._LastGoesOn(5)}
    (text,) = decoders._decoded(decoder, [[0]], 5, **settings)
    assert text.layers_run == [2, 2, 2, 2, 3]


def test_serve_loads_three_servers_alike_and_draws_it(capsys, monkeypatch, tmp_path):
    quickly(monkeypatch)
    put(monkeypatch, SECONDS=0.05, ROUNDS=1, FITTED=40, SATURATING=16, LOADS=(0.1, 0.8))
    cases = rows_of(capsys, "serve", "--picture", str(tmp_path / "loads.png"))
    kinds = ("rebatch", "graph", "rebatch bursts", "graph bursts")
    assert list(cases) == [f"minilm goodput {kind}" for kind in kinds]
    row = cases["minilm goodput rebatch"]
    assert row["ratio"] == pytest.approx(row["seconds"] / row["against_seconds"]) and row["limit"] > 0
    assert {load["server"] for load in row["loads"]} == {"whole", "graph", "rebatch"}
    for load in row["loads"]:
        assert 0 < load["p50"] <= load["p95"] <= load["p99"] and load["in_time"] <= load["offered"]
    assert (tmp_path / "loads.png").read_bytes()[1:4] == b"PNG"


def test_serve_ends_where_the_whole_graph_is_in_time_at_no_load(capsys, monkeypatch, runtime):
    put(monkeypatch, SECONDS=0.05, ROUNDS=1, SATURATING=16, LOADS=(0.1, 0.8), half_saving=None)
    monkeypatch.setattr(serving, "in_time", lambda load, limit: 0.0)
    assert not any(row["holds"] for row in rows_of(capsys, "serve", "--model", str(runtime.folder)).values())


def test_serve_takes_an_exported_folder_with_its_rule_and_segments(capsys, monkeypatch, runtime):
    put(monkeypatch, SECONDS=0.05, ROUNDS=1, SATURATING=16, LOADS=(0.1, 0.8), half_saving=None)
    assert len(rows_of(capsys, "serve", "--model", str(runtime.folder))) == 4
    monkeypatch.setattr("mini_ee.serve.engines.RowEngine._by_segment", lambda self: None)
    for plans in (False, True):  # in a stage of its own
        monkeypatch.setattr(Threshold, "plans_from_texts", plans)
        assert main(["bench", "serve", "--model", str(runtime.folder)]) == 1
        assert "export the run with --segments" in capsys.readouterr().err


def test_half_of_the_layers_are_saved_under_the_load(tmp_path, monkeypatch):
    """Of sentences that the thresholds were not fitted to."""
    quickly(monkeypatch)
    texts = [row for row in toy_task().split("train").texts if len(row) == 1]
    runtime = Runtime(serving._export_random(None, texts, tmp_path, 0), threads=1)
    rule = serving.half_saving(runtime, texts[:200])
    layers = [answer.layers for answer in runtime.run(texts[200:400], rule=rule)]
    assert sum(layers) / len(layers) == pytest.approx(3.0, abs=0.35)


def test_what_was_measured_of_graphs_and_servers_holds():
    assert all(
        parity["labels"] == parity["layers"] == parity["rows"] for parity in read_json(RESULTS / "onnx.json")["parity"]
    )
    served = read_json(RESULTS / "serving.json")
    assert all(row["holds"] for name in serving_page.PARTS for row in served[name])


def test_the_processors_clock_times_batches_that_no_thread_runs(monkeypatch, runtime, task_folder):
    put(monkeypatch, SATURATING=16, LOADS=(0.1, 0.8))
    monkeypatch.setattr(serving_page, "SECONDS", 0.05)
    sources = SimpleNamespace(find=lambda kind, name: {"weights": runtime.folder, "data": task_folder}[kind])
    rows = serving_page.processor(sources, None)["processor"]
    assert len(rows) == 4 and all(0 < load["p50"] <= load["p99"] for row in rows for load in row["loads"])
    assert serving.Worker is not serving_page.Stepped and serving.ROUNDS == 3


def test_parity_counts_answers_of_the_graph_that_are_torchs(monkeypatch, checkpoint_folder, task_folder, tmp_path):
    monkeypatch.setattr(onnx_page, "THREADS", torch.get_num_threads())
    monkeypatch.setattr(onnx_page, "PARITY_METHODS", ("joint",))
    monkeypatch.setattr(onnx_page, "EXITS", (1, 2, 3))
    monkeypatch.setattr(onnx_page, "PARITY_SPLITS", {"words": "dev"})
    for name, folder in (("weights/all-MiniLM-L6-v2", checkpoint_folder), ("data/words", task_folder)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(folder)
    sources = Sources(tmp_path, tmp_path / "work")

    def deeper_in_large_batches(*given):
        result = early_exit(*given)
        return result._replace(layers_run=result.layers_run + (len(result.layers_run) > 1))

    monkeypatch.setattr(onnx_page, "early_exit", deeper_in_large_batches)
    single, large = onnx_page.PARTS["parity"](sources, tmp_path / "work")["parity"]
    for case in (single, large):
        assert case["labels"] == case["rows"] == 20 and case["difference"] < 1e-4
    assert (single["batch"], single["layers"], large["batch"], large["layers"]) == (1, 20, 32, 0)
