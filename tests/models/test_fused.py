"""Triton's kernels: what they compute in its interpreter, and what its compiler makes of them. Neither needs a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qdsim.bench.fake_cuda import Values, pretended
from qdsim.models.convnet import NORM_EPS, ConvNet
from qdsim.models.fast import fused
from qdsim.models.fast.cuda import Fused

triton = pytest.importorskip("triton")
KERNELS = {"forward": True, "backward": False, "tangent": True, "tangent_back": False}
"""Whether a kernel pools."""
INTERPRETED = """
import torch
from qdsim.models.fast import fused
assert fused.triton is not None
draws = torch.Generator().manual_seed(0)
def drawn(*shape): return torch.randn(*shape, generator=draws, dtype=torch.float64)
for n, c, h, w in [
    (3, 5, 32, 32), (2, 3, 16, 16), (5, 3, 8, 8), (2, 2, 4, 4), (2, 3, 9, 9), (3, 2, 5, 7), (1, 2, 2, 3),
    (1, 1, 64, 64),
]:
    shape = n, c, h, w
    z, dz, gamma, beta = 2 * drawn(*shape) + 1, drawn(*shape), drawn(c), 0.3 * drawn(c)
    pooled, d_pooled = drawn(n, c, h // 2, w // 2), drawn(n, c, h // 2, w // 2)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        maps = [tensor.to(dtype) for tensor in (z, dz, pooled, d_pooled)]
        full = torch.float64 if dtype == torch.float64 else torch.float32
        affine = gamma.to(full), beta.to(full)
        state = maps[0], fused.forward_reference(maps[0], *affine)[1], *affine
        for name, given in {
            "forward": (maps[0], *affine), "backward": (*state, maps[2]), "tangent": (*state, maps[1]),
            "tangent_back": (*state, *maps[1:]),
        }.items():
            expected, found = (getattr(fused, f"{name}_{way}")(*given) for way in ("reference", "triton"))
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
nan = torch.full((1, 1, 4, 4), float("nan"))
assert fused.forward_triton(nan, torch.ones(1), torch.zeros(1))[0].isnan().all()
print("equal")
"""


def test_kernels_compute_what_plain_torch_does():
    """In the interpreter: all shapes that jobs use, odd ones too, in three types; what is no number stays none."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "equal", ended.stderr


def compiled(name, side, dtype, capability):
    """A kernel as PTX and as a cubin, without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(fused, f"{name}_kernel")
    full = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = fused.sizes(torch.empty(1, 1, side, side, dtype=dtype, device="meta"), full, KERNELS[name])
    options = {option: sizes.pop(option) for option in ("num_warps", "enable_fp_fusion")}
    if name == "forward":
        sizes["EPS"] = NORM_EPS
    of = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
    kinds = dict.fromkeys(kernel.arg_names, of[full]) | dict.fromkeys(sizes, "constexpr")
    kinds |= {n: of[dtype] for n in ("z", "dz", "pooled", "d_pooled", "out") if n in kernel.arg_names}
    kinds |= {"channels": "i32", "rows": "i32"}
    source = ASTSource(kernel, kinds, constexprs=sizes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spilling(name, capability, tmp_path):
    """For RTX 2060, A100 and H100: the paper's maps, an odd one, the largest in float64; registers hold all.

    bfloat16 from capability 8.0 on.

    What does not fit would lie on a stack in memory. Nor does a kernel sum by atomics.
    """
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    short = torch.float32 if capability == 75 else torch.bfloat16
    for side, dtype in ((32, torch.float32), (16, short), (9, torch.float32), (64, torch.float64)):
        made = compiled(name, side, dtype, capability)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made["cubin"])
        said = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"STACK:(\d+) .* LOCAL:(\d+)", said) == [("0", "0")]
        assert not re.search(r"\b(atom|red)\.", made["ptx"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_triton_cannot_launch_plain_torch_takes_the_kernels_place(monkeypatch):
    """Triton's own error, here that it has no driver, as without a C compiler; an error of the GPU is passed on."""
    plain = fused.block

    def launched(*tensors):
        if fused.version():
            fused.forward_triton(torch.zeros(1, 1, 4, 4), torch.ones(1), torch.zeros(1))
        return plain(*tensors)

    monkeypatch.setattr(fused, "_without", [])
    monkeypatch.setattr(fused, "block", launched)
    with pretended(Values()):
        Fused(ConvNet(1, 8, 3, 4, 2), 32).warm_up()
    assert (fused.version(), "driver" in fused.why_without()) == ("", True)
    assert not fused.suits(torch.empty(1, 1, 8, 8))

    def broken(*tensors):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(fused, "_without", [])
    monkeypatch.setattr(fused, "block", broken)
    with pretended(Values()), pytest.raises(RuntimeError, match="illegal memory access"):
        Fused(ConvNet(1, 8, 3, 4, 2), 32).warm_up()
    assert fused.version()


def test_large_maps_go_without_kernels():
    """65x64 positions are more than a program takes at once."""
    assert fused.suits(torch.empty(1, 1, 64, 64))
    assert not fused.suits(torch.empty(1, 1, 65, 64))
