"""What tests of the intake share."""

from collections.abc import Callable

import pytest

from gradwire.reducer.intake.intake import GradientIntake


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Starts a list of the parameters that are the last of those that are counted together, since their hooks call."""

    def start() -> list[int]:
        seen: list[int] = []
        inner = GradientIntake.pop

        def pop(self: GradientIntake) -> list[int]:
            arrived = inner(self)
            seen.extend(arrived[-1:])
            return arrived

        monkeypatch.setattr(GradientIntake, "pop", pop)
        return seen

    return start
