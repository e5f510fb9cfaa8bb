"""What tests of how gradients are reported share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradwire.reducer.intake.arrivals import Arrivals


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Starts a list of the parameters whose hooks call from now on."""

    def start() -> list[int]:
        seen: list[int] = []
        inner = Arrivals.called

        def called(self: Arrivals, index: int) -> Any:
            seen.append(index)
            return inner(self, index)

        monkeypatch.setattr(Arrivals, "called", called)
        return seen

    return start
