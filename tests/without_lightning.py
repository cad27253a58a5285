"""Import it first in a new interpreter: `lightning_scape`'s modules then come without the Trainer's and Fabric's.

What needs none of these begins in half the time. Names come from their modules:
`lightning_scape.scape.config.ScapeConfig`.
"""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("lightning_scape")
package.__path__ = [str(Path(__file__).parents[1] / "lightning_scape")]
sys.modules["lightning_scape"] = package
