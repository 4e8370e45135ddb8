"""How many instructions the real compiler would make of a graph: an estimate, from the tiles of its operators.

The formula, and where its numbers come from (public documentation of the NeuronCore: 128 partitions; a matrix product
takes a stationary tile of 128 by 128 and a moving one of 128 by 512; a PSUM bank holds 512 float32 a partition, and
four banks can be read at once):

- a product of M x K and K x N: ceil(M/128) ceil(K/128) ceil(N/512), or with M and N exchanged, whichever is less;
- convolutions: the same, as the product of weights and patches;
- everything else that computes or moves: one instruction for 128 x 2048 elements of its larger side;
- attention: its two products for each head, and three passes over the scores; gathered rows: one for 128 rows;
- views: none. A collective: one.

It is calibrated against one thing only: FLUX.2-klein-4B compiled as a whole at 1280 px is known to compile (reports
from the field), and so must stay below the limit of 5,000,000. What the compiler fuses, unrolls or spills is not in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import fx

from neuron_sim.compile.graphs import Call, calls, dimensions, elements, is_view
from neuron_sim.location import NOWHERE, Location

PARTITIONS = 128
MOVING = 512
VECTOR = PARTITIONS * 2048
SCORE_PASSES = 3
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
_ROWS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index.Tensor", "aten::_unsafe_index.Tensor")


@dataclass(frozen=True)
class Estimate:
    """Instructions, estimated: in all, by kind, and the operator and line with most."""

    total: int
    products: int
    passes: int
    largest_op: str = ""
    largest_at: Location = NOWHERE


def estimate_instructions(graph_module: fx.GraphModule) -> Estimate:
    """An estimate of the instructions of a graph whose nodes carry `meta["val"]`. The formula: this module's text."""
    products = passes = 0
    by_place: dict[tuple[str, Location], int] = {}
    for call in calls(graph_module):
        tiles, swept = of_call(call)
        products, passes = products + tiles, passes + swept
        if tiles + swept:
            place = (call.op, call.where)
            by_place[place] = by_place.get(place, 0) + tiles + swept
    op, where = max(by_place, key=lambda place: by_place[place]) if by_place else ("", NOWHERE)
    return Estimate(products + passes, products, passes, op, where)


def of_call(call: Call) -> tuple[int, int]:
    """Instructions of one call: of the tensor engine, and of the engines that pass over elements."""
    op, given = call.op, call.inputs
    if not op.startswith("aten::"):
        return 0, 1 if op.startswith("_c10d_functional::") and "wait" not in op else 0
    if is_view(call.target):
        return 0, 0
    if op in _PRODUCTS and len(given) > max(_PRODUCTS[op]):
        left, right = (dimensions(given[place]) for place in _PRODUCTS[op])
        batch = math.prod(left[:-2])
        return batch * product_tiles(left[-2], left[-1], right[-1]), _sweep(call)
    if "scaled_dot_product" in op and len(given) >= 3:
        return _attention(call)
    if op == "aten::convolution":
        return _convolution(call)
    if op in _ROWS:
        return 0, max(_sweep(call), sum(math.ceil(math.prod(dimensions(t)[:-1]) / PARTITIONS) for t in call.outputs))
    return 0, _sweep(call)


def product_tiles(rows: int, inner: int, columns: int) -> int:
    """Instructions of one product, rows x inner by inner x columns."""
    deep = math.ceil(inner / PARTITIONS)
    one = math.ceil(rows / PARTITIONS) * math.ceil(columns / MOVING)
    other = math.ceil(columns / PARTITIONS) * math.ceil(rows / MOVING)
    return deep * min(one, other)


def _sweep(call: Call) -> int:
    sizes = [elements(tensor) for tensor in (*call.outputs, *_read(call))]
    return math.ceil(max(sizes, default=0) / VECTOR)


def _read(call: Call) -> tuple[torch.Tensor, ...]:
    # What a product or a gather reads is in its own term; anything else, a reduction above all, passes over it.
    return () if call.op in _PRODUCTS or call.op in _ROWS or call.op == "aten::convolution" else call.inputs


def _attention(call: Call) -> tuple[int, int]:
    query, key, value = (dimensions(tensor) for tensor in call.inputs[:3])
    heads = math.prod(query[:-2])
    tiles = product_tiles(query[-2], query[-1], key[-2]) + product_tiles(query[-2], key[-2], value[-1])
    scores = heads * query[-2] * key[-2]
    return heads * tiles, SCORE_PASSES * math.ceil(scores / VECTOR) + _sweep(call)


def _convolution(call: Call) -> tuple[int, int]:
    weight, out = dimensions(call.inputs[1]), dimensions(call.outputs[0])
    transposed, groups = call.argument(6, "transposed"), call.argument(8, "groups") or 1
    made = weight[1] if transposed else weight[0] // groups
    inner = (weight[0] // groups if transposed else weight[1]) * math.prod(weight[2:])
    return groups * out[0] * product_tiles(made, inner, math.prod(out[2:])), _sweep(call)
