"""Who fits where: fractions of GPUs, CPUs and memory, and what is advised when it does not fit."""

import random
import re
import time

import pytest

from qdsim.data import datasets
from qdsim.errors import CannotPlace
from qdsim.experiment import config, plan
from qdsim.experiment.sections import Cluster
from qdsim.models.device import CONTEXT_BYTES
from qdsim.planning import estimate
from qdsim.planning.layout import ACTOR_BYTES, GpuMemory, Layout, Node, assign, grouped, lay_out, without_cores
from qdsim.ray_engine import cluster


def wanted(**changes):
    return Cluster(**changes)


def node(cpus=2.0, gpus=0, memory_bytes=1e12):
    return Node("id", cpus, gpus, memory_bytes)


def test_by_default_each_client_has_an_actor():
    """Ten actors on two cores ask for a tenth of a core each, half of what there is."""
    found = lay_out(10, wanted(), [node()])
    assert found == Layout(tuple((i,) for i in range(10)), gpus=0.0, cpus=0.1)
    assert found.bundle == {"CPU": 0.1, "memory": ACTOR_BYTES}


def test_packing_divides_clients_in_order():
    """12 clients, 5 an actor: 5, 5 and 2."""
    assert [len(group) for group in lay_out(12, wanted(clients_per_actor=5), [node()]).clients] == [5, 5, 2]


def test_packed_actors_get_equal_loads():
    """Most first, to the least: 9 | 8, then 2 to the 8, the ones fill up: 9+1+1 = 11 | 8+2+1 = 11; three each."""
    assert grouped(6, 3, [9, 1, 1, 1, 8, 2]) == ((0, 1, 2), (3, 4, 5))
    # never more than three, whatever the loads: the third light client must go to the heavy one
    assert grouped(5, 3, [100, 1, 1, 1, 1]) == ((0, 4), (1, 2, 3))
    assert grouped(5, 2) == ((0, 1), (2, 3), (4,))
    assert grouped(4, 3, [0, 0, 0, 0]) == ((0, 1, 2), (3,))


def test_automatic_packing_counts_memory_cores_and_gpus():
    """100 clients: 8 GB hold 19 actors of 400 MiB, so 6 clients each, which makes 17; 2 GPUs take two actors each where
    they have the cores, one each of two cores.

    Two cores take four: 25 clients each. Of ten clients three go into an actor, which makes four of them.
    """
    auto = wanted(clients_per_actor="auto")
    assert len(lay_out(100, auto, [node(cpus=64.0, memory_bytes=8.0e9)]).clients) == 17
    assert len(lay_out(100, auto, [node(gpus=2)]).clients) == 2
    assert len(lay_out(100, auto, [node(cpus=4.0, gpus=2)]).clients) == 4
    assert len(lay_out(100, auto, [node(cpus=4.0, gpus=1), node(gpus=1), node(cpus=1.0, gpus=1)]).clients) == 5
    tight = GpuMemory(8e9, lambda packed: int(5e9))
    assert len(lay_out(100, auto, [node(cpus=64.0, gpus=2)], gpu_memory=tight).clients) == 2
    assert [len(group) for group in lay_out(100, auto, [node()]).clients] == [25] * 4
    assert len(lay_out(10, auto, [node()]).clients) == 4
    assert len(lay_out(10, wanted(clients_per_actor="auto", threads=2), [node()]).clients) == 2


def test_the_default_packs_only_as_many_as_a_gpus_memory_asks_for():
    """Actors of 1 GB: 23 fit in 23.9 GB, so 100 clients go into 20 actors of five; with 100 GB each has its own."""
    for there, actors in ((23.9e9, 20), (100e9, 100)):
        memory = GpuMemory(there, lambda packed: 10**9)
        assert len(lay_out(100, wanted(), [node(cpus=64.0, gpus=1)], gpu_memory=memory).clients) == actors


def test_a_share_must_hold_what_its_cap_allows():
    """A tenth of 24 GB is 2.4 GB, of which CUDA takes 0.42: tensors of 2.28 GB do not fit, on a GPU of its own either.

    Of 0.12 eight fit: 2.88 GB each, which holds the actor.
    """
    memory = GpuMemory(24e9, lambda packed: int(2.7e9))
    assert memory.allowed(0.1) == pytest.approx(2.4e9)
    with pytest.raises(CannotPlace) as no:
        lay_out(1, wanted(gpus_per_client=0.1), [node(gpus=1)], gpu_memory=memory)
    assert (
        "asked for actors of 2.7 GB with 0.1 of a GPU, found 24 GB there, of which such an actor may take 2.4 GB"
        in str(no.value)
    )
    assert no.value.fix == "set cluster.gpus_per_client to 0.125 and cluster.clients_per_actor to 1"
    assert lay_out(1, wanted(gpus_per_client=0.12), [node(gpus=1)], gpu_memory=memory).gpus == 0.12
    assert lay_out(1, wanted(gpus_per_client=1.0), [node(gpus=1)], gpu_memory=memory).gpus == 1.0


def test_automatic_fractions_fill_the_gpus():
    """10 actors on 2 GPUs: a fifth each; 3 on 2: a half, since a fraction never straddles two."""
    assert lay_out(10, wanted(), [node(gpus=2)]).gpus == pytest.approx(0.2)
    assert lay_out(3, wanted(), [node(gpus=1), node(gpus=1)]).gpus == pytest.approx(0.5)


@pytest.mark.parametrize("clients", [1, 3, 7, 93, 99, 105, 186, 198])
def test_automatic_fractions_always_fit(clients):
    """1/n of a GPU fits n times, for n whose reciprocal rounds down as well."""
    assert len(lay_out(clients, wanted(), [node(gpus=1)]).clients) == clients


def test_gpus_decide_where_there_are_any():
    """8 whole GPUs on a node with 2 CPUs, beside a node of 64 CPUs: the actors share the two, and no GPU is idle."""
    found = lay_out(8, wanted(), [node(cpus=64.0), node(cpus=2.0, gpus=8)])
    assert (found.bundle["CPU"], found.bundle["GPU"]) == (0.25, 1.0)


def test_an_actor_on_a_gpu_asks_for_a_core_as_far_as_there_are_any():
    """4 to a GPU: of 8 cores one each; of 2 half a core each, so that four still fit; three of ten: 0.3 of a core.

    The share is of what the GPU holds, not of this run's actors: another run has the other half of GPU and cores.
    """
    quarter = wanted(gpus_per_client=0.25)
    assert lay_out(4, quarter, [node(cpus=8.0, gpus=1)]).cpus == 1.0
    assert lay_out(4, quarter, [node(cpus=2.0, gpus=1)]).cpus == 0.5
    assert lay_out(2, quarter, [node(cpus=2.0, gpus=1)]).cpus == 0.5
    assert lay_out(10, wanted(), [node(cpus=3.0, gpus=1)]).cpus == 0.3
    assert lay_out(2, wanted(gpus_per_client=1.0), [node(cpus=4.0, gpus=1), node(cpus=0.5, gpus=1)]).cpus == 0.5
    assert lay_out(8, wanted(cpus_per_actor=0.25), [node(gpus=8)]).cpus == 0.25


def test_cores_that_others_hold_leave_no_gpu_idle():
    """Two actors of half a GPU and a core each, one core free: they ask for a hundredth. What is fixed stays."""
    layout = lay_out(2, wanted(), [node(gpus=1)])
    assert (layout.gpus, layout.cpus) == (0.5, 1.0)
    assert without_cores(layout, wanted(), [node(gpus=1)]) is layout
    assert without_cores(layout, wanted(), [node(cpus=1.0, gpus=1)]).cpus == 0.01
    assert without_cores(layout, wanted(cpus_per_actor=1.0), [node(cpus=1.0, gpus=1)]) is layout
    assert without_cores(layout, wanted(), [node(cpus=1.0, gpus=0.5)]) is layout, "there the GPU is what is missing"


@pytest.mark.parametrize(
    ("clients", "asked", "there", "fixes"),
    [
        (5, {"gpus_per_client": 0.4}, node(gpus=2), ["clients_per_actor to 2", "gpus_per_client to 0.3333"]),
        (100, {"gpus_per_client": 0.02}, node(gpus=1), ["clients_per_actor to 2", "gpus_per_client to 0.01"]),
        (100, {"gpus_per_client": 0.02}, node(gpus=1, memory_bytes=4.2e9), ["clients_per_actor to 10"]),
        (5, {"gpus_per_client": 1.0}, node(), ["gpus_per_client to 0"]),
        (10, {"memory_per_actor_gb": 3.0}, node(memory_bytes=16e9), ["clients_per_actor to 2"]),
        (1, {"memory_per_actor_gb": 30.0}, node(memory_bytes=16e9), ['memory_per_actor_gb to "auto"']),
        (10, {"cpus_per_actor": 1.0}, node(), ["clients_per_actor to 5"]),
        (1, {"cpus_per_actor": 4.0}, node(), ['cpus_per_actor to "auto"']),
        (60, {}, node(memory_bytes=8e9), ["clients_per_actor to 4"]),
    ],
)
def test_what_cannot_fit_is_refused_with_fixes_that_work(clients, asked, there, fixes):
    """5 × 0.4 on 2 GPUs: floor(1/0.4) = 2 fit each, so 4; 100 × 0.02 on 1: 50. 4.2 GB hold 10 actors of 400 MiB."""
    with pytest.raises(CannotPlace) as refused:
        lay_out(clients, wanted(**asked), [there])
    assert refused.value.fix == "set " + ", or ".join(f"cluster.{fix}" for fix in fixes)
    assert refused.value.nodes[0][:3] == ("id", f"{there.cpus:g}", str(there.gpus))
    for key, value in re.findall(r"cluster\.(\w+) to (\S+?)(?:,|$)", refused.value.fix):
        read = {"clients_per_actor": int, "gpus_per_client": float}.get(key, lambda text: text.strip('"'))
        assert lay_out(clients, wanted(**(asked | {key: read(value)})), [there]).fits([there])


@pytest.mark.parametrize("clients", range(5, 60, 3))
def test_both_advised_fixes_work_for_any_number_of_clients(clients):
    """On two GPUs at a half each, four actors fit; what the message says to set is then accepted."""
    with pytest.raises(CannotPlace) as caught:
        lay_out(clients, wanted(gpus_per_client=0.5), [node(gpus=2)])
    packed, fraction = re.findall(
        r"clients_per_actor to (\d+), or cluster\.gpus_per_client to (\S+)", caught.value.fix
    )[0]
    assert len(lay_out(clients, wanted(gpus_per_client=float(fraction)), [node(gpus=2)]).clients) == clients
    assert lay_out(clients, wanted(gpus_per_client=0.5, clients_per_actor=int(packed)), [node(gpus=2)])


def test_what_is_advised_counts_the_clients_that_an_actor_then_holds():
    """300 MB an actor and 400 MB a client, in 4 GB: 2 of three are too few for eight clients, 2 of four are enough."""
    there = [node(memory_bytes=4e9)]

    def grows(packed):
        return int(3e8 + 4e8 * packed)

    with pytest.raises(CannotPlace) as refused:
        lay_out(8, wanted(), there, grows)
    assert refused.value.fix == "set cluster.clients_per_actor to 4"
    assert lay_out(8, wanted(clients_per_actor=4), there, grows).memory_bytes == 19e8
    assert len(lay_out(8, wanted(clients_per_actor="auto"), there, grows).clients) == 2


def test_a_node_that_tells_of_no_memory_is_asked_for_none():
    """Ray would place no bundle with memory there."""
    assert lay_out(2, wanted(), [node(memory_bytes=0)]).bundle == {"CPU": 0.5}


def test_actors_are_spread_and_one_that_moves_goes_where_the_fewest_sit():
    """Three over two nodes: 0, 1, 0. With three on the first and none on the second, the next sits on the second."""
    layout = Layout(((0,),), 0.0, 0.5)
    assert assign(layout, [node(), node()], 3) == [0, 1, 0]
    assert assign(layout, [node(), node()], 1, has=[3, 0]) == [1]
    assert assign(layout, [node(), node()], 9) is None


def test_nothing_mends_what_is_too_big_for_any_node():
    """One client that wants 0.5 GPU of a machine that has 100 MB of memory: said, without advice that does not work."""
    with pytest.raises(
        CannotPlace, match=r"no single setting of \[cluster\] mends that: there is too little of memory"
    ):
        lay_out(1, wanted(gpus_per_client=0.5), [node(gpus=1, memory_bytes=1e8)])


def test_where_nodes_are_still_to_come_nothing_is_refused():
    """An autoscaler may come to 4 GPUs: 8 actors get a half each, though there is none yet."""
    assert lay_out(8, wanted(), [node()], gpus=4).gpus == 0.5
    assert lay_out(8, wanted(gpus_per_client=1.0), [node()], gpus=4).gpus == 1.0


def test_an_actors_memory_grows_with_its_batch_and_width():
    """W = 128, 32 images at once: 13 × 32 × 4·128·(32² + 16² + 8²) B = 286 MB beside the process and six models."""
    job = config.validate({"name": "x", "model": {"width": 128, "depth": 2}, "data": {"dataset": "digits"}})
    made = plan.build_plan(job, datasets.load("digits", ""))
    model = 4 * made.points[0].model.num_params
    maps = 4 * 128 * (8**2 + 4**2)
    assert made.points[0].model.activation_bytes == maps
    assert 0 <= estimate.actor_bytes(made, 1) - (350 * 2**20 + 13 * 32 * maps + 6 * model) < 1e5
    assert estimate.gpu_bytes(made, 1) - CONTEXT_BYTES > 13 * 256 * maps


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 2 * 1000),
        ({"synthetic": {"scale": 1, "finetune": 1}}, 13 * 256),
        ({"synthetic": {"scale": 1}}, 13 * 256),
        ({"synthetic": {"scale": 1, "batch": 200}}, 13 * 200),
        ({"cluster": {"micro_batch": 64}}, 13 * 32),
        ({"cluster": {"micro_batch": 64, "cuda_graphs": "auto"}}, 2 * 13 * 32),
    ],
)
def test_what_steps_hold_of_a_gpu(changes, copies):
    """Batches of 32, two clients of 700 images: all classes' batches of fine-tuning, or matched images, are cut at 256.

    An evaluation has 1,000 images at once, unless micro-batches are small.
    """
    small = {"batch_size": 32}
    sections = {name: small for name in ("train", "unlearn", "recover", "relearn")}
    job = {"name": "x", "model": {"width": 64, "depth": 2}, "data": {"dataset": "digits"}, **sections}
    clients = {"partition": {"kind": "iid", "clients": 2}}
    made = plan.build_plan(config.validate(job | clients | changes), datasets.load("digits", ""))
    maps = made.points[0].model.activation_bytes
    images = 2 * 4 * 64 * 720 + 64 * 720  # at most: pixels and velocity, and the shard's bytes
    beside = CONTEXT_BYTES + 6 * 4 * made.points[0].model.num_params
    assert copies * maps <= estimate.gpu_bytes(made, 1) - beside <= copies * maps + images


@pytest.mark.ray
@pytest.mark.slow
def test_the_capacity_is_what_ray_then_places():
    """20 random shapes: some of three nodes with 1, 2 and 4 GPUs, any fraction, any share of CPUs and memory.

    As many actors as the layout says fit find room at once; with one more there is none, however Ray tries.
    """
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group, remove_placement_group

    shapes = [{"num_cpus": 4, "num_gpus": 1}, {"num_cpus": 3, "num_gpus": 2}, {"num_cpus": 8, "num_gpus": 4}]
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for i, shape in enumerate(shapes):
            made.add_node(**shape, memory=(i + 1) * 10**9, object_store_memory=80 * 2**20)
        ray.init(address=made.address, namespace="layout")
        there = [node for node in cluster.nodes() if node.cpus]
        draws = random.Random(0)
        for _ in range(20):
            chosen = draws.sample(there, draws.randint(1, 3))
            gpus = draws.choice([0.0, 1 / draws.randint(1, 9), round(draws.uniform(0.05, 1.0), 4)])
            cpus = draws.choice([0.01, 0.5, round(draws.uniform(0.05, 2.0), 2)])
            memory = draws.choice([1, 10**8, draws.randint(5 * 10**7, 10**9)])
            one = Layout(((0,),), gpus, cpus, memory)
            capacity = sum(one.held_by(chosen))
            for count, waits_s in ((capacity, 10.0), (capacity + 1, 0.5)):
                places = assign(one, chosen, min(count, capacity)) or []
                where = [{"ray.io/node-id": chosen[i].node_id} for i in places]
                where += [{"ray.io/node-id": f"in({','.join(node.node_id for node in chosen)})"}] * (count - len(where))
                if count:
                    group = placement_group([one.bundle] * count, "SPREAD", bundle_label_selector=where)
                    assert group.wait(waits_s) == (count == capacity), (one.bundle, chosen, capacity)
                    remove_placement_group(group)
                    wait_until_free(there)
    finally:
        ray.shutdown()
        made.shutdown()


def wait_until_free(there):
    """Until a removed group has given everything back."""
    for _ in range(200):
        free = {node.node_id: node for node in cluster.free_nodes()}
        if all((free[n.node_id].cpus, free[n.node_id].gpus) == (n.cpus, n.gpus) for n in there):
            return
        time.sleep(0.05)
    raise AssertionError("a removed group keeps its resources")
