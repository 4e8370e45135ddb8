"""The exceptions and warnings of neuron-sim."""


class NeuronSimError(RuntimeError):
    """Base of what neuron-sim raises itself. What PyTorch raises on its behalf (an index out of range, memory that is
    full) keeps the type that the real device gives it."""


class ConfigurationError(NeuronSimError, ValueError):
    """A variable, instance type or profile that cannot be used. Says what was found and what is accepted."""


class NeuronRuleError(NeuronSimError):
    """The rulebook refuses an operation. Carries the real device's words, then the line and what to do about it.

    `rule` is the name of the rule.
    """

    rule = ""


class NeuronRuleTypeError(NeuronRuleError, TypeError):
    """The same, where the real device raises a TypeError."""


class NeuronSimWarning(UserWarning):
    """The simulated device is not there, or not as asked, and why."""


class NeuronRuleWarning(UserWarning):
    """The real device would do this silently: convert a dtype, run an operator on the host. Told once a line."""
