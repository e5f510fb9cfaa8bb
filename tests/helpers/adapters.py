"""Groups behind adapters to torch and back."""

from gradwire.groups import C10dGroup, Group, GroupWrapper
from gradwire.interop import as_process_group


class ThereAndBack(GroupWrapper):
    """A C10dGroup over a torch process group over the group, which it closes too: operations in flight in it keep it alive."""

    def __init__(self, group: Group) -> None:
        super().__init__(C10dGroup(as_process_group(group), timeout=group.timeout))
        self.far = group

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        return self.inner.split(color, key)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self.far.close(timeout=0)
