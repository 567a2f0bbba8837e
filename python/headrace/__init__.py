"""headrace: gated linear attention and delta-rule operators, native on CPUs.

``headrace.torch`` holds the operators for PyTorch, under the names that users of flash-linear-attention know;
``headrace.numpy`` the same operators on arrays. Formulas: docs/math.md of the project.
"""

from headrace._core import implementations

__version__ = "0.1.0"
__all__ = ["implementations", "__version__"]
