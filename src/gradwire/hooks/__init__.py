"""Communication hooks: what happens to a bucket on its way to the wire."""

from gradwire.hooks.as_torch import as_torch_hook
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Turn, Wrapped
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.combine import chain
from gradwire.hooks.dense import cast, mean, weighted_mean
from gradwire.hooks.feedback import error_feedback
from gradwire.hooks.hierarchical import hierarchical
from gradwire.hooks.low_rank import power_sgd
from gradwire.hooks.partition import by_size, masked, partition
from gradwire.hooks.schedule import after, every

__all__ = [
    "BucketSpec",
    "CommHook",
    "GradBucket",
    "Reduced",
    "Reduction",
    "Stage",
    "Turn",
    "Wrapped",
    "after",
    "as_torch_hook",
    "by_size",
    "cast",
    "chain",
    "error_feedback",
    "every",
    "hierarchical",
    "masked",
    "mean",
    "partition",
    "power_sgd",
    "weighted_mean",
]
