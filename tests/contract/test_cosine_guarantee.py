"""The guarantee on cosines: exact tails, how often it is violated over repeated draws, and its command."""

import json
import math

import numpy as np
import pytest
from conftest import ENCODED as TEXTS

import mini_ee
from mini_ee.lab.cli.main import main
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.cosine_guarantee import calibrate_cosine, share_p_value
from mini_ee.lab.exits.embedding_exits import full_cosines
from mini_ee.lab.methods.embedding_maps_rule import Similarity
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Fixed, Never

EXITS, COSINE, EPSILON, DELTA = (1, 2, 4), 0.9, 0.9, 0.1


def recorded(embeddings):
    flops = np.zeros((*embeddings.shape[:2], 2))
    return Record(Recorded(EXITS, embeddings, flops, [1, 1, 2]), embeddings, 1.0)


def draw(count, random):
    """Texts whose first exit has a cosine of COSINE for a share EPSILON exactly, and whose second is better."""
    full = random.normal(size=(count, 8))
    full /= np.linalg.norm(full, axis=1, keepdims=True)
    noise = random.normal(size=(count, 8))
    noise -= (noise * full).sum(axis=1, keepdims=True) * full
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    first = np.where(random.random(count) < EPSILON, 0.95, 0.5)
    second = np.where(random.random(count) < 0.97, 0.95, 0.5)
    exits = [cosine[:, None] * full + np.sqrt(1 - cosine**2)[:, None] * noise for cosine in (first, second)]
    return np.stack([*exits, full], axis=1)


def test_the_p_value_is_an_upper_binomial_tail():
    for successes in (0, 3, 9, 10):
        tail = sum(math.comb(10, n) * 0.8**n * 0.2 ** (10 - n) for n in range(successes, 11))
        assert share_p_value(successes, 10, 0.8) == pytest.approx(tail, abs=1e-9)


def test_over_repeated_draws_the_guarantee_is_violated_for_a_share_of_delta_at_most():
    """The first exit reaches the cosine for a share just below epsilon: to choose it is a violation."""
    random, chosen = np.random.default_rng(0), []
    for _ in range(600):
        rule, _ = calibrate_cosine(recorded(draw(150, random)), Fixed(0), COSINE, EPSILON + 1e-9, DELTA)
        chosen.append(rule)
    violated = np.mean([rule == Fixed(0) for rule in chosen])
    exact = share_p_value(next(s for s in range(151) if share_p_value(s, 150, EPSILON) <= DELTA), 150, EPSILON)
    assert 0.03 < violated < exact + 2.6 * math.sqrt(exact * (1 - exact) / 600) and exact <= DELTA
    assert np.mean([rule == Never() for rule in chosen]) < 0.2  # the second exit is nearly always proved


def test_thresholds_of_an_adaptive_rule_are_proposed_by_other_texts():
    random = np.random.default_rng(1)
    texts = draw(600, random)
    rule, answer = calibrate_cosine(recorded(texts), Similarity(0.5), COSINE, 0.8, DELTA)
    assert isinstance(rule, Similarity) and answer["rows_calibration"] == 60 and answer["rows_tested"] == 540
    assert answer["share"] > 0.8 and answer["mean_layers"] < 4
    fresh = recorded(draw(5000, random))
    reached = full_cosines(np.stack((fresh.replay(rule).logits, fresh.logits[:, -1]), axis=1))[:, 0]
    assert (reached >= COSINE).mean() > 0.8


def test_too_few_texts_are_refused_with_the_number_needed():
    few = recorded(draw(20, np.random.default_rng(0)))
    for rule, needed in ((Fixed(0), 22), (Similarity(0.5), 25)):
        with pytest.raises(WrongArguments, match=f"at least {needed} are needed, got 20"):
            calibrate_cosine(few, rule, COSINE, EPSILON, DELTA)


def test_calibrate_writes_the_rule_of_a_sentence_encoder(encoder_folder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "others.txt").write_text("\n".join(f"{text} and {text}" for text in TEXTS))
    run = mini_ee.train("embedding-maps", encoder_folder, tmp_path / "texts.txt", tmp_path / "run", epochs=2)
    argv = ["calibrate", str(run.folder), "--epsilon", ".8", "--delta", ".1", "--json", "--cosine"]
    assert main([*argv, ".99999", "--task", str(tmp_path / "others.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == {"name": "never"}
    assert main([*argv, "-.9", "--task", str(tmp_path / "others.txt")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows_tested"] == len(TEXTS) and answer["share"] == 1
    again = mini_ee.load_run(run.folder)
    assert again.rule == Fixed(0) and again.config["guarantee"]["cosine"] == -0.9
    assert main([*argv, ".5", "--task", str(tmp_path / "texts.txt")]) == 0  # only those that trained nothing
    assert json.loads(capsys.readouterr().out)["rows_tested"] == run.metrics["rows_tested"] < len(TEXTS) / 4
    assert main(["calibrate", str(run.folder), "--epsilon", ".8"]) == 2
    assert "needs --cosine" in capsys.readouterr().err
