"""Lowerings of arithmetic, reductions, linear maps, norms and attention. See tracing.py."""

import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.lab.backbones import cache
from mini_ee.lab.export.lower_shapes import expand, reshape, unsqueeze
from mini_ee.lab.export.replaced import replaces
from mini_ee.lab.export.tracing import (
    LOWERINGS,
    TORCH_DTYPES,
    Dim,
    Size,
    Value,
    broadcast,
    cast,
    lowers,
    name_of,
    shape_of,
    sizes_value,
    without,
)


# ---- Element by element ----
def _binary(node: str, kind: type | None = None) -> Callable:
    """The lowering of a function of two values, or of a value and a constant. A Python number takes the type of the
    value; other types promote.
    """

    def write(a, b, *_, **__) -> Value:
        a, b = (x.value() if isinstance(x, Dim) else x for x in (a, b))
        for one, other in ((a, b), (b, a)) if kind is bool else ():
            if getattr(one, "compared", None) is not None:
                one.compared.append(other)
        like = a if isinstance(a, Value) else b
        if node == "Div":  # integers are divided as floats, as torch and numpy do
            a, b = (cast(x, np.float32) if isinstance(x, Value) and x.kind.kind in "iub" else x for x in (a, b))
            like = a if isinstance(a, Value) else b
        kinds = [x.kind for x in (a, b) if isinstance(x, Value)]
        if len(set(kinds)) > 1:
            common = np.result_type(*kinds)
            common = like.g.dtype if common.kind == "f" and like.g.dtype in kinds else common
            a, b = cast(a, common), cast(b, common)
            like = a if isinstance(a, Value) else b
        elif like.kind.kind in "iub" and _is_float(a if like is b else b):
            like = cast(like, np.float32)
            a, b = (like, b) if isinstance(a, Value) else (a, like)
        if like.kind.kind == "f":
            a, b = (x.float() if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter) else x for x in (a, b))
        shape, result_kind = broadcast(shape_of(a), shape_of(b)), kind or like.kind
        others = [x for x in (a, b) if x is not like]
        lone = all(shape_of(x) == tuple(shape) if isinstance(x, Value) else len(shape_of(x)) < 2 for x in others)
        if tuple(shape) == like.shape and lone and any(isinstance(x, Value) and x.is_flat for x in (a, b)):
            names = [x.flat if isinstance(x, Value) else name_of(x, like) for x in (a, b)]
            return like.flat_like(like.g.op(node, *names), shape, result_kind)
        return like.like(like.g.op(node, name_of(a, like), name_of(b, like)), shape, result_kind)

    return write


def _is_float(x) -> bool:
    return isinstance(x, float) or getattr(x, "dtype", None) in (torch.float32, np.float32, np.float64)


for _node, _kind, *_functions in [
    ("Add", None, torch.add, Tensor.add, Tensor.__add__, operator.add, np.add),
    ("Mul", None, torch.mul, Tensor.mul, Tensor.__mul__, operator.mul, np.multiply),
    ("Sub", None, torch.sub, Tensor.sub, Tensor.__sub__, operator.sub, np.subtract),
    ("Div", None, torch.div, Tensor.div, Tensor.__truediv__, operator.truediv, np.true_divide),
    ("Pow", None, torch.pow, Tensor.pow, Tensor.__pow__, operator.pow, np.power),
    ("Max", None, torch.maximum, np.maximum),
    ("Min", None, torch.minimum, np.minimum),
    ("GreaterOrEqual", bool, torch.ge, Tensor.__ge__, operator.ge, np.greater_equal),
    ("LessOrEqual", bool, torch.le, Tensor.__le__, operator.le, np.less_equal),
    ("Greater", bool, torch.gt, Tensor.__gt__, operator.gt, np.greater),
    ("Less", bool, torch.lt, Tensor.__lt__, operator.lt, np.less),
    ("Equal", bool, torch.eq, Tensor.__eq__, operator.eq, np.equal),
    ("And", bool, torch.logical_and, Tensor.__and__, operator.and_, np.bitwise_and, np.logical_and),
    ("Or", bool, torch.logical_or, Tensor.__or__, operator.or_, np.bitwise_or, np.logical_or),
]:
    lowers(*_functions)(_binary(_node, _kind))

for _sign in ("add", "mul", "sub", "truediv", "pow", "ge", "le", "gt", "lt", "eq", "and_", "or_"):
    _function, _sign = getattr(operator, _sign), _sign.strip("_")
    setattr(Value, f"__{_sign}__", lambda a, b, f=_function: LOWERINGS[f](a, b))
    setattr(Value, f"__r{_sign}__", lambda a, b, f=_function: LOWERINGS[f](b, a))
    if hasattr(Tensor, f"__r{_sign}__"):
        lowers(getattr(Tensor, f"__r{_sign}__"))(lambda a, b, f=_function: LOWERINGS[f](b, a))


@lowers(torch.ne, Tensor.__ne__, operator.ne, np.not_equal)
def _differ(a, b) -> Value:
    return ~LOWERINGS[operator.eq](a, b)


Value.__ne__ = _differ


def _unary(node: str) -> Callable:
    return lambda x, *_, **__: x.elementwise(node)


for _node, *_functions in [
    ("Tanh", torch.tanh, Tensor.tanh, F.tanh, np.tanh),
    ("Relu", F.relu, torch.relu),
    ("Sigmoid", torch.sigmoid, Tensor.sigmoid, F.sigmoid),
    ("Exp", torch.exp, Tensor.exp, np.exp),
    ("Log", torch.log, Tensor.log, np.log),
    ("Sqrt", torch.sqrt, Tensor.sqrt, np.sqrt),
    ("Cos", torch.cos, Tensor.cos),
    ("Sin", torch.sin, Tensor.sin),
    ("Abs", torch.abs, Tensor.abs, np.absolute),
    ("Neg", torch.neg, Tensor.neg, np.negative),
    ("Reciprocal", torch.reciprocal, np.reciprocal),
    ("Not", torch.logical_not, np.logical_not, np.invert),
]:
    lowers(*_functions)(_unary(_node))


lowers(Tensor.float, Tensor.double)(lambda x: cast(x, np.float32))  # a graph has no float64
lowers(Tensor.detach, torch.detach)(lambda x: x)
lowers(Tensor.byte, Tensor.long)(lambda x: cast(x, np.int64))
lowers(Tensor.int)(lambda x: cast(x, np.int32))
lowers(Tensor.bool)(lambda x: cast(x, np.bool_))
lowers(Tensor.new_tensor)(lambda x, data, **_: torch.tensor(data))


@lowers(torch.zeros_like)
def _zeros_like(x: Value, dtype=None) -> Value:
    return _filled(x, 0, dtype)


@lowers(torch.ones_like)
def _ones_like(x: Value, dtype=None) -> Value:
    return _filled(x, 1, dtype)


def _filled(x: Value, value: float, dtype) -> Value:
    kind = x.kind if dtype is None else np.dtype(TORCH_DTYPES[dtype])
    number = x.like(x.g.constant_of(np.array(value, kind)), (), kind)
    return number.like(x.g.op("Expand", number.name, sizes_value(x.g, x.shape)), x.shape)


@lowers(F.pad)
def pad(x: Value, ends: Sequence[int], mode: str = "constant", value: float = 0.0) -> Value:
    """Pad the last axis."""
    before, after = ends
    pads = x.g.integers(*[0] * (x.ndim - 1), before, *[0] * (x.ndim - 1), after)
    return x.op("Pad", pads, shape=[*x.shape[:-1], before + x.shape[-1] + after])


@lowers(F.one_hot)
def _one_hot(x: Value, num_classes: int) -> Value:
    return cast(unsqueeze(x, x.ndim) == torch.arange(num_classes), np.int64)


@lowers(F.logsigmoid)
def _logsigmoid(x: Value) -> Value:
    return -(-x).elementwise("Softplus")


@lowers(torch.cosine_similarity, F.cosine_similarity)
def _cosine_similarity(a: Value, b: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    total = LOWERINGS[np.sum]
    return total(a * b, dim) / (total(a * a, dim) * total(b * b, dim)).elementwise("Sqrt")


@lowers(F.dropout)
def _dropout(x: Value, *_, **__) -> Value:
    return x


@lowers(torch.rsqrt, Tensor.rsqrt)
def _rsqrt(x: Value) -> Value:
    return x.elementwise("Sqrt").elementwise("Reciprocal")


@lowers(F.silu)
def _silu(x: Value, inplace: bool = False) -> Value:
    return x * x.elementwise("Sigmoid")


@lowers(F.gelu)
def _gelu(x: Value, approximate: str = "none") -> Value:
    return x.elementwise("Gelu", approximate=approximate)


@lowers(np.logaddexp)
def logaddexp(a, b, **_) -> Value:
    """Softplus if the first is 0; otherwise the larger value plus softplus(-|a - b|), which cannot overflow."""
    if not isinstance(a, Value) and np.all(np.asarray(a) == 0):
        return b.elementwise("Softplus")
    larger = LOWERINGS[np.maximum](a, b)
    return larger + (-abs(a - b)).elementwise("Softplus")


@lowers(torch.clamp, Tensor.clamp, np.clip)
def _clamp(x: Value, min=None, max=None, **_) -> Value:
    ends = ["" if end is None else name_of(end, x) for end in (min, max)]
    return x.elementwise("Clip", *ends)


@lowers(torch.where, np.where)
def _where(condition, a, b) -> Value:
    like = next(x for x in (condition, a, b) if isinstance(x, Value))
    kinds = [x.kind for x in (a, b) if isinstance(x, Value)]
    # Two numbers have the types that torch and numpy give them; floats are float32.
    kind = kinds[0] if kinds else np.float32 if _is_float(a) or _is_float(b) else np.int64
    if np.dtype(kind) == bool:  # ONNX Runtime's Where takes no bool
        return (condition & a) | (~condition & b)
    typed = like.like(like.name, kind=kind)
    names = [name_of(x, typed) for x in (a, b)]
    shape = broadcast(*map(shape_of, (condition, a, b)))
    return typed.like(like.g.op("Where", name_of(condition, like), *names), shape)


@lowers(Tensor.masked_fill, torch.masked_fill)
def _masked_fill(x: Value, mask: Value, value: float) -> Value:
    return _where(mask, value, x)


@lowers(torch.all, Tensor.all, np.all)
def _all_true(x: Value, dim=None, axis=None, **_) -> Value:
    return cast(LOWERINGS[np.min](cast(x, np.int64), dim, axis), np.bool_)


@lowers(torch.is_nonzero, Tensor.is_nonzero)
def _is_nonzero(x: Value) -> bool:
    return False


# ---- Along an axis ----
def _reduced(node: str) -> Callable:
    def write(x: Value, dim=None, axis=None, keepdims=False, keepdim=False, dtype=None, out=None, **_) -> Value:
        axis, keeps = dim if axis is None else axis, keepdims or keepdim
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = sorted(index % x.ndim for index in axes)
        shape = [1 if at in axes else size for at, size in enumerate(x.shape) if keeps or at not in axes]
        if x.kind.kind == "b":
            x = cast(x, np.int64)
        if x.is_flat and keeps and axes == [x.ndim - 1]:
            return x.flat_like(x.g.op(node, x.flat, x.g.integers(1), keepdims=1), shape)
        return x.op(node, x.g.integers(*axes), keepdims=int(keeps), shape=shape)

    return write


lowers(torch.sum, Tensor.sum, np.sum)(_reduced("ReduceSum"))
lowers(torch.mean, Tensor.mean, np.mean)(_reduced("ReduceMean"))
lowers(torch.amax, Tensor.amax, np.max, np.amax)(_reduced("ReduceMax"))
lowers(torch.amin, Tensor.amin, np.min, np.amin)(_reduced("ReduceMin"))


@lowers(torch.any, Tensor.any, np.any)
def _any_true(x: Value, dim=None, axis=None, **_) -> Value:
    return cast(LOWERINGS[np.max](cast(x, np.int64), dim, axis), np.bool_)


@lowers(torch.argmax, Tensor.argmax, np.argmax)
def _argmax(x: Value, dim=None, axis=None, **_) -> Value:
    axis = axis if dim is None else dim
    return x.op("ArgMax", axis=axis, keepdims=0, shape=without(x.shape, axis), kind=np.int64)


@lowers(torch.cumsum, Tensor.cumsum, np.cumsum)
def _cumsum(x: Value, dim=None, axis=None, **_) -> Value:
    x = cast(x, np.int64) if x.kind.kind == "b" else x
    return x.op("CumSum", x.g.constant_of(np.array(dim if axis is None else axis)))


@lowers(F.softmax, torch.softmax, Tensor.softmax)
def _softmax(x: Value, dim: int = -1, dtype=None, **_) -> Value:
    return (x if dtype is None else x.to(dtype)).op("Softmax", axis=dim)


@lowers(F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def _log_softmax(x: Value, dim: int = -1, dtype=None, **_) -> Value:
    return (x if dtype is None else x.to(dtype)).op("LogSoftmax", axis=dim)


@lowers(np.partition)
def partition(x: Value, kth: int, axis: int = -1) -> Value:
    """Only the entries from the kth on, sorted, as `[:, kth:]` needs them. kth is negative."""
    axis %= x.ndim
    largest, _ = x.g.several(2, "TopK", x.name, x.g.integers(-kth), axis=axis)
    rising = x.g.constant_of(np.arange(-kth)[::-1].copy())
    shape = [*x.shape[:axis], -kth, *x.shape[axis + 1 :]]
    return x.like(x.g.op("Gather", largest, rising, axis=axis), shape)


@lowers(np.shape)
def _shape_tuple(x: Value) -> tuple[Size, ...]:
    return x.shape


@lowers(np.asarray, np.array)
def _asarray(x: Value, *_, **__) -> Value:
    return x


# ---- Maps, norms, attention ----
@lowers(F.linear)
def linear(x: Value, weight, bias=None) -> Value:
    """A Gemm on the flat value, which also adds the bias; or what the Builder has for a weight that it rounds."""
    shape = [*x.shape[:-1], weight.shape[0]]
    bias = None if bias is None else name_of(bias, x)
    if id(weight) in x.g.rounded:
        return x.flat_like(x.g.linear_int8(x.flat, weight, bias), shape)
    matrix, *part = getattr(weight, "rows", None) or (weight, None)  # or some outputs: keys and values without queries
    if id(matrix) in x.g.blocks:
        return x.flat_like(x.g.linear_in_blocks(x.flat, matrix, bias, slice(*part)), shape)
    names = [name_of(weight, x), *([] if bias is None else [bias])]
    return x.flat_like(x.g.gemm(x.flat, *names), shape)


@lowers(torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul, np.matmul)
def _matmul(a, b) -> Value:
    like = a if isinstance(a, Value) else b
    before = broadcast(shape_of(a)[:-2], shape_of(b)[:-2])
    name = like.g.op("MatMul", name_of(a, like), name_of(b, like))
    return like.like(name, [*before, shape_of(a)[-2], shape_of(b)[-1]])


Value.__matmul__ = lambda a, b: _matmul(a, b)
Value.__rmatmul__ = lambda a, b: _matmul(b, a)


@lowers(F.layer_norm)
def _layer_norm(x: Value, shape, weight=None, bias=None, eps: float = 1e-5) -> Value:
    return x.elementwise(
        "LayerNormalization", *(operand for operand in (weight, bias) if operand is not None), epsilon=eps
    )


@lowers(F.rms_norm)
def _rms_norm(x: Value, shape, weight=None, eps: float | None = None) -> Value:
    weight = torch.ones(shape) if weight is None else weight
    return x.elementwise("RMSNormalization", weight, epsilon=eps)


@lowers(F.conv1d, torch.conv1d)
def conv1d(x: Value, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Value:
    """(B, D, T) -> (B, O, T)."""
    (pad,) = (padding,) if isinstance(padding, int) else padding
    bias = [] if bias is None else [bias]
    return x.op("Conv", weight, *bias, pads=(pad, pad), group=groups, shape=[x.shape[0], weight.shape[0], x.shape[2]])


@lowers(F.batch_norm)
def _batch_norm(x: Value, mean, variance, weight=None, bias=None, eps=1e-5, **_) -> Value:
    return x.op("BatchNormalization", weight, bias, mean, variance, epsilon=eps)


@lowers(F.normalize)
def _normalize(x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out=None) -> Value:
    length = x.op(
        "ReduceL2", x.g.integers(dim), keepdims=1, shape=[1 if a == dim % x.ndim else s for a, s in enumerate(x.shape)]
    )
    return x / LOWERINGS[np.maximum](length, eps)


@lowers(F.scaled_dot_product_attention)
def attention(
    query: Value, key: Value, value: Value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_
) -> Value:
    """(B, H, T, d), (B, KV, S, d) twice -> (B, H, T, d). The mask, bool or added, is expanded to (B, 1, T, S) once."""
    g, masks, settings = query.g, [], {"softmax_precision": 1}
    if attn_mask is not None:
        sizes = [query.shape[0], 1, query.shape[2], key.shape[2]]
        sizes = broadcast(attn_mask.shape, sizes)
        masks = [expand(attn_mask, sizes).name]
    if scale is not None:
        settings["scale"] = float(scale)
    name = g.op("Attention", query.name, key.name, value.name, *masks, is_causal=int(is_causal), **settings)
    return query.like(name, [*query.shape[:-1], value.shape[-1]])


@replaces(cache, "rotate")
def _rotate(rotate: Callable, x, cos, sin):
    """One node, which takes the heads side by side, (B, T, H d), and the angles of each row once, (B, T, R/2)."""
    if not isinstance(x, Value):
        return rotate(x, cos, sin)
    half, (rows, tokens, heads, width) = cos.shape[-1] // 2, x.shape
    angles = [cast(reshape(angle[..., half:], 1, tokens, half), x.kind) for angle in (cos, sin)]
    angles = [expand(angle, rows, tokens, half) for angle in angles]
    part = {"rotary_embedding_dim": 2 * half} if 2 * half < width else {}
    return reshape(
        reshape(x, rows, tokens, heads * width).op("RotaryEmbedding", *angles, num_heads=heads, **part), x.shape
    )
