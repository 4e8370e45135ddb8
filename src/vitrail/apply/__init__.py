"""The only layer that changes a model: shards its weights, in memory or while they load, and guards the result.

`vitrail.apply.entry` has the public ways in.
"""
