"""Communication hooks: what happens to a bucket on its way to the wire."""

from gradwire.hooks.as_torch import as_torch_hook
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Turn, Wrapped
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.combine import chain
from gradwire.hooks.dense import cast, mean, weighted_mean
from gradwire.hooks.dgc import dgc
from gradwire.hooks.feedback import error_feedback
from gradwire.hooks.sparse import threshold, top_k
from gradwire.hooks.subset import random_k

__all__ = [
    "BucketSpec",
    "CommHook",
    "GradBucket",
    "Reduced",
    "Reduction",
    "Stage",
    "Turn",
    "Wrapped",
    "as_torch_hook",
    "cast",
    "chain",
    "dgc",
    "error_feedback",
    "mean",
    "random_k",
    "threshold",
    "top_k",
    "weighted_mean",
]
