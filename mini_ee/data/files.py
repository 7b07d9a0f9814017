"""Files on disk, whole or not there: JSON with a checksum of its own, bytes and folders that appear at once.

No torch here: the ONNX runtime reads its folder with this file.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mini_ee import WrongArguments

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None


def read_text(path: Path) -> str:
    """A text file that the command line names. Raises WrongArguments where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongArguments(f"{path}: expected text in UTF-8, found {error.reason} at byte {error.start}") from None


def check_regular(path: Path) -> None:
    """Raise ValueError where something else than a file stands: reading a device or a pipe would never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'a device or a pipe'}")


def read_json(path: Path, signed: str | None = None) -> dict:
    """A JSON object; its checksum is compared where it carries one, and must be there beside the key `signed`."""
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
    if digest is None and signed in content:
        raise ValueError(f"{path}: damaged or edited: the checksum that was written with it is gone")
    if digest is not None and digest != json_sha256(content):
        raise ValueError(f"{path}: damaged or edited: the content does not have the checksum that was written with it")
    return content


def write_json(path: Path, content: dict) -> None:
    """A JSON object with a checksum of its own content, written whole or not at all."""
    text = json.dumps(content | {"sha256": json_sha256(content)}, indent=2)
    write_bytes(path, (text + "\n").encode())


def json_sha256(content: dict | Sequence) -> str:
    """One digest over the content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The digest of a file's content, read in pieces."""
    check_regular(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, *content: bytes | memoryview) -> None:
    """The content, in pieces, to a temporary name, then renamed: a kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:  # a full disk does not say which file
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Held by the one process that writes `path`, whose parent is made; a lock stands beside it, which a kill lets go.

    Raises FileExistsError where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    try:
        file = open(lock, "w")
    except OSError as error:  # of the name that was given, not of a hidden one
        raise OSError(error.errno, error.strerror, str(path)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # taken away by its holder, who has just ended
                raise BlockingIOError
        except BlockingIOError:
            raise FileExistsError(f"{path}: another process is writing it; wait for it or name another") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """A folder to write into that takes its name only when the block ends well; of a link, what it leads to.

    Raises FileExistsError where the name is taken, unless by a folder that may be replaced, and where another process
    is writing it.
    """
    folder = Path(os.path.realpath(folder))
    partial, outgoing = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    with sole_writer(folder):
        _restore(outgoing, folder)
        if folder.exists() and not (replace and folder.is_dir()):
            raise FileExistsError(f"{folder}: is there already; name another folder or remove it")
        for leftover in (partial, outgoing):  # of a process that was killed
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
    """Undo half a replacement: the old folder is out of the way, and the new one did not get its name."""
    if outgoing.exists() and not folder.exists():
        os.rename(outgoing, folder)
