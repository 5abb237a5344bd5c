# SPDX-License-Identifier: MIT
"""`xpool devices` looks for NVSHMEM where the agents of the configuration do, and without one in the
environment; never in a folder of the working tree."""

import json
import os
import pathlib
import subprocess
import tempfile

import harness

WHEEL = "lib/python3.11/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3"


def prefix(folder):
    """A prefix with an interpreter and the wheel; (its interpreter, the wheel's library)."""
    library, python = folder / WHEEL, folder / "bin" / "python"
    for file in (library, python):
        file.parent.mkdir(parents=True)
        file.write_text("")
    python.chmod(0o755)
    return str(python), str(library)


def devices(folder, *words, **environment):
    """(exit code, where NVSHMEM was found or None, standard error)."""
    keep = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV" and not k.startswith("XPOOL_")}
    plugin = {"XPOOL_NVSHMEM_PLUGIN": str(harness.XPOOL)}  # any file: nothing is loaded
    done = subprocess.run(
        [str(harness.XPOOL), "devices", "--json", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**keep, **plugin, **environment},
        timeout=30 * harness.SLOW,
    )
    return done.returncode, json.loads(done.stdout).get("nvshmem") if done.stdout else None, done.stderr


def nvshmem():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prefix(folder / ".xpool-cache" / "venv-test")
        python, library = prefix(folder / "chosen")
        there, of_environment = prefix(folder / "active")
        harness.check("venv-test" not in str(devices(folder)[1]), "a folder of the working tree was looked into")
        found = devices(folder, VIRTUAL_ENV=str(folder / "active"))
        harness.check(found[:2] == (0, of_environment), f"the active environment: {found}")
        found = devices(folder, XPOOL_PYTHON=there)
        harness.check(found[:2] == (0, of_environment), f"XPOOL_PYTHON: {found}")
        config = folder / "c.toml"
        entry = f'[[models]]\nid = "m"\npath = "{harness.TALES}"\nengine = "sglang"\npython = "{python}"\n'
        config.write_text(harness.TWO_DEVICES + entry)
        for words, environment in ((("--config", str(config)), {}), ((), {"XPOOL_CONFIG": str(config)})):
            found = devices(folder, *words, XPOOL_PYTHON=there, **environment)
            harness.check(found[:2] == (0, library), f"the model's interpreter: {found}")
        config.write_text("nonsense")
        code, _, error = devices(folder, "--config", str(config))
        harness.check(code == 2 and "c.toml" in error, f"a configuration that is none: {code} {error}")
        code, found, error = devices(folder, XPOOL_CONFIG=str(config))
        harness.check((code, found) == (0, None), f"one in the environment: {code} {found} {error}")


if __name__ == "__main__":
    harness.main(nvshmem)
