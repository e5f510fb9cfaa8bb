"""Which parameters of a module are averaged, and which modules cannot be replicated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gradwire import errors
from gradwire.groups.base import Group
from gradwire.parallel.module_state import ModuleState
from gradwire.reducer import ParameterSpec
from gradwire.reducer.buckets.layout import plain_name
from gradwire.reducer.intake.intake import GradientIntake


def check_module(what: str, module: object) -> None:
    """Raise if `module` is not a module, before any attribute is accessed."""
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise errors.UsageTypeError(f"{what}(...): the model must be a torch.nn.Module, got {given}.")


def check_engine_thread(group: Group, parameters: list[nn.Parameter]) -> None:
    """Refuse a setup that would deadlock: a backward that waits in autograd's thread for a rank that needs the same thread."""
    if group.in_one_process and group.size > 1 and any(p.device.type == "cuda" for p in parameters):
        raise errors.UsageError(
            f"replicating a model on {parameters[0].device} over {group}: its ranks are threads of one process, whose autograd "
            "engine has one thread per CUDA device, so they would wait for each other forever. Use ranks in processes."
        )


def check_not_aborted(group: Group) -> None:
    """Raise the group's failure, with advice: a new model, unlike a forward, does not recover a group."""
    if isinstance(group.failure, errors.GroupAborted):
        error = errors.again(group.failure)
        error.add_note(
            "The group was aborted before this model was built on it. Call group.recover() on every rank first; the next forward "
            "of a model whose step failed does it too."
        )
        raise error


def check_hooked(
    state: ModuleState, names: Sequence[str], parameters: Sequence[nn.Parameter], intake: GradientIntake
) -> None:
    """Raise if the gradient of a parameter would stay local: it is another one than when the module was replicated, or it was
    converted and converted back, and so has another accumulator."""
    ours = dict(zip(names, parameters, strict=True))
    which = f"backward of a replicated model on rank {state.group.rank}: parameter"
    for full_name, parameter in state.module.named_parameters():
        name = plain_name(full_name)
        # While mixed precision has put others in place of them, these are not leaves.
        if name in ours and parameter is not ours[name] and parameter.is_leaf:
            raise errors.LayoutError(
                f"{which} {name} has been replaced since the model was replicated, so its gradient is not averaged. Replace "
                "parameters first, then replicate."
            )
    if intake.hooks is not None and (displaced := intake.hooks.displaced()):
        raise errors.LayoutError(
            f"{which} {', '.join(names[i] for i in displaced)} was converted to another dtype or device, and back, since the model "
            "was replicated, so its gradient is not averaged. Convert parts of a model first, then replicate."
        )


def trainable_parameters(
    module: nn.Module, ignore: Collection[str]
) -> tuple[list[str], list[nn.Parameter], list[ParameterSpec]]:
    """Names, tensors and specs of the parameters that get a gradient. Raises for a module that cannot be replicated."""
    refuse_dtensors("replicating", module, ignore)
    refuse_meta_tensors(module, ignore)
    names, parameters, specs = [], [], []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise errors.UsageRuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
                f"pass to correctly initialize the modules. Uninitialized: {name}."
            )
        if parameter.requires_grad and name not in ignore:
            owner = module.get_submodule(name.rpartition(".")[0])
            sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
            names.append(plain_name(name))
            parameters.append(parameter)
            specs.append(ParameterSpec.of(names[-1], parameter, sparse=sparse))
    if not parameters:
        raise errors.UsageRuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient."
        )
    return names, parameters, specs


def refuse_meta_tensors(module: nn.Module, ignore: Collection[str]) -> None:
    """Raise if parameters or buffers have no memory."""
    found = _listed(module, ignore, lambda tensor: tensor.is_meta)
    if found:
        raise errors.UsageRuntimeError(
            f"replicating {type(module).__name__}: {found} are on the meta device and have no values. Allocate them first "
            "with model.to_empty(device=...) and initialize them, or load a checkpoint with load_state_dict(..., assign=True)."
        )


def refuse_dtensors(doing: str, module: nn.Module, ignore: Collection[str]) -> None:
    """Raise if parameters or buffers are sharded over ranks, which is another kind of parallelism."""
    tensors = sys.modules.get("torch.distributed.tensor")  # if it was never imported, there are no DTensors
    if tensors is None:
        return
    found = _listed(module, ignore, lambda tensor: isinstance(tensor, tensors.DTensor))
    if found:
        raise errors.UsageTypeError(
            f"{doing} {type(module).__name__}: {found} are DTensors, from fully_shard or parallelize_module, but buckets "
            "hold plain tensors. To average over replicas of a sharded model, call fully_shard with a 2-D device mesh; "
            "interop.as_fsdp_hook uses a gradwire hook there. Parameters in `ignore` (DDP: "
            "_set_params_and_buffers_to_ignore_for_model) are skipped."
        )


def _listed(module: nn.Module, ignore: Collection[str], unfit: Callable[[Tensor], bool]) -> str:
    named = [*module.named_parameters(), *module.named_buffers()]
    names = [name for name, tensor in named if name not in ignore and unfit(tensor)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
