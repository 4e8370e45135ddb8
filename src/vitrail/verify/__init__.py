"""Is what is sharded right? Compared with the unsharded model, module by module."""
