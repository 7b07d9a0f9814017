"""results/embeddings.md is what its JSON gives, and its figures are those of plain loops."""

from pathlib import Path

import numpy as np

from mini_ee.data.files import read_json
from mini_ee.experiments.measured.embeddings_page import NEIGHBOURS, page, read_pairs, recalls, similarity_score

RESULTS = Path(__file__).parents[2] / "results"


def test_the_page_is_made_from_its_json():
    assert page(read_json(RESULTS / "embeddings.json")) == (RESULTS / "embeddings.md").read_text()


def test_recall_counts_the_full_models_nearest_documents():
    random = np.random.default_rng(0)
    embeddings, queries, documents = random.normal(size=(60, 3, 8)), np.arange(10), np.arange(10, 60)

    def cosine(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    expected = []
    for k in range(3):
        found = 0
        for query in queries:
            sets = [
                set(sorted(documents, key=lambda at: -cosine(embeddings[query, k], embeddings[at, k]))[:NEIGHBOURS])
                for k in (k, 2)
            ]
            found += len(sets[0] & sets[1])
        expected.append(found / len(queries) / NEIGHBOURS)
    np.testing.assert_allclose(recalls(embeddings, queries, documents), expected)
    assert expected[2] == 1 and expected[0] < 1


def test_similarity_is_a_correlation_of_ranks(tmp_path):
    angles = np.array([0.0, 0.1, 0.5, 1.0])
    embeddings = np.stack((np.cos(angles), np.sin(angles)), axis=1) * np.array([[1.0], [5.0], [2.0], [0.1]])
    first, second = np.zeros(3, int), np.arange(1, 4)
    assert similarity_score(embeddings, first, second, np.array([5.0, 4.0, 1.0])) == 1
    assert similarity_score(embeddings, first, second, np.array([1.0, 4.0, 5.0])) == -1
    path = tmp_path / "pairs.tsv"
    path.write_text('source\tsentence1\tsentence2\tscore\nx\ta "b\tc\t2.5\n')
    pairs = read_pairs(path)
    assert (pairs.first, pairs.second, pairs.gold.tolist()) == (['a "b'], ["c"], [2.5])
