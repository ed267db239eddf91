"""A CUDA device that does not exist: what a GPU would be asked to do can be counted, and computed, without one.

:func:`pretended` has torch take ``cuda:0`` for granted, in one of two ways. With :class:`Shapes` tensors there have a
shape, a type and strides, and no numbers (torch's FakeTensorMode), so the largest network costs nothing. With
:class:`Values` they say cuda:0 and keep their numbers in a CPU tensor, so the way that a GPU would go gives numbers to
compare. Either way an operation on tensors of both devices raises, as it would on a GPU, and :class:`Watch` counts.

What is counted, by the sources of ATen (torch 2.15); exact within this model, and the same on every machine:

* A copy between host and device waits for it (native/cuda/Copy.cu). ``float()``, ``bool()`` and ``.item()`` copy one
  number. ``nonzero`` and ``repeat_interleave`` without a size read back how much they will return, so does indexing by
  booleans, unless one number is written (then it is ``masked_fill``). Indices on the host are copied first.
* Every other operation that is no view and no empty allocation is one launch. ``im2col`` (F.unfold) launches a kernel a
  sample (native/cuda/Im2Col.cu), ``convolution_backward`` one for each gradient, a convolution's bias another.
  cuDNN and cuBLAS may take more, group normalisation takes three.
* Algorithms are the deterministic ones, as qdsim sets them: what writes or adds up at indices sorts these first, in
  eleven launches (native/cuda/Indexing.cu).
* Bytes moved are those of an operation's inputs and outputs. Memory is that of storages that are alive, rounded up to
  512 bytes as torch's allocator does; workspaces of libraries are not in it.
* Float atomics are the operations that sum floats in any order, by the list of ``torch.use_deterministic_algorithms``.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.lift_fresh),
    *(aten.lift, aten._unsafe_view, aten.detach, aten.alias, aten.resize_, aten.is_pinned, aten.set_),
}
READS_BACK = {aten.nonzero, aten.masked_select, aten._unique2, aten.equal, aten.is_nonzero, aten.bincount}
INDEXES = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
ATOMICS = {
    *(aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.put_, aten.bincount, aten.histc),
    *(aten._adaptive_avg_pool2d_backward, aten.adaptive_max_pool2d_backward, aten.upsample_bilinear2d_backward),
    *(aten.reflection_pad2d_backward, aten.embedding_dense_backward, aten.cumsum),
}
SORTS = {
    *(aten.index_put, aten.index_put_, aten._index_put_impl_, aten.index_add, aten.index_add_),
    *(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_),
}
SORTED_LAUNCHES = 11
LARGEST_REMEMBERED = 1 << 16
"""Whole numbers of a tensor without numbers that are remembered: lengths of other tensors may follow from them."""


# -- what is counted ---------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """What one piece of work asks of a GPU."""

    launches: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    """Times that the host waits for the device, by reason; copies are among them."""
    uploads: int = 0
    """Copies from host to device."""
    moved_bytes: int = 0
    flops: int = 0
    atomics: int = 0
    """Operations that sum floats in any order."""
    work: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    """How often an operation of (kind, FLOP, bytes, launches) was done."""
    live_bytes: int = 0
    peak_bytes: int = 0
    log: list[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    """Operations in their order, with the shapes of their tensors."""

    def __sub__(self, other: "Tally") -> "Tally":
        """Return what one piece of work asks for beyond another; memory is that of the larger."""
        found = Tally(live_bytes=self.live_bytes, peak_bytes=self.peak_bytes)
        for name in [f.name for f in fields(Tally) if f.name not in ("live_bytes", "peak_bytes", "log")]:
            setattr(found, name, getattr(self, name) - getattr(other, name))
        return found


def on_cuda(x: object) -> bool:
    """Tell whether something is a tensor on the device."""
    return isinstance(x, Tensor) and x.device.type == "cuda"


def size_bytes(tensor: Tensor) -> int:
    """Return what a tensor's numbers take."""
    return tensor.numel() * tensor.element_size()


class Device(Protocol):
    """A device that is not there."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation with tensors on the device."""

    def on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do one without."""

    def up(self, source: Tensor, kwargs: Any) -> Tensor:
        """Copy to the device."""

    def down(self, source: Tensor, kwargs: Any) -> Tensor:
        """Copy from it."""

    def number(self, tensor: Any) -> float:
        """Read one number."""

    def repeat(self, repeats: Any) -> Tensor:
        """``repeat_interleave`` of the numbers of rows."""

    def storage(self, tensor: Any) -> torch.UntypedStorage:
        """Where a tensor lies."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands above a device that does not exist; sees every ATen operation first."""

    def __init__(self, device: Device):
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.tally = Tally()
        self._seen: dict[int, object] = {}
        self.capturing: Graph | None = None

    def begin(self) -> None:
        """Count anew; what is allocated stays."""
        live = self.tally.live_bytes
        self.tally = Tally(live_bytes=live, peak_bytes=live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # what a tensor without numbers is asked about itself
            return self._device.run(func, args, kwargs)
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        wanted = kwargs.get("device")
        to_cuda = wanted is not None and torch.device(wanted).type == "cuda"
        if not to_cuda and not any(on_cuda(x) for x in inputs):
            return self._device.on_host(func, args, kwargs)
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            self.wait("one number")
            return self._device.number(args[0])
        if packet is aten._to_copy and wanted is not None and on_cuda(args[0]) != to_cuda:
            self._copied("upload" if to_cuda else "download")
            out = self._device.up(args[0], kwargs) if to_cuda else self._device.down(args[0], kwargs)
            if to_cuda:
                self._hold(out)
            return out
        if packet is aten.copy_ and on_cuda(args[0]) != on_cuda(args[1]):
            self._copied("upload" if on_cuda(args[0]) else "download")
            return self._device.run(func, args, kwargs)
        if packet is aten.repeat_interleave and func._overloadname == "Tensor":
            self.wait("repeat_interleave", 2 if kwargs.get("output_size") is None and len(args) < 2 else 0)
            self.tally.launches += 4  # a running sum, its least and its last number, what is repeated
            return self._device.repeat(args[0])
        if packet in INDEXES:
            self._indexed(packet, args)
        if packet in READS_BACK:
            self.wait(packet.__name__)
        if self.capturing is not None:
            return self.capturing.record(func, args, kwargs)
        out = self._device.run(func, args, kwargs)
        self._count(func, args, kwargs, inputs, out)
        return out

    def wait(self, reason: str, times: int = 1) -> None:
        """Count that the host waits for the device; while a graph is captured that is an error."""
        if self.capturing is not None and times:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.tally.syncs[reason] += times

    def _copied(self, way: str) -> None:
        self.wait(way)
        self.tally.uploads += way == "upload"

    def _indexed(self, packet: Any, args: Any) -> None:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        for _ in (index for index in indices if not on_cuda(index)):
            self._copied("upload")
        fills = packet is not aten.index and args[2].numel() == 1 and not on_cuda(args[2])
        if any(index.dtype == torch.bool for index in indices) and not fills:
            self.wait("nonzero")

    def _sorts(self, packet: Any, args: Any) -> bool:
        """Tell whether it writes at indices; at booleans one number is filled in instead."""
        if packet not in SORTS:
            return False
        masks = packet in INDEXES and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1])
        return not (masks and args[2].numel() == 1)

    def _count(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Any) -> None:
        packet, tally = func.overloadpacket, self.tally
        outputs = [x for x in pytree.tree_leaves(out) if on_cuda(x)]
        for x in outputs:
            self._hold(x)
        returns = func._schema.returns
        view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if view or packet in NO_KERNEL or not any(x.numel() for x in [*inputs, *outputs]):
            return
        launches = 1
        if packet is aten.im2col:
            launches = args[0].shape[0]
        elif packet is aten.convolution_backward:
            launches = sum(args[-1])
        elif packet is aten.convolution and args[2] is not None:
            launches = 2
        elif self._sorts(packet, args):
            launches = SORTED_LAUNCHES
        # an expanded tensor has more numbers than bytes
        moved = sum(min(size_bytes(x), x.untyped_storage().nbytes()) for x in [*inputs, *outputs] if on_cuda(x))
        name = packet.__name__.rstrip("_")
        formula = flop_registry.get(getattr(aten, name, None)) if func.namespace == "aten" else None
        kind, flops = "elementwise", 0
        if formula is not None:
            kind = "convolution" if "conv" in name else "product"
            flops = formula(*args, **kwargs, out_val=out)
            if any(x.dtype in (torch.bfloat16, torch.float16) for x in outputs):
                kind += " half"
        tally.launches += launches
        tally.atomics += packet in ATOMICS and any(x.is_floating_point() for x in outputs)
        tally.moved_bytes += moved
        tally.flops += flops
        tally.work[kind, flops, moved, launches] += 1
        tally.log.append((str(func), tuple(tuple(x.shape) for x in inputs)))

    def _hold(self, tensor: Tensor) -> None:
        """Count a storage as allocated until it dies."""
        storage = self._device.storage(tensor)
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // 512) * 512
        self.tally.live_bytes += size
        self.tally.peak_bytes = max(self.tally.peak_bytes, self.tally.live_bytes)

        def freed(ref: object) -> None:
            self._seen.pop(key, None)
            self.tally.live_bytes -= size

        self._seen[key] = weakref.ref(storage, freed)


class Graph:
    """``torch.cuda.CUDAGraph``: operations on the memory that they were captured with.

    A device captures without computing. Here results have to be there to be captured with, so what was changed in place
    meanwhile is put back.
    """

    def __init__(self, device: Device):
        self._device = device
        self._work: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Any, Tensor]] = []

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do and remember an operation."""
        written = [
            given
            for declared, given in zip(func._schema.arguments, args, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        self._before += [(x, x.inner.clone()) for x in pytree.tree_leaves(written) if isinstance(x, Carried)]
        out = self._device.run(func, args, kwargs)
        self._work.append((func, args, kwargs, out))
        return out

    def captured(self) -> None:
        """Put back what was changed."""
        for tensor, before in reversed(self._before):
            tensor.inner.copy_(before)

    def replay(self) -> None:
        """Do it all again."""
        for func, args, kwargs, out in self._work:
            again = self._device.run(func, args, kwargs)
            if not any(result.alias_info is not None for result in func._schema.returns):
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Carried):
                        old.inner.copy_(new.inner)


# -- devices that are not there ----------------------------------------------------------------------------------------
class Shapes:
    """Tensors without numbers, beside real ones on the host."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Find the result's shape."""
        with self.mode:
            out = func(*args, **kwargs)
        remembered = getattr(args[0], "numbers", None) if args else None
        if remembered is not None and func.overloadpacket in (aten.view, aten.slice, aten.alias, aten.detach):
            with unset_fake_temporarily():
                out.numbers = func(remembered, *args[1:], **kwargs)
        return out

    def on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As it is."""
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def up(self, source: Tensor, kwargs: Any) -> Tensor:
        """Forget the numbers, but for short lists of whole ones."""
        out: Any = self.run(aten._to_copy.default, (source,), kwargs)
        if not source.is_floating_point() and source.numel() <= LARGEST_REMEMBERED:
            with unset_fake_temporarily():
                out.numbers = source.detach().clone()
        found: Tensor = out
        return found

    def down(self, source: Tensor, kwargs: Any) -> Tensor:
        """Zeros."""
        with unset_fake_temporarily():
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def number(self, tensor: Any) -> float:
        """Some number."""
        return 1.0 if tensor.is_floating_point() else 1

    def repeat(self, repeats: Any) -> Tensor:
        """As long as the numbers say that are remembered."""
        with unset_fake_temporarily():
            total = int(repeats.numbers.sum())
        found: Tensor = self.run(aten.empty.memory_format, ([total],), {"dtype": repeats.dtype, "device": CUDA})
        return found

    def storage(self, tensor: Any) -> torch.UntypedStorage:
        """Its own."""
        found: torch.UntypedStorage = tensor.untyped_storage()
        return found


class Carried(Tensor):
    """Says cuda:0; its numbers lie in a CPU tensor."""

    inner: Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Carried":
        """Of the same shape and strides."""
        layout: dict[str, Any] = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        found: Carried = torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=CUDA, **layout)
        return found

    def __init__(self, inner: Tensor):
        self.inner = inner

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Carried({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} outside of the watch")


class Values:
    """Real numbers behind a device that is only claimed."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do it on the CPU; refuse what a GPU would."""
        self._check(func, args, kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        if "device" in {argument.name for argument in func._schema.arguments}:
            kwargs["device"] = "cpu"
        carried: dict[int, Carried] = {}

        def lower(x: Any) -> Any:
            if isinstance(x, Carried):
                carried[id(x.inner)] = x
                return x.inner
            return x

        args, kwargs = pytree.tree_map(lower, (args, kwargs))
        out = func(*args, **kwargs)
        return pytree.tree_map(lambda x: carried[id(x)] if id(x) in carried else _carry(x), out)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Only scalars and indices may lie on the host."""
        packet = func.overloadpacket
        host = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not on_cuda(x)]
        if packet is aten.copy_ or (packet in INDEXES and on_cuda(args[0])):
            return
        if any(x.ndim for x in host):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} has cuda:0 and cpu")

    def on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As it is."""
        return func(*args, **kwargs)

    def up(self, source: Tensor, kwargs: Any) -> Tensor:
        """Carry a copy."""
        return Carried(aten._to_copy.default(source, dtype=kwargs.get("dtype")))

    def down(self, source: Any, kwargs: Any) -> Tensor:
        """A copy of what is carried."""
        found: Tensor = aten._to_copy.default(source.inner, dtype=kwargs.get("dtype"))
        return found

    def number(self, tensor: Any) -> float:
        """Its number."""
        found: float = aten._local_scalar_dense.default(tensor.inner)
        return found

    def repeat(self, repeats: Any) -> Tensor:
        """As torch does."""
        return Carried(aten.repeat_interleave.Tensor(repeats.inner))

    def storage(self, tensor: Any) -> torch.UntypedStorage:
        """Of what is carried."""
        found: torch.UntypedStorage = tensor.inner.untyped_storage()
        return found


def _carry(x: Any) -> Any:
    return Carried(x) if isinstance(x, Tensor) else x


# -- what torch does with a device that is there -----------------------------------------------------------------------
def gradient(
    outputs: Any, inputs: Any, *, create_graph: bool = False, materialize_grads: bool = False, **_: Any
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` without its engine, which wants a thread for each device that exists."""
    (root,) = outputs if isinstance(outputs, Sequence) else (outputs,)
    wanted = list(inputs) if isinstance(inputs, Sequence) else [inputs]
    held: dict[Any, dict[int, Tensor]] = {}
    with torch.set_grad_enabled(create_graph):
        if root.grad_fn is not None:
            held[root.grad_fn] = {root.output_nr: torch.ones_like(root)}
        leaves: dict[int, Tensor] = {}
        for node in reversed(_nodes(root.grad_fn)):
            own = held.get(node, {})
            if type(node).__name__ == "AccumulateGrad":
                leaves[id(node.variable)] = own[0]
                continue
            found = node(*(own.get(i) for i in range(len(node._input_metadata))))
            for (following, slot), grad in zip(
                node.next_functions, found if isinstance(found, tuple) else (found,), strict=True
            ):
                if following is not None and grad is not None:
                    expected = following._input_metadata[slot]  # the engine undoes broadcasts and casts, too
                    if grad.numel() == math.prod(expected.shape):
                        grad = grad.reshape(expected.shape)  # group normalisation loses a dimension in torch 2.10
                    else:
                        grad = grad.sum_to_size(expected.shape)
                    grad = grad.to(expected.dtype)
                    slots = held.setdefault(following, {})
                    slots[slot] = grad if slot not in slots else slots[slot] + grad
        return tuple(leaves.get(id(x), torch.zeros_like(x) if materialize_grads else None) for x in wanted)


def _nodes(root: Any) -> list[Any]:
    """Return the nodes of a graph, each after all that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions)
    return order


class _Event:
    """``torch.cuda.Event``: it has passed once the host has waited for the device."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def record(self, stream: object = None) -> None:
        """Mark this moment."""
        self._after = self._watch.tally.syncs.total()

    def query(self) -> bool:
        """Tell whether the device has come here."""
        return self._watch.tally.syncs.total() > self._after

    def elapsed_time(self, other: object) -> float:
        """A millisecond."""
        return 1.0


@contextlib.contextmanager
def pretended(device: Shapes | Values) -> Iterator[Watch]:
    """Have torch take a device for granted."""
    watch = Watch(device)

    @contextlib.contextmanager
    def graph(into: Graph) -> Iterator[None]:
        watch.wait("synchronize")
        watch.capturing = into
        try:
            yield
        finally:
            watch.capturing = None
            into.captured()

    patches: list[Any] = [
        mock.patch.multiple(
            torch.cuda,
            _lazy_init=lambda: None,
            init=lambda: None,
            Event=lambda enable_timing=False: _Event(watch),
            synchronize=lambda device=None: watch.wait("synchronize"),
            reset_peak_memory_stats=lambda device=None: None,
            max_memory_allocated=lambda device=None: watch.tally.peak_bytes,
            CUDAGraph=lambda: Graph(device),
            graph=graph,
        ),
        mock.patch.object(torch.autograd, "grad", gradient),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if isinstance(device, Shapes):
            stack.enter_context(device.mode)
        else:  # as FakeTensorMode does where there is no driver
            torch._C._ensureCUDADeviceGuardSet()
            before = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.enter_context(watch)
        yield watch
