"""The figures of results/embeddings.md are those of plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest

from mini_ee.experiments.measured.embeddings_figures import Figures
from mini_ee.experiments.measured.embeddings_runs import NEIGHBOURS, figures_of, read_pairs, scaled


def test_recall_counts_the_full_models_nearest_documents():
    random = np.random.default_rng(0)
    embeddings, queries, documents = random.normal(size=(60, 2, 8)), np.arange(10), np.arange(10, 60)

    def cosine(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    def neighbours(query, k):
        return set(sorted(documents, key=lambda at: -cosine(embeddings[query, k], embeddings[at, k]))[:NEIGHBOURS])

    expected = [len(neighbours(query, 0) & neighbours(query, 1)) / NEIGHBOURS for query in queries]
    pair = [0], [1], [1.0]
    texts = SimpleNamespace(sets={"a": pair}, retrieval={"b": (queries, documents)})
    values = figures_of(texts, scaled(embeddings[:, 0]), np.ones(60), scaled(embeddings[:, 1]))
    np.testing.assert_allclose(values["recall"], expected)
    np.testing.assert_allclose(values["pairs"], [cosine(embeddings[0, 0], embeddings[1, 0])])
    assert 0 < np.mean(expected) < 1


def test_similarity_is_a_correlation_of_ranks_and_a_rule_is_compared_at_its_own_depth(tmp_path):
    cosines = {"fixed 1": [0.9, 0.8, 0.1], "fixed 3": [0.1, 0.8, 0.9], "rule": [0.9, 0.8, 0.1]}
    layers = {"fixed 1": 1.0, "fixed 3": 3.0, "rule": 2.0}
    arrays = {f"{label}/pairs": np.array(values) for label, values in cosines.items()}
    arrays |= {f"{label}/layers": np.array([value] * 6 + [2.5, 1.5]) for label, value in layers.items()}
    recalls = {"fixed 1": [0.2, 0.4], "fixed 3": [0.6, 0.8], "rule": [0.9, 1.0]}
    arrays |= {f"{label}/recall": np.array(values) for label, values in recalls.items()} | {"rule/cosine": np.ones(8)}
    np.savez(tmp_path / "plain-0.npz", **arrays)
    sets, retrieval = {"a": ([0, 1, 2], [3, 4, 5], np.array([5.0, 4.0, 1.0]))}, {"b": ([6], [7]), "c": ([6], [7])}
    texts = SimpleNamespace(sets=sets, retrieval=retrieval, paired=np.arange(6))
    figures = Figures(texts, {("plain", 0): tmp_path / "plain-0.npz"})
    curve = figures.curve(figures.spearmans, "plain", 0, None)
    assert (curve["fixed 1"], curve["fixed 3"]) == (1, -1)
    layers = figures.layers("plain", 0, "rule"), figures.retrieval_layers("plain", 0, "rule")
    assert layers == (2.0, 2.0)  # of the texts of pairs, and of queries and documents
    assert figures.over_fixed("plain", "rule", lambda name, seed: curve, 0, 2.0) == 1  # 1, less 0 at two layers
    recall = figures.curve(figures.recalls, "plain", 0, None)
    assert figures.over_fixed("plain", "rule", lambda name, seed: recall, 0, 2.0) == pytest.approx(0.95 - 0.5)
    points = figures.curve(figures.recalls, "plain", 0, [np.array([0, 0]), np.array([0])])
    assert points["fixed 1"] == pytest.approx(0.3) and figures.summary("plain", "rule")["recall"] == {
        "b": [0.9],
        "c": [1.0],
    }
    path = tmp_path / "pairs.tsv"
    path.write_text('source\tsentence1\tsentence2\tscore\nx\ta "b\tc\t2.5\n')
    pairs = read_pairs(path)
    assert (pairs.first, pairs.second, pairs.gold.tolist()) == (['a "b'], ["c"], [2.5])
