# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group at work together: the rows of a merged call spread over them, and the kinds that split one row.

All ranks run the same fibers with the same seeds and reach the same calls in the same order. So only rows of outputs are exchanged. The
ranks are one mesh: rows x shard x (sequence or tensor). Those of one sequence or tensor group compute the same rows together; all others
compute rows of their own.

An exception on one rank becomes the same exception on all of them. So no rank waits in a collective for one that has left. In a joint call
(sequence, tensor, shard) that holds only if all ranks fail alike, as on a size that the model refuses. A rank that fails alone has left the
others in a collective. It must end, and the group with it.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.main_thread import OWN
from diffusion_worker.runner.model_call.call import ModelCall, merge, slice_rows
from diffusion_worker.runner.model_call.faults import RankFault, require_usable_rank
from diffusion_worker.runner.parallel.row_group import Packed, RowGroup

T = TypeVar("T")

Execute = Callable[[ModelCall, slice], Any]
# Prepares a call for a parallel kind; raises RequestError, the same on every rank, where its sizes do not allow that.
Prepare = Callable[[ModelCall], ModelCall]
# Decodes an image tile by tile over all ranks; None where it has a single tile.
DecodeTiles = Callable[[ModelCall, Execute], Any]

MESSAGE_BYTES = 2000
# Ranks that run the same code on the same sizes fail within milliseconds of each other.
SAME_FAILURE_S = 2.0
# Separates the parts of a failure on its way between ranks.
PART = "\x01"


class CallFailed(Exception):
    """Raised on every rank when a model call failed on one.

    `kinds` names the classes of that rank's error and of its causes. `refusal` is its RequestError; without one the message names the rank.
    """

    def __init__(self, message: str, refusal: RequestError | None = None, *, kinds: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.kinds = kinds


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Return the names of the classes of an error and of its causes, the error's first; those of the failed rank for CallFailed."""
    if isinstance(error, CallFailed):
        return error.kinds
    own = (type(error).__name__,)
    return own if error.__cause__ is None else own + kinds_of(error.__cause__)


class _Computed(NamedTuple):
    """The output of a call on this rank, and the rows of the whole call. `packed` has the rows for the others if they are spread."""

    output: Any
    rows: int
    packed: Packed | None


class Parallel:
    """A rank's membership in its group, with which it shares out calls. On GPUs the group uses NCCL and gloo, on CPUs only gloo.

    `world` ranks form a mesh: `tensor`, `sequence` and `shard` are sizes of dimensions, and the dimension of rows gets what remains. The
    constructor joins the process group of all ranks.

    Raises:
        ValueError: `world` is not a multiple of the product of these sizes.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        device: torch.device,
        store: Store,
        timeout_s: float,
        tensor: int = 1,
        sequence: int = 1,
        shard: int = 1,
    ) -> None:
        if world % (tensor * sequence * shard):
            raise ValueError(f"{world} ranks are not a multiple of --tensor {tensor} x --sequence {sequence} x --shard {shard}")
        self.rank = rank
        self.world = world
        self.device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        self.everybody = RowGroup(rank, world, None)
        self.mesh = _mesh(device, world, tensor=tensor, sequence=sequence, shard=shard)
        self._rows = _row_group(rank, world, together=tensor * sequence)
        # Ranks that wait for each other inside a call are neighbours, by the order of the mesh's dimensions.
        joint = tensor * sequence * shard
        self._peers = range(rank // joint * joint, rank // joint * joint + joint)
        self._store = store
        self._joint_calls = 0
        self._together: dict[str, Prepare] = {}
        self._sharded: set[str] = set()
        self._tiled: dict[str, DecodeTiles] = {}

    def compute_together(self, component: str, prepare: Prepare) -> None:
        """Register a component whose forward the ranks of a sequence or tensor group run jointly.

        `prepare` checks and pads each call before that.
        """
        self._together[component] = prepare

    def collect_weights(self, component: str) -> None:
        """Mark a component whose forward collects its weights from the ranks of the shard dimension."""
        self._sharded.add(component)

    def decode_tiles(self, component: str, decode: DecodeTiles) -> None:
        """Spread the tiles of a component's decode from now on, instead of its rows."""
        self._tiled[component] = decode

    def run(self, calls: list[ModelCall], execute: Execute) -> Any:
        """Merge calls into one, let each rank compute a share of its rows by `execute`, and return the output of all rows.

        Raises:
            CallFailed: merging or computing failed on some rank; all ranks raise this. RequestError: the call was refused before any of it
                ran; all ranks raise this too. RankFault: this rank alone failed, and must end.
        """
        first = calls[0]
        sharded = first.component in self._sharded
        if first.method == "forward" and (sharded or first.component in self._together):
            prepare = self._together.get(first.component, _unchanged)
            call = self._built(lambda: prepare(merge(calls)), agreed=len(calls) > 1)
            return self._spread(lambda: call, self._jointly(execute), self._rows if first.component in self._together else self.everybody)
        if first.method == "decode" and first.component in self._tiled:
            call = self._built(lambda: merge(calls), agreed=len(calls) > 1)
            output = self._tiled[first.component](call, execute)
            return output if output is not None else self._spread(lambda: call, execute, self.everybody)
        return self._spread(lambda: merge(calls), execute, self.everybody)

    def _built(self, build: Callable[[], ModelCall], *, agreed: bool) -> ModelCall:
        """Return the result of `build`, a call in which ranks wait for each other.

        If `agreed`, all ranks have built it when this returns, or all raise CallFailed. Otherwise an error is raised as it is.
        """
        return self.agree(build) if agreed else build()

    def agree(self, run: Callable[[], T], *, size: Callable[[T], int] = lambda output: 0) -> T:
        """Return the result of `run`; raise `CallFailed` on all ranks if it raised on any, or if its `size` differs between ranks.

        All ranks call this together. An error of the device or of a collective becomes RankFault on this rank.
        """
        try:
            output, message, found = run(), "", 0
            found = size(output)
        except Exception as error:
            require_usable_rank(error)
            message, found = self._words(error), 0
            if self.world == 1:
                raise _failure(message) from error
        OWN.passed()
        if self.world > 1:
            # Without failures this costs one small collective. The lowest rank that failed has the greatest number.
            status = torch.tensor([self.world - self.rank if message else 0, found, -found])
            dist.all_reduce(status, dist.ReduceOp.MAX)
            failed, most, negated = status.tolist()
            least = -negated
            if failed:
                raise _failure(_message_of(self.world - failed, message))
            if most != least:
                raise CallFailed(f"expected rows of equal size on all ranks in a model's output, found {least} to {most} bytes")
        return output

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return each flag as set if it is set on any rank. All ranks call this with the same number of flags."""
        shared = torch.tensor(flags, dtype=torch.int32)
        if self.world > 1:
            dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [bool(flag) for flag in shared.tolist()]

    def _words(self, error: Exception) -> str:
        kinds = " ".join(kinds_of(error))
        if isinstance(error, RequestError):
            return PART.join((kinds, error.code, error.message))
        return PART.join((kinds, "", f"rank {self.rank}: {type(error).__name__}: {error}"))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _spread(self, build: Callable[[], ModelCall], execute: Execute, group: RowGroup) -> Any:
        """Run a call with its rows spread over the ranks of a group. All that may fail on one rank alone is done before they agree."""

        def compute() -> _Computed:
            call = build()
            if group.count == 1 or call.rows == 1 or call.whole:
                return _Computed(execute(call, slice(0, call.rows)), call.rows, None)
            mine = group.part(call.rows)
            output = execute(slice_rows(call, mine.start, mine.stop), mine)
            return _Computed(output, call.rows, group.pack(output, call.rows))

        found = self.agree(compute, size=lambda made: 0 if made.packed is None else made.packed.mine.shape[1])
        return found.output if found.packed is None else group.gather(found.output, found.packed, found.rows)

    def _jointly(self, execute: Execute) -> Execute:
        """Make `execute` safe for calls in which ranks wait for each other: an error becomes RankFault unless all of them fail alike."""
        self._joint_calls += 1

        def run(call: ModelCall, rows: slice) -> Any:
            try:
                return execute(call, rows)
            except Exception as error:
                require_usable_rank(error)
                self._require_same_failure(call, error)
                raise

        return run

    def _require_same_failure(self, call: ModelCall, error: Exception) -> None:
        """Exchange the words of an error, through the store, with the ranks in the same joint call. Return if all failed with these words.

        If one differs, or is silent for `SAME_FAILURE_S` seconds, a rank may hang in a collective, so raise RankFault.
        """
        words = f"{type(error).__name__}: {error}"
        keys = [f"failure-{self._joint_calls}-{peer}" for peer in self._peers]
        self._store.set(f"failure-{self._joint_calls}-{self.rank}", words)
        try:
            self._store.wait(keys, timedelta(seconds=SAME_FAILURE_S))
            alike = len({self._store.get(key) for key in keys}) == 1
        except dist.DistError:
            alike = False
        if not alike:
            others = f"another rank did not fail with these words within {SAME_FAILURE_S:g} s, so this rank ends"
            raise RankFault(Fault.COLLECTIVE, f"{call.component}: {words}; {others}") from error


def _unchanged(call: ModelCall) -> ModelCall:
    return call


def _mesh(device: torch.device, world: int, *, tensor: int, sequence: int, shard: int) -> DeviceMesh | None:
    """Return the mesh: rows x shard x tensor, or for a sequence rows x shard x ring x ulysses; None for rows alone."""
    rows = world // (tensor * sequence * shard)
    if tensor > 1:
        return init_device_mesh(device.type, (rows, shard, tensor), mesh_dim_names=("rows", "shard", "tensor"))
    if sequence > 1:
        return init_device_mesh(device.type, (rows, shard, 1, sequence), mesh_dim_names=("rows", "shard", "ring", "ulysses"))
    return init_device_mesh(device.type, (rows, shard), mesh_dim_names=("rows", "shard")) if shard > 1 else None


def _row_group(rank: int, world: int, *, together: int) -> RowGroup:
    """Return the group that shares out rows: a rank of each sequence or tensor group, whose ranks compute the same rows."""
    if together == 1:
        return RowGroup(rank, world, None)
    # Every rank has to take part in making every group.
    groups = [dist.new_group(list(range(place, world, together))) for place in range(together)]
    own = groups[rank % together]
    assert isinstance(own, dist.ProcessGroup), "torch has another value for a group without this rank"
    return RowGroup(rank // together, world // together, own)


def _failure(words: str) -> CallFailed:
    """Return the exception for a message of `_words`, made here or on another rank."""
    kinds, code, message = words.split(PART, 2)
    return CallFailed(message, RequestError(ErrorCode(code), message) if code else None, kinds=tuple(kinds.split()))


def _message_of(rank: int, mine: str) -> str:
    """Send `mine` of the rank `rank` to all ranks, cut to `MESSAGE_BYTES`, and return it. All ranks call this together."""
    words = mine.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    shared = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    dist.broadcast(shared, rank)
    return bytes(shared.tolist()).rstrip(b"\0").decode(errors="replace")
