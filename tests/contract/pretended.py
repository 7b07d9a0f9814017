"""A device that is pretended: tensors say that they are on cuda:0, and refuse to meet those of the host.

The host computes all of it. So a test without a GPU finds what a GPU would refuse: tensors of two devices in one
operation, and numpy that reads the device. Only Python's calls are seen, not what torch's own C++ does inside.
"""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda:0")
SAYS = {Tensor.device.__get__: DEVICE, Tensor.is_cuda.__get__: True}
READ = {"numpy", "__array__"}
PLAIN = {  # of every device alike: no tensor comes of them
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "requires_grad", "is_leaf", "is_sparse", "ndim")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, torch.is_complex),
}
MAY_MEET = {"copy_", "module_load", "swap_tensors", "backward", "__set__", "set_", "_has_compatible_shallow_copy_type"}
NO_TENSOR = {int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device}  # most arguments
INDEXED = {"__getitem__", "__setitem__"}  # by indices of the host, or by numbers


class Elsewhere(Tensor):
    """A tensor of the device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return called(function, args, kwargs or {})

    def __deepcopy__(self, memo):
        with torch._C.DisableTorchFunction():
            memo[id(self)] = copied = placed(self.detach().as_subclass(Tensor).clone()).requires_grad_(
                self.requires_grad
            )
            copied._is_param = getattr(self, "_is_param", False)
        return copied


class Pretended(TorchFunctionMode):
    """While it is entered, calls that name the device make tensors of it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return called(function, args, kwargs or {})


def placed(x: Tensor, there: bool = True) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Elsewhere if there else Tensor) if isinstance(x, Elsewhere) != there else x


def gathered(values, tensors: list) -> None:
    """Append the tensors in `values`."""
    for argument in values:
        if type(argument) in NO_TENSOR:
            continue
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            gathered(argument, tensors)
        elif isinstance(argument, dict):
            gathered(argument.values(), tensors)


def mapped(change, value):
    """`value` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(change, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [mapped(change, entry) for entry in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def target(name: str, args: tuple, kwargs: dict) -> bool | None:
    """Whether a call names the device or the host; None: neither."""
    if name in ("cpu", "cuda"):
        return name == "cuda"
    others = args[1:] if name in ("to", "type_as") else ()
    for argument in (kwargs.get("device"), *others):
        if isinstance(argument, Tensor):
            return isinstance(argument, Elsewhere)
        if isinstance(argument, (str, torch.device)):
            return str(argument).startswith("cuda")
    return None


def called(function, args: tuple, kwargs: dict):
    if function in PLAIN:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)
    name, tensors = getattr(function, "__name__", ""), []
    with torch._C.DisableTorchFunction():
        gathered(args, tensors)
        gathered(kwargs.values(), tensors)
        there, to = [isinstance(tensor, Elsewhere) for tensor in tensors], target(name, args, kwargs)
        if to is None and True not in there:  # the host alone: most calls
            return function(*args, **kwargs)
        if function in SAYS and there[0]:
            return SAYS[function]
        if name in READ and any(there):
            if not kwargs.get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return placed(args[0], False).numpy(force=True)
        if to is not None:
            here = lambda value: "cpu" if isinstance(value, (str, torch.device)) else value  # noqa: E731
            moves = name in ("to", "cuda", "cpu", "type_as")
            rest = (() if name in ("cuda", "cpu") else tuple(map(here, args[1:]))) if moves else args[1:]
            output = function(*args[:1], *rest, **{key: here(argument) for key, argument in kwargs.items()})
            if moves and there[0] != to and output is args[0]:  # as a real copy is: never the same object
                output = output.view_as(output) if output.requires_grad else placed(output, False).clone()
            return mapped(lambda tensor: placed(tensor, to), output)
        host = any(tensor.dim() for tensor, far in zip(tensors, there) if not far)
        if any(there) and host and name not in MAY_MEET and not (name in INDEXED and there[0]):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
        output = function(*args, **kwargs)
    far = there[0] if name == "copy_" else any(there)
    return mapped(placed, output) if far and output is not None and name != "tolist" else output


@contextmanager
def pretended():
    """Within, torch has the device, as far as this file knows it."""
    apply, swaps = nn.Module._apply, torch.__future__

    def swapped(self, change, recurse=True):
        before = swaps.get_swap_module_params_on_conversion()
        swaps.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, change, recurse)
        finally:
            swaps.set_swap_module_params_on_conversion(before)

    with pytest.MonkeyPatch.context() as patch, Pretended():
        patch.setattr(nn.Module, "_apply", swapped)
        patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        yield
