"""Communication hooks: what happens to a bucket on its way to the wire."""

from gradwire.hooks.as_torch import as_torch_hook
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Turn, Wrapped
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.combine import chain
from gradwire.hooks.decoupled import decoupled_momentum
from gradwire.hooks.dense import cast, mean, reduce_scatter_mean, weighted_mean
from gradwire.hooks.dgc import dgc
from gradwire.hooks.feedback import error_feedback
from gradwire.hooks.hierarchical import hierarchical
from gradwire.hooks.partition import by_size, masked, partition
from gradwire.hooks.schedule import after, every
from gradwire.hooks.quantized import quantize, sign
from gradwire.hooks.scaled import scaled_cast
from gradwire.hooks.shaping import add_noise, clip
from gradwire.hooks.sign_sgd import SignSGD
from gradwire.hooks.sparse import threshold, top_k
from gradwire.hooks.subset import random_k

__all__ = [
    "BucketSpec",
    "CommHook",
    "GradBucket",
    "Reduced",
    "Reduction",
    "SignSGD",
    "Stage",
    "Turn",
    "Wrapped",
    "after",
    "add_noise",
    "as_torch_hook",
    "by_size",
    "cast",
    "chain",
    "clip",
    "decoupled_momentum",
    "dgc",
    "error_feedback",
    "every",
    "hierarchical",
    "masked",
    "mean",
    "partition",
    "quantize",
    "sign",
    "random_k",
    "reduce_scatter_mean",
    "scaled_cast",
    "threshold",
    "top_k",
    "weighted_mean",
]
