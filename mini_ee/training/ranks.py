"""Training on several devices: `torchrun --nproc-per-node N -m mini_ee train ...`, one process ("rank") a device.

Every rank holds the whole model and takes its share of each batch; all have the same seeded order. Between backward
and clipping the gradients become those of the mean over the whole batch: a step is that of one process. Teachers,
states and scores every rank computes alike, and rank 0's score decides. Rank 0 alone locks, writes and speaks. In one
process nothing here does anything.

Each rank has its own dropout and samples, statistics of a batch norm (DREE; rank 0's stay), and means over a part of a
batch (CAT). Each holds the model whole, 16 bytes a parameter that learns: from a billion on, look for a tool that
shards it (FSDP).
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

LONGEST = timedelta(days=1)  # to wait for a rank, of which the first may be collecting; one that ended shows at once
ENDED = "another rank ended, or torchrun was stopped, so this training ends; go on with --resume"


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def together(device: str) -> Iterator[str]:
    """Joins the ranks that torchrun started; gives this one's device. The first rank that fails says why, no other."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield device
        return
    on_gpu = device.startswith("cuda")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        if not dist.is_initialized():  # once: a program may train several runs
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LONGEST)
        yield device
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to those that are left: this one is ending
        sys.stderr = sys.__stderr__ if _fails_first() else open(os.devnull, "w", encoding="utf-8")
        raise
    signal.signal(signal.SIGTERM, before)


def share(units: np.ndarray) -> np.ndarray:
    """What this rank takes of a batch; all of it, as every rank, where there are fewer units than ranks."""
    return units[rank() :: world()] if len(units) >= world() else units


def average(parameters: Sequence[Tensor], loss: Tensor, units: int) -> Tensor:
    """The mean loss over all ranks' units, from the mean over this one's; makes the gradients those of it.

    A gradient that is None on every rank stays so: a zero would let AdamW decay its parameter.
    """
    if world() == 1:
        return loss
    parts = [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters]
    there = loss.new_tensor([each.grad is not None for each in parameters])
    parts += [there, loss.detach()[None], loss.new_ones(1)]
    sums = torch.cat(parts) * units
    _all(dist.all_reduce, sums)
    *means, there, loss, _ = (sums / sums[-1]).split([len(part) for part in parts])
    for parameter, mean, some in zip(parameters, means, there.tolist()):
        parameter.grad = mean.view_as(parameter) if some else None
    return loss[0]


def as_first(tensors: Iterable[Tensor]) -> None:
    """Makes tensors those of rank 0, in place."""
    for tensor in tensors if world() > 1 else ():
        _all(dist.broadcast, tensor, 0)


def wait() -> None:
    """For all ranks to come here."""
    if world() > 1:
        _all(dist.barrier)


def draw_apart(seed: int, step: int) -> None:
    """Gives every rank but the first random numbers of its own for a step, whatever was drawn before."""
    if rank():
        torch.manual_seed((seed + rank()) * 1_000_003 + step)


def _all(do: Callable, *given) -> None:
    """What ranks do together; a rank that ended shows in it."""
    try:
        do(*given)
    except RuntimeError as error:
        raise RuntimeError(ENDED) from error


def _stopped(*_) -> None:
    raise RuntimeError(ENDED)


def _fails_first() -> bool:
    """Whether no rank has failed before: torchrun's store counts, which outlives the ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        return store.add("mini-ee failed", 1) == 1
    except RuntimeError:
        return True
