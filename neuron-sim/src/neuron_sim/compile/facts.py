"""What a call of an operator breaks, seen from its tensors without memory: the same questions as the core asks in eager
mode, for calls that are not run.
"""

from collections.abc import Iterator

import torch

from neuron_sim.compile.graphs import Call
from neuron_sim.profiles import Profile

_MASKS = (torch.bool, torch.uint8)
_INDEXING = ("aten::index.Tensor", "aten::_unsafe_index.Tensor")
_FORMATS = (torch.contiguous_format, torch.preserve_format)


def of_call(call: Call, profile: Profile) -> Iterator[tuple[str, str]]:
    """The rules that a call breaks in eager mode and in a graph alike, each with its detail."""
    # What PyTorch makes of `.item()` where it can keep it on the device.
    is_number = call.op.startswith("prims::convert_element_type") and all(t.dim() == 0 for t in call.outputs)
    for tensor in call.outputs:
        # Where a dtype comes from, and not every place that it then passes through.
        if (
            is_dtype(tensor, torch.float64)
            and not any(is_dtype(t, torch.float64) for t in call.inputs)
            and not is_number
        ):
            yield "float64", ""
        if tensor.dtype.is_complex and not any(t.dtype.is_complex for t in call.inputs):
            yield "complex", str(tensor.dtype)
    memory_format = call.kwargs.get("memory_format")
    if memory_format not in (None, *_FORMATS) and call.chooses_format:
        yield "memory_format", str(memory_format).removeprefix("torch.")
    if number := _number_beyond_int32(call):
        yield "int64", number
    for case in profile.rules["untested"].cases:
        if case.op == call.op and _matches(call, case.argument, case.equals, case.dimensions):
            yield "untested", case.detail


def is_attention(op: str) -> bool:
    """Whether an operator is a fused attention."""
    return op.startswith("aten::") and "scaled_dot_product" in op


def dynamic(call: Call, exempt: bool, in_graph: bool = True) -> str | None:
    """Why a call's result has no fixed shape, or None.

    In a graph (`in_graph`) a size that was computed is one too; in eager mode the host has read it by then.
    """
    depends = f"the shape of what {call.op} returns depends on values"
    if call.op == "aten::_local_scalar_dense":
        return f"what {call.op} returns is a number that the host must read"
    if in_graph and any(is_symbolic(t) for t in call.outputs) and not any(is_symbolic(t) for t in call.inputs):
        return depends
    if exempt or torch.Tag.dynamic_output_shape not in call.target.tags:
        return None
    if call.op in _INDEXING:
        return depends if any(t.dtype in _MASKS for t in call.inputs[1:]) else None
    names = [argument.name for argument in call.target._schema.arguments]
    if "output_size" in names:
        return depends if call.argument(names.index("output_size"), "output_size") is None else None
    return depends


def is_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor of the device has this dtype."""
    # Python's numbers become float64 scalars of the host, which are inputs of a program, not tensors of the device.
    return tensor.dtype == dtype and not (tensor.dim() == 0 and tensor.device.type == "cpu")


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether a size of a tensor is not fixed."""
    return any(not isinstance(size, int) for size in tensor.shape)


def _number_beyond_int32(call: Call) -> str | None:
    """The first number that does not fit into 32 bits, where an int64 tensor meets it. Sizes are no numbers."""
    if not any(t.dtype == torch.int64 for t in (*call.inputs, *call.outputs)):
        return None
    for place, argument in enumerate(call.target._schema.arguments):
        value = call.argument(place, argument.name)
        is_number = str(argument.type) in ("number", "Tensor", "Optional[number]")
        if is_number and isinstance(value, int) and not -(2**31) <= value < 2**31:
            return str(value)
    return None


def _matches(call: Call, place: int, equals: str | None, dimensions: int | None) -> bool:
    if place >= len(call.args):
        return False
    argument = call.args[place]
    if dimensions is None:
        return str(argument).lower() == equals
    return isinstance(argument, torch.Tensor) and argument.dim() == dimensions
