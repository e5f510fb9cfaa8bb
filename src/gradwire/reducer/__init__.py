"""From "this gradient is ready" to "its average is back in .grad"."""

from gradwire.reducer.buckets.layout import BucketLayout, ParameterSpec
from gradwire.reducer.reducer import Reducer, ReducerOptions

__all__ = ["BucketLayout", "ParameterSpec", "Reducer", "ReducerOptions"]
