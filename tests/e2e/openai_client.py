# SPDX-License-Identifier: MIT
"""The official openai Python client against the real system, unchanged: tests/reference/http_openai.py
run for two models behind one gateway. Needs the environment of the references."""

import subprocess
import sys

import harness


def official_client():
    models = [harness.model("tales", dtype="float32"), harness.model("tales-two", dtype="float32")]
    with harness.System(models) as system:
        system.start(120)
        for m in system.models:
            program = harness.ROOT / "tests" / "reference" / "http_openai.py"
            result = subprocess.run(
                [sys.executable, str(program), system.gateway, "--model", m],
                stderr=subprocess.STDOUT, timeout=240 * harness.SLOW
            )
            harness.check(result.returncode == 0, f"{program.name} --model {m} exited with {result.returncode}")
        system.stop()


if __name__ == "__main__":
    harness.main(official_client)
