"""`mini-ee serve OLD --canary NEW`: a share of the requests is answered by NEW; metrics tell both apart."""

import re
import shutil
import threading
from types import SimpleNamespace

import pytest
from http_server import SENTENCES, ask, serving

from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.calibrated import write_calibrated
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Threshold
from mini_ee.serve import Worker, engine_of
from mini_ee.serve.canary import Canary, Compared, check_same
from mini_ee.serve.http_messages import Access, Hosts

CALIBRATION = {"task": "words", "rows_calibration": 1, "rows_fresh": 1, "end_to_end": 1.0, "mean_layers": 1.0}


@pytest.fixture(scope="module")
def newer(runtime, tmp_path_factory):
    """The same model, all of whose texts exit at the first exit."""
    folder = tmp_path_factory.mktemp("canary") / "new"
    write_calibrated(runtime, folder, Threshold(0.0), None, [1, 0, 0, 0], CALIBRATION | {"batch_size": 1})
    return Runtime(folder, threads=1)


def values(page, name):
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.M)}


def test_each_request_is_answered_by_one_export_and_says_which(runtime, newer):
    expected = {model.model_id: model.run([(text,) for text in SENTENCES], 1) for model in (runtime, newer)}
    new = Worker(engine_of(newer))
    with serving(engine_of(runtime), served=lambda old: Canary(old, new, 0.5, Access(Hosts("127.0.0.1")))) as (_, port):
        answered = dict.fromkeys(expected, 0)
        for at, text in enumerate(SENTENCES):
            status, answer, headers = ask(port, {"text": text})
            answered[headers["x-model-id"]] += 1
            right = expected[headers["x-model-id"]][at]
            assert (status, answer["label"], answer["layers"]) == (200, right.label, right.layers)
        ids = {ask(port, {"texts": SENTENCES[:2]})[2]["x-model-id"] for _ in range(12)}
        assert ids == expected.keys() and min(answered.values()) >= 5
        assert ask(port, None, "/health", "GET")[1]["model"] == runtime.model_id
        page = ask(port, None, "/metrics", "GET")[1]
    assert values(page, "mini_ee_model_info") == {f'model="{model_id}"': 1.0 for model_id in expected}
    requests = values(page, "mini_ee_requests_total")
    count = requests[f'model="{newer.model_id}",outcome="answered"']
    assert count >= answered[newer.model_id]
    assert requests[f'model="{runtime.model_id}",outcome="failed"'] == 0
    agreement = values(page, "mini_ee_canary_agreement")
    assert list(agreement) == [f'end="{end}"' for end in ("low", "mean", "high")]
    assert page.count("# TYPE mini_ee_requests_total counter") == 1
    assert new.state == "drained"


def test_the_agreement_counts_texts_that_both_exports_label_alike(runtime, newer):
    expected = [
        one.agrees(other) for one, other in zip(*(e.run([(t,) for t in SENTENCES], 1) for e in (runtime, newer)))
    ]
    with Worker(engine_of(runtime)) as old, Worker(engine_of(newer)) as new:
        compared = Compared(new, old)
        done = threading.Semaphore(0)
        compare = compared._compare
        compared._compare = lambda *given: (compare(*given), done.release())
        for text in SENTENCES:
            compared.submit(text).result(10)
        assert all(done.acquire(timeout=10) for _ in SENTENCES)
    assert sum(compared.agreements) == sum(expected) < len(expected) == compared.rows
    assert f"mini_ee_canary_rows_total {len(expected)}\n" in compared.comparison()


def test_a_comparison_without_room_is_no_refused_request(runtime, newer):
    """Else the alert RequestsRefused would fire although every client got an answer."""
    with Worker(engine_of(runtime), max_open=0) as old, Worker(engine_of(newer)) as new:
        compared = Compared(new, old)
        compared.submit(SENTENCES[0]).result(10)
    assert old.metrics.requests["refused"] == 0 == compared.rows


def test_a_canary_that_has_ended_gets_no_requests(runtime, newer):
    new = Worker(engine_of(newer))
    new.drain()
    with serving(engine_of(runtime), served=lambda old: Canary(old, new, 0.99, Access(Hosts("127.0.0.1")))) as (
        _,
        port,
    ):
        replies = [ask(port, {"text": SENTENCES[0]}) for _ in range(3)]
    assert [(status, headers["x-model-id"]) for status, _, headers in replies] == [(200, runtime.model_id)] * 3


def test_exports_that_answer_other_requests_are_refused(runtime, decoder, tmp_path):
    with pytest.raises(WrongArguments, match="expected the kind of .*, rows, found tokens"):
        check_same(runtime, decoder)
    shutil.copytree(runtime.folder, tmp_path / "other")
    manifest = read_json(tmp_path / "other" / "manifest.json")
    manifest["task"]["label_names"] = ["a", "b", "c"]
    write_json(tmp_path / "other" / "manifest.json", manifest)
    with pytest.raises(WrongArguments, match="expected the labels of"):
        check_same(runtime, Runtime(tmp_path / "other", threads=1))
    for name, value, what in (("num_labels", 8, "number of logits, or embedding size"), ("normalize", True, "scaling")):
        other = SimpleNamespace(folder="new", model_id="new", config=runtime.config | {name: value})
        with pytest.raises(WrongArguments, match=f"--canary new: expected the {what}.*, found {value}"):
            check_same(runtime, other)
    check_same(decoder, SimpleNamespace(folder="new", model_id="new", config=decoder.config))
    with pytest.raises(WrongArguments, match="expected a new export, found .*, model"):
        check_same(runtime, Runtime(runtime.folder, threads=1))


def test_a_canary_that_cannot_answer_some_requests_warns(runtime, newer, monkeypatch, caplog):
    points = [[0.5, 0.9, 0.1, 2.0], ["inf", 1.0, 0.0, 6.0]]
    monkeypatch.setitem(runtime.config, "curve", {"rows": 10, "points": points})
    with Worker(engine_of(runtime)) as old, Worker(engine_of(newer)) as new:
        Canary(old, new, 0.5, Access(Hosts("127.0.0.1")))
        assert "new: cannot answer requests with agreement or max_loss: its share of them gets 400" in caplog.text
        caplog.clear()
        Canary(new, old, 0.5, Access(Hosts("127.0.0.1")))
        assert not caplog.text
