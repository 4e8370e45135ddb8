"""The only layer that changes a model: shards its weights, in memory or while they load, and guards the result."""

from .entry import apply_tensor_parallel, enable_parallelism, from_pretrained
from .sharded import Sharding, is_sharded, sharding_of

__all__ = [
    "Sharding",
    "apply_tensor_parallel",
    "enable_parallelism",
    "from_pretrained",
    "is_sharded",
    "sharding_of",
]
