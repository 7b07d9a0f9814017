"""2DMSE, Starbucks, models of one depth and the cosine predictor: their equations in numpy, and what they train."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import ENCODED as TEXTS

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines import cosine_predictor, matryoshka_2d, one_depth, starbucks
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.embedding_exits import DistillationData, PairData, TrainedEncoder, full_cosines, reached_cosines
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Fixed, Never, Policy
from mini_ee.lab.sweep import compared
from mini_ee.lab.training import embedding_stages
from mini_ee.lab.training.stages import Batch

SIZES = (4, 8, 16)


def arrays(inputs):
    return tuple(map(torch.from_numpy, (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)))


def cosines(a, b):
    return [float(x @ y / math.sqrt((x @ x) * (y @ y))) for x, y in zip(a, b)]


def expected_loss(embeddings, labels):
    """The loss of an exit, example by example in numpy."""
    if labels.ndim == 2:
        return float(np.mean([1 - cosine for cosine in cosines(embeddings, labels[:, : embeddings.shape[1]])]))
    similarities = cosines(*np.split(embeddings, 2))
    total = 1.0
    for i, more in enumerate(labels):
        for j, less in enumerate(labels):
            total += math.exp(20 * (similarities[j] - similarities[i])) if more > less else 0
    return math.log(total)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)


def expected_kl(embeddings, last, temperature):
    p, q = softmax(last / temperature), softmax(embeddings / temperature)
    return float((p * np.log(p / q)).sum(axis=1).mean())


@pytest.fixture(scope="module")
def encoder(encoder_folder):
    return TrainedEncoder(load_backbone(encoder_folder).double(), (1, 2, 3), 16, "mean", False).eval()


@pytest.fixture(scope="module")
def given(encoder, encoder_folder):
    """Inputs of six texts, and the embeddings of all exits in float32, as the losses read them."""
    inputs = Tokenizer.from_folder(encoder_folder, 32).encode([(text,) for text in TEXTS[:6]]).batch(slice(None))
    tensors = arrays(inputs)
    return tensors, [embeddings.float().detach().numpy().astype(np.float64) for embeddings in encoder(*tensors)]


TEACHER = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 16))).float()
SCORES = torch.tensor([3.0, 1.0, 3.0])
LABELS = pytest.mark.parametrize("labels", [TEACHER, SCORES], ids=["texts", "pairs"])


@LABELS
def test_2dmse_trains_the_last_layer_and_one_that_is_drawn(encoder, given, labels, monkeypatch):
    inputs, (first, second, last) = given
    config = matryoshka_2d.Config(sizes=SIZES, align=2.0)
    draws = {2: 1, 3: 0}  # of two layers the second; of three sizes the first
    monkeypatch.setattr(matryoshka_2d, "drawn", draws.__getitem__)
    loss = matryoshka_2d.two_dimensional_loss(encoder, Batch(inputs, labels, None, None), config)
    values = labels.double().numpy()
    expected = sum(expected_loss(embeddings[:, :size], values) for embeddings in (last, second) for size in (16, 4))
    assert loss.item() == pytest.approx(expected + 2 * 0.3 * expected_kl(second, last, 0.3), rel=1e-5)


def test_every_layer_but_the_last_is_drawn():
    torch.manual_seed(0)
    assert {matryoshka_2d.drawn(3) for _ in range(50)} == {0, 1, 2}


@LABELS
def test_starbucks_trains_every_layer_with_its_own_size(encoder, given, labels):
    inputs, embeddings = given
    loss = starbucks.starbucks_loss(encoder, Batch(inputs, labels, None, None), starbucks.Config(sizes=SIZES))
    cut = [whole[:, :size] for whole, size in zip(embeddings, SIZES)]
    expected = sum(expected_loss(small, labels.double().numpy()) for small in cut)
    expected += 0.3 * sum(expected_kl(small, embeddings[-1][:, : small.shape[1]], 1.0) for small in cut[:-1])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@LABELS
def test_one_depth_trains_the_first_exit_alone(encoder, given, labels):
    inputs, (first, *_) = given
    encoder.zero_grad()
    loss = one_depth.one_depth_loss(encoder, Batch(inputs, labels, None, None))
    assert loss.item() == pytest.approx(expected_loss(first, labels.double().numpy()), rel=1e-5)
    loss.backward()
    trained = {name.split(".")[2] for name, value in encoder.named_parameters() if value.grad is not None}
    assert {"0"} == {part for part in trained if part.isdigit()}  # layers 1 and 2 are not run


def test_the_last_layer_is_a_teacher_without_gradient():
    embeddings, last = torch.randn(2, 4, 8, requires_grad=True).unbind()
    with torch.enable_grad():
        gradient = torch.autograd.grad(embedding_stages.alignment(embeddings, last, 0.3), last, allow_unused=True)
    assert gradient == (None,)


@pytest.fixture(scope="module")
def text_runs(tmp_path_factory, encoder_folder):
    """Runs on texts without labels."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    options = {"epochs": 2, "lr": 5e-3, "batch_size": 16}
    return {
        name: mini_ee.train(name, encoder_folder, folder / "texts.txt", folder / name, **options | more)
        for name, more in (("2dmse", {}), ("starbucks", {}), ("one-depth", {"exits": (2, 3)}))
    }


def test_trained_exits_approach_the_embedding_of_the_original_encoder(text_runs, encoder_folder, embedding_run):
    original = embedding_run._replace(rule=Never()).embed(TEXTS)
    untrained = TrainedEncoder(load_backbone(encoder_folder), (1, 2, 3), 16, "mean", True)
    encoded = embedding_run.encode([(text,) for text in TEXTS])
    before = np.array(DistillationData(encoded, original, None).scores(untrained, 32)[0])
    assert before[-1] == pytest.approx(1, abs=1e-6)
    for name, run in text_runs.items():
        after, _ = DistillationData(encoded, original, None).scores(run.model, 32)
        layers = [layer - 1 for layer in run.exits[:-1]]
        assert (np.array(after[:-1]) > before[layers] + 0.01).all(), name
        run = run._replace(rule=Fixed(0))
        assert np.mean((run.embed(TEXTS) * original).sum(axis=1)) == pytest.approx(after[0], abs=1e-5)
    assert text_runs["one-depth"].rule == Fixed(0)


def test_a_run_contains_its_encoder_as_a_checkpoint(text_runs, tmp_path):
    run = text_runs["2dmse"]
    again = mini_ee.load_run(run.folder)
    np.testing.assert_array_equal(again.embed(TEXTS[:4]), run.embed(TEXTS[:4]))
    hidden = load_backbone(run.folder / "backbone")(*arrays(run.encode([(TEXTS[0],)]).batch(slice(None))))
    expected = hidden[0].mean(dim=0).detach()
    embedding = run._replace(rule=Never()).embed(TEXTS[:1])[0]
    np.testing.assert_allclose(embedding, expected / expected.norm(), atol=1e-6)


@pytest.fixture(scope="module")
def pairs_folder(tmp_path_factory):
    """Pairs whose score is the number of words that they share, as a regression."""
    folder = tmp_path_factory.mktemp("pairs")
    random = np.random.default_rng(0)
    for split, count in (("train", 200), ("dev", 20)):
        lines = []
        for _ in range(count):
            first, second = (TEXTS[at] for at in random.integers(len(TEXTS), size=2))
            row = {"sentence1": first, "sentence2": second, "score": len({*first.split()} & {*second.split()}) + 0.5}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def test_pairs_with_scores_are_trained_with_cosent(pairs_folder, encoder_folder, tmp_path):
    options = {"epochs": 6, "lr": 1e-2, "batch_size": 16, "sizes": (8, 8, 16)}
    run = mini_ee.train("starbucks", encoder_folder, pairs_folder, tmp_path / "run", **options)
    train = load_task(pairs_folder).split("train")
    first, second = zip(*train.texts)
    data = PairData(run.encode([*zip(first), *zip(second)]), run.encode([*zip(first)]), train.labels)
    untrained = TrainedEncoder(load_backbone(encoder_folder), (1, 2, 3), 16, "mean", True)
    before, after = (np.array(data.scores(model, 32)[0]) for model in (untrained, run.model))
    assert (after > before + (0.03, 0.1, 0.1)).all() and run.metrics["rows"] == 180
    assert run.embed(TEXTS[:2]).shape == (2, 16)
    texts = mini_ee.train("embedding-maps", encoder_folder, pairs_folder, tmp_path / "texts", epochs=1)
    assert texts.metrics["rows"] > 60  # of the same file, maps learn the different texts


def test_pairs_are_scored_by_spearman_and_batched_with_both_texts(encoder, encoder_folder):
    tokenizer = Tokenizer.from_folder(encoder_folder, 32)
    first, second = TEXTS[:5], TEXTS[5:10]
    encoded = [tokenizer.encode([(text,) for text in texts]) for texts in ((*first, *second), first)]
    model = TrainedEncoder(load_backbone(encoder_folder), (1, 3), 16, "mean", False)
    embedded = record(model.segments(), encoded[0], 3).logits
    for k in range(2):
        data = PairData(*encoded, np.array(cosines(embedded[:5, k], embedded[5:, k])))
        assert data.scores(model, 4)[0][k] == pytest.approx(1)
    inputs, scores = data.batch(np.array([3, 1]), torch.device("cpu"))
    expected = encoded[0].batch(np.array([3, 1, 8, 6]))
    assert torch.equal(inputs[0], torch.from_numpy(expected.input_ids)) and scores.tolist() == [*data.labels[[3, 1]]]


def test_the_predictor_learns_the_cosine_of_each_exit(encoder_folder, tmp_path, embedding_run):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = {"epochs": 10, "head_lr": 0.01}
    run = mini_ee.train("cosine-predictor", encoder_folder, tmp_path / "texts.txt", tmp_path / "run", **options)
    recorded = record(run.segments(), run.encode([(text,) for text in TEXTS]), 32)
    real = full_cosines(recorded.logits)[:, :-1]
    predicted = compared(Policy(), recorded)
    for k in range(2):
        assert spearman(predicted[:, k], real[:, k]) > 0.5
    assert isinstance(run.rule, Policy)
    rule = cosine_predictor.loosest(recorded, 0.98)
    assert reached_cosines(recorded, rule).mean() >= 0.98
    assert reached_cosines(recorded, Policy(rule.cut - 0.05)).mean() < 0.98
    assert 1 < recorded.replay(rule).layers_run.mean() < 3


def test_the_loss_of_the_predictor_is_a_squared_error(embedding_run):
    model, states = embedding_run.model, [torch.randn(5, 16) for _ in range(3)]
    targets, logits = torch.randn(5, 16), torch.randn(5, 2)
    model.exit_logits = lambda given: logits
    try:
        loss = cosine_predictor.prediction_loss(model, Batch((), targets, states, targets)).item()
    finally:
        del model.exit_logits
    expected = 0.0
    for k in range(2):
        embeddings = model.classify(k, states[k]).detach().double().numpy()
        real = np.array(cosines(embeddings, targets.double().numpy()))
        expected += np.mean((1 / (1 + np.exp(-logits[:, k].double().numpy())) - real) ** 2)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_sizes_are_refused_in_one_line(encoder_folder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    with pytest.raises((WrongArguments, ValueError), match="expected 3 sizes, one per exit, found 2"):
        mini_ee.train("starbucks", encoder_folder, tmp_path / "texts.txt", tmp_path / "never", sizes=(4, 8))
