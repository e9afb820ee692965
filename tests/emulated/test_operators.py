"""The emulated device's operators: those of the CPU where CUDA would run, refusals where it would not."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice

ADDED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
DEVICES = "import torch\nc = torch.ones(3)\nd = torch.ones(3, device='cuda')\ne = torch.ones(3, device='cuda:1')\n"
ON_CPU = "Expected all tensors to be on the same device, but got "
TWO = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("d + c", ADDED),
        ("d + e", TWO),
        ("d @ c", f"{ON_CPU}"),
        ("d.index_select(0, torch.tensor([1]))", f"{ON_CPU}index is on cpu"),
        ("d[torch.tensor([1], device='cuda:1')]", "indices should be either on cpu or on the same device"),
        ("d.index_put_((torch.tensor([0, 1]),), torch.ones(2))", f"{ON_CPU}values is on cpu"),
        ("torch.nn.functional.embedding(torch.tensor([1]), d[:, None])", f"{ON_CPU}"),
        ("torch.cat([d, c])", f"{ON_CPU}tensors is on cpu"),
        ("torch._foreach_add_([d, d], [d, c])", ADDED),
        ("torch._foreach_mul([d, e], [d, d])", "Expected all tensors to be on the same device"),
        ("torch._foreach_addcdiv_([d], [d], [c + 1], value=1.0)", ADDED),
        (
            "torch._fused_adamw_([d], [d], [d.clone()], [d.clone()], [], [torch.tensor(1.0)], lr=1e-3, beta1=0.9, "
            "beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)",
            f"{ON_CPU}state_steps is on cpu",
        ),
        ("torch.rand(3, device='cuda', generator=torch.Generator())", "Expected a 'cuda' device type for generator"),
        ("torch.ones(1, device='cuda:7')", "CUDA error: invalid device ordinal"),
        ("torch.cuda.set_device(7)", "CUDA error: invalid device ordinal"),
    ],
)  # fmt: skip
def test_refused(code: str, error: str, emulated: EmulatedDevice) -> None:
    """Tensors of two devices, as CUDA refuses them; devices that are not there."""
    run = emulated.run(f"{DEVICES}try:\n    {code}\n    result = 'works'\nexcept Exception as e:\n    result = str(e)")
    assert run.result.startswith(error)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("(d + torch.tensor(2.0)).tolist()", [3.0] * 3),
        ("d[torch.tensor([0, 2])].tolist()", [1.0, 1.0]),
        ("d.index_put_((torch.tensor([0]),), torch.tensor(5.0)).tolist()", [5.0, 1.0, 1.0]),
        ("[t.sum().item() for t in torch._foreach_add([d, e], [d, e])]", [6.0, 6.0]),
        ("(torch._foreach_add_([c, d], 1.0), c.tolist(), d.tolist())[1:]", [[2.0] * 3, [2.0] * 3]),
        ("d.copy_(e * 4).tolist()", [4.0] * 3),
        ("c.to('cuda:1').device.index", 1),
        ("d.view(3, 1).expand(3, 2).t().sum().item()", 6.0),
        ("torch.cat([d, d]).numel()", 6),
        ("torch.linalg.vector_norm(d).item() ** 2", pytest.approx(3.0)),
        ("d.masked_select(d > 0).numel()", 3),
        ("torch.ones(2, dtype=torch.bfloat16, device='cuda').add(1).tolist()", [2.0, 2.0]),
        ("torch.histc(torch.tensor([0, 1, 1, 3], device='cuda', dtype=torch.int32), 4, 0, 3).tolist()", [1, 2, 0, 1]),
    ],
)
def test_computed(code: str, value: object, emulated: EmulatedDevice) -> None:
    """Numbers without dimensions and indices may be on the CPU; so may a list's other positions for _foreach."""
    run = emulated.run(f"{DEVICES}result = {code}")
    assert run.result == value, run.stderr


def test_a_model_trains_as_on_the_cpu(emulated: EmulatedDevice) -> None:
    """Autograd, layers, autocast and a loss scale: the CPU's numbers to the last bit, or near in 16 bits."""
    run = emulated.run("""
import torch
from torch import nn

def train(device, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 11)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(22).remainder(11).view(2, 11).to(device)
    scaler = torch.amp.GradScaler(device, enabled=precision == torch.float16)
    losses = []
    for _ in range(4):
        with torch.autocast(device, precision, enabled=precision != torch.float32):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

result = [train("cpu", torch.float32) == train("cuda", torch.float32)]
for precision in (torch.bfloat16, torch.float16):
    near = zip(train("cpu", torch.float32), train("cuda", precision))
    result.append(0 < max(abs(a - b) for a, b in near) < 0.02)
""")
    assert run.result == [True, True, True], run.stderr


def test_saved_and_loaded(emulated: EmulatedDevice, tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.save and torch.load keep a tensor's device, or map it."""
    file = tmp_path_factory.mktemp("saved") / "x.pt"
    run = emulated.run(f"""
import torch
torch.save(torch.arange(3.0, device="cuda:1"), {str(file)!r})
back, host = torch.load({str(file)!r}), torch.load({str(file)!r}, map_location="cpu")
result = [str(back.device), back.tolist(), str(host.device), host.tolist()]
""")
    assert run.result == ["cuda:1", [0.0, 1.0, 2.0], "cpu", [0.0, 1.0, 2.0]], run.stderr


@pytest.mark.parametrize(
    ("kernel", "dtype", "near"),
    [
        ("EFFICIENT_ATTENTION", "float32", 1e-5),
        ("FLASH_ATTENTION", "bfloat16", 0.05),
        ("CUDNN_ATTENTION", "float16", 0.01),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_attention(kernel: str, dtype: str, near: float, causal: bool, emulated: EmulatedDevice) -> None:
    """Kernels that only CUDA has give the products' values and gradients."""
    run = emulated.run(f"""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

def attend(backend, dtype):
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, 10, 8).to("cuda", dtype).requires_grad_() for _ in range(3)]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*qkv, is_causal={causal})
    out.float().square().sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in qkv)], out.grad_fn.name()

got, name = attend(SDPBackend.{kernel}, torch.{dtype})
wanted, _ = attend(SDPBackend.MATH, torch.float32)
result = [name, max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(got, wanted))]
""")
    assert run.result[0] == f"ScaledDotProduct{kernel.partition('_')[0].capitalize()}AttentionBackward0", run.stderr
    assert run.result[1] < near


def test_attention_that_cuda_chooses(emulated: EmulatedDevice) -> None:
    """Flash for 16 bits without a mask, efficient for the rest."""
    run = emulated.run("""
import torch
from torch.nn.functional import scaled_dot_product_attention

def kernel(dtype, mask=None):
    qkv = [torch.zeros(1, 2, 4, 8, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    return scaled_dot_product_attention(*qkv, attn_mask=mask).grad_fn.name()

mask = torch.ones(4, 4, dtype=torch.bool, device="cuda")
result = [kernel(torch.float32), kernel(torch.bfloat16), kernel(torch.bfloat16, mask)]
""")
    assert run.result == [
        f"ScaledDotProduct{name}AttentionBackward0" for name in ("Efficient", "Flash", "Efficient")
    ], run.stderr


def test_dropout_in_attention(emulated: EmulatedDevice) -> None:
    """The mask of the backward is that of the forward, and the random state moves on."""
    run = emulated.run("""
import torch
from torch.nn.functional import scaled_dot_product_attention
v = torch.ones(1, 1, 64, 8, device="cuda", requires_grad=True)
q = torch.zeros(1, 1, 64, 8, device="cuda")
one = scaled_dot_product_attention(q, q, v, dropout_p=0.5)
other = scaled_dot_product_attention(q, q, v, dropout_p=0.5)
(one.sum()).backward()
result = [torch.equal(one, other), abs(v.grad.sum().item() - one.sum().item()) < 1e-2, 0.8 < one.mean().item() < 1.2]
""")
    assert run.result == [False, True, True], run.stderr
