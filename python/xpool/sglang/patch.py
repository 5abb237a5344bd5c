# SPDX-License-Identifier: MIT
"""Changing a function of SGLang, strictly: a target that is not there is an error, not a log line."""

import functools
import importlib
import inspect

from xpool.native import XpoolError
from xpool.sglang import release


_around = []  # what `check` looks for


def resolve(module_name, path):
    """The object that holds the last name of `path` in a module, that name, and its value."""
    try:
        owner = importlib.import_module(module_name)
        *owners, name = path.split(".")
        for step in owners:
            owner = getattr(owner, step)
        return owner, name, inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise XpoolError(
            f"SGLang {release.found()} has no {module_name}.{path}, which the plugin must change:"
            f" {error}"
        ) from error


def around(module_name, path, hook):
    """Calls `hook(original, *arguments, **options)` in place of a function or method."""
    owner, name, original = resolve(module_name, path)
    bind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if bind else original

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        return hook(function, *arguments, **options)

    wrapped.xpool_hook = hook
    setattr(owner, name, bind(wrapped) if bind else wrapped)
    _around.append((module_name, path, hook))


def replace(module_name, path, value):
    owner, name, _ = resolve(module_name, path)
    setattr(owner, name, value)


def check():
    """Every hook is still in place; another plugin may have put its own function over one."""
    for module_name, path, hook in _around:
        if not _is_hooked(module_name, path, hook):
            raise XpoolError(f"the hook on {module_name}.{path} is gone: is another plugin in its place?")


def _is_hooked(module_name, path, hook):
    found = resolve(module_name, path)[2]
    found = getattr(found, "__func__", found)
    while found is not None:
        if getattr(found, "xpool_hook", None) is hook:
            return True
        found = getattr(found, "__wrapped__", None)
    return False
