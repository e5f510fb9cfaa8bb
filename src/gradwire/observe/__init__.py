"""What happens in a run: the flight recorder, and what is read from it.

`start(directory)` records this process until `stop()`. `gradwire run` does it for every rank that calls `gw.init()`.

>>> import tempfile, gradwire as gw
>>> with tempfile.TemporaryDirectory() as run:
...     gw.observe.start(run, rank=0, size=1)
...     gw.observe.mark("the data is loaded")
...     gw.observe.stop()
...     [(record.kind.name, record.label) for record in gw.observe.read_rings(run)[0].records]
[('MARK', 'the data is loaded')]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.runtime.lazy import lazy

if TYPE_CHECKING:
    from gradwire.observe.metrics import METRICS, Export, export, opentelemetry_metrics, opentelemetry_spans, prometheus
    from gradwire.observe.recording import mark, samples, start, stop
    from gradwire.observe.rings.ring import Record, Ring, read_ring, read_rings
    from gradwire.observe.run_warnings import RunWarning, read_warnings
    from gradwire.observe.stragglers.detect import Straggler, find_stragglers

__all__ = [
    "METRICS", "Export", "Record", "Ring", "RunWarning", "Straggler", "export", "find_stragglers", "mark", "opentelemetry_metrics",
    "opentelemetry_spans", "prometheus", "read_ring", "read_rings", "read_warnings", "samples", "start", "stop",
]  # fmt: skip
# Imported when first used: `gradwire run` needs modules of this package before it can start anything.
_NAMES = {
    "metrics": "METRICS Export export opentelemetry_metrics opentelemetry_spans prometheus",
    "recording": "mark samples start stop",
    "rings.ring": "Record Ring read_ring read_rings",
    "run_warnings": "RunWarning read_warnings",
    "stragglers.detect": "Straggler find_stragglers",
}
lazy(__name__, _NAMES)
