"""Files and folders are written whole or not at all, carry a checksum, and the same content is the same bytes."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.run import _output
from mini_ee.lab.data.files import (
    atomic_folder,
    copy_folder,
    file_sha256,
    read_json,
    read_text,
    sole_writer,
    write_bytes,
    write_json,
)
from mini_ee.lab.errors import WrongArguments


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as partial:
        (partial / "half").write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with atomic_folder(tmp_path / "deep" / "out") as partial:
        assert not (tmp_path / "deep" / "out").exists()
        (partial / "all").write_text("x")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "all").read_text() == "x"


def test_a_folder_is_replaced_as_a_whole_if_asked_and_kept_if_that_fails(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(out, replace=True):
        raise KeyboardInterrupt
    assert [path.name for path in out.iterdir()] == ["old"]
    with atomic_folder(out, replace=True) as partial:
        (partial / "new").write_text("new")
    assert [path.name for path in out.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [out]


def test_a_replaced_folder_comes_back_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", os.rename
    out.mkdir()
    (out / "old").write_text("old")

    def second_fails(source, target):
        if Path(source).name.endswith(".partial"):
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="no"), atomic_folder(out, replace=True):
        pass
    assert [path.name for path in out.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [out]


def test_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".out.lock").touch()
    for name in (".out.partial", ".out.old", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "leftover").write_text("x")
    with atomic_folder(tmp_path / "out", replace=True) as partial:
        assert not list(partial.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not list((tmp_path / "out").iterdir())


def test_a_second_writer_is_refused_and_the_first_ends_well(tmp_path):
    with atomic_folder(tmp_path / "out", replace=True) as partial:
        with pytest.raises(FileExistsError, match="out: another process is writing it"):
            with atomic_folder(tmp_path / "out", replace=True):
                pass
        (partial / "mine").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


HOLDER = """
import sys, time
from pathlib import Path
from mini_ee.lab.data.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_kept_out_until_it_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FileExistsError, match="out: another process is writing it; wait for it or name another"):
            with sole_writer(tmp_path / "out"):
                pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    with sole_writer(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named_as_it_was_given(tmp_path, monkeypatch):
    def refusing(path, *flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.raises(PermissionError) as error, atomic_folder(tmp_path / "out"):
            pass
    assert error.value.filename == str(tmp_path / "out") and not list(tmp_path.iterdir())
    name = tmp_path / ("x" * 252)  # with a dot before it and .lock behind it longer than a name may be
    with pytest.raises(OSError, match="File name too long") as error, atomic_folder(name):
        pass
    assert error.value.filename == str(name) and not list(tmp_path.iterdir())


def test_of_a_link_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "link", replace=True) as partial:
            (partial / content).write_text("x")
        assert [path.name for path in (tmp_path / "real").iterdir()] == [content] and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "out").write_text("kept")
    with pytest.raises(FileExistsError, match="is there already"), atomic_folder(tmp_path / "out", replace=True):
        pass
    assert (tmp_path / "out").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1


def test_the_old_folder_survives_a_kill_between_the_two_renames(tmp_path):
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "old").write_text("old")
    with pytest.raises(FileExistsError, match="is there already"), atomic_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "old").read_text() == "old"


def test_a_full_disk_does_not_change_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_bytes(path, b"new")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_copied_without_the_names_that_are_excluded(tmp_path):
    for name in ("a/deep/one", "a/two", "a/left/three"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b").mkdir()
    copy_folder(tmp_path / "a", tmp_path / "b", without=("left",))
    copied = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "b").rglob("*") if path.is_file())
    assert copied == ["b/deep/one", "b/two"] and (tmp_path / "b" / "deep" / "one").read_text() == "a/deep/one"


def test_a_copy_that_the_disk_has_no_room_for_names_the_file(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "file").write_text("x")

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        copy_folder(tmp_path / "a", tmp_path / "b")
    assert error.value.filename == str(tmp_path / "b" / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_answers_that_a_full_disk_does_not_take_name_the_file():
    with pytest.raises(OSError, match="No space left on device") as error, _output(Path("/dev/full")) as file:
        file.write("x" * 10**6)
    assert error.value.filename == "/dev/full"


@pytest.mark.parametrize("read", [read_json, file_sha256, read_text])
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path, read):
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, kind in (("folder", "a folder"), ("zero", "a device")):
        with pytest.raises(ValueError, match=f"{name}: expected a file, found {kind}; name a file") as error:
            read(tmp_path / name)
        assert isinstance(error.value, WrongArguments) == (read is read_text)


def test_a_run_with_a_link_to_a_device_in_it_is_not_copied(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "model").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="model: expected a file, found a device"):
        copy_folder(tmp_path / "a", tmp_path / "b")


def test_a_pipe_serves_as_text_and_not_as_a_file(tmp_path):
    read_end, write_end = os.pipe()
    os.write(write_end, "é".encode())
    os.close(write_end)
    with pytest.raises(ValueError, match="expected a file, found a pipe"):
        read_json(Path(f"/dev/fd/{read_end}"))
    assert read_text(Path(f"/dev/fd/{read_end}")) == "é"
    os.close(read_end)


def test_json_is_read_back_as_it_was_and_an_edit_is_an_error(tmp_path):
    path, content = tmp_path / "x.json", {"a": [1, 2.5, None], "b": {"c": "é"}}
    write_json(path, content)
    assert read_json(path) == content
    path.write_text(path.read_text().replace("2.5", "2.6"))
    with pytest.raises(ValueError, match="x.json: damaged or edited"):
        read_json(path)


def test_tensors_are_read_back_and_compared_with_the_checksum_that_was_given(tmp_path):
    tensors = {
        "a": torch.arange(6.0).view(2, 3).T,
        "b": torch.tensor([True]),
        "c": torch.zeros(0, 2),
        "d": torch.tensor(3),
    }
    digest = write_tensors(tmp_path / "x.safetensors", tensors)
    read = read_tensors(tmp_path / "x.safetensors", digest)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    write_tensors(tmp_path / "x.safetensors", tensors | {"b": torch.tensor([False])})
    with pytest.raises(ValueError, match="x.safetensors: damaged"):
        read_tensors(tmp_path / "x.safetensors", digest)


def test_the_same_tensors_are_the_same_bytes_in_a_file_that_safetensors_reads(tmp_path):
    tensors, path = {"é": torch.ones(3), "b": torch.arange(4)}, tmp_path / "x.safetensors"
    written = set()
    for _ in range(20):
        write_tensors(path, dict(reversed(tensors.items())))
        written.add(path.read_bytes())
    assert len(written) == 1 and torch.equal(load_file(path)["é"], tensors["é"])


@pytest.mark.parametrize("name", ["a", "aa", "aaa"])
def test_the_values_stay_aligned_to_eight_bytes(tmp_path, name):
    write_tensors(tmp_path / "x.safetensors", {name: torch.ones(1)})
    assert int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little") % 8 == 0
