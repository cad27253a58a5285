"""Training data that needs no download: the Python files on this machine."""

from lightning_scape.data.python_source import (
    END_OF_FILE,
    VOCABULARY,
    Corpus,
    PythonSource,
    Shard,
    TrainingWindows,
    ValidationWindows,
    WindowLoader,
    read_corpus,
)

__all__ = [
    "END_OF_FILE",
    "VOCABULARY",
    "Corpus",
    "PythonSource",
    "Shard",
    "TrainingWindows",
    "ValidationWindows",
    "WindowLoader",
    "read_corpus",
]
