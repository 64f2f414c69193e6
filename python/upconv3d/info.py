# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.info`: what was built, and what it found on this machine."""

import argparse
import json
import platform
from typing import Any

import torch

import upconv3d

from ._command import piped


def machine() -> dict[str, Any]:
    """Versions and devices that the process sees."""
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(f"{properties.name}, sm_{properties.major}{properties.minor}")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_devices": devices,
        "cpu_threads": torch.get_num_threads(),
    }


def _lines(values: dict[str, Any], indent: str) -> list[str]:
    width = max((len(key) for key in values), default=0)
    lines = []
    for key, value in values.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            lines.append(f"{indent}{key}:")
            for row in value:
                lines.append(indent + "  " + "  ".join(f"{name}={item}" for name, item in row.items()))
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            lines.append(f"{indent}{key:<{width}}  {'none' if text in ('', None) else text}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m upconv3d.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = {"build": upconv3d.build_config(), "machine": machine()}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for title, values in found.items():
            print(title)
            print("\n".join(_lines(values, "  ")))
    return 0


if __name__ == "__main__":
    raise SystemExit(piped(main))
