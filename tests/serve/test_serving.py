"""A worker that takes rows of different requests together again after each exit: what it answers, refuses, and forgets.

The oracle is `Runtime.run` at batch 1. Queues are checked on engines that are written here.
"""

import math
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from http_server import SENTENCES, Said, Slow

from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.decoding import MISSING_KV
from mini_ee.lab.export.runtime import Runtime, TokenRuntime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.rules import Fixed, Never, Patience, Planned, Rule, Threshold
from mini_ee.lab.statistics import binomial_cdf
from mini_ee.serve import Refused, Worker, WrongRow, engine_of
from mini_ee.serve.engines import PromptRow, RowEngine, TextEngine
from mini_ee.serve.monitoring import ERROR_LEVEL, TEST_EVERY, Guarantee

RULES = {
    "threshold": Threshold((0.875, 0.87, 0.88, 0.0)),
    "entropy": Threshold(-0.4, "entropy"),
    "patience": Patience(1),
    "fixed": Fixed(1),
    "never": Never(),
}


PROMPTS = ["the film was", "a meal", "book and song and room", "the", "very very good"] * 2


def all_at_once(engine, texts, **settings):
    """Answers to all, given by several threads to one worker; and its metrics."""
    futures = [None] * len(texts)
    with Worker(engine, max_open=len(texts), **settings) as worker:

        def give(some):
            for at in some:
                futures[at] = worker.submit(texts[at])

        threads = [threading.Thread(target=give, args=(range(start, len(texts), 3),)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [future.result(30) for future in futures], worker.metrics


# ---- A copy in another process ----
def test_a_copy_of_a_runtime_opens_its_folder_again_with_its_own_arguments_and_rule(runtime, decoder, tmp_path):
    """As Spark, joblib and multiprocessing make it. The rule may be another one than that of the folder."""
    opened = Runtime(runtime.folder, ["CPUExecutionProvider"], threads=1)
    copied = pickle.loads(pickle.dumps(opened))
    assert type(copied) is Runtime and copied._threads == 1 and copied.rule == opened.rule
    opened.rule = Never()
    for one, other in ((opened, pickle.loads(pickle.dumps(opened))), (copied, deepcopy(copied))):
        assert [answer.layers for answer in other.run(SENTENCES)] == [answer.layers for answer in one.run(SENTENCES)]
    texts = pickle.loads(pickle.dumps(decoder))
    assert type(texts) is TokenRuntime and texts.max_new_tokens == decoder.max_new_tokens == 8
    assert texts.run(PROMPTS)[0].tokens == decoder.run(PROMPTS)[0].tokens
    folder = shutil.copytree(runtime.folder, tmp_path / "copy")
    sent = pickle.dumps(Runtime(folder))
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"max_length": 64})
    with pytest.raises(ValueError, match=f"copy: expected the model {runtime.model_id}, found .*; open it anew"):
        pickle.loads(sent)


# ---- Answers ----
@pytest.mark.parametrize("rebatch", [True, False], ids=["segments", "one graph"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_answers_are_those_of_the_runtime_at_batch_1_whoever_shared_the_batches(runtime, rule, rebatch):
    texts = random.Random(3).choices(SENTENCES, k=60) + SENTENCES
    answers, metrics = all_at_once(RowEngine(runtime, rule, rebatch), texts, batch=4, max_wait=0.002)
    alone = runtime.run(texts, batch_size=1, rule=rule)
    assert [(answer.label, answer.layers) for answer in answers] == [(answer.label, answer.layers) for answer in alone]
    np.testing.assert_allclose([answer.logits for answer in answers], [answer.logits for answer in alone], atol=1e-5)
    assert metrics.requests["answered"] == len(texts)
    assert metrics.exit_counts.total() == len(texts)
    last = str(runtime.exits[-1])
    assert metrics.rows[last] == (metrics.exit_counts[runtime.exits[-1]] if rebatch else 0)


def test_a_rule_for_other_exits_is_refused(runtime):
    with pytest.raises(ValueError, match="expected one threshold or"):
        RowEngine(runtime, Threshold((0.9,) * 9))


def test_rows_of_different_requests_share_a_batch_after_an_exit(runtime):
    """Half of a batch of four leaves: two batches of survivors are one."""
    engine, texts = RowEngine(runtime, RULES["threshold"]), SENTENCES * 8
    _, metrics = all_at_once(engine, texts, batch=8, max_wait=10)
    assert metrics.rows["2"] < len(texts)
    assert metrics.rows["2"] / metrics.batches["2"] > 0.8 * 8 * (1 - metrics.exit_counts[1] / len(texts))
    assert metrics.batches["2"] < metrics.batches["1"]


def test_what_a_rule_keeps_of_a_row_goes_with_it_into_another_batch(runtime):
    seen, mixed = [], (4, 1, 5)  # of two batches of three

    class Keeps(Rule):
        needs = "logits"

        def stop(self, k, read, memory):
            seen.append(memory.get("said"))
            memory["said"] = read
            return np.zeros(len(read), bool)

    engine = RowEngine(runtime, Keeps())
    rows = [engine.row(text) for text in SENTENCES[:6]]
    engine.run(0, rows[:3])
    engine.run(0, rows[3:])
    engine.run(1, [rows[at] for at in mixed])
    alone = [runtime.run([SENTENCES[at]], rule=Fixed(0))[0].logits for at in mixed]
    np.testing.assert_allclose(seen[-1], alone, atol=1e-5)


def test_what_has_no_answer_of_full_depth_is_not_put_in_the_shadow(runtime):
    graphs, task = runtime.config["graphs"] | {"whole": {}}, runtime.config["task"] | {"label_names": []}
    for config, line in (({"graphs": graphs}, "tokens exit within a row"), ({"task": task}, "found a regression")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=f"{line}.*leave out --shadow"):
            patch.setattr(runtime, "config", runtime.config | config)
            RowEngine(runtime, guarantee=Guarantee(0.5))


class TwoParts(Rule):
    """Plans by the length of a text, as a rule that retrieves plans from texts."""

    name, needs, plans_from_texts = "halves", None, True

    def plan(self, inputs):
        return inputs.attention_mask.sum(axis=1) % 3


@pytest.mark.parametrize("rebatch", [True, False], ids=["segments", "one graph"])
@pytest.mark.parametrize("rule", ["threshold", "patience", "fixed", "halves"])
def test_shadow_requests_measure_the_agreement_with_the_full_model(runtime, rule, rebatch):
    rule, guarantee = TwoParts() if rule == "halves" else RULES[rule], Guarantee(1.0)
    answers, metrics = all_at_once(RowEngine(runtime, rule, rebatch, guarantee), SENTENCES, batch=4)
    full = runtime.run(SENTENCES, batch_size=1, rule=Never())
    agree = [answer.label == other.label for answer, other in zip(answers, full)]
    assert guarantee.rows == len(SENTENCES) and sum(guarantee.agreements) == sum(agree) < len(agree)
    assert metrics.requests["answered"] == len(SENTENCES)
    if rebatch:
        assert metrics.rows[str(runtime.exits[-1])] == len(SENTENCES)


def test_a_share_of_the_requests_is_in_the_shadow(runtime):
    guarantee = Guarantee(0.25)
    all_at_once(RowEngine(runtime, guarantee=guarantee, seed=3), SENTENCES * 8)
    assert 0.15 < guarantee.rows / (8 * len(SENTENCES)) < 0.35


def test_thresholds_rise_in_a_worker_whose_guarantee_is_broken(runtime):
    """A rule that lets all leave at the first exit, which is drawn: few agree."""
    engine = RowEngine(runtime, Threshold(0.0), guarantee=Guarantee(1.0, 0.95, tighten=True))
    with Worker(engine, max_open=1000) as worker:
        for _ in range(40):
            for future in [worker.submit(text) for text in SENTENCES]:
                future.result(30)
        last = [worker.submit(text) for text in SENTENCES]
        answers = [future.result(30) for future in last]
    full = runtime.run(SENTENCES, batch_size=1, rule=Never())
    assert engine.rule.threshold > 0.8 and engine.guarantee.tightened >= 3
    assert np.mean([answer.label == other.label for answer, other in zip(answers, full)]) >= 0.9


def test_looks_at_a_stricter_rule_are_counted_anew():
    """15 of 20 where .9 is guaranteed: enough for a rule's first look, and not for its second."""
    guarantee, rule = Guarantee(1.0, 0.9, tighten=True), Threshold(0.5)
    assert ERROR_LEVEL / 6 < binomial_cdf(15, TEST_EVERY, 0.9) < ERROR_LEVEL / 2
    for agrees in [False] * TEST_EVERY + [True] * 15 + [False] * 5:
        rule = guarantee.observe(agrees, rule)
    assert guarantee.tightened == 2 and rule.threshold == 0.875


@pytest.mark.parametrize("threshold, exit", [(0.0, 0), (math.inf, 3)], ids=["early", "at full depth"])
def test_rows_that_exited_by_a_rule_do_not_count_for_the_stricter_one(runtime, threshold, exit):
    """The first of them to be observed brings another rule into force, while the others are still to be observed."""
    guarantee, observed = Guarantee(1.0, 0.95, tighten=True), []
    guarantee.observe = lambda agrees, rule: observed.append(agrees) or Threshold(0.9)
    engine = RowEngine(runtime, Threshold(threshold), guarantee=guarantee)
    rows = [engine.row(text) for text in SENTENCES[:3]]
    for at in range(len(engine.queues)):
        engine.run(at, rows)
    assert [row.answer.exit for row in rows] == [runtime.exits[exit]] * 3 and len(observed) == 1


def test_drift_is_from_the_exits_that_the_calibration_counted(runtime, decoder, monkeypatch):
    last = len(decoder.exits) - 1
    monkeypatch.setattr(decoder, "config", decoder.config | {"exit_counts": [3] + [0] * (last - 1) + [1]})
    monkeypatch.setattr(runtime, "config", runtime.config | {"exit_counts": [6, 2, 1, 1]})
    for engine, texts, drift in (
        (RowEngine(runtime, Never()), SENTENCES, 0.9),
        (TextEngine(decoder, Never()), PROMPTS[:3], 0.75),
    ):
        assert all_at_once(engine, texts)[1].drift() == pytest.approx(drift)


@pytest.mark.parametrize("rebatch", [True, False], ids=["segments", "one graph"])
def test_a_plan_is_made_in_a_stage_of_its_own(runtime, rebatch):
    engine = RowEngine(runtime, TwoParts(), rebatch)
    assert engine.queues[0] == "plan"
    answers, metrics = all_at_once(engine, SENTENCES, batch=4)
    plan = TwoParts().plan(runtime.encode(SENTENCES).batch(slice(None)))
    alone = [runtime.run([text], rule=Planned([k]))[0] for text, k in zip(SENTENCES, plan)]
    assert [(answer.label, answer.exit) for answer in answers] == [(answer.label, answer.exit) for answer in alone]
    assert metrics.rows["plan"] == len(SENTENCES)


def test_a_model_with_parallel_streams_is_served_by_its_one_graph(runtime, monkeypatch):
    segments = type(runtime.segments().by_segment(Never()))
    monkeypatch.setattr(segments, "can_join", lambda self: False)
    assert RowEngine(runtime).queues == ("model",)


def test_a_wrong_row_is_refused_before_it_is_queued(runtime):
    with Worker(engine_of(runtime)) as worker:
        for row, message in (("", "empty"), (("a", "b"), "expected 1 texts, found 2"), ((7,), "no string")):
            with pytest.raises(WrongRow, match=message) as error:
                worker.submit(row).result(10)
            assert "row 0" not in str(error.value)
        assert worker.submit("the film").result(10).label in runtime.label_names


# ---- Decoders ----
@pytest.mark.parametrize("room", [1, 3, 16])
def test_texts_that_begin_and_end_at_any_time_are_those_of_the_runtime_alone(decoder, room):
    alone = [decoder.run([prompt])[0] for prompt in PROMPTS]
    texts, metrics = all_at_once(TextEngine(decoder, room=room), PROMPTS, batch=room)
    assert [(text.tokens, text.layers, text.text) for text in texts] == [
        (text.tokens, text.layers, text.text) for text in alone
    ]
    assert len({layers for text in texts for layers in text.layers}) > 1
    assert metrics.batches["texts"] < sum(len(text.tokens) for text in alone) or room == 1


def test_a_text_takes_the_place_of_one_that_ended(decoder):
    """Lengths differ, and never do more texts than there is room for stand in a step."""
    sizes, engine = [], TextEngine(decoder, room=2)
    run = engine.run
    engine.run = lambda at, rows: (sizes.append(len(rows)), run(at, rows))
    with Worker(engine, max_open=50) as worker:
        counts = [2, 7, 3, 5, 1, 6]
        futures = [worker.submit(prompt, max_new_tokens=count) for prompt, count in zip(PROMPTS, counts)]
        texts = [future.result(30) for future in futures]
    alone = [decoder.run([prompt], max_new_tokens=count)[0] for prompt, count in zip(PROMPTS, counts)]
    assert [text.tokens for text in texts] == [text.tokens for text in alone]
    assert max(sizes) == 2 and sum(sizes) == sum(len(text.tokens) for text in texts)
    assert len(sizes) <= sum(sizes) / 2 + 7, "places stood empty while texts waited"


@pytest.mark.parametrize("missing_kv", MISSING_KV)
def test_the_state_of_a_text_does_not_reach_the_next_in_its_place(decoder, missing_kv):
    """All its tokens leave at the first exit, and wait for the layers above where the next has its prompt."""
    engine = TextEngine(Runtime(decoder.folder, missing_kv=missing_kv, segments=torch_segments(decoder.folder)), room=1)
    short, long = (engine.row(prompt, count) for prompt, count in (("the", 6), ("book and song and room", 8)))
    for row, engine.rule in ((short, Fixed(0)), (long, Never())):
        while row.answer is None:
            engine.run(0, [row])
        engine.release(row)
    (alone,) = decoder.run(["book and song and room"], rule=Never())
    assert short.layers == [1] * 6 and long.tokens == alone.tokens


def test_pieces_of_a_text_are_sent_as_they_are_written(decoder):
    pieces = []
    with Worker(TextEngine(decoder)) as worker:
        future = worker.submit("the film", on_piece=lambda text, layers: pieces.append((text, layers)))
        answer = future.result(10)
    assert "".join(text for text, _ in pieces) == answer.text
    assert len(pieces) == len(answer.tokens) and [layers for _, layers in pieces] == answer.layers


def test_a_letter_of_several_tokens_is_sent_when_it_is_complete():
    backend = Tokenizer.from_folder(BUILT_IN_DECODER).backend
    text = "Señor Café’s 🎬 said: “東京” 👩‍👩‍👧 naïve"
    prompt, ids = ([*backend.encode(words, add_special_tokens=False).ids] for words in ("The film:", text))
    runtime = SimpleNamespace(config={"stop": []}, tokenizer=SimpleNamespace(backend=backend))
    runtime.text_after = lambda *tokens: TokenRuntime.text_after(runtime, *tokens)
    engine = object.__new__(TextEngine)
    engine.runtime = runtime
    for count in range(1, len(ids) + 1):
        pieces = []
        row = PromptRow(prompt, prompt, count, lambda text, layers, pieces=pieces: pieces.append(text))
        for token in ids[:count]:
            engine._write(row, token, 3)
        assert "".join(pieces) == row.answer.text  # that ends within a letter, too: then by what there is of it
        assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert text in row.answer.text and len(pieces) < len(ids) and "\ufffd" not in pieces[-1]


def test_a_prompt_that_the_caches_cannot_hold_is_refused(decoder, monkeypatch):
    monkeypatch.setattr("mini_ee.serve.engines.CAPACITY", 12)
    with Worker(TextEngine(decoder)) as worker:
        with pytest.raises(WrongRow, match="expected at most 12 tokens, found [2-9] and 11 to generate"):
            worker.submit("the film was", max_new_tokens=11).result(10)
        assert len(worker.submit("the film was", max_new_tokens=4).result(10).tokens) == 4


def test_a_text_that_nobody_waits_for_gives_its_place_back(decoder):
    engine = TextEngine(decoder, room=1)
    with Worker(engine) as worker:
        begun = threading.Event()
        first = worker.submit("the film", max_new_tokens=30, on_piece=lambda *_: (begun.set(), time.sleep(0.01)))
        begun.wait(10)
        first.cancel()
        assert len(worker.submit("a meal", max_new_tokens=2).result(10).tokens) == 2
    assert len(first_tokens := engine._free) == 1, first_tokens


# ---- Queues ----
@contextmanager
def busy(engine, worker, width=2):
    """While a batch of one row runs: what is submitted meanwhile is in the queue before the next is chosen."""
    engine.held.clear()
    worker.submit("x" * width)
    while sum(worker.lengths().values()):
        time.sleep(0.001)
    yield
    engine.held.set()


def test_a_request_lasts_from_before_its_row_is_made(runtime):
    class Reading(RowEngine):
        def row(self, texts):
            time.sleep(0.1)
            return super().row(texts)

    engine = Reading(runtime, Never())
    with Worker(engine) as worker:
        answer = worker.submit(SENTENCES[0]).result(30)
    assert answer.milliseconds >= 100 and engine.metrics._total >= 0.1


def waiting_behind(engine, worker, widths):
    """Rows that are all in the queue at once."""
    with busy(engine, worker):
        return [worker.submit("x" * width) for width in widths]


@pytest.mark.parametrize(
    "size, widths, batches",
    [
        (3, [100, 500, 102, 504, 98, 496], [[100, 102, 98], [500, 504, 496]]),
        (16, [4, 100, 4, 4], [[4, 4, 4], [100]]),  # not filled up with padding
    ],
)
def test_rows_of_similar_lengths_share_the_batch_of_the_oldest(size, widths, batches):
    engine = Slow()
    with Worker(engine, batch=size) as worker:
        wait(waiting_behind(engine, worker, widths))
    assert engine.ran[1:3] == [("first", batch) for batch in batches]


def test_the_deepest_queue_that_is_full_or_due_is_next_else_the_first():
    """Of each pair that comes, one goes on."""
    for max_wait, expected in ((10, ["first", "first", "second", "first", "second"]), (0, ["first", "second"] * 3)):
        engine = Slow(0.002)
        engine.by_length = False
        with Worker(engine, batch=2, max_wait=max_wait) as worker:
            wait(waiting_behind(engine, worker, [3, 2, 3, 2, 3, 2]))
        assert [name for name, _ in engine.ran[1:]] == expected


def test_a_row_that_goes_on_may_be_held_for_company_anew(monkeypatch):
    """Its first batch took longer than a row may be held; another row waits before the first queue."""
    clock = [0.0]
    monkeypatch.setattr("mini_ee.serve.worker.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = Slow()
    with Worker(engine, batch=2, max_wait=1) as worker:
        with busy(engine, worker, 3):
            clock[0] = 5.0
            worker.submit("xx")
    assert engine.ran == [("first", [3]), ("first", [2]), ("second", [3])]


def test_no_row_waits_if_the_engine_is_idle():
    with Worker(Slow(), max_wait=10) as worker:
        begin = time.perf_counter()
        worker.submit("xxx").result(5)
        assert time.perf_counter() - begin < 1


def test_what_is_too_much_is_refused_at_once_with_the_reason():
    engine = Slow()
    with Worker(engine, max_open=3) as worker:
        with busy(engine, worker):
            futures = [worker.submit("xx") for _ in range(2)]
            with pytest.raises(
                Refused, match="3 requests are open, with room for 0 more; send the request again later"
            ):
                worker.submit("xx")
            futures[1].cancel()
            futures.append(worker.submit("xx"))
        wait(futures)
    assert worker.metrics.requests == {"answered": 3, "refused": 1, "late": 0, "cancelled": 1, "failed": 0}


def test_a_deadline_that_passes_is_an_error_and_the_row_is_not_run():
    engine = Slow()
    with Worker(engine) as worker:
        with busy(engine, worker):
            late, fine = worker.submit("x" * 4, deadline=0.01), worker.submit("x" * 4, deadline=60)
            time.sleep(0.05)
        with pytest.raises(Refused, match="the deadline passed"):
            late.result(5)
        assert fine.result(5).layers == 1
    assert [widths for _, widths in engine.ran] == [[2], [4]] and len(engine.released) == 3
    assert worker.metrics.requests["late"] == 1


def test_a_row_that_is_cancelled_while_it_runs_ends_nothing():
    engine = Slow()
    with Worker(engine) as worker:
        engine.held.clear()
        gone = worker.submit("xx")
        while sum(worker.lengths().values()):
            time.sleep(0.001)
        assert gone.cancel()
        engine.held.set()
        assert wait([gone], 5).done and worker.submit("xx").result(5).layers == 1
    assert worker.metrics.requests == {"answered": 1, "refused": 0, "late": 0, "cancelled": 1, "failed": 0}


def test_the_rows_of_a_batch_that_fails_run_one_by_one():
    engine = Slow()
    engine.by_length = False
    with Worker(engine) as worker:
        futures = waiting_behind(engine, worker, [4, 13, 6, 3])
        wait(futures)
    assert [future.exception() is None for future in futures] == [True, False, True, True]
    first = [widths for name, widths in engine.ran if name == "first"]
    assert first[1:] == [[4, 13, 6, 3], [13], [6], [3]], "4 had gone on before the batch failed"
    assert worker.metrics.requests["failed"] == 1 and len(engine.released) == 5


def test_a_row_that_fails_in_the_shadow_had_its_answer_and_ends_nothing():
    class Shadowed(Slow):
        def run(self, at, rows):
            if at:
                raise RuntimeError("a batch that fails")
            for row in rows:
                row.answer, row.queue = Said(1), 1

    with Worker(engine := Shadowed()) as worker:
        for _ in range(2):
            assert worker.submit("xx").result(5).layers == 1
    assert (worker.metrics.requests["answered"], worker.metrics.requests["failed"], len(engine.released)) == (2, 0, 2)


def test_draining_answers_what_was_taken_and_takes_no_more():
    engine = Slow(0.01)
    worker = Worker(engine, batch=1)
    futures = [worker.submit("xxx") for _ in range(5)]
    assert worker.drain(5) and worker.state == "drained"
    assert all(future.done() and future.result().layers == 2 for future in futures)
    with pytest.raises(Refused, match="shutting down"):
        worker.submit("xx")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_thread_has_ended_takes_no_more():
    """Nothing in the code ends it; a MemoryError outside of a batch could."""
    engine = Slow(0.0)
    worker = Worker(engine)
    worker._choose = None
    with worker._ready:
        worker._ready.notify()
    worker._thread.join(5)
    assert worker.state == "dead"
    with pytest.raises(Refused, match="has ended; restart this server"):
        worker.submit("xxx")
    assert worker.metrics.requests["refused"] == 1


def test_above_the_load_that_it_bears_every_request_is_answered_or_refused_once(runtime, count=1000):
    """At 1.5 times what the first segment alone could do: requests are refused, given up, too late. By hand it was run
    once with 100,000."""
    engine, chance, ended, futures, refused = RowEngine(runtime, RULES["threshold"]), random.Random(0), [], [], 0
    run = engine.run
    engine.run = lambda at, rows: (time.sleep(0.004), run(at, rows))
    with Worker(engine, max_open=64, batch=8) as worker:
        gaps = np.random.default_rng(0).exponential(4 * 0.004 / 8 / 1.5, count // 4)
        begin, moments = time.perf_counter(), np.repeat(np.cumsum(gaps), 4)
        for at, moment in enumerate(moments.tolist()):
            time.sleep(max(0, moment - (time.perf_counter() - begin)))
            try:
                future = worker.submit(SENTENCES[at % len(SENTENCES)], 60 if at % 17 else 0.002)
            except Refused:
                refused += 1
                continue
            future.add_done_callback(lambda future: ended.append(id(future)))
            futures.append((at, future))
            if not chance.randrange(20):
                future.cancel()
        wait([future for _, future in futures], 60)
        assert sum(worker.lengths().values()) == 0
    assert sorted(ended) == sorted(id(future) for _, future in futures), "one was answered twice, or never"
    counts = worker.metrics.requests
    assert sum(counts.values()) == len(moments) == len(futures) + refused
    assert counts["refused"] == refused > len(moments) / 8
    alone = [(answer.label, answer.layers) for answer in runtime.run(SENTENCES, batch_size=1, rule=engine.rule)]
    good = [
        (at, accepted.result()) for at, accepted in futures if not accepted.cancelled() and accepted.exception() is None
    ]
    assert len(good) == counts["answered"] > len(moments) / 8
    assert all((answer.label, answer.layers) == alone[at % len(SENTENCES)] for at, answer in good)


def test_nothing_that_a_row_held_outlives_it(runtime):
    import gc
    import weakref

    engine = RowEngine(runtime, RULES["threshold"])
    references = []
    make = engine.row
    engine.row = lambda texts: references.append(weakref.ref(row := make(texts))) or row
    with Worker(engine) as worker:
        for text in SENTENCES:
            worker.submit(text).result(10)
        worker.submit("the film").result(10)
        time.sleep(0.05)
        gc.collect(1)  # not what was there before
        assert sum(ref() is not None for ref in references) <= 2  # the batch that ran last


# ---- Without torch ----
def test_the_worker_needs_no_torch(runtime):
    code = f"""
import sys
class NoTorch:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, NoTorch())
from mini_ee.lab.export.runtime import Runtime
from mini_ee.serve import Worker, engine_of
import mini_ee.serve.app, mini_ee.serve.command_serve
with Worker(engine_of(Runtime({str(runtime.folder)!r}, threads=1))) as worker:
    print(worker.submit("the film was good").result(10).layers)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0 and int(process.stdout) in (1, 2, 4, 6), process.stderr
