"""Loading a model: ``models/gpt.py:gpt3_1_3b`` or ``package.module:function``."""

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from solver_plan.errors import InputError
from solver_plan.profiles.description import ModelDescription
from solver_plan.profiles.multitask import MultitaskDescription

_LOG = logging.getLogger(__name__)
_ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


def load_description(source: str) -> ModelDescription:
    """Call the function that `source` names and return its description.

    Parameters
    ----------
    source
        ``file.py:function`` or ``package.module:function``. The function takes no arguments, or has defaults for all.

    Raises
    ------
    InputError
        If there is no such file, module or function, or it does not return a `ModelDescription`.
    """
    found = _described(source)
    if not isinstance(found, ModelDescription):
        raise InputError(f"{source}: found {type(found).__name__} returned; the function returns a ModelDescription")
    return found


def load_multitask_description(source: str) -> MultitaskDescription:
    """Return the description of a model of several tasks; see `load_description`."""
    found = _described(source)
    if not isinstance(found, MultitaskDescription):
        raise InputError(
            f"{source}: found {type(found).__name__} returned; for several tasks the function returns a "
            "MultitaskDescription"
        )
    return found


def load_any_description(source: str) -> ModelDescription | MultitaskDescription:
    """Return a description of a model of one task or of several; see `load_description`."""
    found = _described(source)
    if not isinstance(found, ModelDescription | MultitaskDescription):
        raise InputError(
            f"{source}: found {type(found).__name__} returned; the function returns a ModelDescription, "
            "or a MultitaskDescription"
        )
    return found


def _described(source: str) -> object:
    function = load_function(source)
    try:
        return function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        _LOG.debug("describing %s failed", source, exc_info=True)
        raise InputError(f"{source}: the function raised {_one_line(error)}; correct the model file") from None


def load_function(source: str) -> Callable[[], object]:
    """Return the function that `source` names, without calling it; see `load_description`."""
    module_name, colon, function_name = source.rpartition(":")
    if not colon or not module_name or not function_name.isidentifier():
        raise InputError(f"model: found {source!r}; write file.py:function or package.module:function")
    module = _load_module(source, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        known = ", ".join(_functions(module)) or "none"
        raise InputError(f"{source}: found no function {function_name!r} in {module_name}; its functions: {known}")
    if not callable(function):
        raise InputError(
            f"{source}: found a {type(function).__name__}; name a function that returns a ModelDescription"
        )
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(f"{source}: found a function that needs {', '.join(needed)}; give every parameter a default")
    return function  # type: ignore[no-any-return]


def _load_module(source: str, name: str) -> ModuleType:
    is_file = name.endswith(".py") or "/" in name
    try:
        return _load_file(Path(name)) if is_file else importlib.import_module(name)
    except InputError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and name.startswith(error.name):
            raise InputError(
                f"{source}: found no module {error.name!r}; install it, or name a file as file.py:function"
            ) from None
        raise InputError(f"{source}: the file imports {error.name!r}, which is not installed; install it") from None
    except (Exception, SystemExit) as error:
        _LOG.debug("importing %s failed", source, exc_info=True)
        raise InputError(f"{source}: importing it raised {_one_line(error)}; correct the model file") from None


def _load_file(path: Path) -> ModuleType:
    """Import a file under its dotted name below the project's root, so that it can import its neighbours."""
    if not path.is_file():
        raise InputError(f"{path}: found no such file; name a Python file as file.py:function")
    path = path.resolve()
    root = _root_of(path)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: found no Python file; its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            del sys.modules[name]
        else:
            sys.modules[name] = known
        raise
    return module


def _root_of(path: Path) -> Path:
    """Return the nearest folder above that looks like a project's root, else the working folder, else the file's."""
    for folder in path.parents:
        if any((folder / mark).exists() for mark in _ROOT_MARKS):
            return folder
    here = Path.cwd().resolve()
    return here if here in path.parents else path.parent


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
