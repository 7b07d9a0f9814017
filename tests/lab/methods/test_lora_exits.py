"""LoRAExit: streams side by side, schedules and their cost, ragged batches, merged weights, PEFT's layout.

Its equations: tests/spec/test_1_lora_exits.py.
"""

import gc
import json
from copy import deepcopy
from functools import partial
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from conftest import DECODERS, all_exits, all_schedules, lora_model, tensors
from method_cases import each_exit_alone
from safetensors.torch import load_file, save_file

import mini_ee.lab.methods.lora_exits_streams as streams_module
from mini_ee.experiments.bench.common import BERT_BASE
from mini_ee.lab.backbones.bert import Bert
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.lora_exits_peft import load_adapters, save_adapters
from mini_ee.lab.methods.lora_exits_streams import Costs, cheapest_schedule, measure_costs, parallel, restart
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Patience, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.train_run import train

ATOL = 5e-5  # float32, between ways to compute logits of up to 8; at most 1.6e-5 here
RAGGED_ATOL = 1e-5  # between a ragged batch and its rows apart
EXITS = (1, 2, 4)
TARGETS = ("query", "key", "value", "attention_output", "up", "down")


# Eq. 2 of every family


def with_adapted_weights(model, inputs, k):
    """Add A B alpha / rank to the weights of a copy of the backbone, in float64, and run it to exit k."""
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
def test_an_exit_of_every_family_computes_with_w_plus_ab(model_type, targets, padded_inputs):
    model = lora_model(model_type, targets)
    logits = all_exits(model, padded_inputs)
    for k in range(len(model.exits)):
        expected = with_adapted_weights(model, padded_inputs, k)
        np.testing.assert_allclose(logits[:, k], expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_exits_of_decoders_compute_with_w_plus_ab(kind, padded_inputs):
    model = lora_model(kind, TARGETS if kind == "phi" else (*TARGETS, "gate"))
    logits = all_exits(model, padded_inputs)
    for k in range(len(model.exits)):
        expected = with_adapted_weights(model, padded_inputs, k)
        np.testing.assert_allclose(logits[:, k], expected, rtol=0, atol=ATOL)


def test_before_a_training_an_exit_is_the_frozen_backbone(padded_inputs):
    """B begins as zero, so training starts from the pretrained model; a drawn B changes the logits."""
    model, fresh = lora_model(), lora_model()
    for name, parameter in fresh.adapters.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.zeros_(parameter)
    hidden = fresh.backbone(*tensors(padded_inputs))
    expected = fresh.heads[2](hidden, tensors(padded_inputs)[1].bool()[:, None, None, :])
    torch.testing.assert_close(fresh.merged(2)(*tensors(padded_inputs))[0], expected)
    assert abs(all_exits(model, padded_inputs) - all_exits(fresh, padded_inputs)).max() > 0.1


def test_heads_read_the_mean_by_default():
    model = lora_model()
    assert LoRAExits(model.backbone, model.exits, 3).pool == "mean"


# Streams


@pytest.mark.parametrize("schedule", all_schedules(3), ids=str)
@pytest.mark.parametrize("model_type", ["bert", "albert", "llama", "phi"])
@pytest.mark.parametrize("targets", [("query", "value"), TARGETS], ids=len)
def test_every_schedule_gives_every_exit_the_logits_that_it_has_alone(schedule, model_type, targets, padded_inputs):
    model = lora_model(model_type, targets)
    same_as_alone(model, schedule, padded_inputs, all_exits(model, padded_inputs))


def same_as_alone(model, schedule, inputs, expected):
    logits, *_ = read_every_exit(model.segments(schedule), inputs)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("schedule", all_schedules(3), ids=str)
@pytest.mark.parametrize("rule", [Threshold(0.75), Threshold(0.7), Patience(1), Fixed(1), Never()], ids=repr)
def test_parallel_equals_restart_and_a_batch_equals_rows_alone(schedule, rule, padded_inputs):
    model = lora_model()
    result = early_exit(model.segments(schedule), rule, padded_inputs)
    reference = early_exit(model.segments(restart(3)), rule, padded_inputs)
    np.testing.assert_array_equal(result.exit_index, reference.exit_index)
    np.testing.assert_allclose(result.logits, reference.logits, rtol=0, atol=ATOL)
    for row in range(len(padded_inputs)):
        alone = early_exit(model.segments(schedule), rule, padded_inputs.take(slice(row, row + 1)))
        assert alone.exit_index[0] == result.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], result.logits[row], rtol=0, atol=ATOL)


def test_rows_do_leave_at_different_exits_here(padded_inputs):
    assert len(set(early_exit(lora_model().segments(), Threshold(0.7), padded_inputs).exit_index)) > 1


@pytest.mark.parametrize("schedule", [parallel(3), restart(3), [[0, 1], [2]]], ids=str)
def test_layer_passes_are_the_rows_that_layers_see(schedule, padded_inputs, monkeypatch):
    model, seen = lora_model(), []
    run_layers = Bert.run_layers

    def watched(self, hidden, context, start, stop, adapt=None):
        seen.append(len(hidden) * (stop - start))
        return run_layers(self, hidden, context, start, stop, adapt)

    monkeypatch.setattr(Bert, "run_layers", watched)
    result = early_exit(model.segments(schedule), Threshold(0.7), padded_inputs)
    assert sum(seen) == result.cost.layer_passes.sum()


def test_layer_passes_of_the_exits_3_6_9_12():
    """The table in the head of mini_ee/lora_exits.py."""
    model = lora_model(exits=(3, 6, 9, 12))
    side_by_side, one_by_one = (model.segments(schedule(4)) for schedule in (parallel, restart))
    assert np.cumsum([side_by_side.layer_passes(k) for k in range(4)]).tolist() == [12, 21, 27, 30]
    assert np.cumsum([one_by_one.layer_passes(k) for k in range(4)]).tolist() == [3, 9, 18, 30]


# Rows at different exits in one batch


def ragged(model, inputs, exit_of_row):
    with torch.no_grad():
        return model.ragged(exit_of_row, *tensors(inputs)).numpy()


RAGGED = [
    (0, 1, 2, 0, 1, 2, 2),
    (2, 0, 0, 2, 2, 0, 2),
    (1, 1, 0, 0, 1, 0, 1),
    (2,) * 7,
    (0,) * 7,
    (1, 2, 0, 0, 0, 0, 0),
]


@pytest.mark.parametrize("exit_of_row", RAGGED, ids=str)
@pytest.mark.parametrize("model_type", ["bert", "albert", "llama", "phi"])
@pytest.mark.parametrize("targets", [("query", "value"), TARGETS], ids=len)
def test_a_ragged_batch_equals_each_exits_rows_apart(exit_of_row, model_type, targets, padded_inputs):
    model = lora_model(model_type, targets)
    logits = ragged(model, padded_inputs, exit_of_row)
    np.testing.assert_allclose(logits, each_exit_alone(model, padded_inputs, exit_of_row), rtol=0, atol=RAGGED_ATOL)


@pytest.mark.parametrize(
    "exit_of_row, passes",
    [((2, 0, 1, 1, 0, 0, 1), [(7, 0, 1), (4, 1, 2), (1, 2, 4)]), ((1, 0, 1, 1, 0, 0, 1), [(7, 0, 1), (4, 1, 2)])],
    ids=str,
)
def test_rows_of_a_ragged_batch_go_no_deeper_than_their_exit(exit_of_row, passes, padded_inputs):
    model, seen = lora_model(), []
    run_layers = model.backbone.run_layers
    model.backbone.run_layers = lambda hidden, context, start, stop, adapt: (
        seen.append((len(hidden), start, stop)) or run_layers(hidden, context, start, stop, adapt)
    )
    ragged(model, padded_inputs, exit_of_row)
    assert seen == passes


@pytest.mark.parametrize("exit_of_row", [(0, 1), (0, 1, 2, 3, 0, 0, 0), (0, 1, 2, -1, 0, 0, 0)], ids=str)
def test_a_ragged_batch_of_other_exits_or_rows_is_refused(exit_of_row, padded_inputs):
    with pytest.raises(ValueError, match="expected exits from 0 to 2 of 7 rows"):
        ragged(lora_model(), padded_inputs, exit_of_row)


# What is held in memory


def storages(root):
    """Bytes of the storages of all tensors that can be reached from an object, by address."""
    todo, seen, sizes = [root], {}, {}
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen[id(thing)] = thing
        if torch.is_tensor(thing):
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, FunctionType):
            todo += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            todo += gc.get_referents(thing)
    return sizes


@pytest.mark.parametrize("schedule", all_schedules(3), ids=str)
@pytest.mark.parametrize("model_type", ["bert", "albert", "llama"])
@pytest.mark.parametrize("targets", [("query", "value"), TARGETS], ids=len)
def test_bytes_held_are_those_of_the_weights_that_can_be_reached(schedule, model_type, targets, padded_inputs):
    model = lora_model(model_type, targets)
    segments = model.segments(schedule)
    early_exit(segments, Never(), padded_inputs)
    sizes = storages(segments)
    tables = sum(sizes[buffer.untyped_storage().data_ptr()] for buffer in model.buffers())  # of a decoder's positions
    assert segments.bytes_held == sum(sizes.values()) - tables
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    adapters = sum(parameter.nbytes for parameter in model.adapters.parameters())
    if schedule == restart(3):
        assert segments.bytes_held == parameters  # no copies
    else:
        assert parameters < segments.bytes_held <= parameters + adapters  # those of streams side by side, once


def test_training_one_exit_changes_no_other_exits_logits(padded_inputs):
    model = lora_model()
    before = all_exits(model, padded_inputs)
    optimizer = torch.optim.SGD([*model.adapters[1].parameters(), *model.heads[1].parameters()], 0.1)
    model.logits_of(1, *tensors(padded_inputs)).square().sum().backward()
    optimizer.step()
    touched = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.grad is not None}
    after = all_exits(model, padded_inputs)
    assert touched == {"1"}
    assert np.array_equal(before[:, [0, 2]], after[:, [0, 2]]) and not np.allclose(before[:, 1], after[:, 1])


@pytest.mark.parametrize("model_type", ["bert", "albert", "llama", "gemma", "phi"])
def test_merged_weights_are_the_exit_in_a_model_of_its_depth(model_type, padded_inputs):
    model = lora_model(model_type, TARGETS)
    for k, layer in enumerate(EXITS):
        merged = model.merged(k)
        assert merged.exits == (layer,) and merged.backbone.config.num_hidden_layers == layer
        logits, *_ = read_every_exit(merged.segments(), padded_inputs)
        np.testing.assert_allclose(logits[:, 0], all_exits(model, padded_inputs)[:, k], rtol=0, atol=ATOL)


def test_gradients_through_a_stream_are_those_of_eq2_in_float64(padded_inputs):
    model = lora_model(targets=TARGETS).double()
    pair = model.adapters[0][0]["value"]

    def loss(A, B):
        values = {"adapters.0.0.value.A": A, "adapters.0.0.value.B": B}
        names = partial(torch.func.functional_call, model, values)
        return names(args=tuple(tensors(padded_inputs)))[0].square().sum()

    A, B = (value.detach().clone().requires_grad_() for value in (pair.A, pair.B))
    assert torch.autograd.gradcheck(loss, (A, B), eps=1e-6, atol=1e-4, fast_mode=True)


# Schedules


def layer_costs(exits, price):
    """Where n streams cost price(n) a layer."""
    starts, prices = np.array((0, *exits[:-1])), [price(n + 1) for n in range(len(exits))]
    return Costs(np.outer(exits, prices), np.outer(np.array(exits) - starts, prices))


def expected_seconds(schedule, costs, reach):
    """Of one row, by hand: exit k runs where all before have refused the row, side by side with those of its group."""
    return sum(
        reach[k] * (costs.fresh if k == group[0] else costs.onward)[k, group[-1] - k]
        for group in schedule
        for k in group
    )


@pytest.mark.parametrize("reach", [[1, 1, 1, 1], [1, 0.9, 0.6, 0.3], [1, 0.1, 0.1, 0.05], [1, 0.5, 0.5, 0.1]], ids=str)
@pytest.mark.parametrize("power", [0.0, 0.3, 0.7, 1.0])
def test_the_cheapest_schedule_is_the_best_of_simulated_rows(reach, power):
    exits, reach = (3, 6, 9, 12), np.array(reach)
    seconds = layer_costs(exits, lambda n: n**power)
    left_at = np.append(-np.diff(reach), reach[-1])
    simulated = {}
    for schedule in all_schedules(4):
        token_cost = []
        for last in range(4):  # a row that leaves at exit `last`, walked through
            total = 0.0
            for group in schedule:
                live = list(group)
                depth = 0
                for k in group:
                    if k <= last:
                        total += (exits[k] - depth) * len(live) ** power
                    depth = exits[k]
                    live.pop(0)
            token_cost.append(total)
        simulated[str(schedule)] = float(left_at @ token_cost)
        assert expected_seconds(schedule, seconds, reach) == pytest.approx(simulated[str(schedule)])
    chosen = simulated[str(cheapest_schedule(seconds, reach))]
    assert chosen == pytest.approx(min(simulated.values()))


def test_free_streams_run_side_by_side_and_dear_ones_one_by_one():
    exits = (3, 6, 9, 12)
    assert cheapest_schedule(layer_costs(exits, lambda n: 1.0), np.array([1, 0.9, 0.8, 0.7])) == parallel(4)
    assert cheapest_schedule(layer_costs(exits, float), np.array([1, 0.5, 0.3, 0.1])) == restart(4)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_cheapest_schedule_is_that_of_an_enumeration(count):
    random = np.random.default_rng(count)
    for _ in range(20):
        costs, reach = Costs(*random.uniform(1, 2, (2, count, count))), np.sort(random.uniform(0, 1, count))[::-1]
        enumerated = min(expected_seconds(schedule, costs, reach) for schedule in all_schedules(count))
        assert expected_seconds(cheapest_schedule(costs, reach), costs, reach) == pytest.approx(enumerated)


def test_measured_costs_are_those_of_the_layers_that_run():
    model, ran = lora_model(), []
    run_layers = model.backbone.run_layers
    model.backbone.run_layers = lambda hidden, context, start, stop, adapt: (
        ran.append((len(hidden), start, stop)) or run_layers(hidden, context, start, stop, adapt)
    )
    costs = measure_costs(model, batch_size=2, tokens=5, rounds=1)
    expected = [(2 * n, start, EXITS[k]) for k in range(3) for n in range(1, 4 - k) for start in (0, (0, 1, 2)[k])]
    assert ran == 2 * expected  # a warm round, then a timed one
    possible = np.add.outer(range(3), range(3)) < 3  # streams of exits k .. k + n - 1
    assert ((costs.fresh > 0) == possible).all() and ((costs.onward > 0) == possible).all()


def test_measured_costs_are_medians_over_the_rounds_that_are_warm(monkeypatch):
    model, clock, ran = lora_model(), [0.0], []

    def run_layers(hidden, context, start, stop, adapt):
        ran.append((len(hidden), start, stop))
        turn = (len(ran) - 1) // 12  # of twelve runs each: the first is slow, and so is one of the other three
        clock[0] += len(hidden) * (10 * stop + start) + 1000 * (turn in (0, 2))
        return hidden

    model.backbone.run_layers = run_layers
    monkeypatch.setattr(streams_module.time, "perf_counter", lambda: clock[0])
    costs = measure_costs(model, batch_size=1, tokens=2, rounds=3)
    for k, (before, stop) in enumerate(zip((0, *EXITS), EXITS)):
        for n in range(1, 4 - k):
            assert (costs.fresh[k, n - 1], costs.onward[k, n - 1]) == (n * 10 * stop, n * (10 * stop + before))


def test_what_a_speed_up_is_measured_against_draws_no_random_number_and_has_the_models_type():
    model = lora_model().double()
    before = torch.get_rng_state()
    merged = model.merged(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float64}


@pytest.mark.parametrize("schedule", [[[0, 1]], [[0], [2], [1]], [[0, 1, 2], []], [[0, 1], [1, 2]]], ids=str)
def test_a_schedule_that_is_no_cut_of_the_exits_is_refused(schedule):
    with pytest.raises(ValueError, match="a schedule must cut the exits"):
        lora_model().segments(schedule)


# Disk


@pytest.mark.parametrize("model_type", ["bert", "albert"])
def test_adapters_come_back_from_pefts_layout(tmp_path, model_type, padded_inputs):
    model, other = lora_model(model_type, TARGETS), lora_model(model_type, TARGETS)
    digests = save_adapters(model, tmp_path, "base")
    for parameter in other.adapters.parameters():
        torch.nn.init.zeros_(parameter)
    load_adapters(other, tmp_path, digests)
    np.testing.assert_array_equal(all_exits(other, padded_inputs), all_exits(model, padded_inputs))


def test_the_layout_is_pefts(tmp_path):
    model = lora_model()
    save_adapters(model, tmp_path, "base")
    config = json.loads((tmp_path / "exit_2" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16.0)
    adapter = load_file(tmp_path / "exit_2" / "adapter_model.safetensors")
    stem = "base_model.model.encoder.layer.1.attention.self.value"
    assert len(adapter) == 2 * 2 * 2 and adapter[f"{stem}.lora_A.weight"].shape == (4, 24)
    pair = model.adapters[1][1]["value"]
    torch.testing.assert_close(adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"], (pair.A @ pair.B).T)


def test_adapters_in_float16_are_computed_in_float32(tmp_path, padded_inputs):
    model = lora_model()
    save_adapters(model, tmp_path, "base")
    for layer in EXITS:
        path = tmp_path / f"exit_{layer}" / "adapter_model.safetensors"
        save_file({name: value.half() for name, value in load_file(path).items()}, path)
    load_adapters(model, tmp_path, {})
    assert {parameter.dtype for parameter in model.adapters.parameters()} == {torch.float32}
    assert np.isfinite(all_exits(model, padded_inputs)).all()


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("lora") / "run"
    options = {"epochs": 1, "lr": 1e-2, "head_lr": 1e-2, "batch_size": 8, "exits": (1, 3), "rank": 2}
    train("lora-exits", checkpoint_folder, task_folder, out, **options)
    return out


def test_a_run_holds_adapters_and_heads_and_names_its_backbone(lora_run, checkpoint_folder):
    names = {str(path.relative_to(lora_run)) for path in lora_run.rglob("*") if path.is_file()}
    folders = {f"exit_{layer}/adapter_{kind}" for layer in (1, 3) for kind in ("model.safetensors", "config.json")}
    assert names == folders | {"config.json", "metrics.json", "model.safetensors", "tokenizer.json"}
    assert all(name.startswith("heads.") for name in load_file(lora_run / "model.safetensors"))
    run = load_run(lora_run)
    settings = run.config["settings"]
    assert {key: settings[key] for key in ("rank", "alpha", "targets")} == {
        "rank": 2,
        "alpha": 16.0,
        "targets": ["query", "value"],
    }
    assert run.exits == (1, 3) and run.whole_model().exits == (3,)
    assert any(parameter.abs().sum() > 0 for name, parameter in run.model.adapters.named_parameters() if ".B" in name)


def copied(run, tmp_path):
    import shutil

    return shutil.copytree(run, tmp_path / "copy")


def test_a_missing_exit_is_said(lora_run, tmp_path):
    copy = copied(lora_run, tmp_path)
    (copy / "exit_3" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="exit_3/adapter_model.safetensors: no such file"):
        load_run(copy)


def test_a_flipped_bit_in_an_adapter_is_found(lora_run, tmp_path):
    copy = copied(lora_run, tmp_path)
    path = copy / "exit_1" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_run(copy)


def test_a_missing_or_edited_adapter_config_is_said(lora_run, tmp_path):
    copy = copied(lora_run, tmp_path)
    path = copy / "exit_3" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.5'))
    with pytest.raises(ValueError, match="exit_3/adapter_config.json: damaged or edited"):
        load_run(copy)
    path.write_text("")
    with pytest.raises(ValueError, match="exit_3/adapter_config.json: expected a JSON object"):
        load_run(copy)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="exit_3/adapter_config.json: no such file"):
        load_run(copy)


@pytest.mark.parametrize(
    "key, value", [("r", 2), ("lora_alpha", 8.0), ("target_modules", ["encoder.layer.0.output.dense"]), ("bias", "all")]
)
def test_an_adapter_config_that_says_other_than_the_run_is_refused(key, value, tmp_path):
    model = lora_model()
    save_adapters(model, tmp_path, "base")
    path = tmp_path / "exit_2" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(
        ValueError, match=f"exit_2/adapter_config.json: expected {key} .* found .*{value!r}".replace("[", r"\[")
    ):
        load_adapters(model, tmp_path, {})


def test_adapters_of_another_backbone_are_refused(lora_run, tmp_path, checkpoint_folder):
    import shutil

    other = shutil.copytree(checkpoint_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config.pop("sha256")
    (other / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-6}))
    with pytest.raises(ValueError, match="another backbone"):
        load_run(lora_run, other)
    with pytest.raises(FileNotFoundError, match="--model"):
        load_run(lora_run, tmp_path / "nowhere")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 0}, "rank must be"),
        ({"rank": 1.5}, "rank must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"targets": ("query", "pooler")}, "targets must be some of .*, got pooler"),
        ({"targets": ()}, "targets must be"),
        ({"targets": ("query", "query")}, "targets must be different ones, got query, query"),
        ({"targets": ("query", "gate")}, "targets of a bert must be some of query, key, .*, down, got gate"),
        ({"pool": "max"}, "pool must be"),
        ({"exits": (2, 1, 4)}, "exits must ascend"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, message):
    backbone = lora_model().backbone
    exits = options.pop("exits", EXITS)
    with pytest.raises(ValueError, match=message):
        LoRAExits(backbone, exits, 3, **options)


def test_adapters_and_heads_of_four_exits_are_at_most_4_percent_of_a_bert_base_as_table_10_counts():
    """Rank 8, query and value; bytes on disk are four times as many as parameters, of both."""
    with torch.device("meta"):
        model = LoRAExits(Bert(BERT_BASE, pooler=False, lm_head=False), (3, 6, 9, 12), 2)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    by_hand = (3 + 6 + 9 + 12) * 2 * 2 * 768 * 8  # layers, projections, A and B
    assert counts["adapters"] == by_hand
    assert (counts["adapters"] + counts["heads"]) / counts["backbone"] < 0.04  # measured .0286
