"""The ConvNet's gradients on a GPU: convolutions by cuDNN, what lies between them in one kernel (:mod:`fused`).

The derivatives are those of :mod:`derivatives`, whose notation holds here. What differs is what a GPU asks for: no
operation waits for the device, none sums floats by atomics (which would not repeat), the shapes of a step do not depend
on which samples it drew, since classes without any are there as well, and the gradients of all classes come from one
product of the samples' own gradients with a zero-one matrix, because a small kernel costs its launch. A convolution's
bias is left out: normalisation takes it away again, and its gradient is zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.models.convnet import ConvNet
from qdsim.models.device import gpu_failure
from qdsim.models.fast import fused
from qdsim.models.fast.graph import Graphs
from qdsim.models.gradients import Objective, PixelGradient, Towards, class_weights, is_matched
from qdsim.models.params import Params


@dataclass(frozen=True)
class _Forward:
    """A batch's way through the network, one entry a block."""

    x: list[Tensor]
    """What goes into a block's convolution."""
    z: list[Tensor]
    stats: list[Tensor]
    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class _Backward:
    """The way back."""

    pooled: list[Tensor]
    """∂L/∂(a block's output)."""
    z: list[Tensor]
    """∂L/∂z."""
    found: Params
    """∂L/∂θ of γ, β and the classifier's bias; of a convolution's filters, where they are wanted."""


@dataclass(frozen=True)
class Fused:
    """The gradients of a ConvNet on a GPU; also on a CPU, slowly, for tests."""

    model: ConvNet
    micro_batch: int
    half: torch.dtype | None = None
    """What convolutions are computed in, if not in float32; maps are kept in it, sums are not."""
    all_classes = True

    def logits(self, params: Params, images: Tensor) -> Tensor:
        """Run the network."""
        return self._forward(params, images, keep=False).logits

    def of_classes(
        self, params: Params, images: Tensor, labels: Tensor, counts: Sequence[int], objective: Objective
    ) -> tuple[Tensor, Params, Params]:
        """One pass for a micro-batch; the classes' gradients are sums of the samples' own."""
        members = self._members(labels, images.dtype) if len(counts) > 1 else labels
        losses, found, stacks = [], [], []
        for batch in self._micro_batches(len(images)):
            forward = self._forward(params, images[batch])
            leaf = forward.logits.detach().requires_grad_()
            with torch.enable_grad():
                loss = objective(leaf, labels[batch])
            (g,) = torch.autograd.grad(loss, leaf)
            backward = self._backward(params, forward, g, filters=len(counts) == 1)
            losses.append(loss.detach())
            found.append(backward.found)
            if len(counts) > 1:
                columns = self._columns(forward)
                stacks.append(self._of_classes(params, forward, backward, g, members[:, batch], columns))
        total = _sum(found)
        by_class = _sum(stacks) if stacks else {n: total[n][None] for n in params if is_matched(params[n])}
        total |= {n: stack.sum(0) for n, stack in by_class.items() if stacks}
        return sum(losses[1:], losses[0]), {n: total[n] for n in params}, by_class

    def of_pixels(self, params: Params) -> PixelGradient:
        """Tangents along v, forwards and backwards (Pearlmutter's R operator)."""

        def gradient(images: Tensor, labels: Tensor, counts: Sequence[int], towards: Towards) -> Tensor:
            weights = class_weights(labels, images.dtype)[:, None]
            answers = torch.arange(self.model.num_classes, device=images.device)
            members = self._members(labels, images.dtype)
            passes, stacks = [], []
            for batch in self._micro_batches(len(images)):
                forward = self._forward(params, images[batch])
                g = (forward.logits.softmax(1) - (labels[batch, None] == answers).to(images.dtype)) * weights[batch]
                backward = self._backward(params, forward, g)
                columns = self._columns(forward)
                stacks.append(self._of_classes(params, forward, backward, g, members[:, batch], columns))
                passes.append((forward, backward, columns, g, weights[batch], labels[batch]))
            v = towards(_sum(stacks))
            return torch.cat([self._tangents(params, *done, v) for done in passes])

        return gradient

    def warm_up(self) -> None:
        """Compile the kernels, or find them in Triton's cache; where Triton cannot, do without it.

        It needs a C compiler at its first launch, and a GPU that it knows.
        """
        try:
            self._one_image()
        except Exception as error:
            if gpu_failure(error) or not fused.version():
                raise
            fused.do_without((str(error) or type(error).__name__).splitlines()[0])
            self._one_image()

    def try_out(self, graphs: Graphs) -> None:
        """Capture both kinds of a step with one image, where a process is to capture what it repeats."""
        params, image, label = self._sample()
        every = [1] * self.model.num_classes
        graphs.try_out(lambda x, y: self.of_classes(params, x, y, every, _summed_loss), image, label)
        graphs.try_out(lambda x, y: self.of_pixels(params)(x, y, every, lambda stacks: stacks), image, label)

    def _one_image(self) -> None:
        params, image, label = self._sample()
        self.of_pixels(params)(image, label, [], lambda stacks: stacks)
        torch.cuda.synchronize()  # an error of a kernel is told by then

    def _sample(self) -> tuple[Params, Tensor, Tensor]:
        draws, device = torch.Generator().manual_seed(0), torch.device("cuda")
        params = {name: tensor.to(device) for name, tensor in self.model.init(draws).items()}
        image = torch.randn(1, self.model.channels, self.model.size, self.model.size, generator=draws).to(device)
        return params, image, torch.zeros(1, dtype=torch.int64, device=device)

    def _forward(self, params: Params, images: Tensor, keep: bool = True) -> _Forward:
        x = self._short(images)
        found = _Forward([], [], [], x, x)
        for block in range(self.model.depth):
            z = F.conv2d(x, self._filters(params, block), padding=self._padding(block))
            following, stats = fused.block(z, params[f"norm{block}.weight"], params[f"norm{block}.bias"])
            if keep:
                found.x.append(x)
                found.z.append(z)
                found.stats.append(stats)
            x = following
        features = x.flatten(1).to(images.dtype)
        logits = F.linear(features, params["linear.weight"], params["linear.bias"])
        return _Forward(found.x, found.z, found.stats, features, logits)

    def _backward(self, params: Params, forward: _Forward, g: Tensor, filters: bool = False) -> _Backward:
        """Go back from ∂L/∂logits; ``filters``: as far as those of the convolutions, and the classifier's matrix."""
        found = {"linear.bias": g.sum(0)}
        if filters:
            found["linear.weight"] = g.t() @ forward.features
        pooled = self._short(
            (g @ params["linear.weight"]).view(len(g), self.model.width, *2 * [self.model.feature_size])
        )
        way = _Backward([], [], found)
        nothing = torch.zeros_like(params["conv0.bias"])
        for block in reversed(range(self.model.depth)):
            z, sums = fused.block_back(*self._normalisation(params, forward, block), pooled)
            found[f"norm{block}.bias"], found[f"norm{block}.weight"] = sums.sum(1)
            found[f"conv{block}.bias"] = nothing
            way.pooled.insert(0, pooled)
            way.z.insert(0, z)
            pooled, own = self._convolution_backward(params, forward, block, z, (block > 0, filters, False))
            if filters:
                found[f"conv{block}.weight"] = own.to(g.dtype)
        return way

    def _of_classes(
        self, params: Params, forward: _Forward, backward: _Backward, g: Tensor, members: Tensor, columns: list[Tensor]
    ) -> Params:
        """Return the gradients of what matching looks at, stacked over classes."""
        found = {}
        for block, own in enumerate(columns):
            name = f"conv{block}.weight"
            each = torch.bmm(backward.z[block].flatten(2), own.transpose(1, 2)).flatten(1).to(g.dtype)
            found[name] = (members @ each).view(len(members), *params[name].shape)
        of_class = (members[:, None] * g.t()).flatten(0, 1) @ forward.features
        found["linear.weight"] = of_class.view(len(members), *params["linear.weight"].shape)
        return found

    def _tangents(
        self,
        params: Params,
        forward: _Forward,
        backward: _Backward,
        columns: list[Tensor],
        g: Tensor,
        weights: Tensor,
        labels: Tensor,
        v: Params,
    ) -> Tensor:
        """∇_S ⟨∇_θ L, v⟩: the tangent of ∂L/∂pixels as θ moves along v, each sample along its class's."""
        blocks = range(self.model.depth)
        moves = [self._short(v[f"conv{block}.weight"].flatten(2)).index_select(0, labels) for block in blocks]
        dz: list[Tensor] = []
        dx: Tensor | None = None
        for block in blocks:
            if dx is None:
                u = torch.bmm(moves[block], columns[block])
            else:
                moved = F.conv2d(dx, self._filters(params, block), padding=self._padding(block))
                u = torch.baddbmm(moved.flatten(2), moves[block], columns[block])
            dz.append(u.view_as(forward.z[block]))
            dx = fused.block_tangent(*self._normalisation(params, forward, block), dz[block])
        assert dx is not None
        # the classifier and the loss: the derivative of the softmax p is diag p - p pᵀ
        matrix, matrices = params["linear.weight"], v["linear.weight"].index_select(0, labels)
        moved = (dx.flatten(1).to(g.dtype) @ matrix.t())[:, None]
        d_logits = torch.baddbmm(moved, forward.features[:, None], matrices.transpose(1, 2))[:, 0]
        p = forward.logits.softmax(1)
        d_g = p * d_logits
        d_g = (d_g - p * d_g.sum(1, keepdim=True)) * weights
        d_pooled = torch.bmm(g[:, None], matrices)[:, 0].addmm(d_g, matrix).view_as(backward.pooled[-1])
        for block in reversed(blocks):
            normalisation = self._normalisation(params, forward, block)
            d_pooled = self._short(d_pooled)
            u = fused.block_tangent_back(*normalisation, dz[block], backward.pooled[block], d_pooled)
            back, x = backward.z[block].flatten(2), forward.x[block]
            if block == 0:  # so few channels come slowly out of a convolution
                both = torch.matmul(self._filters(params, 0).flatten(1).t(), u.flatten(2))
                both = torch.baddbmm(both, moves[0].transpose(1, 2), back)
                return F.fold(both, x.shape[2:], 3, padding=self._padding(0)).to(g.dtype)
            d_pooled, _ = self._convolution_backward(params, forward, block, u, (True, False, False))
            moved = torch.bmm(moves[block].transpose(1, 2), back)
            d_pooled += F.fold(moved, x.shape[2:], 3, padding=self._padding(block))
        raise AssertionError("a network has at least one block")

    def _convolution_backward(
        self, params: Params, forward: _Forward, block: int, z: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a convolution's input and filters, those that are wanted."""
        if not any(wanted):
            return z, z
        padding = [self._padding(block)] * 2
        found = torch.ops.aten.convolution_backward(
            z, forward.x[block], self._filters(params, block), None, [1, 1], padding, [1, 1], False, [0, 0], 1, wanted
        )
        return found[0], found[1]

    def _columns(self, forward: _Forward) -> list[Tensor]:
        """Return what a block's filters see at each position: ``F.unfold`` without a launch for each sample."""
        found = []
        for block, x in enumerate(forward.x):
            padded = F.pad(x, [self._padding(block)] * 4)
            n, channels, height, width = padded.shape
            a, b, c, d = padded.stride()
            seen = padded.as_strided((n, channels, 3, 3, height - 2, width - 2), (a, b, c, d, c, d))
            found.append(seen.reshape(n, channels * 9, (height - 2) * (width - 2)))
        return found

    def _normalisation(self, params: Params, forward: _Forward, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return forward.z[block], forward.stats[block], params[f"norm{block}.weight"], params[f"norm{block}.bias"]

    def _filters(self, params: Params, block: int) -> Tensor:
        return self._short(params[f"conv{block}.weight"])

    def _padding(self, block: int) -> int:
        return self.model.first_padding if block == 0 else 1

    def _members(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the zero-one matrix (classes, n) of a batch; which classes it has is not asked."""
        return (torch.arange(self.model.num_classes, device=labels.device)[:, None] == labels).to(dtype)

    def _short(self, tensor: Tensor) -> Tensor:
        return tensor if self.half is None else tensor.to(self.half)

    def _micro_batches(self, size: int) -> Iterator[slice]:
        for start in range(0, size, self.micro_batch):
            yield slice(start, min(start + self.micro_batch, size))


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _sum(parts: list[Params]) -> Params:
    """Add up micro-batches, in order."""
    total = dict(parts[0])
    for part in parts[1:]:
        total = {name: tensor + part[name] for name, tensor in total.items()}
    return total
