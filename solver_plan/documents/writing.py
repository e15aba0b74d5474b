"""Writing documents: readable JSON, and files that are replaced only by complete new ones."""

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path

from pydantic import JsonValue, TypeAdapter

from solver_plan.documents.certificate import Certificate
from solver_plan.documents.frame import Document
from solver_plan.errors import OutputError

LINE_WIDTH = 120


def document_text(document: Document) -> str:
    """Return the document as JSON text. Optional fields at their default are left out; parsing it gives it back."""
    plain = TypeAdapter(type(document)).dump_python(document, mode="json", exclude_defaults=True)
    head = {"format": document.format, "version": document.version, "kind": document.kind}
    return _pretty({**head, **plain}, 0) + "\n"


def certificate_text(certificate: Certificate) -> str:
    """Return a certificate alone as JSON text."""
    return _pretty(TypeAdapter(Certificate).dump_python(certificate, mode="json"), 0) + "\n"


def write_document(document: Document, path: str | Path) -> None:
    """Write a document to a file, whole or not at all. Raises `OutputError`."""
    write_text(document_text(document), path)


def ensure_writable(path: str | Path) -> None:
    """Raise `OutputError` if a file could not be written there, before work is spent on its contents."""
    try:
        target = _target(path)
        if _is_stream(target):
            os.close(os.open(target, os.O_WRONLY | os.O_NONBLOCK))
            return
        temporary = _beside(target)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(temporary)
    except OSError as error:
        raise _output_error(path, error) from None


def write_text(text: str, path: str | Path) -> None:
    """Write text beside the file and rename it over the file when it is complete. Raises `OutputError`.

    A symbolic link is followed. What is not a file (a terminal, a pipe) is written to as it is.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OutputError(
            f"{path}: cannot write half a character (a lone surrogate, {error.object[error.start]!r})"
        ) from None
    try:
        target = _target(path)
        if _is_stream(target):
            target.write_bytes(data)
            return
        temporary = _beside(target)
        try:
            _write_new(data, temporary, target)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise _output_error(path, error) from None


def _target(path: str | Path) -> Path:
    if not os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, "no name given")
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    return target if _is_stream(target) else Path(os.path.realpath(target))


def _is_stream(target: Path) -> bool:
    return target.exists() and not target.is_file()


def _beside(target: Path) -> Path:
    return target.parent / f".solver-plan-{os.getpid()}-{secrets.token_hex(4)}.part"


def _write_new(data: bytes, temporary: Path, target: Path) -> None:
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _output_error(path: str | Path, error: OSError) -> OutputError:
    remedy = {
        errno.ENOENT: "make the folder first",
        errno.EISDIR: "name a file in it",
        errno.ENOTDIR: "name a file in a folder",
        errno.ENOSPC: "the disk is full: free some space",
        errno.EDQUOT: "the disk quota is used up: free some space",
        errno.EACCES: "choose a folder that may be written",
        errno.EPERM: "choose a folder that may be written",
        errno.EROFS: "choose a folder that may be written",
        errno.ENAMETOOLONG: "choose a shorter name",
    }.get(error.errno or 0, "choose another place")
    reason = error.strerror or type(error).__name__
    return OutputError(f"{path or repr(path)}: cannot write ({reason[:1].lower() + reason[1:]}); {remedy}")


def _pretty(value: JsonValue, indent: int) -> str:
    """Lay out JSON: what fits on a line stays on one, the rest is indented by one space a level."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + indent <= LINE_WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {_pretty(item, indent + 1)}" for key, item in value.items()]
        return "{" + pad + ("," + pad).join(inner) + "\n" + " " * indent + "}"
    if all(isinstance(item, int | float | str) or item is None for item in value):
        return flat
    return "[" + pad + ("," + pad).join(_pretty(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
