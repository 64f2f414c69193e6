# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.profile.ncu_target CASE`: what Nsight Compute measures, one call of the block.

CASE is what ncu.case_to_json writes. Profiling is on for the last call alone.
"""

from __future__ import annotations

import json
import sys

import torch

from .cases import DTYPES, Case, make_tensors, shape_from_json
from .peers import block_call, set_precision

WARM_CALLS = 2  # cuDNN tries its algorithms in the first


@torch.no_grad()
def main() -> int:
    given = json.loads(sys.argv[1])
    case = Case(shape_from_json(given["shape"]), DTYPES[given["dtype"]], given["layout"], given["precision"])
    device = torch.device(given["device"])
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    set_precision(case)
    call = block_call(make_tensors(case, device), case)
    for _ in range(WARM_CALLS):
        call()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        call()
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
