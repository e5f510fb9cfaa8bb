"""`TrainedState`: a model, its optimizer, its hook's states and what else was registered, on one member: all that is saved, or sent
to a member that joins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.elasticity.deal import Deal, fixed_hash
from gradwire.elasticity.state import checksum
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.groups.threads_group import ThreadGroup
from gradwire.hooks.base import CommHook, Trait
from gradwire.parallel.divergence import DivergenceSchedule, digest
from gradwire.parallel.replicate import replicate
from gradwire.policies import Buckets, Buffers, Graph, NonFinite

AT_ONCE = ("hook", "owners", "script")
"""What a member needs of the state to take part in a step."""


class TrainedState:
    """What one member of a run trains."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        hook: CommHook | None,
        data: Deal | None,
        graph: Graph,
        buckets: Buckets | None,
    ) -> None:
        if data is not None and hook is not None and Trait.WEIGHS in hook.traits:
            raise UsageError(
                f"gw.elastic(hook={hook!r}): slots are of one size, and their sum is divided by their number. Use mean() instead."
            )
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.script: dict[str, object] = {"hook=, graph= or buckets=": f"{hook!r} {graph} {buckets!r}"}
        """What is the same on all members, by name."""
        self._parameters = list(model.parameters())
        self._buffer_names = frozenset(name for name, _ in model.named_buffers())  # a first forward may make more
        self.registered: dict[str, Any] = {}
        self.committed = 0
        """How many steps are known to be committed."""
        self._members: tuple[str, ...] = ()
        self._owners: tuple[str, ...] = ()
        """Who computes which slot."""
        self._saved_owners: list[int] = []
        """The ranks that had the slots in the run that this one continues."""
        self.group: Group = ThreadGroup.world(1)[0]
        self.replica = replicate(
            model,
            group=self.group,
            hook=hook,
            buckets=buckets or Buckets(from_start=True),
            graph=graph,
            buffers=Buffers.NEVER,
            nonfinite=NonFinite.PASS,
        )
        self._averaged = frozenset(self.replica.parameters)
        self.replica.reducer.order.limits = None  # buckets depend on the model alone, so all members have the same
        self.replica.divergence = DivergenceSchedule(None)

    @property
    def digest(self) -> int:
        """Of the bits of all parameters. On the CPU a checksum takes a quarter of the time or less."""
        of = lambda p: checksum(p) if p.device.type == "cpu" else int(digest(p))  # noqa: E731
        return fixed_hash(*((p.dtype, *p.shape, of(p)) for p in self.replica.parameters))

    @property
    def _script(self) -> dict[str, object]:
        """What a member that joins must have in common with the others before it takes part in their reductions."""
        names = {p: name for name, p in self.model.named_parameters()}
        stepped = [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        parameters = [(names[p], p) for p in self.replica.parameters]
        buffers = [(name, one) for name, one in self.model.named_buffers() if name in self._buffer_names]
        model = fixed_hash(*((name, t.dtype, *t.shape) for name, t in [*parameters, *buffers]))
        optimizer = fixed_hash(type(self.optimizer).__name__, stepped)
        return {**self.script, "model": model, "optimizer": optimizer, "data=": self.data and self.data.facts}

    @property
    def unaveraged(self) -> str | None:
        """A parameter with a gradient that is not averaged: when the run was made it required none, or was not there."""
        every = (*self._parameters, *(p for group in self.optimizer.param_groups for p in group["params"]))
        late = next((p for p in every if p.requires_grad and p.grad is not None and p not in self._averaged), None)
        names = {} if late is None else {p: name for name, p in self.model.named_parameters()}
        return None if late is None else names.get(late, "a parameter")

    @property
    def remembers(self) -> bool:
        """Whether members may owe something to the average."""
        return Trait.REMEMBERS in self.replica.runner.hook.traits

    def state_dict(self) -> dict[str, Any]:
        model, here = self.model.state_dict(), [one for one in self._members if one in self._owners]  # who computes
        return {
            "committed": self.committed,
            "model": model,
            "versions": getattr(model, "_metadata", {}),
            "optimizer": self.optimizer.state_dict(),
            "registered": {name: one.state_dict() for name, one in self.registered.items()},
            "hook": self.replica.runner.state_dict(),
            "slots": [here.index(owner) for owner in self._owners],
            "data": None if self.data is None else list(self.data.facts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["registered"].keys() != self.registered.keys():
            known, named = (", ".join(sorted(names)) or "nothing" for names in (state["registered"], self.registered))
            raise UsageError(
                f"the state of a run with register= of {known}, and here it is of {named}: register the same."
            )
        theirs, ours = state.get("data"), self.data and list(self.data.facts)
        if theirs and ours and theirs[0 if self.remembers else 1 :] != ours[0 if self.remembers else 1 :]:
            raise UsageError(
                f"the state of a run with data of (slots, global batch, seed, samples) {theirs}, and here they are {ours}: a step "
                "would have other samples. Pass the same; for other data begin a new run, with the model of this one."
            )
        model = OrderedDict(state["model"])
        model._metadata = state["versions"]  # type: ignore[attr-defined]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_as_saved(state["optimizer"]["state"], model)
        for name, one in self.registered.items():
            one.load_state_dict(state["registered"][name])
        if "hook" in state:
            self.replica.runner.restore(state["hook"], rank=state["hook"]["rank"])  # also what that rank owes
        self.committed = state["committed"]
        self._saved_owners = state.get("slots", [])

    def _load_as_saved(self, saved: Mapping[int, Mapping[str, Any]], model: Mapping[str, Tensor]) -> None:
        """Tensors of the optimizer, of which torch makes no copies, and changes the dtype to that of the parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            here, before = self.optimizer.state.get(parameter, {}), model.get(names[parameter])
            same = before is not None and before.dtype == parameter.dtype
            for key, value in saved.get(number, {}).items():
                if isinstance(now := here.get(key), Tensor):
                    here[key] = value.to(now.device, value.dtype if same else now.dtype, copy=True)

    def _travelling(self) -> dict[str, Any]:
        saved = (state := self.state_dict())["hook"]
        mine = {"buffers": dict(self.model.named_buffers()), "owners": self._owners}  # also those that are not saved
        shared = {**saved, "state": self.replica.hook.shared(saved["state"]), "owed": {}}
        return {**state, "hook": shared, "script": self._script, **mine}

    def _rest(self) -> dict[str, Any]:
        return {name: part for name, part in self._travelling().items() if name not in AT_ONCE}

    def _arrive(self, state: Mapping[str, Any]) -> None:
        theirs = state.get("script", mine := self._script)
        if wrong := [name for name, value in mine.items() if value != theirs[name]]:
            raise UsageError(
                f"gw.elastic(): the others train with another {', '.join(wrong)} than this process, which cannot join them. "
                "Start the script that they have, with the same data."
            )
        self._owners = state.get("owners", self._owners)
        if "model" not in state:
            return self.replica.runner.restore(state["hook"], rank=state["hook"]["rank"])
        committed = self.committed
        self.load_state_dict(state)
        self.committed = committed
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        return None
