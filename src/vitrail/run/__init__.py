"""Ranks, devices and pipelines: what turns a sharded model into pictures."""
