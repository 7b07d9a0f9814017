"""Embedding maps: the full embedding is the encoder's own, maps learn it from texts alone, a depth is chosen."""

import json

import numpy as np
import pytest
import torch
from conftest import ENCODED as TEXTS

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.modernbert import ModernBert, ModernBertConfig
from mini_ee.lab.cli.main import main
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.embedding_exits import EmbeddingExits, full_cosines
from mini_ee.lab.rules import Fixed, Never
from mini_ee.lab.training.embedding_stages import map_loss
from mini_ee.lab.training.method import load_method

PAIRS = [*zip(TEXTS[::2], TEXTS[1::2])]


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n\n")
    return path


@pytest.fixture(scope="module")
def run(embedding_run):
    return embedding_run


def arrays(encoded):
    return [torch.from_numpy(x) for x in (encoded.input_ids, encoded.attention_mask, encoded.token_type_ids)]


def test_the_full_embedding_is_the_mean_of_the_last_hidden_states(run, encoder_folder):
    embeddings = run._replace(rule=Never()).embed(TEXTS[:9], batch_size=4)
    with torch.no_grad():
        for text, embedding in zip(TEXTS, embeddings):
            hidden = load_backbone(encoder_folder)(*arrays(run.encode([text]).batch(slice(None))))
            expected = hidden[0].mean(dim=0)
            np.testing.assert_allclose(embedding, expected / expected.norm(), atol=1e-6)


def test_the_loss_is_one_minus_the_cosine():
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 2.0]])
    assert map_loss(a, b).item() == pytest.approx((0 + 1) / 2)


def test_maps_raise_the_cosine_and_nothing_else_is_trained(run, encoder_folder):
    inputs = run.encode(TEXTS).batch(slice(None))
    fresh = EmbeddingExits(load_backbone(encoder_folder), run.exits, 16, "mean", True).eval()
    cosines = []
    for model in (fresh, run.model):
        with torch.no_grad():
            embeddings = torch.stack(model(*arrays(inputs)), dim=1).numpy()
        cosines.append(full_cosines(embeddings).mean(axis=0))
    assert (cosines[1][:-1] > cosines[0][:-1] + 0.005).all() and cosines[1][-1] == pytest.approx(1, abs=1e-6)
    trained = set(run.model.own_state())
    assert trained == {f"heads.{k}.linear.{part}" for k in (0, 1) for part in ("weight", "bias")}
    fresh_state = fresh.state_dict()
    for name, value in run.model.state_dict().items():
        assert name in trained or torch.equal(value, fresh_state[name])


def test_the_default_depth_is_the_shallowest_with_the_required_mean_cosine(run, encoder_folder, texts_file, tmp_path):
    means = run.metrics["per_exit_cosine"]
    assert means[-1] == pytest.approx(1) and run.rule == Fixed(next(k for k, mean in enumerate(means) if mean >= 0.7))
    out = tmp_path / "run"
    argv = ["train", "embedding-maps", "--model", str(encoder_folder), "--task", str(texts_file), "--out", str(out)]
    assert main([*argv, "--epochs", "1", "--min-cosine", "1", "--exits", "1,3"]) == 0
    assert mini_ee.load_run(out).rule == Never()


def test_embeddings_keep_their_first_numbers(encoder_folder, texts_file, tmp_path):
    run = mini_ee.train("embedding-maps", encoder_folder, texts_file, tmp_path / "run", epochs=1, size=5)
    full = EmbeddingExits(load_backbone(encoder_folder), (3,), 16, "mean", False).eval()
    inputs = run.encode(TEXTS[:6]).batch(slice(None))
    expected = early_exit(full.segments(), Never(), inputs).logits[:, :5]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)  # the encoder scales to length 1
    np.testing.assert_allclose(run._replace(rule=Never()).embed(TEXTS[:6]), expected, atol=1e-6)
    assert run.embed(TEXTS[:6]).shape == (6, 5) and run.embed([]).shape == (0, 5)


def test_texts_come_from_lines_tables_and_tasks_without_labels(encoder_folder, task_folder, tmp_path):
    table = tmp_path / "pairs.tsv"
    table.write_text("sentence1\tsentence2\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS))
    runs = {
        name: mini_ee.train("embedding-maps", encoder_folder, task, tmp_path / name, epochs=1)
        for name, task in (("table", table), ("folder", task_folder))
    }
    counts = [sum(run.metrics[key] for key in ("rows", "rows_held", "rows_tested")) for run in runs.values()]
    words = {row["sentence"] for row in map(json.loads, (task_folder / "train.jsonl").read_text().splitlines())}
    assert counts == [len(set(TEXTS)), len(words)]


def test_a_final_norm_is_the_encoders_own(tmp_path, encoder_folder, texts_file):
    config = {"model_type": "modernbert", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}
    config |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    torch.manual_seed(1)
    model = ModernBert(ModernBertConfig.from_hugging_face(config))
    torch.nn.init.uniform_(model.norm.weight)
    save_backbone(model, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((encoder_folder / name).read_bytes())
    mini_ee.train("embedding-maps", tmp_path / "model", texts_file, tmp_path / "run", epochs=1, exits=(1, 3))
    run = mini_ee.load_run(tmp_path / "run")._replace(rule=Never())
    inputs = run.encode(TEXTS[:1]).batch(slice(None))
    with torch.no_grad():
        model.eval()
        hidden = model.run_layers(model.embed(inputs), model.context(inputs), 0, 3)
        expected = model.norm(hidden)[0].mean(dim=0).numpy()
    np.testing.assert_allclose(run.embed(TEXTS[:1])[0], expected, atol=1e-5)


def test_refusals_are_one_line(run, encoder_folder, decoder_checkpoint, texts_file, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("a film\nthe film\n")
    cases = [
        ((decoder_checkpoint, texts_file), {}, "expected a sentence encoder"),
        ((encoder_folder, few), {}, "expected at least 20 different texts, found 2"),
        ((encoder_folder, texts_file), {"size": 17}, "expected an embedding of 1 to 16 numbers"),
    ]
    for given, options, message in cases:
        with pytest.raises(WrongArguments, match=message):
            mini_ee.train("embedding-maps", *given, tmp_path / "never", **options)
    for call in (run.classify, run.generate):
        with pytest.raises(WrongArguments, match="use embed"):
            call(TEXTS[:2])
    with pytest.raises(ValueError, match="row 0: expected one text"):
        run.embed([""])
    assert load_method("embedding-maps").units == ("embeddings",)
