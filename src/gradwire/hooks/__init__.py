"""Communication hooks: what happens to a bucket on its way to the wire."""

from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.clip_noise import add_noise, clip
from gradwire.hooks.combinators.capture import capture
from gradwire.hooks.combinators.feedback import error_feedback
from gradwire.hooks.combinators.hierarchical import hierarchical
from gradwire.hooks.combinators.partition import by_size, masked, partition
from gradwire.hooks.combinators.schedule import after, every
from gradwire.hooks.composite import Composite, Wrapped
from gradwire.hooks.compressors.chunked import chunked_top_k
from gradwire.hooks.compressors.demo import decoupled_momentum
from gradwire.hooks.compressors.dgc import dgc
from gradwire.hooks.compressors.dion import dion
from gradwire.hooks.compressors.low_rank import power_sgd
from gradwire.hooks.compressors.quantized import quantize, sign
from gradwire.hooks.compressors.scaled import scaled_cast
from gradwire.hooks.compressors.sparse import random_k, threshold, top_k
from gradwire.hooks.dense import cast, chain, mean, reduce_scatter_mean, weighted_mean
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.periodic.diloco import diloco, sparse_loco, streaming_diloco, visible
from gradwire.hooks.periodic.local_sgd import gossip, local_sgd, post_local_sgd

__all__ = [
    "BucketSpec",
    "CommHook",
    "Composite",
    "GradBucket",
    "OuterHook",
    "Reduced",
    "Reduction",
    "Stage",
    "Trait",
    "Turn",
    "Wrapped",
    "add_noise",
    "after",
    "by_size",
    "capture",
    "cast",
    "chain",
    "chunked_top_k",
    "clip",
    "decoupled_momentum",
    "dgc",
    "diloco",
    "dion",
    "error_feedback",
    "every",
    "gossip",
    "hierarchical",
    "local_sgd",
    "masked",
    "mean",
    "partition",
    "post_local_sgd",
    "power_sgd",
    "quantize",
    "random_k",
    "reduce_scatter_mean",
    "scaled_cast",
    "sign",
    "sparse_loco",
    "streaming_diloco",
    "threshold",
    "top_k",
    "visible",
    "weighted_mean",
]
