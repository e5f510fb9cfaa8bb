"""User-defined buffer synchronization: `hook(state, {name: buffer})`, called before or after forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from gradwire.errors import UsageTypeError
from gradwire.parallel.replica import Replica


class BufferHook:
    """One registered buffer hook. Futures it returns are waited for at the end of backward."""

    BEFORE: ClassVar[str] = "PRE_FORWARD"
    AFTER: ClassVar[str] = "POST_FORWARD"

    def __init__(self, hook: Callable[..., Any], state: Any, location: Any = None) -> None:
        if not callable(hook):
            raise UsageTypeError(f"buffer hook: {hook!r} is not callable. Pass a function hook(state, named_buffers).")
        self.buffer_comm_hook = hook
        self.buffer_comm_hook_state = state
        self.buffer_comm_hook_location = location
        self.place = self.AFTER if location is None else getattr(location, "name", str(location))

    def run(self, replica: Replica) -> None:
        """Call the hook and keep its futures."""
        futures = self.buffer_comm_hook(self.buffer_comm_hook_state, replica.state.named_buffers())
        if futures is not None:
            replica.reducer.wait_at_end.extend(list(futures))
