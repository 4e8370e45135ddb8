"""What a program did on the simulated device, written at its end, and what that means for a real one.

`recorder` collects in the program's process, `merged` puts the processes of one run together, `verdict` judges,
`text` shows, `command` is `neuron-sim report`.
"""
