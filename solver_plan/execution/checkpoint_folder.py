"""The folder of a run's checkpoints: each is whole or absent. No torch.

A checkpoint is a folder ``step-00000100``. It is written as ``.step-00000100.part`` beside it, gets its record
``checkpoint.json`` last, which names every file with its size, and is then renamed: what has the final name is whole.
All ranks see the same folder. One run saves there at a time: it holds the lock of the file ``.lock``.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import TypeAdapter

from solver_plan.documents import Count, document, ensure_writable, parse_document
from solver_plan.errors import CheckpointError, DocumentError, InputError, OutputError

RECORD = "checkpoint.json"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(part|old)")
_logger = logging.getLogger(__name__)

Whole = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved, and how many are kept."""

    folder: Path
    """Made if it is absent; the folder it lies in must exist."""
    every: int = 100
    """Steps; the last step is saved too."""
    keep: int = 2
    """Older ones are deleted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value < 1:
                raise InputError(f"checkpoints: found {name} {value}; at least 1")


@document
class SavedFile:
    """A file of a checkpoint."""

    name: str
    size_bytes: Whole


@document
class CheckpointRecord:
    """What a checkpoint is of; beside it lie the tensors as `torch.distributed.checkpoint` writes them."""

    format: Literal["solver-plan/checkpoint"] = "solver-plan/checkpoint"
    version: Literal[1] = 1
    step: Whole
    """Steps trained."""
    samples: Whole
    """Samples of the data that were trained on."""
    seed: int
    optimizer: str | None
    """Class of the optimizer; None: none."""
    plan_digest: str
    """Of the plan that it was saved under; it loads under any other plan of the model."""
    world_size: Count
    files: tuple[SavedFile, ...] = ()


class FolderLock:
    """Keeps other runs out of a folder of checkpoints; a process that ends however loses it.

    Parameters
    ----------
    folder
        Exists.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return self._descriptor is not None

    def take(self) -> None:
        """Take it; where the file system has no locks, nobody is kept out.

        Raises
        ------
        CheckpointError
            If another process has it.
        OutputError
            If its file cannot be written.
        """
        while self._descriptor is None:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise OutputError(f"{self._path}: cannot write ({_reason(error)}); choose another folder") from None
            try:
                # of the process, not of those that it forks, and known to other machines on a shared file system
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                    os.close(descriptor)
                    raise CheckpointError(
                        f"{self._path.parent}: another run saves there ({holder}); end it or wait for it, "
                        "or choose another folder"
                    ) from None
                _logger.debug("%s: no locks here (%s)", self._path, error)
            if self._is_at_its_place(descriptor):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                self._descriptor = descriptor
            else:
                # who had it has deleted it since
                os.close(descriptor)

    def _is_at_its_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give it back if it is held."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def prepare_folder(folder: Path) -> None:
    """Make the folder of checkpoints if it is absent. Raises `OutputError` if none can be written there."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: checkpoints need a folder, found a file; name a folder")
    if not folder.exists():
        ensure_writable(folder)
        folder.mkdir(exist_ok=True)
    ensure_writable(folder / RECORD)


def last_whole(folder: Path) -> tuple[Path, CheckpointRecord] | None:
    """Return the newest whole checkpoint; None if there is none. Damaged ones are passed over with a warning.

    Raises
    ------
    CheckpointError
        If all are damaged.
    DocumentError
        The same, where it is the record.
    """
    damage: CheckpointError | DocumentError | None = None
    for _, path in reversed(_by_step(folder)):
        try:
            found = path, read_record(path)
        except (CheckpointError, DocumentError) as error:
            damage = damage or error
        else:
            if damage is not None:
                _logger.warning("%s; going on from %s", damage, path)
            return found
    if damage is not None:
        raise damage
    return None


def read_record(path: Path) -> CheckpointRecord:
    """Return the record of a checkpoint whose files are all there.

    Raises
    ------
    CheckpointError
        If a file is missing or has another size.
    DocumentError
        If the record breaks a rule of its format.
    """
    file = path / RECORD
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: not a whole checkpoint, cannot read its {RECORD} ({_reason(error)}); delete it"
        ) from None
    record = parse_document(text, str(file), CheckpointRecord)
    for saved in record.files:
        found = _size(path / saved.name)
        if found != saved.size_bytes:
            state = "is missing" if found is None else f"has {found} of {saved.size_bytes} bytes"
            raise CheckpointError(f"{path}: not a whole checkpoint, its file {saved.name} {state}; delete it")
    return record


def begin(folder: Path, step: int) -> Path:
    """Return an empty folder to write a checkpoint to."""
    part = folder / f".{_name(step)}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    return part


def finish(folder: Path, part: Path, record: CheckpointRecord, expected: frozenset[str]) -> Path:
    """Give a checkpoint that is written its record and its name.

    Parameters
    ----------
    folder, part
        Of all checkpoints, and of this one.
    record
        Its `files` are filled in here.
    expected
        Names of the files that all ranks have written.

    Raises
    ------
    CheckpointError
        If a file is not there: the ranks do not see the same folder.
    """
    sizes = {name: _size(part / name) for name in sorted(expected)}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise CheckpointError(
            f"{part}: a rank has written {missing[0]}, which is not there; name a folder that all ranks share"
        )
    files = tuple(SavedFile(name=name, size_bytes=size) for name, size in sizes.items() if size is not None)
    whole = CheckpointRecord(**{**record.__dict__, "files": files})
    _write_synced(part / RECORD, TypeAdapter(CheckpointRecord).dump_json(whole, indent=1))
    _sync_folder(part)
    final = folder / _name(record.step)
    if final.exists():
        _remove(final)
    part.rename(final)
    _sync_folder(folder)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete what is older than the newest whole checkpoints, and what was left unfinished."""
    found = _by_step(folder)
    oldest = min([step for step, path in found if _is_whole(path)][-keep:], default=0)
    for step, path in found:
        if step < oldest:
            _remove(path)
    remove_unfinished(folder)


def _is_whole(path: Path) -> bool:
    try:
        read_record(path)
    except (CheckpointError, DocumentError):
        return False
    return True


def remove_unfinished(folder: Path) -> None:
    """Delete what a process that ended in the middle has left; nobody may be writing."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or type(error).__name__).lower() if isinstance(error, OSError) else "no UTF-8"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        named = _NAME.fullmatch(path.name)
        if named and path.is_dir():
            found.append((int(named[1]), path))
    return sorted(found)


def _remove(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that half of it is never taken for one."""
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
