"""The laws of hooks, without the one that takes hundreds of steps."""

import torch

from gradwire.testing.laws import LAWS, Law, pays_back

SHORT_LAWS = tuple(law for law in LAWS if law is not pays_back)
"""For dtypes and sizes other than those in which a hook is checked by all laws."""


def laws_in(dtype: torch.dtype) -> tuple[Law, ...]:
    """All laws in float32. `tests/unit/hooks/test_feedback.py` has the long one in other dtypes."""
    return LAWS if dtype is torch.float32 else SHORT_LAWS
