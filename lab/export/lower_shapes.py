"""Lowerings of functions that move entries: reshape, split, join, index, sort. See tracing.py."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.lab.export.replaced import replaces
from mini_ee.lab.export.tracing import (
    LOWERINGS,
    Dim,
    NotTraceable,
    Size,
    Value,
    lifted,
    lowers,
    name_of,
    shape_of,
    sizes_value,
    without,
)


# ---- Shapes ----
@lowers(torch.reshape, Tensor.reshape, Tensor.view, np.reshape)
def reshape(x: Value, *shape) -> Value:
    """x with other axes, one of which may be -1.

    A Reshape node takes ints: 0 copies the size of the axis at the same place, and one -1 stands for the rest. So a Dim
    costs no Shape node if it stays where it is, or if it is the only one that moves.
    """
    shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple | torch.Size) else list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = _inferred_size(x, shape)
    if any(size is None for size in shape):  # -1 is a product of Dims: a new Dim, read from the result
        spec = [-1 if size is None else 0 if _same_at(x, at, size) else size for at, size in enumerate(shape)]
        if any(isinstance(size, Dim) for size in spec):
            spec = sizes_value(x.g, [size if size is not None else -1 for size in shape])
        source = x.flat if x.is_flat and (isinstance(spec, str) or 0 not in spec) else x.name
        name = x.g.op("Reshape", source, spec if isinstance(spec, str) else x.g.integers(*spec))
        return x.like(name, [f"{x.shape}->{at}" if size is None else size for at, size in enumerate(shape)])
    if list(shape) == list(x.shape):
        return x
    x, last = x if x.root is None else x.root, shape[-1]  # two reshapes in a row are one, or none
    if list(shape) == list(x.shape):
        return x

    def make() -> str:
        if x.is_flat:
            return x.g.op("Reshape", x.flat, sizes_value(x.g, shape))
        spec = [0 if _same_at(x, at, size) else size for at, size in enumerate(shape)]
        unknown = [at for at, size in enumerate(spec) if isinstance(size, Dim)]
        if len(unknown) > 1:
            return x.g.op("Reshape", x.name, sizes_value(x.g, shape))
        return x.g.op("Reshape", x.name, x.g.integers(*(-1 if isinstance(size, Dim) else size for size in spec)))

    flat = None
    if len(shape) > 2 and isinstance(last, int) and not isinstance(x.shape[-1], Dim):
        # A use as (N, last axis) skips `make`: no Reshape if x is flat with the same last axis, else one, not two.
        source = x.flat if x.is_flat and x.shape[-1] == last else None
        flat = (lambda: source) if source else lambda: x.g.op("Reshape", x.name, x.g.integers(-1, last))
    made = type(x)(x.g, shape, x.kind, make, flat)
    made.root = x
    return made


def _same_at(x: Value, at: int, size: Size) -> bool:
    """Whether a Dim stays at its place, so that 0 in a Reshape copies it. A flat value has its axes elsewhere."""
    return isinstance(size, Dim) and at < x.ndim and x.shape[at] == size and not x.is_flat


def _inferred_size(x: Value, shape: Sequence[Size]) -> Size | None:
    """The size that -1 stands for: an int, a Dim, or None for a product of several Dims.

    Divides the sizes of x by those of the new shape: the Dims that are left over, and the ints multiplied in `whole`.
    """
    dims, whole = [size for size in x.shape if isinstance(size, Dim)], 1
    for size in x.shape:
        whole *= size if isinstance(size, int) else 1
    for size in shape:
        if isinstance(size, Dim) and size in dims:
            dims.remove(size)
        elif isinstance(size, Dim):
            return None
        elif size != -1:
            if whole % size:
                return None
            whole //= size
    if not dims:
        return whole
    return dims[0] if len(dims) == 1 and whole == 1 else None


@lowers(torch.flatten, Tensor.flatten)
def _flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    end = end_dim % x.ndim
    return reshape(x, [*x.shape[:start_dim], -1, *x.shape[end + 1 :]])


@lowers(torch.unflatten, Tensor.unflatten)
def _unflatten(x: Value, dim: int, sizes: Sequence[Size]) -> Value:
    at = dim % x.ndim
    sizes = list(sizes)
    if -1 in sizes and isinstance(x.shape[at], int):
        sizes[sizes.index(-1)] = x.shape[at] // -math.prod(sizes)
    return reshape(x, [*x.shape[:at], *sizes, *x.shape[at + 1 :]])


@lowers(torch.permute, Tensor.permute)
def _permute(x: Value, *axes) -> Value:
    axes = list(axes[0]) if len(axes) == 1 and not isinstance(axes[0], int) else list(axes)
    source, before = x.permuted or (x, list(range(x.ndim)))
    order, shape = [before[axis] for axis in axes], [x.shape[axis] for axis in axes]
    if order == sorted(order):
        return source
    made = type(x)(x.g, shape, x.kind, lambda: x.g.op("Transpose", source.name, perm=order))
    made.permuted = source, order  # two permutations in a row are one
    return made


@lowers(torch.transpose, Tensor.transpose)
def _transpose(x: Value, one: int, other: int) -> Value:
    axes = list(range(x.ndim))
    axes[one], axes[other] = axes[other], axes[one]
    return _permute(x, axes)


@lowers(torch.unsqueeze, Tensor.unsqueeze, np.expand_dims)
def unsqueeze(x: Value, axis: int) -> Value:
    """x with a new axis of size 1."""
    axis %= x.ndim + 1
    return x.op("Unsqueeze", x.g.integers(axis), shape=[*x.shape[:axis], 1, *x.shape[axis:]])


@lowers(torch.squeeze, Tensor.squeeze, np.squeeze)
def _squeeze(x: Value, axis: int) -> Value:
    return x.op("Squeeze", x.g.integers(axis), shape=without(x.shape, axis))


@lowers(torch.unbind, Tensor.unbind)
def _unbind(x: Value, dim: int = 0) -> list[Value]:
    count = x.shape[dim]
    if isinstance(count, Dim):
        raise NotTraceable(f"the size {count} is known only when the graph runs")
    names = x.g.several(count, "Split", x.name, axis=dim, num_outputs=count)
    return [x.like(x.g.op("Squeeze", name, x.g.integers(dim)), without(x.shape, dim)) for name in names]


@lowers(torch.chunk, Tensor.chunk)
def _chunk(x: Value, chunks: int, dim: int = 0) -> list[Value]:
    return _split(x, x.shape[dim] // chunks, dim)


@lowers(torch.split, Tensor.split)
def _split(x: Value, sizes: int | Sequence[int], dim: int = 0) -> list[Value]:
    if isinstance(sizes, int):
        sizes = [sizes] * (x.shape[dim] // sizes)
    axis, g = dim % x.ndim, x.g
    shapes = [[*x.shape[:axis], size, *x.shape[axis + 1 :]] for size in sizes]

    def part(at: int, name: Callable[[], str], axis: int) -> Callable[[], str]:
        return lambda: g.several(len(sizes), "Split", name(), g.integers(*sizes), axis=axis)[at]

    if x.is_flat and axis == x.ndim - 1:  # split on the last axis: each part can be read with its axes or flat
        makes = [(part(at, lambda: x.name, axis), part(at, lambda: x.flat, 1)) for at in range(len(sizes))]
    else:
        makes = [(part(at, lambda: x.name, axis), None) for at in range(len(sizes))]
    return [type(x)(g, shape, x.kind, *make) for shape, make in zip(shapes, makes)]


@lowers(torch.cat, np.concatenate)
def _concatenate(parts: Sequence, dim: int = 0, axis: int | None = None) -> Value:
    first = next(part for part in parts if isinstance(part, Value))
    axis = (dim if axis is None else axis) % first.ndim
    sizes = [part.shape[axis] for part in parts]
    name = first.g.op("Concat", *(name_of(part, first) for part in parts), axis=axis)
    size = sum(sizes) if all(isinstance(size, int) for size in sizes) else "+".join(map(str, sizes))
    return first.like(name, [*first.shape[:axis], size, *first.shape[axis + 1 :]])


@lowers(torch.stack, np.stack)
def _stack(parts: Sequence, dim: int = 0, axis: int | None = None) -> Value:
    at = dim if axis is None else axis
    return _concatenate([unsqueeze(part, at) for part in parts], at % (parts[0].ndim + 1))


@lowers(Tensor.expand, torch.broadcast_to, np.broadcast_to)
def expand(x: Value, *sizes) -> Value:
    """x with axes of size 1 repeated to other sizes; -1 keeps a size."""
    sizes = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int | Dim) else list(sizes)
    before = [1] * (len(sizes) - x.ndim) + list(x.shape)
    shape = [old if size == -1 else size for old, size in zip(before, sizes)]
    if shape == before:  # only new axes of size 1 in front
        return reshape(x, shape)
    return x.op("Expand", sizes_value(x.g, shape), shape=shape)


@lowers(Tensor.repeat)
def _repeat(x: Value, *counts: int) -> Value:
    shape = [
        size if count == 1 else (size * count if isinstance(size, int) else None)
        for size, count in zip(x.shape, counts)
    ]
    if set(counts) == {1}:
        return x
    name = x.g.op("Tile", x.name, x.g.integers(*counts))
    return x.like(name, [f"{old}*{n}" if s is None else s for s, old, n in zip(shape, x.shape, counts)])


# ---- Parts ----
def index(x: Value, key) -> Value:
    """x[key], where the key has ints, slices, None, ..., indices, and one-dimensional masks.

    x may be a tensor if the key has a value. `axis` counts the axes of the result: an int removes an axis, None adds
    one, and an index of n axes puts n in the place of one.
    """
    if not isinstance(x, Value):
        known = lifted(key.g, x)
        return (known if isinstance(known, Value) else constant(key, x))[key]
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [part if part is Ellipsis else None for part in keys]:
        at = next(i for i, part in enumerate(keys) if part is Ellipsis)
        taken = sum(part is not None and part is not Ellipsis for part in keys)
        keys[at : at + 1] = [slice(None)] * (x.ndim - taken)
    axis = 0
    for part in keys:
        if part is None:
            x, axis = unsqueeze(x, axis), axis + 1
        elif isinstance(part, int):
            x = take(x, part, axis)
        elif isinstance(part, slice):
            x, axis = _sliced(x, part, axis), axis + 1
        else:
            x = take(x, _where_true(part) if shape_of(part) and part.dtype in (torch.bool, np.bool_) else part, axis)
            axis += len(shape_of(part)) if shape_of(part) else 0
    return x


LOWERINGS[Tensor.__getitem__] = index


def constant(like: Value, tensor: Tensor) -> Value:
    """A tensor as a constant of the graph of another value."""
    array = tensor.numpy(force=True)
    return like.like(like.g.constant_of(array), array.shape, array.dtype)


def take(x: Value, at, axis: int) -> Value:
    """The entries of an axis at an int or an index. Of a parameter only the rows at a constant index are stored."""
    if isinstance(at, int):
        if isinstance(x.shape[axis], int) and at < 0:
            at += x.shape[axis]
        return x.op("Gather", x.g.constant_of(np.array(at)), axis=axis, shape=without(x.shape, axis))
    if isinstance(at, Tensor) and getattr(x, "parameter", None) is not None and not axis:
        return x.like(x.g.rows_of(x.parameter, at), [*at.shape, *x.shape[1:]])
    return x.op("Gather", name_of(at, x), axis=axis, shape=[*x.shape[:axis], *shape_of(at), *x.shape[axis + 1 :]])


def _where_true(mask) -> Value:
    return _squeeze(nonzero(mask), 1)


def _sliced(x: Value, part: slice, axis: int) -> Value:
    if part == slice(None):
        return x
    size, start, stop = x.shape[axis], 0 if part.start is None else part.start, part.stop
    if all(isinstance(bound, int | None) for bound in (size, start, stop)):
        start, stop, _ = part.indices(size)
        if (start, stop) == (0, size):
            return x
        length: Size | str = max(0, stop - start)
    elif isinstance(stop, Dim) and start == 0:
        length = stop
    else:
        length = f"{size}[{start}:{stop}]"
    ends = [
        x.g.integers(end) if isinstance(end, int) else end.read() for end in (start, 2**62 if stop is None else stop)
    ]
    shape, g = [*x.shape[:axis], length, *x.shape[axis + 1 :]], x.g
    if getattr(x, "parameter", None) is not None and not axis:  # a rounded parameter is not written as a whole
        sliced = type(x)(g, shape, x.kind, lambda: g.op("Slice", x.name, *ends, g.integers(axis)))
        sliced.rows = x.parameter, start, stop
        return sliced
    return x.like(g.op("Slice", x.name, *ends, g.integers(axis)), shape)


@lowers(torch.nonzero, Tensor.nonzero)
def nonzero(x: Value) -> Value:
    """(n, axes) int64: the indices of true entries. n is a new Dim."""
    name = x.g.op("Transpose", x.g.op("NonZero", x.name), perm=[1, 0])
    return x.like(name, [f"true {name}", x.ndim], np.int64)


@replaces(torch, "arange")
def _arange(arange: Callable, *ends, **settings):
    """0, 1, ... of a size that is known only when the graph runs; torch.arange itself takes no such size."""
    if len(ends) != 1 or not isinstance(size := ends[0], Dim):
        return arange(*ends, **settings)
    g = size.source.g
    start, stop, step = g.constant_of(np.array(0)), g.op("Squeeze", size.read()), g.constant_of(np.array(1))
    return size.source.like(g.op("Range", start, stop, step), [size], np.int64)


@lowers(np.flatnonzero)
def _flatnonzero(x: Value) -> Value:
    name = x.g.op("Squeeze", x.g.op("NonZero", x.name), x.g.integers(0))
    return x.like(name, [f"true {name}"], np.int64)


@lowers(Tensor.tolist)
def _tolist(counts: Value) -> list[Dim]:
    return [Dim(f"{count.name}", unsqueeze(count, 0), None) for count in _unbind(counts)]


@lowers(torch.topk, Tensor.topk)
def topk(x: Value, k: int | Dim, dim: int = -1, **_) -> "Sorted":
    """The k largest entries; of equal entries, the first comes first."""
    axis, count = dim % x.ndim, x.g.integers(k) if isinstance(k, int) else k.read()
    values, places = x.g.several(2, "TopK", x.name, count, axis=axis)
    shape = [*x.shape[:axis], k, *x.shape[axis + 1 :]]
    return Sorted(x.like(values, shape), x.like(places, shape, np.int64))


class Sorted(NamedTuple):
    """The result of torch.sort and torch.topk."""

    values: Value
    indices: Value


@lowers(torch.sort, Tensor.sort)
def _sort(x: Value, dim: int = -1, descending: bool = False, stable: bool = True) -> Sorted:
    if not descending:
        raise NotTraceable("an ascending sort has no lowering")
    return topk(x, x.shape[dim], dim)


@lowers(torch.gather, Tensor.gather)
def _gather(x: Value, dim: int, at: Value) -> Value:
    return x.op("GatherElements", at, axis=dim, shape=at.shape)


@lowers(F.embedding)
def _embedding(ids: Value, weight, *_, **__) -> Value:
    like = ids if isinstance(ids, Value) else weight
    kind = weight.kind if isinstance(weight, Value) else like.g.dtype
    if id(weight) in like.g.blocks:
        return like.like(like.g.embedding_rounded(ids.name, weight), [*ids.shape, weight.shape[1]], kind)
    return like.like(
        like.g.op("Gather", name_of(weight, like), name_of(ids, like)), [*ids.shape, weight.shape[1]], kind
    )
