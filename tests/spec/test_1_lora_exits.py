"""LoRAExit, equation by equation: Eq. 2 (the adapters), Eq. 3 to 5 (the losses), Eq. 6 (several exits in one pass), and
the cost table. The method: mini_ee/lora_exits.py, and lab/methods/lora_exits.py with lora_exits_sgmv.py for Eq. 6.

Eq. 1 is the layer of the backbone: tests/lab/parity/test_bert.py compares it with Hugging Face transformers. How exits
share computation, what is on disk, and whole trainings: test_lora_exits.py, test_sgmv.py, test_segd.py in
tests/methods.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch
from both import IMPLEMENTATIONS, LORA, core_inputs, core_lora_model
from conftest import DECODERS, all_exits, lora_model, tensors
from torch.nn.functional import cross_entropy

from mini_ee.bert import Bert
from mini_ee.data import Rows
from mini_ee.lab.methods.lora_exits import Config, LoRAExits, distillation_loss, recipe
from mini_ee.lab.methods.lora_exits_sgmv import sgmv_loop
from mini_ee.loop import early_exit
from mini_ee.lora_exits import LoRAExits as CoreLoRAExits
from mini_ee.lora_exits import SideBySide, fit
from mini_ee.rules import Never, Threshold


@pytest.fixture(params=IMPLEMENTATIONS)
def paper(request):
    return LORA[request.param]


ATOL = 5e-5  # float32 against float64, logits of up to 8; measured max 1.6e-5
TARGETS = ("query", "key", "value", "attention_output", "up", "down")


# ---- Eq. 2: an exit computes with W + A B ----


def with_adapted_weights(model, inputs, k):
    """The oracle: add A B alpha / rank to the weights of a copy of the backbone, in float64, and run it to exit k."""
    backbone = deepcopy(model.backbone).double().eval()
    outputs = {"llama": (24, 12, 12), "gemma": (32, 32, 32)}.get(backbone.config.model_type, (24, 24, 24))
    edges = np.cumsum((0, *outputs))  # query, key and value are one linear map: where the outputs of each begin
    with torch.no_grad():
        for stored, layer in enumerate(model.adapters[k]):
            for target, pair in layer.items():
                update = (pair.A.double() @ pair.B.double()).T * model.alpha / model.rank
                if target in ("query", "key", "value"):
                    part = ("query", "key", "value").index(target)
                    backbone.layers[stored].qkv.weight[edges[part] : edges[part + 1]] += update
                else:
                    getattr(backbone.layers[stored], target).weight += update
        ids, mask, types = tensors(inputs)
        more = () if backbone.config.model_type in DECODERS else (types,)
        hidden = backbone.hidden_states(ids, mask, *more)[model.exits[k]]
        return model.heads[k].double()(hidden, mask.bool()[:, None, None, :]).numpy()


@pytest.mark.parametrize("model_type", ["bert", "roberta", "albert", "elasticbert"])
@pytest.mark.parametrize("targets", [("query", "value"), ("value",), TARGETS], ids=len)
def test_eq2_an_exit_computes_with_w_plus_ab(model_type, targets, padded_inputs):
    model = lora_model(model_type, targets)
    found = all_exits(model, padded_inputs)
    for k in range(len(model.exits)):
        expected = with_adapted_weights(model, padded_inputs, k)
        np.testing.assert_allclose(found[:, k], expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("targets", [("query", "value"), ("value",), TARGETS], ids=len)
def test_eq2_an_exit_of_the_core_computes_with_w_plus_ab(targets, padded_inputs):
    model, inputs = core_lora_model(targets), core_inputs(padded_inputs)
    with torch.no_grad():
        found = model(inputs)
        for k, depth in enumerate(model.exits):
            bert = deepcopy(model.bert).double()
            for layer, adapters in zip(bert.layers, model.adapters[k]):
                for target, pair in adapters.items():
                    getattr(layer, target).weight += (pair.A.double() @ pair.B.double()).T * 16.0 / 4
            hidden = bert.run(bert.embed(inputs), inputs.mask, 0, depth)
            expected = deepcopy(model.heads[k]).double()(model.pooled(hidden, inputs.mask))
            torch.testing.assert_close(found[:, k].double(), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", DECODERS)
def test_eq2_holds_for_the_exits_of_decoders(kind, padded_inputs):
    model = lora_model(kind, TARGETS if kind == "phi" else (*TARGETS, "gate"))
    found = all_exits(model, padded_inputs)
    for k in range(len(model.exits)):
        expected = with_adapted_weights(model, padded_inputs, k)
        np.testing.assert_allclose(found[:, k], expected, rtol=0, atol=ATOL)


def test_eq2_without_b_an_exit_is_the_frozen_backbone(padded_inputs):
    """B begins as zero, so training starts from the pretrained model; a drawn B changes the logits."""
    model, fresh = lora_model(), lora_model()
    for name, parameter in fresh.adapters.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.zeros_(parameter)
    hidden = fresh.backbone(*tensors(padded_inputs))
    expected = fresh.heads[2](hidden, tensors(padded_inputs)[1].bool()[:, None, None, :])
    torch.testing.assert_close(fresh.merged(2)(*tensors(padded_inputs))[0], expected)
    assert abs(all_exits(model, padded_inputs) - all_exits(fresh, padded_inputs)).max() > 0.1


def test_eq2_of_the_core_without_b_an_exit_is_the_frozen_backbone(padded_inputs):
    model, inputs = core_lora_model(), core_inputs(padded_inputs)
    fresh = CoreLoRAExits(model.bert, model.exits, 3).eval()
    with torch.no_grad():
        hidden = model.bert.run(model.bert.embed(inputs), inputs.mask, 0, 4)
        expected = fresh.heads[2](model.pooled(hidden, inputs.mask))
        torch.testing.assert_close(fresh(inputs)[:, 2], expected)


def test_heads_read_the_mean_by_default():
    model = lora_model()
    assert LoRAExits(model.backbone, model.exits, 3).pool == "mean"
    assert core_lora_model().pool == "mean"


# ---- Eq. 3 to 5: the loss of an exit ----


def softmax(z, T=1.0):
    """Eq. 5, from its definition."""
    return np.exp(z / T) / np.exp(z / T).sum(axis=1, keepdims=True)


LOGITS, TEACHER = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 5, 3)))
LABELS = torch.tensor([0, 2, 1, 1, 0])


def test_eq3_without_a_teacher_the_loss_is_the_cross_entropy(paper):
    expected = -np.log(softmax(LOGITS.numpy())[range(5), LABELS]).mean()
    assert paper.exit_loss(LOGITS, LABELS, None).item() == pytest.approx(expected, abs=1e-6)


def test_eq5_soft_labels_are_the_softmax_of_the_logits_over_t(paper):
    z, T = np.array([[1.0, 3.0, -2.0]]), 10.0
    np.testing.assert_allclose(paper.log_soft_label(torch.from_numpy(z), T).exp().numpy(), softmax(z, T), atol=1e-7)


def test_eq4_the_divergence_is_from_teacher_to_student_summed_over_classes_averaged_over_examples(paper):
    T = 2.0
    p, q = softmax(TEACHER.numpy(), T), softmax(LOGITS.numpy(), T)
    expected = (p * np.log(p / q)).sum() / 5
    assert paper.distillation_loss(LOGITS, TEACHER, T).item() == pytest.approx(expected, abs=1e-6)


def test_eq4_may_be_multiplied_by_t_squared():
    T, expected = 2.0, distillation_loss(LOGITS, TEACHER, 2.0).item()
    squared = distillation_loss(LOGITS, TEACHER, T, t_squared=True)
    assert squared.item() == pytest.approx(T**2 * expected, abs=1e-6)


def test_eq4_is_zero_for_equal_distributions(paper):
    """Logits that differ by a constant give the same probabilities."""
    assert paper.distillation_loss(LOGITS, LOGITS + 1.5, 2.0).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_eq4_weighs_labels_and_teacher_with_lambda(weight, paper):
    hard, soft = cross_entropy(LOGITS.float(), LABELS), paper.distillation_loss(LOGITS, TEACHER, 10.0)
    found = paper.exit_loss(LOGITS, LABELS, TEACHER, weight=weight, temperature=10.0)
    torch.testing.assert_close(found.float(), (1 - weight) * hard + weight * soft)


def test_a_regression_follows_its_teachers_value(paper):
    """A squared error in place of the divergence."""
    found = paper.distillation_loss(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]), 2.0)
    assert found.item() == ((3 - 1) ** 2 + 0) / 2


# ---- Section 3.2: which exit teaches which, and in what order they learn ----


@pytest.mark.parametrize(
    "distill, teachers", [("vanilla", [None] * 4), ("kd", [3, 3, 3, None]), ("segd", [1, 2, 3, None])]
)
def test_the_teacher_of_each_of_four_exits(distill, teachers, paper):
    assert [paper.teacher_of(k, 3, distill) for k in range(4)] == teachers


def test_the_last_exit_learns_first_and_each_stage_trains_one_exit():
    model = lora_model()
    stages = recipe(model, Config())
    assert [stage.name for stage in stages] == ["exit 4", "exit 2", "exit 1"]
    names = [name for name, _ in model.named_parameters()]
    for k, stage in zip((2, 1, 0), stages):
        trained = [name for name in names if stage.trainable(name)]
        assert trained and all(name.startswith((f"adapters.{k}.", f"heads.{k}.")) for name in trained)


def test_fit_trains_no_backbone_and_the_last_exit_first():
    """In the core: each exit in its turn; what an exit learned stays when the next one learns."""
    torch.manual_seed(0)
    model = core_lora_model()
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
    assert isinstance(model.bert, Bert) and not any(p.requires_grad for p in model.bert.parameters())


# ---- Eq. 6: rows of several exits in one product ----


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 7, 3], [0, 4, 2], [4, 2, 0], [0, 9, 0], [0, 0, 0], [6]], ids=str)
@pytest.mark.parametrize("way", ["sgmv_loop", "project", "core"])
def test_eq6_adds_to_each_row_the_product_with_the_adapters_of_its_own_exit(lengths, way):
    """y_row += scale x_row A_i B_i, row by row, where row belongs to segment i."""
    random = np.random.default_rng(0)
    n, rows = len(lengths), sum(lengths)
    shapes = (rows, 12), (n, 12, 8), (n, 8, 10), (rows, 10)  # x, A, B, and the first term y = x W
    x, A, B, y = (random.normal(size=shape) for shape in shapes)
    expected = y.copy()
    for row, i in enumerate(np.repeat(range(n), lengths)):
        expected[row] += 0.5 * x[row] @ A[i] @ B[i]
    starts = [0, *np.cumsum(lengths).tolist()]
    function = sgmv_loop if way == "sgmv_loop" else LORA[way].sgmv
    found = function(*map(torch.from_numpy, (y, x, A, B)), starts, scale=0.5)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("targets", [("query", "value"), TARGETS], ids=len)
@pytest.mark.parametrize("rule", [Never(), Threshold(0.0), Threshold(0.6)], ids=repr)
def test_eq6_side_by_side_is_restart(rule, targets, padded_inputs):
    """The engines of the core: the same exits, the same logits, and those of each exit alone."""
    model, inputs = core_lora_model(targets), core_inputs(padded_inputs)
    restarted, side_by_side = (early_exit(engine, rule, inputs) for engine in (model, SideBySide(model)))
    np.testing.assert_array_equal(restarted.exit_index, side_by_side.exit_index)
    np.testing.assert_allclose(restarted.logits, side_by_side.logits, rtol=0, atol=ATOL)
    every = model(inputs).numpy()[range(len(inputs)), restarted.exit_index]
    np.testing.assert_allclose(restarted.logits, every, rtol=0, atol=ATOL)


# ---- The cost of the two schedules ----


def test_layer_passes_of_the_exits_3_6_9_12(paper):
    """The table in the method's head: side by side, with restarts."""
    assert list(paper.passes((3, 6, 9, 12))) == [[12, 21, 27, 30], [3, 9, 18, 30]]
