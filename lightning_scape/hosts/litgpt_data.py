"""The Python standard library as bytes, for ``litgpt pretrain``: nothing to download, nothing to prepare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litgpt.data import DataModule

from lightning_scape.data import PythonSource, WindowLoader


@dataclass
class LitGPTPythonSource(DataModule):  # type: ignore[misc]
    """:class:`~lightning_scape.PythonSource` as a data module of LitGPT.

    In a configuration file: ``data: {class_path: lightning_scape.hosts.litgpt_data.LitGPTPythonSource}``. The model
    needs a vocabulary of at least 256. Tokens are bytes, so no tokenizer is needed to train. With ``tokenizer_dir:
    configs/byte_tokenizer``, which maps each byte to its value, a tokenizer lies beside each checkpoint, for ``litgpt
    generate``.

    The loader's position is part of LitGPT's checkpoints, so a resumed run goes on with the batch after the last one.
    """

    seed: int = 0
    """Seed of the training windows' offsets and order."""
    val_fraction: float = 0.05
    """Share of the files that is validation, in (0, 1)."""
    max_bytes: int | None = None
    """Use only so many bytes of whole files; null is the whole library, about 12 MB."""

    source: PythonSource | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **kwargs: Any
    ) -> None:
        """Called by LitGPT before any loader is asked for.

        Args:
            tokenizer: not used.
            batch_size: windows per rank and batch.
            max_seq_length: bytes per window that are predicted.
            kwargs: not used.

        Raises:
            ValueError: an argument of :class:`~lightning_scape.PythonSource` is outside its rule.
        """
        self.source = PythonSource(
            batch_size=batch_size,
            context_length=max_seq_length or 256,
            seed=self.seed,
            val_fraction=self.val_fraction,
            max_bytes=self.max_bytes,
        )

    def setup(self, stage: str = "") -> None:
        """Reads the corpus; the ranks are those of the process group, which Fabric has made by now."""
        self._connected().setup()

    def train_dataloader(self) -> WindowLoader:
        """Batches ``[b, T + 1]``, int64."""
        return self._connected().train_dataloader()

    def val_dataloader(self) -> Any:
        """The same, from the held-out files."""
        return self._connected().val_dataloader()

    def _connected(self) -> PythonSource:
        if self.source is None:
            raise RuntimeError(
                "`connect` must be called before `setup` and the loaders, as LitGPT does. Call it first."
            )
        return self.source
