"""DDTree speculative decoding with a DFlash drafter, as a plugin for stock SGLang.

Importing this package imports neither SGLang nor torch, so that `ddtree --help` answers at once and
without them. SGLang loads the plugin through the entry points in pyproject.toml.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, kernels/, patches/ and launch/ are siblings of this folder; in an installed wheel they
# are below it. Python started in the checkout takes the package from there even where a wheel is
# installed too, so the checkout must be complete by itself.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))
