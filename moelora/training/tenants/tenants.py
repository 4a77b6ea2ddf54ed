"""Several adapters that train in one step, each as if it trained alone.

The factors are those of an `AdapterPool`, whose slots the operators read, so that what is trained
is served without a copy. Autograd computes the gradients of all slots at once; the rest is torch's,
by tenant: an optimizer of the tenant's slot, the norm of its gradients, its accumulated batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer

from moelora.adapters.columns import Layout
from moelora.adapters.layers import Adapter
from moelora.adapters.pool import AdapterPool
from moelora.adapters.reader import Given
from moelora.operators.sparse import freeze, set_sparse, warn_silently
from moelora.training.tenants.arguments import (
    check_accumulation,
    check_max_norm,
    check_new,
    check_pool,
    check_settings,
)
from moelora.training.tenants.files import save
from moelora.training.tenants.new import new_adapter
from moelora.training.tenants.optimizers import make_optimizer
from moelora.training.tenants.replicas import Replicas, content, shapes
from moelora.training.tenants.resumed import check_adam, of_tenant
from moelora.training.tenants.steps import Loss, Step, is_within
from moelora.training.tenants.tenant import Tenant, read_adapter, stacks_of
from moelora.training.tenants.updates import step

# Those that are not closed, by the id of their pool: gradients are beside the pool's factors.
_TRAINED: WeakValueDictionary[int, Tenants] = WeakValueDictionary()


class Tenants:
    """Trains adapters of an `AdapterPool` side by side.

    An adapter trains as if it were alone, whatever other tenants are in the step, join or leave:
    operators give the same bits. An error of a tenant stops only this tenant.

    Parameters
    ----------
    pool : AdapterPool
        With `w13_slices=1`, as PEFT stores gate and up, and without `shared_outer`. Its other
        adapters are served as they are. Its tensors of factors require gradients from now on.
    group : torch.distributed.ProcessGroup, optional
        Data-parallel ranks that train the same tenants, each with a pool of its own and a replica
        of the model; a tenant's rows may be on any of them. Absent: this process alone.

    Raises
    ------
    ValueError
        The pool has another layout, or other `Tenants` that are not closed; this process is not in
        the group.
    NotImplementedError
        The pool is of a model that processes share by tensors, by experts or by FSDP.
    RuntimeError
        The pools of the ranks differ in layers, ranks or dtypes.

    Notes
    -----
    Methods may be called from any thread and wait for one another, but not from a loss or an
    optimizer of a step. What adds, removes or updates a tenant writes to tensors that forwards
    read: a forward whose `step` comes after it has to be repeated, as `step` then says.

    With a group all ranks construct `Tenants`, and call `add`, `remove`, `step` and `save`, in the
    same order. These succeed on all or on none: if one rank fails, it raises what it would alone,
    and the others RuntimeError; if ranks differ in tenants, versions, factors or settings, all
    raise RuntimeError before anything changes. What ends one process, such as KeyboardInterrupt,
    ends the others by the group's timeout. Factors and optimizers stay equal bit for bit on all
    ranks, and a tenant's bits do not depend on other tenants.

    Examples
    --------
    >>> import torch, moelora
    >>> from moelora.training import Tenants
    >>> pool = moelora.AdapterPool(
    ...     [moelora.MoELayer("moe", 4, 32, 16)], 2, 8, dtype=torch.float32, w13_slices=1)
    >>> tenants = Tenants(pool)
    >>> _ = tenants.add("law", lr=1e-2), tenants.add("code", lr=1e-3, accumulation=4, max_norm=1.0)
    >>> x, w13, w2 = torch.randn(6, 32), torch.randn(4, 32, 32), torch.randn(4, 32, 16)
    >>> topk_weights, topk_ids = torch.rand(6, 4).topk(2)
    >>> out = moelora.fused_experts_lora(
    ...     x, w13, w2, topk_weights, topk_ids, **pool.layer("moe"),
    ...     token_lora_mapping=pool.mapping(["law"] * 3 + ["code"] * 3))
    >>> steps = tenants.step({"law": out[:3].square().mean(), "code": out[3:].square().mean()})
    >>> steps["law"].updated, steps["code"].updated
    (True, False)
    """

    def __init__(
        self, pool: AdapterPool, *, group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        self._replicas = None
        if group is None:
            self._open(pool)
            return
        self._replicas = Replicas(group)
        try:
            self._replicas.together("Tenants", lambda: self._open(pool), lambda _: shapes(pool))
        except BaseException:
            if _TRAINED.get(id(pool)) is self:
                self.close()
            raise

    def _open(self, pool: AdapterPool) -> None:
        check_pool(pool)
        if id(pool) in _TRAINED:
            raise ValueError("the pool has other Tenants already: use those, or close them before")
        _TRAINED[id(pool)] = self
        self.pool = pool
        self._tenants: dict[str, Tenant] = {}
        self._lock = RLock()
        self._unsettled = False  # a step has begun that did not end
        self._stacks = [stack for pair in stacks_of(pool).values() for stack in pair]
        for stack in self._stacks:
            stack.requires_grad_()
        self._freeze = finalize(self, freeze, self._stacks)
        self._freeze.atexit = False

    # -- tenants in and out --

    def add(
        self,
        name: str,
        source: str | Path | Mapping[str, Tensor] | None = None,
        *,
        rank: int = 8,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        resume: bool = False,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        sparse: bool = False,
        accumulation: int | None = None,
        max_norm: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tenant:
        """Begin to train an adapter, new or from a checkpoint. Others are not affected.

        Parameters
        ----------
        name : str
            A name that the pool does not have. The adapter is pinned in it.
        source : path or state dict, optional
            Where to begin, in any dialect that `AdapterPool.add` reads (`config` and `layout` as
            there). A pair of gate and one of up become one pair of both ranks. Absent: as PEFT
            initializes, A uniform within 1 / sqrt(in) (of an embedding 0) and B 0 (normal).
        rank, alpha, targets, generator
            Of a new adapter: its rank, its alpha (absent: twice the rank), the layers of the pool
            that it has factors of, by name or the end of it (absent: all), and what draws A. In a
            group the first rank's generator draws, and it alone advances.
        resume : bool
            Restore what `save` wrote beside the adapter: the optimizer with its learning rate,
            accumulated gradients, and `accumulation` and `max_norm` unless they are passed.
        lr, weight_decay : float
            Of `torch.optim.AdamW`.
        optimizer : callable, optional
            Makes another optimizer of the float32 parameters that it is called with, or of some of
            them. It must leave alone what has no gradient and is 0: the padding up to the ranks of
            the pool.
        sparse : bool
            Gradients and updates only of experts that the batches of an update have reached, by
            `torch.optim.SparseAdam`: others keep their factors and moments, which do not decay.
            While there is such a tenant, there are no gradients of whole stacks, but of the pairs
            of tenant and expert in a batch. Each of the other tenants has dense gradients during
            its update.
        accumulation : int, optional
            Batches for an update. Absent: 1, or what is resumed.
        max_norm : float, optional
            Norm to clip its gradients to. Absent: no clipping, or what is resumed.

        Returns
        -------
        Tenant

        Raises
        ------
        ValueError, FileNotFoundError
            A checkpoint is refused as by `AdapterPool.add`, or an argument is not as above; or what
            is resumed has another shape, dtype or range than this tenant's.
        RuntimeError
            The pool is full, or `close` has been called; or ranks of the group differ in the
            checkpoint, the state that is resumed, or arguments.

        Notes
        -----
        What is refused leaves the pool as it was, unless `optimizer` raises or makes something
        else: its parameters are in the slot, for which another adapter may have been evicted.
        """
        self._check_outside("add")

        def check() -> None:
            self._check_open(name)
            check_new(rank, alpha, targets)
            check_settings(lr, weight_decay, optimizer, sparse)
            check_max_norm(max_norm)
            if accumulation is not None:
                check_accumulation(accumulation)
            if sparse:
                warn_silently()  # also of gradients in a folder
            if resume and not isinstance(source, (str, Path)):
                raise ValueError("resume=True needs the folder that save wrote")

        def begin(draws: torch.Generator | None) -> Tenant:
            saved = None
            if source is None:
                adapter = new_adapter(self.pool, rank, alpha, targets, draws)
            else:
                given = Given(name, source, config, layout)
                adapter, saved = read_adapter(self.pool, given, resume)
            make = partial(make_optimizer, sparse=sparse, lr=lr, weight_decay=weight_decay)
            if saved is not None and optimizer is None:
                with of_tenant(name):
                    check_adam(saved, make([torch.zeros(0, device="cpu")], None))
            with self._lock:
                self._recover()
                self._check_open(name)
                trainer = object()
                try:
                    self.pool._add(Given(name, adapter), trainer=trainer)
                    tenant = Tenant(name, self.pool, adapter, trainer)
                    tenant.optimizer = make(tenant.parameters(), optimizer)
                    if saved is not None:
                        with of_tenant(name):
                            tenant.restore(saved)
                    if accumulation is not None:
                        tenant.accumulation = accumulation
                    if max_norm is not None:
                        tenant.max_norm = max_norm
                except BaseException:
                    with self.pool._versions.lock:
                        if self.pool._versions.of_trainer(name, trainer) is not None:
                            self.pool.remove(name)
                    raise
                self._tenants[name] = tenant
                self._choose_gradients()
                return tenant

        if self._replicas is None:
            check()
            return begin(generator)
        facts: dict[str, object] = {"source": "a checkpoint"}
        if source is None:
            facts = {"source": "absent", "rank": rank, "alpha": alpha, "targets": targets}
        with self._lock:
            before = self._tenants.get(name)
            try:
                return self._replicas.add(
                    f"add of tenant {name!r}", check, facts, generator, begin, resume
                )
            except BaseException:
                if name in self._tenants and self._tenants[name] is not before:
                    self._remove(self._tenants[name])
                raise

    def _check_open(self, name: str) -> None:
        if _TRAINED.get(id(self.pool)) is not self:
            raise RuntimeError(f"tenant {name!r} cannot be added: these Tenants are closed")

    def _check_outside(self, method: str) -> None:
        """RuntimeError within a step of this thread."""
        if is_within(Tenants._step.__code__, self):
            raise RuntimeError(
                f"{method} is called by a loss or an optimizer within a step of the same Tenants: "
                "call it before the step or after it"
            )

    def _recover(self) -> None:
        """Finish what an interrupted call has left: drop an update that is not current, write one
        that is, drop the gradients of tenants that were stopped, and disable them. An interrupt may
        end this, too; the next call then does it again."""
        if not self._unsettled:
            return
        for tenant in self._tenants.values():
            tenant.settle()
        for tenant in self._tenants.values():
            if tenant.stopped is not None:
                tenant.drop()
                # Only after the step, of which a graph has saved the table of enabled adapters.
                if not tenant.ended:
                    tenant.disable()
                tenant.ended = True
        for stack in self._stacks:
            stack.grad = None
        self._unsettled = False

    def _choose_gradients(self) -> None:
        """Make gradients of stacks sparse as long as a tenant is. Those of other tenants are then
        made dense again, one tenant at a time."""
        set_sparse(self._stacks, any(tenant.is_sparse() for tenant in self._tenants.values()))

    def remove(self, name: str) -> None:
        """End the training of an adapter and free its slot. Save it before.

        KeyError if there is no such tenant, RuntimeError while a batch holds it; in a group, on all
        ranks, and no rank removes it.
        """
        self._check_outside("remove")
        with self._lock:
            self._recover()
            if self._replicas is not None:
                call = f"remove of tenant {name!r}"
                self._replicas.together(call, self[name].check_free, lambda _: {})
            self._remove(self[name])

    def _remove(self, tenant: Tenant) -> None:
        tenant.leave()
        del self._tenants[tenant.name]
        self._choose_gradients()

    def __getitem__(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise KeyError(f"no tenant {name!r}; there are {sorted(self._tenants)}")
        return self._tenants[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tenants

    def names(self) -> list[str]:
        """All tenants, in the order in which they came."""
        return list(self._tenants)

    def running(self) -> list[str]:
        """Those that are not stopped."""
        return [name for name, tenant in self._tenants.items() if tenant.stopped is None]

    def close(self) -> None:
        """End all training, as when the object is collected; the pool serves the adapters.

        In a group, each rank by itself.
        """
        self._check_outside("close")
        with self._lock:
            self._recover()
            self._tenants.clear()
            if _TRAINED.get(id(self.pool)) is not self:
                return  # closed before; the pool may have other Tenants by now
            del _TRAINED[id(self.pool)]
            self._freeze()

    # -- a step --

    def step(
        self, losses: Mapping[str, Loss], *, weights: Mapping[str, float] | None = None
    ) -> dict[str, Step]:
        """Backward of all losses at once, then an update of each tenant that is due.

        Parameters
        ----------
        losses : mapping
            Tenant -> the loss of its rows of the batch, a tensor of one element; or a function that
            computes it, whose exceptions stop only that tenant. Losses of stopped tenants are not
            looked at, so that a loop need not know who is. One that depends on rows of other
            tenants, as a router's auxiliary loss of the whole batch does, changes their gradients.
            In a group, of the tenants that have rows on this rank: none is a step, too.
        weights : mapping, optional
            In a group, tenant -> what its loss counts on this rank, such as the number of tokens
            that it is a mean of; absent, 1. The loss of the step is the weighted mean over the
            ranks that have one.

        Returns
        -------
        dict
            Tenant -> what happened to it, in a group the same on all ranks. A loss, a gradient or
            an update that is not finite (in the dtype of the pool), an exception of the loss
            function or of the optimizer, or a slot that the pool has given to others stop the
            tenant: its factors stay as they were before this step, its rows are those of the base
            model from now on, and no other tenant's bits change.

        Raises
        ------
        KeyError
            There is no such tenant.
        ValueError
            `losses` is no mapping; a loss is no real tensor of one element and no function, or
            requires no gradient; a weight is not above 0, or of a tenant without a loss.
        RuntimeError
            The backward raised, grad mode is `torch.inference_mode`, or a loss calls `step`. If the
            part of the graph that belongs to one loss raised, its tenant is named and stopped; the
            others, and all if the shared part raised, are as before the call: the batch may be
            repeated.
        NoSlot
            A RuntimeError, before anything: batches hold tenants that are due, and no slots can be
            freed for their next versions. Other tenants of the step keep their slots. If a batch of
            another thread takes a tenant or a slot during the step, the error comes after the
            backward, as other exceptions do.

        Notes
        -----
        An update is a new version of the adapter (`AdapterPool.version`). Batches that hold the one
        before finish with it, and the new one is in another slot, as after `AdapterPool.update`.

        After any other exception, such as KeyboardInterrupt, either all tenants have the factors
        and accumulated gradients of before the call, or all of them those of after it, as
        `Tenant.updates` and `pending` say; in the first case the moments of an optimizer may
        include the batch.

        Gradients that a backward outside of `step` has left in the pool's tensors are dropped.

        In a group, each call exchanges gradients, also of batches that are only accumulated: those
        of the experts that the rows of a tenant have reached on any rank, in the dtype of the pool.
        They are summed in float32, in the order of the ranks.

        Waits for the device three times: for the losses, for the norms of the tenants that are
        due, and for whether their updates are finite. With sparse gradients it waits once more,
        and the backward of each layer waits for its forward. Works under `torch.no_grad`, with
        losses that require gradients.
        """
        self._check_outside("step")
        with self._lock:
            self._recover()
            try:
                self._unsettled = True
                return self._step(losses, {} if weights is None else weights)
            finally:
                self._recover()

    def _step(self, losses: Mapping[str, Loss], weights: Mapping[str, float]) -> dict[str, Step]:
        return step(self.pool, self._stacks, self._tenants, losses, weights, self._replicas)

    # -- folders --

    def save(
        self,
        name: str,
        folder: str | Path,
        *,
        optimizer: bool = True,
        base_model: str | None = None,
    ) -> None:
        """Write a tenant as a PEFT folder.

        Parameters
        ----------
        name : str
            The tenant. One that is stopped has the factors of before it went wrong and no
            accumulated gradients; the moments of its optimizer may include the last batch.
        folder : path
            PEFT's two files go there, float32, which PEFT, `load_adapters` and engines read. In a
            group the first rank writes them, to its folder.
        optimizer : bool
            Write `training.json` and `training.safetensors` as well, for `add(..., resume=True)`;
            without it, old ones are removed.
        base_model : str, optional
            `base_model_name_or_path` of the configuration.

        Raises
        ------
        KeyError
            There is no such tenant.
        RuntimeError
            The pool has removed or replaced the adapter: its factors are gone; or ranks of the
            group differ in its factors, or in the state of an optimizer that is to be saved.
        ValueError
            The state of the optimizer has a value of a type that the files cannot hold, or the
            folder has the current one in it.
        OSError
            A file cannot be written, or the folder cannot be renamed (a mount point).

        Notes
        -----
        The folder is replaced as a whole: whenever the process ends, it is the old one or the new
        one. What else it has, such as README.md, stays.
        """
        self._check_outside("save")

        def read() -> tuple[Adapter, dict[str, Any] | None]:
            self._recover()
            tenant = self[name]
            return tenant.adapter(), tenant.state() if optimizer else None

        def write(adapter: Adapter, state: dict[str, Any] | None) -> None:
            layers, linears = self.pool.layers, self.pool.linears
            save(folder, adapter, state, layers, linears, base_model)

        if self._replicas is None:
            with self._lock:
                found = read()
            write(*found)
            return
        call, is_first = f"save of tenant {name!r}", self._replicas.is_first
        with self._lock:
            found = self._replicas.together(call, read, lambda both: content(self[name], *both))
            self._replicas.together(call, lambda: write(*found) if is_first else None, lambda _: {})
