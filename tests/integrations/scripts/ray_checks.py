"""examples/ray_train.py with workers that first train with torch's DDP and with gradwire's, and then as in the example, twice.

With `--local`, Ray's local mode: no Ray is started, each of the processes is a worker, and its checkpoint stays its own.
"""

import contextlib
import functools
import json
import runpy
import sys
from typing import Any


def checks(example: Any, directory: str, local: bool, config: dict[str, Any]) -> None:
    """In a worker. Ray sends it by value, so everything that it needs is in here."""
    import os

    import ray.train
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradwire as gw
    from gradwire import hooks
    from gradwire.errors import HookTypeError, UsageTypeError
    from gradwire.integrations import load_hook_states, save_hook_states
    from gradwire.integrations.ray import prepare_model

    feedback = hooks.chain(hooks.error_feedback(), hooks.cast(torch.bfloat16), hooks.mean())
    rank = dist.get_rank()
    said: dict[str, Any] = {
        "backend": dist.get_backend(),
        "group": type(gw.from_process_group(dist.group.WORLD)).__name__,
    }

    def start() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def train(model: nn.Module, *, save: str = "", load: str = "") -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if load:
            saved = torch.load(f"{load}/model-{rank}.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            load_hook_states([model], load)
        losses = []
        for step in range(3 if load else 0, 6):
            if step == 3 and save:
                save_hook_states([model], save)
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{save}/model-{rank}.pt"
                )
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = (model(x) - x[:, :4]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    stock = nn.parallel.DistributedDataParallel(start(), process_group=dist.new_group(backend="gloo"))
    said["stock"] = train(stock)
    said["gradwire"] = train(prepare_model(start()))
    said["mean"] = train(prepare_model(start(), hook=hooks.mean(), find_unused_parameters=True))
    said["compressed"] = train(prepare_model(start(), hook=feedback), save=f"{directory}/saved")
    dist.barrier()
    said["resumed"] = train(prepare_model(start(), hook=feedback), load=f"{directory}/saved")
    said["errors"] = []
    strategy = {"parallel_strategy_kwargs": {"find_unused_parameters": True}}
    for model, wrong in [(start(), {"hook": hooks.error_feedback()}), (start, {}), (start(), strategy)]:
        try:
            prepare_model(model, **wrong)
        except (HookTypeError, UsageTypeError) as error:
            said["errors"].append(str(error))

    example(config)
    if not local:
        dist.barrier()  # report() has returned where it was called: the file of another worker may still be on its way
        first = ray.train.get_checkpoint().path
        said["files"] = sorted(os.listdir(first))
        example({"checkpoint": first})
    with open(f"{directory}/rank-{rank}.json", "w") as file:
        json.dump(said, file)


class OneWorker:
    """A worker group of this process, as far as what gradwire adds to Ray's backend."""

    def execute(self, function: Any) -> None:
        function()
        raise LookupError("the rest needs Ray")


def without_ray() -> None:
    """Let `TorchTrainer` run its workers in processes that torchrun has started, over the backend that gradwire registers."""
    import ray.train
    import torch.distributed as dist

    from gradwire.integrations.ray import GradwireConfig

    config, scaling, init = GradwireConfig(), ray.train.ScalingConfig, dist.init_process_group
    with contextlib.suppress(LookupError):
        config.backend_cls().on_start(OneWorker(), config)
    ray.init = ray.shutdown = lambda **_: None
    ray.train.ScalingConfig = lambda **_: scaling(num_workers=0)
    dist.init_process_group = lambda backend: init(config.backend)  # Ray's own choice is gloo


if __name__ == "__main__":
    path, directory, *local = sys.argv[1:]
    if local:
        without_ray()
    main = runpy.run_path(path, run_name="example")["main"]
    main.__globals__["worker"] = functools.partial(checks, main.__globals__["worker"], directory, bool(local))
    sys.argv = [path, "--directory", f"{directory}/example"]
    main()
    if not local:
        print("last", main.__globals__["last_checkpoint"](f"{directory}/example"))
