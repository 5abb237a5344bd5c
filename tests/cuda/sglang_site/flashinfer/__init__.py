# SPDX-License-Identifier: MIT
"""Stands for flashinfer where it is not installed: SGLang imports names of it that it does not use with
the Triton backends. Any module below imports; calling what comes from it raises. `flashinfer.norm` is
refused, since sgl_kernel would take its rmsnorm from there."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.6.12"


def _unusable(name):
    def call(*arguments, **options):
        raise NotImplementedError(f"flashinfer is not installed: {name}")

    call.__name__ = name
    return call


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _unusable(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name == "flashinfer.norm":
            raise ModuleNotFoundError(name)
        if name.startswith("flashinfer."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _unusable(name)
