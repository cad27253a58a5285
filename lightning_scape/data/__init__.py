"""Training data that needs no download: the Python files on this machine.

It stands in ``examples/python_source.py``, to which a link leads from here; a wheel holds the file itself.
"""

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
