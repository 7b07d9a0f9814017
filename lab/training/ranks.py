"""Training on several devices: `torchrun --nproc-per-node N -m mini_ee train ...`, one process ("rank") per device.

Every rank has the whole model and takes its share of each batch; the seeded order is the same on all. Between backward
and clipping, the gradients are averaged over the whole batch, so a step is equal to that of one process. Every rank
computes the same teachers, states and scores; the score of rank 0 decides. Only rank 0 locks, writes and prints. In a
single process the functions of this file do nothing.

Each rank has its own dropout and samples, its own statistics of a batch norm (DREE; those of rank 0 are saved), and
means over its part of a batch (CAT). Each needs 16 bytes per trained parameter. For models of a billion parameters or
more use a tool that shards the model (FSDP).
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

LONGEST = timedelta(days=1)  # time to wait for a rank; the first may be collecting. A rank that ended is seen at once
ENDED = "another rank ended, or torchrun was stopped, so this training ends; continue it with --resume"


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def together(device: str) -> Iterator[str]:
    """Join the ranks that torchrun started; yields this rank's device. Only the first rank that fails prints why."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield device
        return
    on_gpu = device.startswith("cuda")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        if not dist.is_initialized():  # only once, because a program may train several runs
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LONGEST)
        yield device
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by torchrun to the remaining ranks; this one is ending
        sys.stderr = sys.__stderr__ if _fails_first() else open(os.devnull, "w", encoding="utf-8")
        raise
    signal.signal(signal.SIGTERM, before)


def share(units: np.ndarray) -> np.ndarray:
    """This rank's share of a batch. Every rank takes all of it if there are fewer units than ranks."""
    return units[rank() :: world()] if len(units) >= world() else units


def average(parameters: Sequence[Tensor], loss: Tensor, units: int) -> Tensor:
    """Average the gradients over the units of all ranks. Returns the mean loss of all units.

    loss: mean over the units of this rank. A gradient that is None on every rank stays None, because with a zero AdamW
    would decay the parameter.
    """
    if world() == 1:
        return loss
    parts = [(torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten() for weight in parameters]
    there = loss.new_tensor([weight.grad is not None for weight in parameters])
    parts += [there, loss.detach()[None], loss.new_ones(1)]
    sums = torch.cat(parts) * units
    _all(dist.all_reduce, sums)
    *means, there, loss, _ = (sums / sums[-1]).split([len(part) for part in parts])
    for parameter, mean, some in zip(parameters, means, there.tolist()):
        parameter.grad = mean.view_as(parameter) if some else None
    return loss[0]


def as_first(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to all ranks, in place."""
    for tensor in tensors if world() > 1 else ():
        _all(dist.broadcast, tensor, 0)


def wait() -> None:
    """Wait until all ranks are here."""
    if world() > 1:
        _all(dist.barrier)


def draw_apart(seed: int, step: int) -> None:
    """Seed every rank but the first with a seed of its own for this step."""
    if rank():
        torch.manual_seed((seed + rank()) * 1_000_003 + step)


def _all(do: Callable, *given) -> None:
    """Call a collective operation. Raises RuntimeError(ENDED) if another rank ended."""
    try:
        do(*given)
    except RuntimeError as error:
        raise RuntimeError(ENDED) from error


def _stopped(*_) -> None:
    raise RuntimeError(ENDED)


def _fails_first() -> bool:
    """Whether no rank failed before. torchrun's store counts; it exists longer than the ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        return store.add("mini-ee failed", 1) == 1
    except RuntimeError:
        return True
