"""What a rank of a test needs, imported by the server that it is forked from. See launcher.py."""

import gc

import hypothesis  # noqa: F401
import launcher  # noqa: F401
import lightning.pytorch
import litgpt  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.optim  # noqa: F401 - for Lightning's DDPStrategy, when it saves

import lightning_scape

torch.set_num_threads(1)
for name in lightning_scape.__all__:
    getattr(lightning_scape, name)  # imports the module that it lies in
gc.freeze()
