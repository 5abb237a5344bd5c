# SPDX-License-Identifier: MIT
"""Where NVIDIA's MPS controller is."""

import glob
import os
import shutil

NAME = "nvidia-cuda-mps-control"
FOLDERS = ("/usr/local/nvidia/bin", "/usr/local/nvidia/*/bin", "/opt/nvidia/*/bin", "/usr/local/cuda/bin")


def find_control():
    """Puts the controller's folder on PATH where the driver lies beside the system; its path, or None."""
    for pattern in FOLDERS:
        for folder in glob.glob(pattern):
            if not shutil.which(NAME) and os.access(f"{folder}/{NAME}", os.X_OK):
                os.environ["PATH"] += f":{folder}"
    return shutil.which(NAME)
