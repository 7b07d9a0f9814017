"""LoRAExit, equation by equation: Eq. 2 (the adapters), Eq. 3 to 5 (the losses), Eq. 6 (several exits in one pass), and
the cost table. The method: mini_ee/lora_exits.py.

Eq. 1 is the layer of BERT: tests/core/test_core_models.py. The lab's families, streams on a GPU, what is on disk, and
whole trainings: test_lora_exits.py, test_sgmv.py, test_segd.py in tests/lab/methods.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from mini_ee import lora_exits as paper
from mini_ee.bert import Bert, Exits
from mini_ee.data import Inputs, Rows, scored
from mini_ee.loop import early_exit
from mini_ee.lora_exits import SideBySide, fit
from mini_ee.rules import Fixed, Never, Threshold

ATOL = 5e-5  # float32 against float64, logits of up to 8; measured max 1.6e-5
TARGETS = ("query", "key", "value", "attention_output", "up", "down")


def lora_model(targets=("query", "value"), exits=(1, 2, 4), rank=4):
    """Random parameters; also B, which is zero before a training."""
    config = {"hidden_size": 24, "num_hidden_layers": exits[-1], "num_attention_heads": 3, "intermediate_size": 48}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        bert = Bert(config | {"vocab_size": 60, "max_position_embeddings": 40})
        for parameter in bert.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model = paper.LoRAExits(bert, exits, 3, rank, targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        for head in model.heads:
            torch.nn.init.normal_(head[0].weight, std=0.3)
            torch.nn.init.normal_(head[3].weight, std=0.3)
    return model


def padded_batch():
    """Seven rows of 1 to 9 tokens."""
    random = np.random.default_rng(0)
    mask = (torch.arange(9) < torch.tensor([9, 4, 1, 7, 9, 2, 5])[:, None]).long()
    ids, kinds = (torch.from_numpy(random.integers(low, high, (7, 9))) * mask for low, high in ((5, 60), (0, 2)))
    return Inputs(ids, mask, kinds)


# ---- Eq. 2: an exit computes with W + A B ----


@pytest.mark.parametrize("targets", [("query", "value"), ("value",), TARGETS], ids=len)
def test_eq2_an_exit_computes_with_w_plus_ab(targets):
    model, inputs = lora_model(targets), padded_batch()
    with torch.no_grad():
        logits = model(inputs)
        for k, depth in enumerate(model.exits):
            bert = deepcopy(model.bert).double()
            for layer, adapters in zip(bert.layers, model.adapters[k]):
                for target, pair in adapters.items():
                    getattr(layer, target).weight += (pair.A.double() @ pair.B.double()).T * 16.0 / 4
            hidden = bert.run(bert.embed(inputs), inputs.mask, 0, depth)
            expected = deepcopy(model.heads[k]).double()(model.pooled(hidden, inputs.mask))
            torch.testing.assert_close(logits[:, k].double(), expected, rtol=0, atol=ATOL)


def test_eq2_without_b_an_exit_is_the_frozen_backbone():
    """B begins as zero, so training starts from the pretrained model; a drawn B changes the logits."""
    model, inputs = lora_model(), padded_batch()
    fresh = paper.LoRAExits(model.bert, model.exits, 3).eval()
    with torch.no_grad():
        hidden = model.bert.run(model.bert.embed(inputs), inputs.mask, 0, 4)
        expected = fresh.heads[2](model.pooled(hidden, inputs.mask))
        torch.testing.assert_close(fresh(inputs)[:, 2], expected)
        assert (model(inputs) - fresh(inputs)).abs().max() > 0.1


def test_heads_read_the_mean_by_default():
    assert lora_model().pool == "mean"


# ---- Eq. 3 to 5: the loss of an exit ----


def softmax(z, T=1.0):
    """Eq. 5, from its definition."""
    return np.exp(z / T) / np.exp(z / T).sum(axis=1, keepdims=True)


LOGITS, TEACHER = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 5, 3)))
LABELS = torch.tensor([0, 2, 1, 1, 0])


def test_eq3_without_a_teacher_the_loss_is_the_cross_entropy():
    expected = -np.log(softmax(LOGITS.numpy())[range(5), LABELS]).mean()
    assert paper.exit_loss(LOGITS, LABELS, None).item() == pytest.approx(expected, abs=1e-6)


def test_eq5_soft_labels_are_the_softmax_of_the_logits_over_t():
    z, T = np.array([[1.0, 3.0, -2.0]]), 10.0
    np.testing.assert_allclose(paper.log_soft_label(torch.from_numpy(z), T).exp().numpy(), softmax(z, T), atol=1e-7)


def test_eq4_the_divergence_is_from_teacher_to_student_summed_over_classes_averaged_over_examples():
    T = 2.0
    p, q = softmax(TEACHER.numpy(), T), softmax(LOGITS.numpy(), T)
    expected = (p * np.log(p / q)).sum() / 5
    assert paper.distillation_loss(LOGITS, TEACHER, T).item() == pytest.approx(expected, abs=1e-6)


def test_eq4_the_divergence_may_have_a_factor():
    """Of T squared, as in Hinton et al. 2015."""
    without, twice = (paper.exit_loss(LOGITS, LABELS, TEACHER, 0.2, 2.0, factor) for factor in (0.0, 4.0))
    difference = 0.2 * 4 * paper.distillation_loss(LOGITS, TEACHER, 2.0)
    torch.testing.assert_close(twice - without, difference, check_dtype=False)


def test_eq4_is_zero_for_equal_distributions():
    """Logits that differ by a constant give the same probabilities."""
    assert paper.distillation_loss(LOGITS, LOGITS + 1.5, 2.0).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_eq4_weighs_labels_and_teacher_with_lambda(weight):
    hard, soft = cross_entropy(LOGITS.float(), LABELS), paper.distillation_loss(LOGITS, TEACHER, 10.0)
    loss = paper.exit_loss(LOGITS, LABELS, TEACHER, weight=weight, temperature=10.0)
    torch.testing.assert_close(loss.float(), (1 - weight) * hard + weight * soft)


def test_a_regression_follows_its_teachers_value():
    """A squared error in place of the divergence."""
    loss = paper.distillation_loss(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]), 2.0)
    assert loss.item() == ((3 - 1) ** 2 + 0) / 2


# ---- Section 3.2: which exit teaches which, and in what order they learn ----


@pytest.mark.parametrize(
    "distill, teachers", [("vanilla", [None] * 4), ("kd", [3, 3, 3, None]), ("segd", [1, 2, 3, None])]
)
def test_the_teacher_of_each_of_four_exits(distill, teachers):
    assert [paper.teacher_of(k, 3, distill) for k in range(4)] == teachers


def test_fit_trains_no_backbone_and_the_last_exit_first():
    """Each exit in its turn; what an exit learned stays when the next one learns."""
    torch.manual_seed(0)
    model = lora_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = Rows(
        [[5, 6, 7], [8, 9], [10], [11, 12]], [[0] * 3, [0] * 2, [0], [0] * 2], torch.arange(4) % 3, ("a", "b", "c")
    )
    order, train_exit = [], model.logits_of
    model.logits_of = lambda k, inputs: (order.append((k, model.bert.training)), train_exit(k, inputs))[1]
    fit(model, data, data, epochs=1, lr=1e-3)
    first_seen = list(dict.fromkeys(k for k, _ in order))
    assert first_seen == [2, 1, 0] and not any(training for _, training in order)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith(("adapters.", "heads.")) for name in changed)
    assert not any(p.requires_grad for p in model.bert.parameters())


# ---- Eq. 6: rows of several exits in one product ----


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 7, 3], [0, 4, 2], [4, 2, 0], [0, 9, 0], [0, 0, 0], [6]], ids=str)
def test_eq6_adds_to_each_row_the_product_with_the_adapters_of_its_own_exit(lengths):
    """y_row += scale x_row A_i B_i, row by row, where row belongs to segment i."""
    random = np.random.default_rng(0)
    n, rows = len(lengths), sum(lengths)
    shapes = (rows, 12), (n, 12, 8), (n, 8, 10), (rows, 10)  # x, A, B, and the first term y = x W
    x, A, B, y = (random.normal(size=shape) for shape in shapes)
    expected = y.copy()
    for row, i in enumerate(np.repeat(range(n), lengths)):
        expected[row] += 0.5 * x[row] @ A[i] @ B[i]
    starts = [0, *np.cumsum(lengths).tolist()]
    product = paper.sgmv(*map(torch.from_numpy, (y, x, A, B)), starts, scale=0.5)
    np.testing.assert_allclose(product.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "starts",
    [[0, 3], [0, 2, 1, 6], [1, 2, 3, 6], [0, 2, 4, 5], [0, 2, 4, 7]],
    ids=["few", "back", "late", "short", "far"],
)
def test_eq6_segments_that_do_not_cover_the_rows_are_refused(starts):
    with pytest.raises(ValueError, match="starts must ascend from 0 to 6 with 3 segments"):
        paper.sgmv(torch.zeros(6, 4), torch.ones(6, 5), torch.ones(3, 5, 2), torch.ones(3, 2, 4), starts)


@torch.inference_mode()
@pytest.mark.parametrize("targets", [("query", "value"), TARGETS], ids=len)
@pytest.mark.parametrize("rule", [Never(), Threshold(0.0), Threshold(0.6)], ids=repr)
def test_eq6_side_by_side_is_restart(rule, targets):
    """The two engines: the same exits, the same logits, and those of each exit alone."""
    model, inputs = lora_model(targets), padded_batch()
    restarted, side_by_side = (early_exit(engine, rule, inputs) for engine in (model, SideBySide(model)))
    np.testing.assert_array_equal(restarted.exit_index, side_by_side.exit_index)
    np.testing.assert_allclose(restarted.logits, side_by_side.logits, rtol=0, atol=ATOL)
    every = model(inputs).numpy()[range(len(inputs)), restarted.exit_index]
    np.testing.assert_allclose(restarted.logits, every, rtol=0, atol=ATOL)


# ---- The cost of the two schedules ----


def test_layer_passes_of_the_exits_3_6_9_12():
    """The table in the method's head: side by side, with restarts, and if only one exit is read."""
    model = lora_model(exits=(3, 6, 9, 12))
    assert SideBySide(model).passes(every_head=True).tolist() == [12, 21, 27, 30]
    assert model.passes(every_head=True).tolist() == [3, 9, 18, 30]
    assert model.passes(every_head=False).tolist() == [3, 6, 9, 12]


@torch.inference_mode()
@pytest.mark.parametrize(
    "rule, every, read", [(Never(), False, [2]), (Fixed(1), False, [1]), (Threshold(2.0), True, [0, 1, 2])], ids=repr
)
def test_only_exits_that_are_read_run_and_are_counted(rule, every, read, monkeypatch):
    model, layers, products = lora_model(), [], []
    run, product = model.bert.run, paper.LowRank.forward
    monkeypatch.setattr(model.bert, "run", lambda *args: (layers.append(args[3] - args[2]), run(*args))[1])

    def counted(self, x, scale):
        products.append(2 * (self.A.numel() + self.B.numel()))
        return product(self, x, scale)

    monkeypatch.setattr(paper.LowRank, "forward", counted)
    k = early_exit(model, rule, padded_batch()).exit_index[0]
    assert layers == [model.exits[at] for at in read] and sum(layers) == model.passes(every)[k]
    of_adapters = model.flops(9, every)[k] - Exits.flops(model, 9, every)[k]
    assert of_adapters == pytest.approx(9 * sum(products))


def test_the_full_model_is_the_last_exit_alone():
    data = Rows([[5, 6, 7], [8, 9]], [[0] * 3, [0] * 2], torch.tensor([0, 1]), ("a", "b", "c"))
    assert scored(lora_model(), Never(), data)[1:] == (4.0, 0.0)
