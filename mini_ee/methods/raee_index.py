"""hnswlib's index file, checked before hnswlib loads it: hnswlib trusts every number in it, and a wrong one is a crash.

As hnswlib 0.8.0 writes it (`saveIndex` in hnswalg.h), in the machine's own byte order:

    header          96 bytes: the fields of Header, as HEADER packs them
    elements        for each: a count and 2 M numbers of elements (its links on layer 0), a vector (D float32), and its
                    label (8 bytes)
    upper layers    for each element: a size in bytes, then on each layer from 1 up a count and M numbers of elements

Counts, numbers and sizes have 4 bytes. The third byte of a count on layer 0 is 1 where the element is deleted.
"""

import math
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

HEADER = struct.Struct("=6QiI3QdQ")

CAPACITY = 1024  # elements that a new index has room for; it doubles

UNIT = 1e-3  # how far from 1 the length of a stored vector may be; rounding to float32 moves it by less than 1e-6


class Header(NamedTuple):
    """The header of an index file; in hnswlib the same names end with an underscore."""

    offset_level0: int
    max_elements: int
    cur_element_count: int
    size_data_per_element: int
    label_offset: int
    offset_data: int
    maxlevel: int
    enterpoint_node: int
    max_m: int
    max_m0: int
    m: int
    mult: float
    ef_construction: int


class _Damaged(Exception):
    """What is wrong with an index file."""


def check_index(path: Path, dimension: int, m: int, ef_construction: int, count: int, ids: np.ndarray) -> None:
    """Raise ValueError unless the file is an index of `count` vectors of length 1, made with these parameters.

    ids: (N,) int64, the labels of the vectors that are not deleted, in ascending order.
    """
    try:
        size = path.stat().st_size
        offset_data = 4 + 4 * 2 * m
        label_offset = offset_data + 4 * dimension
        start = HEADER.size + count * (label_offset + 8)
        if size < start + 4 * count:
            raise _Damaged(f"expected at least {start + 4 * count} bytes for {count} vectors, found {size}")
        content = np.memmap(path, np.uint8, "r")
        header = Header(*HEADER.unpack(content[: HEADER.size].tobytes()))
        sizes = label_offset + 8, label_offset, offset_data
        _check_header(header, (0, count, *sizes, m, 2 * m, m, ef_construction))
        elements = content[HEADER.size : start].reshape(count, label_offset + 8)
        _check_elements(elements, header, ids)
        _check_upper_layers(content[start:].tobytes(), header)
    except _Damaged as error:
        raise ValueError(f"{path}: damaged index: {error}; build the datastore again") from None


def _check_header(header: Header, expected: tuple) -> None:
    own = {"max_elements", "maxlevel", "enterpoint_node", "mult"}
    found = tuple(value for name, value in header._asdict().items() if name not in own)
    if found != expected or not math.isclose(header.mult, 1 / math.log(header.m)):
        raise _Damaged("its header does not agree with the manifest")
    if not header.cur_element_count <= header.max_elements <= max(CAPACITY, 2 * header.cur_element_count):
        raise _Damaged(f"it asks for room for {header.max_elements} vectors")


def _check_elements(elements: np.ndarray, header: Header, ids: np.ndarray) -> None:
    """Links on layer 0, vectors and labels of all elements: (count, size_data_per_element) bytes."""
    labels = np.ascontiguousarray(elements[:, header.label_offset :]).view(np.uint64)[:, 0]
    if not np.array_equal(np.sort(labels), np.arange(len(labels), dtype=np.uint64)):
        raise _Damaged("its labels are not the numbers of its vectors")
    deleted = np.zeros(len(elements), bool)
    for start in range(0, len(elements), 10_000):  # a part at a time: the vectors are most of the file
        part = slice(start, start + 10_000)
        links = np.ascontiguousarray(elements[part, : header.offset_data]).view(np.uint32)
        marks, counts = links[:, 0] >> 16, links[:, 0] & 0xFFFF
        if (marks > 1).any():
            raise _Damaged("a deletion mark is neither 0 nor 1")
        deleted[part] = marks == 1
        _check_links(counts, links[:, 1:], np.zeros(len(links), np.int64), np.zeros(len(elements), np.int64))
        vectors = np.ascontiguousarray(elements[part, header.offset_data : header.label_offset]).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            unit = np.abs(np.linalg.norm(vectors, axis=1) - 1) <= UNIT
        if not unit.all():
            raise _Damaged("a vector is not of length 1")
    if not np.array_equal(np.sort(labels[~deleted]), ids.astype(np.uint64)):
        raise _Damaged("it marks other vectors as deleted than the entries do")


def _check_upper_layers(content: bytes, header: Header) -> None:
    """The links of all elements on layer 1 and above, and where a search begins."""
    size_on_layer = 4 + 4 * header.m
    levels = np.zeros(header.cur_element_count, np.int64)  # the highest layer of each element
    links, layers, at = [np.empty((0, 1 + header.m), np.uint32)], [np.empty(0, np.int64)], 0
    for element in range(len(levels)):
        size = int.from_bytes(content[at : at + 4], sys.byteorder)
        at += 4
        level, rest = divmod(size, size_on_layer)
        if rest or at + size > len(content):
            raise _Damaged("the size of an upper layer is wrong")
        if level:
            levels[element] = level
            links.append(np.frombuffer(content, np.uint32, size // 4, at).reshape(level, 1 + header.m))
            layers.append(np.arange(1, level + 1))
            at += size
    if at != len(content):
        raise _Damaged(f"expected {at} bytes of upper layers, found {len(content)}")
    all_links = np.concatenate(links)
    _check_links(all_links[:, 0], all_links[:, 1:], np.concatenate(layers), levels)
    if header.maxlevel != levels.max(initial=-1):
        raise _Damaged(f"expected {levels.max(initial=-1)} as its highest layer, found {header.maxlevel}")
    if len(levels) and (header.enterpoint_node >= len(levels) or levels[header.enterpoint_node] != header.maxlevel):
        raise _Damaged("a search would begin at an element that is not on the highest layer")


def _check_links(counts: np.ndarray, links: np.ndarray, layers: np.ndarray, levels: np.ndarray) -> None:
    """The first counts[i] of links[i] lead to elements that are on layer layers[i]; levels: of all elements."""
    if (counts > links.shape[1]).any():
        raise _Damaged("an element has more links than there is room for")
    used = np.arange(links.shape[1]) < counts[:, None]
    targets, on = links[used], np.broadcast_to(layers[:, None], used.shape)[used]
    if (targets >= len(levels)).any() or (levels[targets] < on).any():
        raise _Damaged("a link leads to an element that is not there")
