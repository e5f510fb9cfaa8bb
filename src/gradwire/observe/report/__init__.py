"""The report of a run: `gradwire report`. Rings in, one model out (`report_model.py`), which `render.py` turns into a page
and into lines. Without torch."""
