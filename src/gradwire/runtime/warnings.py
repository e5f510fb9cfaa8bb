"""`warn_user`: a warning that is shown at the line of the program that called us, however deep we are."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_USERS = ("gradwire", "torch")


def warn_user(text: str) -> None:
    """Warn, at the innermost line that is neither ours nor torch's; at ours, if there is none, as in a thread of torch's engine.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_user("look out")
    >>> caught[0].category, str(caught[0].message)
    (<class 'RuntimeWarning'>, 'look out')
    """
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        if frame.f_back is None:
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
