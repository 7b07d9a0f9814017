"""Training on several devices: 2 and 3 ranks are one process; a rank that dies ends all; another number goes on."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee
import mini_ee.lab.exits.heads as heads
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.training import ranks
from mini_ee.lab.training.train_settings import PRECISIONS

SAME = 1e-6  # between weights; measured max 3.3e-7
NOISE = 1e-3  # between losses in float32 and bf16 after an epoch; measured max 1.2e-5

ROWS = {"max_train": 22, "batch_size": 7, "epochs": 1, "lr": 1e-4, "head_lr": 1e-3}  # the last batch is of one row
TEXTS = {"texts": 12, "new_tokens": 12, "batch_size": 5, "epochs": 2, "prompt": ("the film",)}
METHODS = {
    "joint": ROWS | {"epochs": 2},
    "lora-exits": ROWS | {"distill": "segd", "exits": (1, 3)},
    "consistent": ROWS | {"estimator": "exact", "rounds": 1, "policy_epochs": 1},
    "self-supervised": TEXTS,
}
LONG = {"epochs": 8, "lr": 1e-3, "head_lr": 1e-2, "batch_size": 9}  # of what is killed


WITHOUT_DROPOUT = """
import faulthandler
import sys
import mini_ee.lab.exits.heads
from mini_ee.lab.cli.main import main
mini_ee.lab.exits.heads.HEAD_DROPOUT = 0.0
faulthandler.dump_traceback_later(25, repeat=True)  # torchrun kills after 30 s what hangs
sys.exit(main())
"""


@pytest.fixture(scope="module", autouse=True)
def no_dropout():
    """Ranks draw apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "HEAD_DROPOUT", 0.0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory, checkpoint_folder, decoder_checkpoint):
    """The small encoder without dropout, and the small decoder, which has none."""
    folder = tmp_path_factory.mktemp("ranks") / "bert"
    shutil.copytree(checkpoint_folder, folder)
    config = read_json(folder / "config.json") | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_json(folder / "config.json", config)
    return folder, decoder_checkpoint


# What ranks do: each of these runs in all of them, or in this process


def train_each(methods, folder, models, task):
    """These methods in turn."""
    for method in methods:
        given = (models[1], None) if method == "self-supervised" else (models[0], task)
        mini_ee.train(method, *given, folder / method, **METHODS[method])


def options(model, task, out):
    """Of the command line, for what is killed and resumed."""
    given = {"model": model, "task": task, "out": out} | LONG
    return [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]


def resume(out, model, task):
    """By the command line, which prints to a file."""
    with open(out.with_name("printed"), "a") as printed, contextlib.redirect_stdout(printed):
        assert main(["train", "joint", *options(model, task, out), "--resume", "--json"]) == 0


def collect(folder, model, task):
    """RAEE through a prompt, after a few shots: training and collection."""
    words = {"template": "{text} the {mask}", "words": ("bad=awful", "good=great")}
    mini_ee.train("raee", model, task, folder, shots=3, epochs=2, k=2, **words)


def fail(printed):
    """One rank fails, and the other with it."""
    sys.__stderr__ = open(printed, "a")
    with ranks.together("cpu"):
        ranks.wait()
        if ranks.rank() == 1:
            raise ValueError("rank 1 has a reason")
        ranks.wait()


def as_rank(rank, world, port, job, *given):
    """A job as torchrun starts it, without dropout."""
    heads.HEAD_DROPOUT = 0.0
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in address.items()}
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")
    job(*given)


def on_ranks(world, job, *given):
    """Run a job on so many ranks; returns their exit codes."""
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        port = connection.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "mini_ee.lab.methods.raee_collect"]
    )  # what takes long is loaded once
    started = [
        context.Process(target=as_rank, args=(rank, world, port, job, *given), daemon=True) for rank in range(world)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    return [ended.exitcode for ended in started]


# Equal to one process


def weights(run):
    return {
        f"{path.relative_to(run)} {name}": tensor
        for path in sorted(run.rglob("*.safetensors"))
        for name, tensor in read_tensors(path).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("world", "methods"), [(2, ("joint", "self-supervised")), (3, ("lora-exits", "consistent"))])
def test_so_many_ranks_give_the_weights_of_one_process(tmp_path, models, task_folder, world, methods):
    alone, several = tmp_path / "alone", tmp_path / "several"
    train_each(methods, alone, models, task_folder)
    assert on_ranks(world, train_each, methods, several, models, task_folder) == [0] * world
    for method in methods:
        expected, of_ranks = weights(alone / method), weights(several / method)
        assert expected.keys() == of_ranks.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(of_ranks[name], tensor, rtol=0, atol=SAME, msg=f"{method}: {name}")
        for one, other in zip(*(read_json(folder / method / "metrics.json")["epochs"] for folder in (alone, several))):
            assert one["loss"] == pytest.approx(other["loss"], abs=SAME), method


@pytest.mark.slow
def test_raee_tunes_on_all_ranks_and_the_first_collects(tmp_path, models, task_folder):
    assert on_ranks(2, collect, tmp_path / "run", models[0], task_folder) == [0, 0]
    collect(tmp_path / "alone", models[0], task_folder)
    expected, of_ranks = weights(tmp_path / "alone"), weights(tmp_path / "run")
    assert expected.keys() == of_ranks.keys() and "backbone/model.safetensors" in " ".join(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(of_ranks[name], tensor, rtol=0, atol=SAME, msg=name)


def test_ranks_share_the_examples_and_all_have_all_if_there_are_fewer_than_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "world", lambda: 3)
    for count, shares in ((7, [[0, 3, 6], [1, 4], [2, 5]]), (2, [[0, 1]] * 3)):
        for rank, share in enumerate(shares):
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            assert ranks.share(np.arange(count)).tolist() == share


def test_gradients_are_those_of_the_mean_over_all_examples_and_none_if_no_rank_has_one(monkeypatch):
    """Three units here, one on the other rank, whose sums are made by hand; LayerSkip passes over whole layers."""
    random = np.random.default_rng(0)
    a, b, c = (torch.zeros(2, 2), torch.zeros(3), torch.zeros(1))
    a.grad = torch.tensor(random.normal(size=(2, 2)), dtype=torch.float32)  # b has one on the other rank, c nowhere
    ours, theirs = a.grad.flatten().tolist(), random.normal(size=7).astype(np.float32).tolist()
    monkeypatch.setattr(ranks, "world", lambda: 2)
    others = torch.tensor([*theirs, 0.0, 1.0, 1.0, 0.0, 0.25, 1.0])
    monkeypatch.setattr(ranks, "_all", lambda do, sums: sums.add_(others))
    loss = ranks.average([a, b, c], torch.tensor(0.5), 3)
    np.testing.assert_allclose(a.grad.flatten(), [(3 * x + y) / 4 for x, y in zip(ours, theirs)], rtol=1e-6)
    np.testing.assert_allclose(b.grad, [y / 4 for y in theirs[4:]], rtol=1e-6)
    assert c.grad is None and loss.item() == (3 * 0.5 + 0.25) / 4


def test_ranks_draw_apart_and_the_first_as_one_process_does(monkeypatch):
    drawn = []
    for rank in (0, 0, 1, 1, 2):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            torch.rand(len(drawn))  # what a rank drew before a step changes nothing, but for the first
            ranks.draw_apart(0, 3)
            drawn.append(torch.rand(1).item())
    assert drawn[2] == drawn[3] and len(set(drawn)) == 4


# Ends


@pytest.fixture(scope="module")
def killed(tmp_path_factory, models, task_folder):
    """A training on two ranks whose second one is killed: the torchrun that ended, its seconds, and the run's name."""
    out = tmp_path_factory.mktemp("killed") / "run"
    (script := out.with_name("without_dropout.py")).write_text(WITHOUT_DROPOUT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    command += ["train", "joint", *options(models[0], task_folder, out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env=environment, **pipes) as torchrun:
        while not (out.with_name("run.training") / "state.safetensors").exists() and torchrun.poll() is None:
            time.sleep(0.01)
        os.kill(pid_of_rank(1, torchrun.pid), signal.SIGKILL)
        begin = time.monotonic()
        printed = torchrun.communicate(timeout=60)
    return torchrun.returncode, printed, time.monotonic() - begin, out


def pid_of_rank(rank, parent):
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (pid,) = [
        pid for pid in children if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return int(pid)


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found in Linux's /proc")


@pytest.mark.slow
@needs_proc
def test_a_killed_rank_ends_all_with_one_line(killed):
    status, (output, errors), seconds, out = killed
    assert status == 1 and seconds < 60 and not output and not out.exists()
    lines = [line for line in errors.splitlines() if line.startswith("mini-ee")]
    assert lines == [f"mini-ee train: {ranks.ENDED}"], errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models, task_folder):
    """The scores of the same training by one process that nobody killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    mini_ee.train("joint", models[0], task_folder, out, **LONG)
    return read_json(out / "metrics.json")["per_exit_accuracy"]


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_resumes_to_an_equal_score(tmp_path, killed, whole, models, task_folder, world):
    shutil.copytree(killed[3].with_name("run.training"), tmp_path / "run.training")
    given = tmp_path / "run", models[0], task_folder
    if world == 1:
        resume(*given)
    else:
        assert on_ranks(world, resume, *given) == [0] * world
    answer = json.loads((tmp_path / "printed").read_text())  # of the first rank alone
    assert answer["per_exit_accuracy"] == whole


@pytest.mark.slow
def test_only_the_first_rank_that_fails_prints_its_error(tmp_path):
    assert on_ranks(2, fail, tmp_path / "printed") == [1, 1]
    printed = (tmp_path / "printed").read_text()
    assert printed.count("Error: ") == printed.count("ValueError: rank 1 has a reason") == 1


# Precision


@pytest.mark.parametrize("method", ["joint", "lora-exits"])
def test_bf16_is_for_the_steps_alone_and_its_losses_are_within_noise(tmp_path, models, task_folder, method):
    runs = {}
    for precision in PRECISIONS:
        given = method, models[0], task_folder, tmp_path / precision
        runs[precision] = mini_ee.train(*given, **LONG | {"epochs": 1}, exits=(1, 3), precision=precision)
    exact, rough = (weights(run.folder) for run in runs.values())
    assert all(tensor.dtype == torch.float32 for tensor in rough.values())
    assert not any(torch.equal(tensor, rough[name]) for name, tensor in exact.items() if name.endswith("out.weight"))
    losses = [[epoch["loss"] for epoch in read_json(run.folder / "metrics.json")["epochs"]] for run in runs.values()]
    np.testing.assert_allclose(*losses, atol=NOISE)
