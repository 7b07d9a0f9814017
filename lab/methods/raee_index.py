"""Checks hnswlib's index file before hnswlib opens it, because hnswlib trusts every number in it.

A checksum detects damage. It does not detect a file that was wrong when its checksum was computed, for example in a
datastore that somebody else made. If a link leads to an element that does not exist, or the search begins at such an
element, hnswlib reads outside of its memory and the process ends.

hnswlib 0.8.0 writes (`saveIndex` in hnswalg.h), in the machine's own byte order: HEADER; each element as element_type;
and for each element the size of its upper layers in bytes (4 bytes), then each of them from layer 1 up as layer_type.
An upper layer has links like layer 0, among fewer elements.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HEADER = np.dtype(  # hnswlib's names, which end with an underscore there
    [(name, np.uint64) for name in ("offset_level0", "max_elements", "cur_element_count", "size_data_per_element")]
    + [("label_offset", np.uint64), ("offset_data", np.uint64), ("maxlevel", np.int32), ("enterpoint_node", np.uint32)]
    + [("max_m", np.uint64), ("max_m0", np.uint64), ("m", np.uint64), ("mult", float), ("ef_construction", np.uint64)]
)

CAPACITY = 1024  # elements for which a new index has room; it doubles if needed

NORM_TOLERANCE = 1e-3  # tolerance for the length 1 of a stored vector; rounding to float32 changes it by less than 1e-6

CHECKED_AT_ONCE = 10_000  # elements that are checked together, because their vectors are most of the file


def element_type(m: int, dimension: int) -> np.dtype:
    """An element on layer 0: the first `count` of its links lead to other elements, by their numbers."""
    links = [("count", np.uint16), ("deleted", np.uint16), ("links", np.uint32, (2 * m,))]
    return np.dtype([*links, ("vector", np.float32, (dimension,)), ("label", np.uint64)])


def layer_type(m: int) -> np.dtype:
    """The links of an element on one upper layer."""
    return np.dtype([("count", np.uint32), ("links", np.uint32, (m,))])


def check_index(path: Path, dimension: int, m: int, ef_construction: int, count: int, ids: np.ndarray) -> None:
    """Raise ValueError unless the file is an index of `count` vectors of length 1, made with these parameters.

    ids: (N,) int64, the labels of the vectors that are not deleted, in ascending order.
    """
    size, least = path.stat().st_size, HEADER.itemsize + count * (element_type(m, dimension).itemsize + 4)
    problems = iter([f"expected at least {least} bytes for {count} vectors, found {size}"])
    if size >= least:
        problems = _problems(np.memmap(path, np.uint8, "r"), element_type(m, dimension), m, ef_construction, count, ids)
    if problem := next(problems, None):
        raise ValueError(f"{path}: damaged index: {problem}; build the datastore again")


def _problems(
    content: np.ndarray, element: np.dtype, m: int, ef_construction: int, count: int, ids: np.ndarray
) -> Iterator[str]:
    """The problems of a file. Use only the first: the next checks rely on the ones before."""
    end = HEADER.itemsize + count * element.itemsize
    # Views of the mapped file as one header and `count` elements: nothing is copied.
    header, elements = content[: HEADER.itemsize].view(HEADER)[0], content[HEADER.itemsize : end].view(element)
    expected = {"offset_level0": 0, "cur_element_count": count, "size_data_per_element": element.itemsize}
    assert element.fields is not None  # it is a structured dtype
    expected |= {"label_offset": element.fields["label"][1], "offset_data": element.fields["vector"][1]}
    expected |= {"max_m": m, "max_m0": 2 * m, "m": m, "ef_construction": ef_construction}
    agrees = all(header[name] == number for name, number in expected.items())
    if not agrees or not math.isclose(header["mult"], 1 / math.log(m)):
        yield "its header does not agree with the manifest"
    if not count <= header["max_elements"] <= max(CAPACITY, 2 * count):
        yield f"it reserves room for {header['max_elements']} vectors"
    labels, deleted = elements["label"], elements["deleted"]
    if not np.array_equal(np.sort(labels), np.arange(count, dtype=np.uint64)):
        yield "its labels are not the numbers of its vectors"
    if (deleted > 1).any():
        yield "a deletion mark is neither 0 nor 1"
    if not np.array_equal(np.sort(labels[deleted == 0]), ids.astype(np.uint64)):
        yield "it marks other vectors as deleted than the entries do"
    ground = np.zeros(count, np.int64)  # every element is on layer 0
    for part in np.array_split(elements, 1 + count // CHECKED_AT_ONCE):
        yield from _link_problems(part, ground[: len(part)], ground)
        with np.errstate(over="ignore", invalid="ignore"):
            unit = np.abs(np.linalg.norm(part["vector"], axis=1) - 1) <= NORM_TOLERANCE
        if not unit.all():
            yield "a vector is not of length 1"
    yield from _upper_layer_problems(content[end:].tobytes(), layer_type(m), header, count)


def _upper_layer_problems(content: bytes, layer: np.dtype, header: np.void, count: int) -> Iterator[str]:
    """Problems of the links on layer 1 and above, and of the element at which a search begins."""
    levels = np.zeros(count, np.int64)  # the highest layer of each element
    # `at` is the position in content. The empty arrays are for np.concatenate, if no element has an upper layer.
    lists, layers, at = [np.empty(0, layer)], [np.empty(0, np.int64)], 0
    for number in range(count):  # the size of its upper layers in 4 bytes, then one `layer` for each from 1 to `level`
        size = int.from_bytes(content[at : at + 4], sys.byteorder)
        level, rest = divmod(size, layer.itemsize)
        at += 4 + size
        if rest or at > len(content):
            yield "the size of an upper layer is wrong"
        if level:
            levels[number] = level
            lists.append(np.frombuffer(content, layer, level, at - size))
            layers.append(np.arange(1, level + 1))
    if at != len(content):
        yield f"expected {at} bytes of upper layers, found {len(content)}"
    yield from _link_problems(np.concatenate(lists), np.concatenate(layers), levels)
    highest, start = levels.max(initial=-1), header["enterpoint_node"]
    if header["maxlevel"] != highest:
        yield f"expected {highest} as its highest layer, found {header['maxlevel']}"
    if count and (start >= count or levels[start] != highest):
        yield "a search would begin at an element that is not on the highest layer"


def _link_problems(lists: np.ndarray, layers: np.ndarray, levels: np.ndarray) -> Iterator[str]:
    """Problems of n lists of links, on the `layers` (n,). levels: the highest layer of every element.

    A link on layer l must lead to an element that is on layer l too, so one whose level is at least l.
    """
    counts, links = lists["count"], lists["links"]
    if (counts > links.shape[1]).any():
        yield "an element has more links than there is room for"
    used = np.arange(links.shape[1]) < counts[:, None]  # (n, slots): the first `count` slots of a list are links
    # Flat arrays over all links: the element that each leads to, and the layer that it is on.
    targets, on = links[used], np.broadcast_to(layers[:, None], used.shape)[used]
    if (targets >= len(levels)).any() or (levels[targets] < on).any():
        yield "a link leads to an element that is not there"
