"""Communication hooks: what happens to a bucket on its way to the wire."""

from gradwire.hooks.as_torch import as_torch_hook
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Turn, Wrapped
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.combine import chain
from gradwire.hooks.dense import cast, mean, weighted_mean
from gradwire.hooks.feedback import error_feedback
from gradwire.hooks.gossip import gossip
from gradwire.hooks.outer import OuterHook
from gradwire.hooks.seldom import diloco, local_sgd, post_local_sgd, streaming_diloco

__all__ = [
    "BucketSpec",
    "CommHook",
    "GradBucket",
    "OuterHook",
    "Reduced",
    "Reduction",
    "Stage",
    "Turn",
    "Wrapped",
    "as_torch_hook",
    "cast",
    "chain",
    "diloco",
    "error_feedback",
    "gossip",
    "local_sgd",
    "mean",
    "post_local_sgd",
    "streaming_diloco",
    "weighted_mean",
]
