"""The process groups that scripts see: torch's own functions, DTensor and functional collectives call them.

`register` makes the backend `shoal` known to `torch.distributed`, whose default group is the cell then: rank is the
coordinate, size the processes of a cell. The objects last as long as the process, so compiled graphs and meshes keep
them while worlds come and go; the hub has what changes. Here calls are translated and nothing is decided. Torch calls
a group by the names of its methods: `dist.all_reduce` and the like from Python, functional collectives from C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch.distributed as dist
from shoal_protos.errors import UserError
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

from shoal.cells import collectives
from shoal.cells.call import Op
from shoal.cells.collectives import Collective, root_within
from shoal.cells.hub import CellHub, Doing, GroupPlace

BACKEND = "shoal"


class CellWork(dist.Work):
    """Collectives that a script waits for."""

    def __init__(self, doing: Sequence[Doing], results: object) -> None:
        super().__init__()
        self._doing, self._results = doing, results

    def wait(self, *_: object) -> bool:
        """Blocks until all are done or answered. No time-out: members that are gone end it."""
        for one in self._doing:
            one.finish()
        return True

    def is_completed(self) -> bool:
        return all(one.is_done for one in self._doing)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._results

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future


_ProcessGroup: Any = dist.ProcessGroup
"""Its methods have overloads of which torch uses one."""


class _OneInAProcess:
    """What is itself in a copy of a layer that has it, which is at the same place."""

    def __deepcopy__(self, _: object) -> Self:
        return self


class CellGroup(_ProcessGroup, _OneInAProcess):  # type: ignore[misc]
    """A group of a cell's coordinates."""

    def __init__(self, hub: CellHub, coordinates: Sequence[int], name: str) -> None:
        """`coordinates`: of its members, by rank. `name`: the same on all of them."""
        self.place = GroupPlace(hub, coordinates, name)
        super().__init__(self.place.me, self.place.size)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    def getGroupName(self) -> str:
        """As torch's C++ asks for it."""
        return self.place.name

    @property
    def group_name(self) -> str:
        """As torch's Python asks for it."""
        return self.place.name

    def _run(self, made: Sequence[Collective], results: object) -> CellWork:
        return CellWork([self.place.begin(one) for one in made], results)

    @property
    def _who(self) -> tuple[int, int]:
        return self.place.me, self.place.size

    # ---- sums

    def allreduce(self, tensors: Sequence[Tensor], opts: object = None) -> CellWork:
        op = _op(opts)
        return self._run([collectives.all_reduce(*self._who, one, op) for one in tensors], tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> CellWork:
        op, root = _op(opts), self._root(opts)
        return self._run([collectives.reduce(*self._who, one, op, root) for one in tensors], tensors)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: object = None
    ) -> CellWork:
        op, pairs = _op(opts), zip(outputs, inputs, strict=True)
        return self._run([collectives.reduce_scatter(*self._who, out, given, op) for out, given in pairs], outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: object = None) -> CellWork:
        return self.reduce_scatter([output], [self._cut(given)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: object = None
    ) -> CellWork:
        return self.reduce_scatter(outputs, [self._cut(one) for one in inputs], opts)

    # ---- moves

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: object) -> CellWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run([collectives.all_gather(*self._who, out, given) for out, given in pairs], outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: object
    ) -> CellWork:
        """`outputs`: by rank, of each input."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(self, output: Tensor, given: Tensor, *_: object) -> CellWork:
        return self.allgather([self._cut(output)], [given])

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: object) -> CellWork:
        return self.allgather([self._cut(one) for one in outputs], inputs)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> CellWork:
        root, given = self._root(opts), outputs or [[]] * len(inputs)
        pairs = zip(given, inputs, strict=True)
        return self._run([collectives.gather(*self._who, out, one, root) for out, one in pairs], outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> CellWork:
        root, given = self._root(opts), inputs or [[]] * len(outputs)
        pairs = zip(outputs, given, strict=True)
        return self._run([collectives.scatter(*self._who, out, one, root) for out, one in pairs], outputs)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> CellWork:
        root = self._root(opts)
        return self._run([collectives.broadcast(*self._who, one, root) for one in tensors], tensors)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: object) -> CellWork:
        return self._run([collectives.all_to_all(*self._who, outputs, inputs)], outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *_: object,
    ) -> CellWork:
        """Sizes: of the first dimension, by rank; empty where all are equal."""
        return self.alltoall(self._split(output, output_sizes), self._split(given, input_sizes))

    def barrier(self, *_: object, **__: object) -> CellWork:
        return self._run([collectives.barrier(*self._who)], None)

    # ---- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> CellWork:
        self._check_peer(peer)
        return self._run([collectives.send(peer, one, tag) for one in tensors], tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> CellWork:
        self._check_peer(peer)
        return self._run([collectives.receive(peer, one, tag) for one in tensors], tensors)

    def recv_anysource(self, *_: object) -> CellWork:
        raise UserError("a message is awaited from any rank, which is not supported in a cell: name its source.")

    # ---- names that functional collectives and earlier versions of torch use

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- arguments

    def _root(self, opts: Any) -> int:
        return root_within(self.place.size, opts.rootRank)

    def _check_peer(self, peer: int) -> None:
        if root_within(self.place.size, peer) == self.place.me:
            raise ValueError(f"rank {peer} of a cell's process group sends a message to itself")

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Into equal parts, by rank."""
        if tensor.numel() % self.place.size or not tensor.is_contiguous():
            raise ValueError(
                f"a collective of a cell cuts a tensor of shape {tuple(tensor.shape)} into {self.place.size} equal "
                "parts; expected a contiguous one of which that is possible"
            )
        return tuple(tensor.detach().view(self.place.size, -1).unbind(0))

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        if not sizes:
            return self._cut(tensor)
        if len(sizes) != self.place.size or sum(sizes) != tensor.size(0):
            raise ValueError(
                f"all_to_all splits {tensor.size(0)} rows into {list(sizes)}; expected {self.place.size} numbers that "
                "add up to them"
            )
        return tuple(tensor.detach().split(list(sizes)))


_OPS = {getattr(dist.ReduceOp, op.name): op for op in Op if op is not Op.NONE}


def _op(opts: Any) -> Op:
    """Of the options of a collective. Raises `UserError`."""
    if opts is None:
        return Op.SUM
    given = getattr(opts, "reduceOp", opts)
    found = _OPS.get(getattr(given, "op", given))
    if found is None:
        raise UserError(f"a collective reduces by {given}, which is not supported in a cell.")
    return found


def register(hub: CellHub) -> None:
    """Makes the backend known. Its groups are of this hub."""

    def create(options: Any, _: object = None) -> CellGroup:
        coordinates = list(options.global_ranks_in_group) or list(range(options.group_size))
        return CellGroup(hub, coordinates, options.group_id)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def init(hub: CellHub) -> None:
    """Makes the cell the default group of `torch.distributed`. Nothing is sent."""
    register(hub)
    processes = hub.shape.processes
    dist.init_process_group(BACKEND, store=HashStore(), rank=hub.coordinate, world_size=processes)
