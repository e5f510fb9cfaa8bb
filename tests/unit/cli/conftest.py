"""What the tests of commands share."""

from __future__ import annotations

import os

# oneDNN writes every kernel that it makes to /tmp/perf-PID.map, keeps the file open and leaves it there. It asks once, when
# the first kernel is made, so this cannot be a fixture.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
