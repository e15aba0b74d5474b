"""Writing documents: readable JSON, and files that are replaced only by complete new ones."""

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path

from pydantic import JsonValue, TypeAdapter

from solver_plan.documents.frame import PlanDocument, ProblemDocument
from solver_plan.errors import OutputError

LINE_WIDTH = 120


def document_text(document: ProblemDocument | PlanDocument) -> str:
    """Return the document as JSON text. Optional fields at their default are left out; parsing it gives it back."""
    plain = TypeAdapter(type(document)).dump_python(document, mode="json", exclude_defaults=True)
    head = {"format": document.format, "version": document.version, "kind": document.kind}
    return _pretty({**head, **plain}, 0) + "\n"


def write_document(document: ProblemDocument | PlanDocument, path: str | Path) -> None:
    """Write a document to a file, whole or not at all. Raises `OutputError`."""
    write_text(document_text(document), path)


def ensure_writable(path: str | Path) -> None:
    """Raise `OutputError` if a file could not be written there, before work is spent on its contents."""
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{path}: is a folder; name a file")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:100]}."):
            pass
    except OSError as error:
        raise _output_error(path, error) from None


def write_text(text: str, path: str | Path) -> None:
    """Write text beside the file and rename it over the file when it is complete. Raises `OutputError`."""
    target = Path(path)
    temporary: str | None = None
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file")
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise _output_error(path, error) from None


def _output_error(path: str | Path, error: OSError) -> OutputError:
    remedy = {
        errno.ENOENT: "make the folder first",
        errno.ENOTDIR: "name a file in a folder",
        errno.ENOSPC: "the disk is full: free some space",
        errno.EACCES: "choose a folder that may be written",
        errno.EROFS: "choose a folder that may be written",
    }.get(error.errno or 0, "choose another place")
    return OutputError(f"{path}: cannot write ({error.strerror}); {remedy}")


def _pretty(value: JsonValue, indent: int) -> str:
    """Lay out JSON: what fits on a line stays on one, the rest is indented by one space a level."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= LINE_WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {_pretty(item, indent + 1)}" for key, item in value.items()]
        return "{" + pad + ("," + pad).join(inner) + "\n" + " " * indent + "}"
    if all(isinstance(item, int | float | str) or item is None for item in value):
        return flat
    return "[" + pad + ("," + pad).join(_pretty(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
