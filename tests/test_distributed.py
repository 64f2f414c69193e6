# SPDX-License-Identifier: Apache-2.0
"""Training in two processes, under DDP and FSDP2, takes the path of one process with the whole batch.

The blocks by themselves, and a model of PyTorch's modules that upconv3d.accelerate changed.
"""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import upconv3d
from accelerated_models import count_blocks_run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from upconv3d._accelerated import block

WORLD, BATCH, STEPS = 2, 4, 5
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def _of_blocks(device):
    block = partial(upconv3d.ConvTranspose3dReLUGroupNorm, device=device, precision="ieee")
    torch.manual_seed(0)
    return nn.Sequential(
        block(4, 16, 3, 4, stride=2, padding=1, output_padding=1),
        nn.Conv3d(16, 8, 1, device=device),
        block(8, 8, 3, 2),
        nn.Conv3d(8, 1, 1, device=device),
    )


class _Up(nn.Module):
    """A forward that accelerate() traces."""

    def __init__(self, device):
        super().__init__()
        self.conv = nn.ConvTranspose3d(8, 8, 3, device=device)
        self.norm = nn.InstanceNorm3d(8, affine=True, device=device)

    def forward(self, x):
        return nn.functional.leaky_relu(self.norm(self.conv(x)), 0.1)


def _plain(device):
    up = nn.ConvTranspose3d(4, 16, 3, 2, padding=1, output_padding=1, device=device)
    return nn.Sequential(
        nn.Sequential(up, nn.GroupNorm(4, 16, device=device), nn.PReLU(device=device)),
        nn.Conv3d(16, 8, 1, device=device),
        _Up(device),
        nn.Conv3d(8, 1, 1, device=device),
    )


def _accelerated(device):
    torch.manual_seed(0)
    model = _plain(device)
    report = upconv3d.accelerate(model, precision="ieee")
    assert len(report.replaced) == 2, str(report)
    return model


MODELS = {"blocks": _of_blocks, "accelerated": _accelerated}


def _train(model, x, target, mean=lambda loss: loss):
    """Losses of a few steps of SGD; `mean` is that over the processes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(mean(loss.detach())))
    return losses


def _data(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, 3, 4, 5, generator=generator)
    target = torch.randn(BATCH, 1, 8, 10, 12, generator=generator)
    return x.to(device), target.to(device)


def _replicated(model, device):
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def _sharded(model, device):
    """The block is a unit: its own forward gathers the parameters, that of its submodules does not run.

    So is what accelerate() gave a forward of ours, for the same reason.
    """
    mesh = init_device_mesh(device.type, (WORLD,))
    for module in model:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": _replicated, "fsdp2": _sharded}


def _count_blocks_of_accelerate():
    """count_blocks_run in this process, where no block is too small."""
    block.SMALL_BLOCK_VALUES = 0
    return count_blocks_run(setattr)


def _worker(rank, kind, folder):
    """One process: its share of the batch, under each wrapper in turn; the losses go to a file."""
    torch.set_num_threads(1)
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[kind], init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)

    def mean(loss):
        dist.all_reduce(loss)
        return loss / WORLD

    share = slice(rank * BATCH // WORLD, (rank + 1) * BATCH // WORLD)
    x, target = (tensor[share] for tensor in _data(device))
    calls = _count_blocks_of_accelerate()
    losses = {}
    for model, make in MODELS.items():
        for name, wrapper in WRAPPERS.items():
            calls.clear()
            losses[model, name] = _train(wrapper(make(device), device), x, target, mean)
            expected = 2 * STEPS if model == "accelerated" else 0
            assert len(calls) == expected, f"{len(calls)} of {expected} blocks ran in one call under {name}"
    torch.save(losses, folder / f"losses_{rank}.pt")
    dist.destroy_process_group()
    # Caches of DTensor keep the mesh, so the group's threads outlive it. One that drops the last reference to
    # a tensor while the interpreter shuts down is ended as it asks for the GIL, and takes the process along
    # (SIGABRT).
    os._exit(0)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def losses(request, tmp_path_factory):
    """Losses by model and wrapper: of one process ("alone"), and of two under each."""
    kind = request.param
    if not dist.is_available() or not dist.is_backend_available(BACKENDS[kind]):
        pytest.skip(f"needs torch.distributed with {BACKENDS[kind]}")
    if kind == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(_worker, (kind, folder), nprocs=WORLD)
    of_ranks = [torch.load(folder / f"losses_{rank}.pt") for rank in range(WORLD)]
    assert of_ranks[0] == of_ranks[1]
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    device = torch.device(kind)
    alone = {(model, "alone"): _train(MODELS[model](device), *_data(device)) for model in MODELS}
    torch.backends.cudnn.conv.fp32_precision = before
    return alone | of_ranks[0]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
def test_like_one_process(losses, model, wrapper):
    alone = losses[model, "alone"]
    assert losses[model, wrapper] == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < 0.98 * alone[0]
