"""Atomic writes of files and folders, and JSON files that contain their own checksum. No torch here."""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mini_ee.lab.errors import WrongArguments

STDOUT = Path("standard output")  # its name in errors
CHECKPOINT = "a checkpoint with config.json and model.safetensors"
HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")  # of a model on Hugging Face


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless a folder, of a checkpoint, exists."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected {CHECKPOINT}{how_to_download(folder)}")


def how_to_download(folder: Path) -> str:
    """The command for a model of Hugging Face whose name stands in place of a folder, as the end of an error.

    Empty if the folder exists, or if no model can have its name.
    """
    if folder.exists() or not HUB_NAME.fullmatch(folder.as_posix()):
        return ""
    return f"; if this is a model of Hugging Face, first: hf download {folder.as_posix()} --local-dir {folder.name}"


MANIFEST = "manifest.json"
"""The file that describes an export."""


def run_config(folder: str | Path) -> dict | None:
    """The config.json of a run, or None for another folder."""
    path = Path(folder) / "config.json"
    config = read_json(path) if path.is_file() else {}
    return config if "format_version" in config else None


def check_regular(path: Path, pipe: bool = False) -> None:
    """Raise ValueError if the path is a folder, a device or a pipe; not if it does not exist.

    Call it before a file is read: a device such as /dev/zero never ends. pipe: a pipe is allowed.
    """
    if not path.exists():
        return
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or pipe and stat.S_ISFIFO(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    actual = next((kind for is_kind, kind in kinds if is_kind(mode)), "a device")
    raise ValueError(f"{path}: expected a file, found {actual}; name a file")


def read_text(path: Path) -> str:
    """The content of a text file named on the command line. Raises WrongArguments if it is not a file or not UTF-8."""
    try:
        check_regular(path, pipe=True)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongArguments(f"{path}: expected text in UTF-8, found {error.reason} at byte {error.start}") from None


def read_json(path: Path, signed: str | None = None) -> dict:
    """A JSON object, whose checksum is compared if it has one.

    signed: a key that only files with a checksum have. Raises FileNotFoundError, and ValueError if it is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object, found none ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    digest = content.pop("sha256", None)
    if "transformers_version" in content:
        digest = None  # transformers changed the content and kept the key
    if digest is None and signed in content:
        raise ValueError(f"{path}: damaged or edited: the checksum that was written with it is gone")
    if digest is not None and digest != json_sha256(content):
        raise ValueError(f"{path}: damaged or edited: the content does not have the checksum that was written with it")
    return content


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object with the checksum of its content, atomically (`write_bytes`)."""
    text = json.dumps(content | {"sha256": json_sha256(content)}, indent=2)
    write_bytes(path, (text + "\n").encode())


def json_sha256(content: dict | Sequence) -> str:
    """One digest over the content; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The digest of a file's content, read in pieces. Raises ValueError if the path is not a regular file."""
    check_regular(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Adds the path to operating-system errors in this block: the error of a full disk does not name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_bytes(path: Path, *content: bytes | memoryview) -> None:
    """Write the pieces to a temporary file, then rename it: if this is killed, the old or the new file is there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with errors_name(path), open(partial, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Only one process at a time may be in this block for a path. Creates the parent folder.

    The lock is on a file next to the path. If a process is killed, the file stays, but it is not locked.
    Raises FileExistsError if another process is in the block.
    """
    from filelock import FileLock, Timeout  # slower to import than everything else that a runtime without torch needs

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(f"{error.filename}: expected a folder, found a file; name another") from None
    absolute = Path(os.path.abspath(path))  # "." has no name
    file = absolute.parent / f".{absolute.name}.lock"
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise FileExistsError(f"{path}: another process is writing it; wait for it or name another") from None
    except OSError as error:  # name the path that was given, not the hidden file
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes the file when the lock is released
            file.unlink()
        lock.release()


def copy_folder(source: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Copy the files and folders of `source`, except for names in `without`, into the existing folder `target`.

    Raises OSError, which names the file that could not be written, and ValueError for a device or a pipe in `source`.
    """
    for path in sorted(source.iterdir()):
        copy = target / path.name
        if path.name in without:
            continue
        if path.is_dir():
            copy.mkdir()
            copy_folder(path, copy)
            continue
        check_regular(path)
        with errors_name(copy):
            shutil.copy2(path, copy)


@contextmanager
def atomic_folder(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """A new folder to write to, which gets its name if the block ends without an error, and is removed otherwise.

    If the name is a link, the folder that it points to is written. replace: an existing folder is replaced.
    Raises FileExistsError if the name exists or another process is writing it.
    """
    folder = Path(os.path.realpath(folder))
    partial, outgoing = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    with sole_writer(folder):
        _restore(outgoing, folder)
        if folder.exists() and not (replace and folder.is_dir()):
            raise FileExistsError(f"{folder}: is there already; name another folder or remove it")
        for leftover in (partial, outgoing):  # from a process that was killed
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir()
        try:
            yield partial
            if folder.exists():
                os.rename(folder, outgoing)
            os.rename(partial, folder)
            shutil.rmtree(outgoing, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            _restore(outgoing, folder)
            raise


def _restore(outgoing: Path, folder: Path) -> None:
    """Give the old folder its name back if a replacement was stopped between the two renames."""
    if outgoing.exists() and not folder.exists():
        os.rename(outgoing, folder)
