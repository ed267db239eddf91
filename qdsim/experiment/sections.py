"""The sections of a job that only the experiment reads, and how pydantic checks those that algorithms read.

Every key has its type, its range and its default, the paper's where the paper gives one.
"""

import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from qdsim import plugins
from qdsim.errors import BadInput
from qdsim.models.kinds import CONVNET, NETWORKS, TORCHVISION
from qdsim.models.numerics import Numerics
from qdsim.ranges import NotNegative, Positive, Rate

SMALLEST_FRACTION = 0.0001


class Section(BaseModel):
    """Unknown keys, other types and later changes are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Checked:
    """Have pydantic check a dataclass of settings as strictly as a :class:`Section`: ``Annotated[Train, Checked]``.

    Pydantic by itself takes no TOML table for a dataclass in strict mode, so it checks the table as a model with the
    same fields, and the dataclass is made of what it returns.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check as a model, return the dataclass, write it as a table."""
        checked = core_schema.no_info_after_validator_function(
            lambda model: source(**{field.name: getattr(model, field.name) for field in fields(source)}),
            handler.generate_schema(as_section(source)),
        )
        return core_schema.no_info_before_validator_function(
            lambda value: asdict(value) if isinstance(value, source) else value,
            checked,
            serialization=core_schema.plain_serializer_function_ser_schema(asdict),
        )

    @staticmethod
    def adapter(settings: type) -> TypeAdapter[Any]:
        """Return what checks a table against these settings."""
        kind: Any = Annotated[settings, Checked]
        return TypeAdapter(kind)


@cache
def as_section(settings: type) -> type[Section]:
    """Return a model with the fields of a dataclass."""
    hints = get_type_hints(settings, include_extras=True)
    declared: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in fields(settings)}
    return create_model(settings.__name__, __base__=Section, **declared)


class DataSection(Section):
    """Which images, and where they lie."""

    dataset: str = "digits"
    """``digits`` (needs no download), ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, ``svhn``,
    ``svhn+extra``, ``parquet:DIR`` (Hugging Face layout), ``folder:DIR`` (``train/`` and ``test/``) or
    ``package.module:reader``: a function of ``data.root`` that returns the four arrays."""
    root: str = Field(default_factory=lambda: os.environ.get("QDSIM_DATA_ROOT", "data"))
    """Where data sets lie; ``$QDSIM_DATA_ROOT``, else ``data``."""
    verify: bool = True
    """Check SVHN's files against torchvision's checksums."""
    download: bool = False
    """Fetch a missing data set from its public source."""
    size: Positive | None = None
    """Resize the images of ``parquet:`` and ``folder:`` to size x size pixels."""


class PartitionSection(Section):
    """How the training data are divided among the clients."""

    kind: Literal["dirichlet", "official", "iid"] = "dirichlet"
    """``dirichlet``: class-major Dir(α); ``official``: the same with the seeding of the paper's code."""
    clients: Positive = 10
    """N."""
    alpha: Rate = 0.1
    """α; smaller is more heterogeneous."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """One partition for all seeds; by default each run seed has its own (``official``: 42)."""
    min_size: Positive = 10
    """No client gets fewer samples: the split is drawn again, at most 1,000 times."""


class ModelSection(Section):
    """The network; by default the paper's ConvNet [W, N, A, P] x D."""

    kind: str = CONVNET
    """``convnet``, ``mlp``, ``lenet``, ``resnet`` (CIFAR's, with group normalisation), ``torchvision:NAME`` (with group
    normalisation where it takes one), or ``package.module:factory``: a function of ``channels``, ``size`` and
    ``num_classes`` that returns a ``torch.nn.Module``."""
    width: Annotated[int, Field(ge=1, le=4096)] = 128
    """W of the ConvNet; other networks have ``options`` of their own."""
    depth: Annotated[int, Field(ge=1, le=16)] = 3
    """D of the ConvNet; other networks have ``options`` of their own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the other networks' factories, for example ``{width = 16, depth = 20}`` of ``resnet``."""
    gradients: Literal["auto", "autograd"] = "auto"
    """``auto``: the ConvNet's derivatives written out, autograd for every other network. ``autograd`` for the ConvNet,
    too: the same up to rounding, and slower."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind in (CONVNET, *NETWORKS) or kind.startswith(TORCHVISION) or plugins.reference_of("network", kind):
            return kind
        own = [CONVNET, *NETWORKS, f"{TORCHVISION}NAME", *plugins.declared("network")]
        raise ValueError(f"allowed: {', '.join(own)}, package.module:factory")

    @model_validator(mode="after")
    def _of_the_kind(self) -> "ModelSection":
        if self.kind == CONVNET and self.options:
            raise BadInput("model.options", self.options, "convnet has none; it has model.width and model.depth")
        return self


def _ray_can_count_it(fraction: float) -> float:
    if 0 < fraction < SMALLEST_FRACTION:
        raise ValueError(f"Ray counts GPUs in steps of {SMALLEST_FRACTION}")
    return fraction


@dataclass(frozen=True)
class Cluster(Numerics):
    """Where clients are placed. Only the fields of :class:`Numerics` change results, and devices of another kind."""

    gpus_per_client: Annotated[float, Field(ge=0, le=1), AfterValidator(_ray_can_count_it)] | Literal["auto"] = "auto"
    """Fraction of a GPU that an actor is pinned to; ``auto`` shares what there is, 0 without GPUs."""
    clients_per_actor: Positive | Literal["auto"] = 1
    """``auto`` packs clients so that memory suffices, and no core has more than two actors, a GPU one or two: as many
    as it has cores and memory for. The default is one each; where GPUs that ``gpus_per_client = "auto"`` shares have
    too little memory for that, as few more as fit. The results are the same bits."""
    cpus_per_actor: Rate | Literal["auto"] = "auto"
    """CPUs that Ray sets aside for an actor; ``auto``: half of them shared out, so that ten actors fit two cores, and
    with GPUs a core each, or less where that would leave GPUs idle. How many steps run at once is decided by cores, or
    by GPUs, whatever this says."""
    memory_per_actor_gb: Rate | Literal["auto"] = "auto"
    """Memory that Ray sets aside for an actor; ``auto``: an estimate from model and batch (see ``qdsim plan``)."""
    placement_timeout_s: Rate = 30.0
    """How long to wait for room before giving up with exit code 3."""
    attempts: Positive = 3
    """How often a step is tried when its actor is lost, and a run when its driver is; then it ends with code 4 or 1."""
    step_timeout_s: Rate | Literal["auto"] = "auto"
    """After how long a step is taken to hang and its actor replaced; ``auto``: 20 times the longest of its phase so
    far, 600 s at least; four hours for a phase's first step."""
    cpu_fallback: bool = False
    """Whether a client runs on the CPU where torch cannot use the GPU that it was granted; else the run ends with exit
    code 3 and the reason. Logical GPUs of a machine without any need it. CPU and GPU differ in their last digits."""
    mixed_devices: bool = False
    """Whether a run's clients may compute on several kinds of device, a GPU of another model or the CPU among them, as
    after a node is replaced. Their last digits differ, so the results then depend on where clients sat."""
    cuda_graphs: Literal["off", "auto", "on"] = "off"
    """On GPUs, whether the launches of a local step of the ConvNet are captured once in a client's call, as a CUDA
    graph, and then replayed as one: less for the host to do, the same bits. ``auto``: where capturing works and gives
    the same bits, which each actor tries as it starts, else it is said why not; ``on``: there, or exit code 3."""
    local_gpus: NotNegative | None = None
    """Logical GPUs of the local cluster that ``qdsim run`` starts; by default those that are found."""
    local_cpus: Positive | None = None
    """CPUs of that local cluster; by default those that are found."""

    def numerics(self) -> Numerics:
        """Return what moves bits, without the rest: client processes get it, and need nothing of this file."""
        return Numerics(**{field.name: getattr(self, field.name) for field in fields(Numerics)})


class Request(Section):
    """What is to be forgotten."""

    kind: Literal["class", "client"]
    """A class at every client, or all samples of a client."""
    target: NotNegative | str
    """A number, ``random`` (drawn for each seed), or a class's name where the data set has names, such as ``dog``."""
