"""Any ``torch.nn.Module`` as a function of its parameters, through ``torch.func.functional_call``.

What travels between processes is the network's description; each process builds the module once and calls it with
whatever parameters a step has. The module runs in evaluation mode, always: a step is a function of values, so nothing
in it may draw by itself (dropout) or keep statistics (batch normalisation). Such layers are refused with the way out,
because they would not do what they were put there for.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from qdsim import plugins
from qdsim.errors import BadInput
from qdsim.models.kinds import NETWORKS, TORCHVISION
from qdsim.models.model import PrunableLayer
from qdsim.models.params import Params

MOST_GROUPS = 32
"""Of the group normalisation in torchvision's networks: Wu and He's choice."""
Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class ModuleModel:
    """A network that a factory builds."""

    kind: str
    """``model.kind``: a built-in name, ``torchvision:NAME``, an entry point or ``package.module:factory``."""
    channels: int
    size: int
    num_classes: int
    options: str = "{}"
    """``model.options`` as JSON: keywords of the factory."""

    @property
    def num_params(self) -> int:
        """How many numbers :meth:`init` returns."""
        return sum(tensor.numel() for tensor in _module_of(self).parameters())

    @property
    def forward_flops(self) -> int:
        """Operations for one image, as torch counts those of products and convolutions."""
        return _cost_of(self)[0]

    @property
    def activation_bytes(self) -> int:
        """What one image's feature maps take in float32: the outputs of all layers."""
        return _cost_of(self)[1]

    @property
    def prunable(self) -> tuple[PrunableLayer, ...]:
        """What the module says in its attribute ``prunable``; a module without one has nothing that FU-MP may prune."""
        return tuple(getattr(_module_of(self), "prunable", ()))

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Params:
        """Build the module with torch's own generator seeded from this one, and take its parameters."""
        seed = int(torch.randint(2**62, (), generator=generator))
        return {name: tensor.detach().to(dtype) for name, tensor in _build(self, seed).named_parameters()}

    def forward(self, params: Params, images: Tensor) -> Tensor:
        """Return logits (n, num_classes) for normalised images (n, c, h, w)."""
        constants = _constants_on(self, images.device, images.dtype)
        logits: Tensor = functional_call(_module_of(self), (params, constants), (images,))
        return logits

    def features(self, params: Params, images: Tensor) -> Tensor:
        """Return the input of the last linear layer that is executed, wherever it was declared, (n, features)."""
        seen: list[Tensor] = []

        def read(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[:] = inputs[:1]

        linear = [layer for layer in _module_of(self).modules() if isinstance(layer, nn.Linear)]
        handles = [layer.register_forward_pre_hook(read) for layer in linear]
        try:
            self.forward(params, images)
        finally:
            for handle in handles:
                handle.remove()
        if not seen:
            why = "it executes no torch.nn.Linear, so there are no features before a classifier; end it with one"
            raise _refused(self, why)
        return seen[0].flatten(1)

    def activity(self, params: Params, images: Tensor, hook: str) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and for each prunable layer the mean activity of every channel (n, channels)."""
        names = [getattr(layer, hook) for layer in self.prunable]
        if not all(names):
            raise _refused(self, f"its attribute prunable names no {hook}, which fump.hook asks for")
        logits, outputs = self._outputs_of(names, params, images)
        found = [output.relu() if hook == "convolution" else output for (output,) in outputs]
        return logits, [output.flatten(2).mean(2) if output.ndim > 2 else output for output in found]

    def _outputs_of(self, names: list[str], params: Params, images: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the logits, and of each of these submodules what it returned, one for each time it was executed."""
        found: list[list[Tensor]] = [[] for _ in names]

        def into(own: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
            return lambda layer, inputs, output: own.append(output)

        pairs = zip(names, found, strict=True)
        handles = [_module_of(self).get_submodule(name).register_forward_hook(into(own)) for name, own in pairs]
        try:
            logits = self.forward(params, images)
        finally:
            for handle in handles:
                handle.remove()
        return logits, found

    def describe(self) -> dict[str, Any]:
        """Return what it is built from."""
        built_from = {"kind": self.kind, "options": json.loads(self.options)}
        return built_from | {"channels": self.channels, "size": self.size, "num_classes": self.num_classes}


@cache
def _module_of(model: ModuleModel) -> nn.Module:
    """Return the module that is called with the parameters of others: it has shapes, and no numbers of its own."""
    return _build(model, 0).to("meta")


@cache
def _constants_of(model: ModuleModel) -> dict[str, Tensor]:
    """Return the module's buffers, which no step changes."""
    return dict(_build(model, 0).named_buffers())


@cache
def _constants_on(model: ModuleModel, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return them on a device, copied once; numbers that are no integers have the precision of the images."""
    found = _constants_of(model).items()
    return {name: buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype) for name, buffer in found}


def _build(model: ModuleModel, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _factory(model.kind)(
            channels=model.channels, size=model.size, num_classes=model.num_classes, **json.loads(model.options)
        )
    return module.eval()


@cache
def _factory(kind: str) -> Factory:
    if kind.startswith(TORCHVISION):
        return _torchvision_factory(kind.removeprefix(TORCHVISION))
    reference = NETWORKS.get(kind) or plugins.reference_of("network", kind)
    assert reference is not None  # a job's kind has been checked
    found = plugins.load("model.kind", kind, reference)
    if not callable(found):
        what = f"{reference} is no factory but a {type(found).__name__}"
        raise BadInput("model.kind", kind, f"{what}; wanted is a function that returns a torch.nn.Module")
    return found


def _torchvision_factory(name: str) -> Factory:
    """Return a factory of torchvision's network, with group normalisation where it takes another normalisation."""
    from torchvision import models

    if name not in models.list_models(module=models):
        raise BadInput("model.kind", TORCHVISION + name, "torchvision has no such network; try torchvision:resnet18")

    def factory(*, channels: int, size: int, num_classes: int, **options: Any) -> nn.Module:
        wanted = {"weights": None, "num_classes": num_classes, **options}
        try:
            network = models.get_model(name, norm_layer=_group_norm, **wanted)
        except TypeError:  # it has no normalisation, or none that can be chosen
            network = models.get_model(name, **wanted)
        return network if channels == 3 else nn.Sequential(_InThreeChannels(), network)

    return factory


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, MOST_GROUPS), channels)


class _InThreeChannels(nn.Module):
    """A grey image three times over, for networks that were made for colour."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


@cache
def _cost_of(model: ModuleModel) -> tuple[int, int]:
    """Return the operations for one image, and the bytes of the outputs of all layers."""
    from torch.utils.flop_counter import FlopCounterMode  # a fifth of a second to import

    numbers = 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal numbers
        numbers += output.numel() if isinstance(output, Tensor) else 0

    module = _module_of(model)
    handles = [layer.register_forward_hook(count) for layer in module.modules() if not list(layer.children())]
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            model.forward(model.init(torch.Generator()), torch.zeros(1, model.channels, model.size, model.size))
    finally:
        for handle in handles:
            handle.remove()
    return max(1, counter.get_total_flops()), 4 * numbers


# -- what a job is told of a network that cannot serve -----------------------------------------------------------------


def checked_model(model: ModuleModel, *, distils: bool) -> ModuleModel:
    """Return the network if the simulator can work with it; else say what is wrong, with the way out.

    ``distils``: synthetic sets are made with it, so it is differentiated twice.
    """
    try:
        module = _build(model, 0)
        again = _build(model, 0)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # whatever the factory's own code raises
        raise _refused_call(model, error) from None
    if not isinstance(module, nn.Module):
        raise _refused(model, f"it returned a {type(module).__name__}; wanted is a torch.nn.Module")
    _check_layers(model, module)
    if not any(True for _ in module.parameters()):
        raise _refused(model, "it has no parameters to train")
    first, second = dict(module.named_parameters()), dict(again.named_parameters())
    if any(not torch.equal(first[name], second[name]) for name in first):
        why = (
            "its parameters differ between two calls with the same seed: draw them from torch's global generator alone"
        )
        raise _refused(model, why)
    draws = torch.Generator().manual_seed(0)
    params = model.init(draws, torch.float64)
    images = torch.randn(3, model.channels, model.size, model.size, generator=draws, dtype=torch.float64)
    _check_answers(model, params, images, distils)
    _check_prunable(model, params, images)
    return model


def _check_layers(model: ModuleModel, module: nn.Module) -> None:
    """Refuse layers that see the whole batch, keep statistics of it, or draw."""
    for name, layer in module.named_modules():
        what = f"its layer {name or 'itself'} is a {type(layer).__name__}"
        if isinstance(layer, nn.modules.batchnorm._NormBase) and (
            isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats
        ):
            why = (
                "its statistics couple the samples of a batch, so no class has a gradient of its own, and belong to no"
            )
            raise _refused(model, f"{what}: {why} client; use torch.nn.GroupNorm in its place")
        share = getattr(layer, "p", 0.0)
        draws = isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth"
        if draws and share:
            fix = "set it to 0, for torchvision's networks by model.options (dropout or stochastic_depth_prob)"
            raise _refused(model, f"{what} with p = {share}: a step must be a function of its values; {fix}")


def _check_answers(model: ModuleModel, params: Params, images: Tensor, distils: bool) -> None:
    """Refuse a network whose answers have another shape, are not numbers, or depend on the batch around a sample."""
    constants = _constants_on(model, images.device, images.dtype)
    versions = {name: buffer._version for name, buffer in constants.items()}
    shape = (model.channels, model.size, model.size)
    try:
        with torch.no_grad():
            logits = model.forward(params, images)
    except (Exception, SystemExit) as error:  # whatever the network's own code raises
        raise _refused(model, f"on images of {shape} it fails: {plugins.in_a_line(error)}") from None
    if not isinstance(logits, Tensor) or logits.shape != (3, model.num_classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise _refused(model, f"for 3 images it returns {found}, wanted are logits of shape (3, {model.num_classes})")
    if not torch.isfinite(logits).all():
        raise _refused(model, "its first answers are not finite")
    with torch.no_grad():
        alone = model.forward(params, images[:1])
    changed = [name for name, buffer in constants.items() if buffer._version != versions[name]]
    if changed:
        why = f"its buffer {changed[0]} is changed by a call: a step must be a function of its values"
        raise _refused(model, f"{why}; keep what is counted or averaged out of the network")
    if not torch.allclose(alone, logits[:1], rtol=1e-6, atol=1e-8):
        apart = float((alone - logits[:1]).abs().max())
        why = f"an image's logits differ by {apart:.2g} when it is alone: samples of a batch see each other"
        raise _refused(model, f"{why}, so no class has a gradient of its own; normalise within a sample (GroupNorm)")
    if distils:
        _check_second_derivative(model, params, images)


def _check_second_derivative(model: ModuleModel, params: Params, images: Tensor) -> None:
    """Refuse a network whose gradient autograd cannot differentiate: by an error, or by a number that is wrong.

    The pixels' derivative of |∇_θ Σ logits²|² along a direction is compared with a difference over ±h.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}

    def length(pixels: Tensor, create_graph: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # as in matching: the fused ones have no second derivative
            loss = model.forward(leaves, pixels).square().sum()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph, materialize_grads=True)
        return torch.stack([gradient.square().sum() for gradient in found]).sum()

    h, pixels = 1e-6, images.detach().requires_grad_()
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=images.dtype)
    try:
        (gradient,) = torch.autograd.grad(length(pixels, create_graph=True), pixels)
    except RuntimeError as error:
        why = f"it cannot be differentiated twice ({plugins.in_a_line(error)}), which matching needs"
        raise _refused(model, f"{why}; use other layers, or methods without synthetic sets") from None
    ends = [float(length((images + sign * h * direction).detach(), create_graph=False)) for sign in (1, -1)]
    found, expected = float((gradient * direction).sum()), (ends[0] - ends[1]) / (2 * h)
    if not math.isclose(found, expected, rel_tol=0.02, abs_tol=1e-6 * max(1.0, ends[0])):
        why = f"the derivative of its gradient is {found:.4g} by autograd and {expected:.4g} by a difference"
        raise _refused(model, f"{why}: a layer cannot be differentiated twice, which matching needs; use other layers")


def _check_prunable(model: ModuleModel, params: Params, images: Tensor) -> None:
    """Refuse names that are nobody's, and layers whose parameters have not one row for each channel."""
    submodules = {name for name, _ in _module_of(model).named_modules()}
    for layer in model.prunable:
        if not isinstance(layer, PrunableLayer):
            raise _refused(model, f"its attribute prunable holds a {type(layer).__name__}, wanted is a PrunableLayer")
        odd = [n for n in layer.tensors if n not in params]
        odd += [n for n in (layer.activation, layer.convolution) if n not in submodules]
        if odd:
            raise _refused(model, f"its attribute prunable names {odd[0]}, which it does not have")
        if not layer.tensors or not (layer.activation or layer.convolution):
            raise _refused(model, f"its attribute prunable holds {layer}, which names no tensors or no submodule")
        read = [name for name in (layer.activation, layer.convolution) if name]
        with torch.no_grad():
            _, outputs = model._outputs_of(read, params, images)
        for name, returned in zip(read, outputs, strict=True):
            if len(returned) != 1:
                raise _refused(model, f"its prunable submodule {name} is executed {len(returned)} times, wanted is one")
            shapes = {n: tuple(params[n].shape) for n in layer.tensors}
            wide = returned[0].shape[1] if returned[0].ndim > 1 else 0
            narrow = [n for n, shape in shapes.items() if shape[:1] != (wide,)]
            if narrow:
                why = f"its submodule {name} has {wide} channels and its parameter {narrow[0]} the shape"
                raise _refused(model, f"{why} {shapes[narrow[0]]}: FU-MP needs one row of it for each channel")


def _refused(model: ModuleModel, why: str) -> BadInput:
    return BadInput("model.kind", model.kind, why)


def _refused_call(model: ModuleModel, error: BaseException) -> BadInput:
    options = json.loads(model.options)
    if isinstance(error, TypeError) and not model.kind.startswith(TORCHVISION):
        known = inspect.signature(_factory(model.kind)).parameters
        extra = [name for name in options if name not in known]
        if extra and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            own = [name for name in known if name not in ("channels", "size", "num_classes")]
            return BadInput("model.options", options, f"{model.kind} takes {', '.join(own) or 'none'}, not {extra[0]}")
    key, value = ("model.options", options) if options else ("model.kind", model.kind)
    return BadInput(key, value, f"building {model.kind} fails: {plugins.in_a_line(error)}")
