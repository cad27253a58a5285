"""Every Python that tests start runs this first, and imports Lightning in two thirds of the time.

Torchmetrics, and so Lightning, imports SciPy, matplotlib and transformers wherever they are installed. No test needs
what it does with them: it finds none of them. Whoever else imports them does.
"""

import sys
from importlib.metadata import PackageNotFoundError

HIDDEN = ("matplotlib", "scipy", "transformers")


class _BeforeTorchmetrics:
    """Finds nothing: it sees that torchmetrics is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchmetrics":
            sys.meta_path.remove(self)
            from lightning_utilities.core import imports

            version, available = imports._version, imports.package_available
            imports._version = lambda name: _refuse(name) if name in HIDDEN else version(name)
            imports.package_available = lambda name: name not in HIDDEN and available(name)


def _refuse(name):
    raise PackageNotFoundError(name)


sys.meta_path.insert(0, _BeforeTorchmetrics())
