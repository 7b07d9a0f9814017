"""results/alternatives.md compares models that are made from one another: a DistilBERT has the states of its BERT."""

import pytest
import torch

from mini_ee.experiments.measured.fine_tuning import _as_distilbert


def test_a_distilbert_of_a_bert_has_its_states():
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, num_labels=3, **sizes))
    made = _as_distilbert(bert.eval()).eval()
    ids, mask = torch.randint(50, (2, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    expected, states = (model(ids, mask).last_hidden_state for model in (bert.bert, made.distilbert))
    assert torch.allclose(states[mask > 0], expected[mask > 0], atol=1e-6) and made.config.num_labels == 3
