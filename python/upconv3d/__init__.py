# SPDX-License-Identifier: Apache-2.0
"""One fused block for PyTorch: group_norm(relu(conv_transpose3d(x, w, bias)))."""

import os

from ._extension import load_extension, require_torch

require_torch()
_C = load_extension()

from . import (  # noqa: E402  (they register with the operator that _C has just defined)
    _autocast,
    _autograd,
    _fake,
    _flops,
    _graphs,
    _in_graphs,
    _numbered,
    _recorded_casts,
    _tail_autocast,
    _tail_op,
    _transforms,
)
from .accelerate import Finding, Report, accelerate, restore  # noqa: E402
from .explain import Plan, build_config, explain, explain_norm_act  # noqa: E402
from .functional import conv_transpose3d_relu_group_norm  # noqa: E402
from .inductor import InductorPass, inductor_pass  # noqa: E402
from .module import ConvTranspose3dReLUGroupNorm  # noqa: E402
from .norm_act import conv_transpose3d_norm_act  # noqa: E402
from .norm_act_module import ConvTranspose3dNormAct  # noqa: E402

__version__: str = build_config()["version"]

__all__ = [
    "ConvTranspose3dNormAct",
    "ConvTranspose3dReLUGroupNorm",
    "Finding",
    "InductorPass",
    "Plan",
    "Report",
    "__version__",
    "accelerate",
    "build_config",
    "conv_transpose3d_norm_act",
    "conv_transpose3d_relu_group_norm",
    "explain",
    "explain_norm_act",
    "inductor_pass",
    "restore",
]

# Builds of one version may differ, and are told apart by when they were made.
_graphs.tag_compile_cache(f"{__version__} {os.path.getmtime(str(_C.__file__))}")
_autograd.register()
_autocast.register()
_fake.register()
_in_graphs.register()
_numbered.register()
_recorded_casts.register()
_tail_op.register()
_tail_autocast.register()
_transforms.register()
_flops.register()
