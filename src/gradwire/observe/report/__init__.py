"""The report of a run: `gradwire report`. Rings in, one model out (`report_model.py`), shown by `render.py`. Without torch."""
