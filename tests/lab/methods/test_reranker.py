"""`add-exits --top-k` and `calibrate EXPORTED --top-k` on a small reranker: what the exported graph ranks, by loops."""

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BAD, GOOD, THINGS, refused
from http_server import ask, serving
from lab_fixtures import one_number_of
from method_cases import few_epochs_and_no_picture  # noqa: F401

import mini_ee
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.add_exits import _task, card, line_of
from mini_ee.lab.export.card import guarantee_line
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Never
from mini_ee.lab.training.holdout import split_rows
from mini_ee.serve import engine_of

K, TEXTS = 2, 4
QUERIES = [
    f"{'very ' * (at % 3)}{word} {thing} {other}"
    for at, word in enumerate(GOOD + BAD)
    for thing in THINGS
    for other in THINGS[:3]
]
PAIRS = tuple(
    (query, f"the {THINGS[(at + number) % len(THINGS)]} is {(GOOD + BAD)[(3 * at + 2 * number) % len(GOOD + BAD)]}")
    for at, query in enumerate(QUERIES)
    for number in range(TEXTS)
)


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory, classifier_folder):
    return one_number_of(classifier_folder, tmp_path_factory.mktemp("reranker") / "model", 20)


@pytest.fixture(scope="module")
def added(tmp_path_factory, reranker_folder):
    out, messages = tmp_path_factory.mktemp("ranked") / "fast", list[str]()
    few = tuple((f"{query} {query}", text) for query in QUERIES[:3] for _, text in PAIRS[:K])
    run = mini_ee.add_exits(
        reranker_folder, PAIRS + few, out, top_k=K, agreement=0.6, confidence=0.8, exits=(1, 2, 3), say=messages.append
    )
    return SimpleNamespace(run=run, out=out, messages=messages, summary=read_json(out / "summary.json"))


@pytest.fixture
def exported(added, tmp_path):
    with open(tmp_path / "pairs.jsonl", "w") as file:
        for at, (query, text) in enumerate(PAIRS):
            print(json.dumps({"query": query, "passage": text, "label": float(at % 3)}), file=file)
    return shutil.copytree(added.out / "exported", tmp_path / "exported")


def kept_by_loops(runtime, pairs, rule=None):
    """For each query, whether the answers have the top k of the full model."""
    served = [answer.label for answer in runtime.run(pairs, rule=rule)]
    full = early_exit(runtime.segments(), Never(), runtime.encode(pairs).batch(slice(None))).logits[:, 0]
    unchanged = []
    for query in dict.fromkeys(query for query, _ in pairs):
        rows = [row for row, (first, _) in enumerate(pairs) if first == query]
        best = [{*sorted(rows, key=lambda row: (-of[row], row))[:K]} for of in (served, full)]
        unchanged.append(best[0] == best[1])
    return unchanged


def test_the_summary_counts_queries_as_the_exported_graph_ranks_them(added):
    summary, runtime = added.summary, Runtime(added.out / "exported", threads=1)
    test = split_rows(_task((), PAIRS, top_k=K), 0, int(0.6 * len(QUERIES))).test
    unchanged = kept_by_loops(runtime, test.texts)
    assert summary["queries"] == len(unchanged) and summary["texts"]["tested"] == len(test) == TEXTS * len(unchanged)
    assert summary["agreement"] == pytest.approx(np.mean(unchanged)) and 0.5 < np.mean(unchanged) <= 1
    assert summary["rule"]["measure"] == "low_score" and summary["layers_saved"] > 0.03
    assert summary["guarantee"]["top_k"] == K and summary["guarantee"]["rows"] == len(unchanged)
    assert runtime.config["guarantee"]["epsilon"] == 0.6 and runtime.config["rule"]["measure"] == "low_score"
    assert f"3 of {len(QUERIES) + 3} queries are left out: they have at most 2 texts." in added.messages


def test_the_cards_say_what_is_guaranteed_of_queries(added):
    text = (added.out / "README.md").read_text()
    assert text == card(added.summary) and line_of(added.summary) in text and "queries like these" in text
    assert f"Keeps the top {K} of the original for " in text and f"{added.summary['queries']} test queries" in text
    line = guarantee_line(Runtime(added.out / "exported").config)
    assert line.startswith(f"At least 60.0% of queries keep the {K} best texts of the full model, with confidence 80%")


def test_calibrate_writes_the_threshold_whose_queries_passed(exported, capsys):
    words = ["calibrate", exported, "--text", exported.parent / "pairs.jsonl", "--top-k", K, "--epsilon", ".6"]
    assert main([*map(str, words), "--delta", ".2", "--sets", "5", "--json"]) == 0
    answer, runtime = json.loads(capsys.readouterr().out), Runtime(exported, threads=1)
    assert [runtime.config["rule"]["threshold"]] * 2 == answer["thresholds"]
    assert answer["queries"] + answer["queries_fresh"] < len(QUERIES)
    assert answer["exit_counts"] == runtime.config["exit_counts"] and answer["broken"]["sets"] == 5
    assert runtime.config["guarantee"] == {
        "top_k": K,
        "epsilon": 0.6,
        "max_loss": 0.4,
        "confidence": 0.8,
        "rows": answer["queries"],
    }
    unchanged = kept_by_loops(runtime, PAIRS)
    assert np.mean(unchanged) == pytest.approx(answer["end_to_end"], abs=0.15)
    page = (exported / "README.md").read_text()
    assert "At least 60.0% of queries keep" in page and f"Of {answer['queries_fresh']} other queries" in page
    agreement = [point[1] for point in runtime.config["curve"]["points"]]
    assert agreement[-1] == 1.0 > agreement[0] and all(
        round(share * len(QUERIES), 6).is_integer() for share in agreement
    )


def test_evaluate_counts_the_queries_of_a_task(exported, capsys, tmp_path):
    (tmp_path / "task").mkdir()
    shutil.copy(tmp_path / "pairs.jsonl", tmp_path / "task" / "dev.jsonl")
    words = ["evaluate", exported, "--task", tmp_path / "task", "--regression", "--top-k", K, "--json"]
    assert main([*map(str, words)]) == 0
    answer = json.loads(capsys.readouterr().out)["top_k"]
    unchanged = kept_by_loops(Runtime(exported), PAIRS)
    assert (answer["k"], answer["queries"]) == (K, len(unchanged)) and answer["kept"] == pytest.approx(
        np.mean(unchanged)
    )
    assert answer["interval"][0] < answer["kept"] < answer["interval"][1]


def test_rerank_batches_the_pairs_of_a_query_and_lets_each_exit_alone(exported):
    """The oracle runs each pair alone, and sorts the numbers that it gets."""
    pytest.importorskip("uvicorn", reason="the extra serve")
    runtime = Runtime(exported, threads=1)
    alone = {pair: runtime.run([pair], 1)[0] for pair in PAIRS[: 20 * TEXTS]}
    with serving(engine_of(runtime), max_wait=0.05) as (worker, port):
        for query in QUERIES[:20]:
            texts = [text for first, text in PAIRS if first == query]
            ranking = ask(port, {"query": query, "texts": texts, "raw_scores": True}, "/rerank")[1]
            numbers = [alone[query, text].label for text in texts]
            expected = sorted(range(TEXTS), key=lambda at: (-numbers[at], at))
            assert [ranked["index"] for ranked in ranking] == expected
            np.testing.assert_allclose([ranked["score"] for ranked in ranking], sorted(numbers)[::-1], atol=1e-5)
    counts = worker.metrics.exit_counts
    assert counts == Counter(answer.layers for answer in alone.values()) and len(counts) > 1
    assert worker.metrics.rows["model"] == len(alone) > worker.metrics.batches["model"]  # the first may run alone


REFUSED = [  # words, a part of the line
    ("add-exits {classifier} --text {pairs} --top-k 2", "--top-k is for a model that predicts a number"),
    ("add-exits {reranker} --text {pairs} --top-k 2 --tolerance .1", "--top-k counts queries that keep their best"),
    ("add-exits {reranker} --text {pairs} --top-k 4", "at least 100 queries with more than 4 texts, found 0 of"),
    ("add-exits {reranker} --text {pairs} --top-k 0", "top_k must be a whole number of at least 1"),
    ("add-exits {reranker} --text {single} --top-k 2", "--top-k needs pairs of a query and a text, found single texts"),
    ("calibrate {exported} --text {pairs} --top-k 2 --epsilon .9", "--top-k takes --epsilon and --delta, and no"),
    (
        "calibrate {exported} --text {pairs} --top-k 2 --epsilon .99 --delta .05",
        "at least 750 queries with more than 2 texts are needed",
    ),
    ("calibrate {exported} --text {pairs} --top-k 9 --epsilon .9 --delta .1", "at least 1 queries with more than 9 te"),
    (
        "evaluate {exported} --task {task} --regression --threshold .5 --measure entropy",
        "has no confidence: use .* or --measure low_score",
    ),
]


@pytest.mark.parametrize("words, message", REFUSED)
def test_what_cannot_be_ranked_is_refused(words, message, exported, reranker_folder, classifier_folder, capsys):
    single = exported.parent / "single.txt"
    single.write_text("\n".join(f"{query} {number}" for number, query in enumerate(QUERIES)))
    places = {"exported": exported, "reranker": reranker_folder, "classifier": classifier_folder, "single": single}
    places |= {"pairs": (pairs := exported.parent / "pairs.jsonl"), "task": exported.parent / "task"}
    places["task"].mkdir()
    shutil.copy(pairs, places["task"] / "dev.jsonl")
    line = refused(capsys, *words.format(**places).split())
    assert re.search(message, line), line
