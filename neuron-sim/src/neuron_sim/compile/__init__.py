"""`torch.compile(backend="neuron")`.

`backend` is what Dynamo calls; `graphdata` writes a graph down as data and `program` makes a callable of it; `store`
finds artifacts in memory and on disk; `record` remembers every graph for reports; `torch_private` holds what is private
in PyTorch.
"""
