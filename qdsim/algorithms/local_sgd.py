"""Local SGD on labelled images, descent or ascent: the inner loop of Algorithm 1 (lines 10-16).

Wu et al. Federated unlearning: guarantee the right of clients to forget. IEEE Network 2022, as restated
in the paper's Algorithm 1.

Departures from the paper: (1) ascent stops at a client once the loss of its mini-batch passes ``max_loss``. The
paper's literal T steps of ascent destroy the model: on MNIST (laptop profile, seed 0, plain samples) 20 steps
left 11 % on the retain set and 13 % after recovery, a stop at 2 ln C 88 % and 96 %. ``max_loss = inf`` is the
literal version. (2) A mini-batch is drawn without replacement within a pass over Z_i, as usual in practice; the
paper only says "sample". (3) Its gradient is summed over micro-batches in a fixed order: the same number up to
rounding, faster where the cache is short.
Not in the paper: FedProx (Li et al. Federated optimization in heterogeneous networks. MLSys 2020), whose term
μ/2 |θ - θ_round|² is ``proximal`` of a phase's settings, 0 by default.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.algorithms.settings import Stage
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import View
from qdsim.errors import Diverged
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.gradients import Objective
from qdsim.models.params import Params


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """L, summed over samples."""
    return F.cross_entropy(logits, labels, reduction="sum")


def batches(size: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[np.ndarray]:
    """Yield ``steps`` mini-batches of positions: slices of one permutation after another.

    A permutation's remainder that is too short for a batch is dropped; fewer than ``batch_size`` samples are
    all taken in every step.
    """
    take = min(batch_size, size)
    order = np.empty(0, np.int64)
    for _ in range(steps):
        if len(order) < take:
            order = torch.randperm(size, generator=generator).numpy()
        chosen, order = order[:take], order[take:]
        yield chosen


def summed_gradient(
    compute: Compute, params: Params, images: Tensor, labels: Tensor, objective: Objective = cross_entropy
) -> tuple[Tensor, Params]:
    """Return the sum over samples of loss and ∇_θ loss, added up over micro-batches in order."""
    loss_sum, total, _ = compute.gradients.of_classes(params, images, labels, [len(labels)], objective)
    return loss_sum, total


def run(
    client: ClientState,
    params: Params,
    *,
    stage: Stage,
    view: View,
    ctx: RoundContext,
    compute: Compute,
    ascend: bool = False,
    max_loss: float = float("inf"),
    objective: Objective = cross_entropy,
    after_step: Callable[[Params], object] | None = None,
) -> tuple[ClientState, ClientUpdate]:
    """One client's T steps on Z_i: θ ← θ ∓ η ∇L^{Z_i}(θ) (Algorithm 1, lines 10-16).

    ``after_step`` may change θ in place after each of them: FU-MP holds its pruned channels at zero so.
    """
    samples = client.samples(view)
    theta = P.to(P.clone(params), compute.device)
    anchor = P.to(params, compute.device) if stage.proximal else {}
    dtype = next(iter(theta.values())).dtype
    draws = ctx.generator("batches", client.client_id)
    sign = 1.0 if ascend else -1.0
    losses: list[Tensor] = []
    processed = 0
    for chosen in batches(len(samples), stage.batch_size, stage.steps, draws):
        images, labels = samples.batch(chosen, compute.device, dtype)
        loss_sum, gradient = summed_gradient(compute, theta, images, labels, objective)
        losses.append(loss_sum / len(labels))
        processed += len(labels)
        if ascend and not float(losses[-1]) <= max_loss:
            break
        if stage.proximal:
            P.pull_(theta, anchor, stage.lr * stage.proximal)
        P.step_(theta, gradient, sign * stage.lr / len(labels))
        if after_step is not None:
            after_step(theta)
    return client, make_update(client.client_id, len(samples), params, theta, losses, processed)


def make_update(
    client_id: int,
    num_samples: int,
    start: Params,
    theta: Params,
    losses: list[Tensor],
    processed: int,
    matching: Stopwatch | None = None,
) -> ClientUpdate:
    """Turn the end of a step into what the client sends; refuse numbers that are not finite."""
    delta = P.subtract(P.to(theta, torch.device("cpu")), start)
    loss = float(torch.stack(losses).mean())
    if not np.isfinite(loss) or not P.is_finite(delta):
        raise Diverged(f"loss {loss:.3g} after {len(losses)} steps is no longer finite: lower the phase's lr")
    return ClientUpdate(
        client_id=client_id,
        num_samples=num_samples,
        delta=delta,
        loss=loss,
        first_loss=float(losses[0]),
        gradients=len(losses),
        samples=processed,
        matching_s=matching.seconds if matching else 0.0,
    )
