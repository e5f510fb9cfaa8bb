"""Warm rank processes: kept between calls, because importing torch takes seconds.

A worker waits for a job (usually a function, and how to build its rank's group), runs it, reports the result, closes its group when
every rank is done, looks for leftovers and waits for the next job. What outcomes mean is decided in `testing/ranks.py`.
"""
