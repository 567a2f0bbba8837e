"""headrace: gated linear attention and delta-rule operators, native on CPUs.

``headrace.torch`` holds the operators for PyTorch, under the names that users of flash-linear-attention know,
``headrace.jax`` for JAX, ``headrace.numpy`` on arrays. Formulas: docs/math.md of the project.
"""

from headrace._core import implementations, version
from headrace._versions import require_core

__version__ = "0.1.0"
__all__ = ["implementations", "__version__"]

require_core(__version__, version())
