"""What a model is worth, asked of all hosts: accuracies, what attacks see, images to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from qdsim.data.forgetting import UnlearningRequest
from qdsim.federation.client_host import ImagePair
from qdsim.federation.executor import Call, Executor, Future
from qdsim.federation.measures import BATCH, FEATURES, GPU_BATCH, Counts
from qdsim.models.params import Params

PIECES_PER_LANE = 4
"""The test set is cut finely, so that workers with less to do in a round can take more of it."""

Pick = tuple[int, int, int]
"""Client, class, and which of the class's synthetic images."""


@dataclass(frozen=True)
class Evaluation:
    """What evaluating a model has found."""

    test: Counts
    forgotten_clients: Counts | None
    """On the data of the clients that a request is about, where it is about clients."""
    elapsed_s: float
    """The least time that it takes on the workers there are."""


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation that has been submitted."""

    executor: Executor
    test: list[Future]
    forgotten_clients: list[Future]

    @property
    def futures(self) -> list[Future]:
        """All of its calls."""
        return [*self.forgotten_clients, *self.test]

    def result(self) -> Evaluation:
        """Wait for it."""
        own = [future.result()[0] for future in self.forgotten_clients]
        test = _total([future.result() for future in self.test])
        return Evaluation(test, _total(own) if own else None, self.executor.least_time_s(self.futures))


def evaluate(executor: Executor, params: Params, num_test: int, request: UnlearningRequest) -> PendingEvaluation:
    """Have a model evaluated on the test set, and on the clients' own data that a request forgets."""
    own = [
        executor.submit(Call("client_counts", ((i,), request), params, client_id=i))
        for i in sorted(request.forget.clients)
    ]
    test = [
        executor.submit(Call("test_counts", (start, stop), params, work=stop - start))
        for start, stop in ranges(num_test, PIECES_PER_LANE * executor.lanes, _batch(executor))
    ]
    return PendingEvaluation(executor, test, own)


def training_counts(executor: Executor, params: Params, request: UnlearningRequest) -> tuple[Counts, Counts]:
    """Count on all clients' own data: the forget set, and what no request has taken away."""
    halves = executor.broadcast("client_counts", None, request, params=params)
    return _total([forgotten for forgotten, _ in halves]), _total([retained for _, retained in halves])


def test_features(executor: Executor, params: Params, rows: np.ndarray) -> np.ndarray:
    """Return what an attack sees of test samples, in the order of ``rows``."""
    futures = [
        executor.submit(Call("test_features", (rows[start:stop],), params, work=stop - start))
        for start, stop in ranges(len(rows), executor.lanes, _batch(executor))
    ]
    return np.concatenate([future.result() for future in futures])


def client_features(executor: Executor, params: Params, positions: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return what an attack sees of clients' own samples, in the order of client numbers."""
    futures = [
        executor.submit(Call("client_features", (i, positions[i]), params, client_id=i)) for i in sorted(positions)
    ]
    return np.concatenate([np.empty((0, len(FEATURES))), *(future.result() for future in futures)])


def image_pairs(executor: Executor, picks: Sequence[Pick], init: str) -> list[ImagePair]:
    """Return synthetic images with the real ones they began as, in the order of ``picks``."""
    futures = [executor.submit(Call("image_pair", (*pick, init), client_id=pick[0])) for pick in picks]
    return [future.result() for future in futures]


def ranges(count: int, parts: int, batch: int = BATCH) -> list[tuple[int, int]]:
    """Cut so many samples into at most ``parts`` ranges that begin at multiples of the evaluation batch."""
    batches = -(-count // batch)
    edges = sorted({min(count, batch * (batches * i // parts)) for i in range(parts)} | {0, count})
    return list(pairwise(edges))


def _batch(executor: Executor) -> int:
    return BATCH if executor.device == "cpu" else GPU_BATCH


def _total(counts: Sequence[Counts]) -> Counts:
    total = counts[0]
    for other in counts[1:]:
        total = total + other
    return total
