"""Modules whose every name can be imported and none called."""

import importlib.machinery
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


class NameOnly(type):
    """Metaclass of placeholders: a class, so that `isinstance` and subclassing work; attributes are placeholders too."""

    def __getattr__(cls, name: str) -> "NameOnly":
        """Return a placeholder for an attribute; Python's own double-underscore names stay missing."""
        return placeholder(cls.__qualname__, name)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        """Raise NotImplementedError: whatever is called is missing in earnest."""
        raise NotImplementedError(
            f"{cls.__qualname__} was called, but the CPU stand-in knows only its name: "
            "this model or option of SGLang needs a GPU."
        )


def placeholder(parent: str, name: str) -> NameOnly:
    """Return the placeholder for `name` in `parent`; raises AttributeError for double-underscore names."""
    if name.startswith("__"):
        raise AttributeError(f"{parent} has no {name}")
    return NameOnly(name, (), {"__qualname__": f"{parent}.{name}"})


class PlaceholderFinder(MetaPathFinder, Loader):
    """Finds `package` and all below it, after every other finder; `contents` maps module names to real functions."""

    def __init__(self, package: str, contents: Mapping[str, Sequence[Callable[..., Any]]]) -> None:
        self.package = package
        self.contents = contents

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim the package and its submodules, all as packages."""
        if fullname.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with its real functions and answer every other name with a placeholder."""
        for function in self.contents.get(module.__name__, ()):
            setattr(module, function.__name__, function)
        module.__getattr__ = lambda name: placeholder(module.__name__, name)  # type: ignore[method-assign]
