"""What others import from the native backend's compiler; the names that need no compiler yet."""

_model_name: str | None = None


def set_model_name(name: str | None) -> None:
    """Name the model that is compiled next, for the cache and for reports."""
    global _model_name
    _model_name = name


def get_model_name() -> str | None:
    """The name set last."""
    return _model_name
