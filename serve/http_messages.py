"""Heads and bodies of requests and responses over HTTP, for app.py and replicas.py. No torch."""

import hmac
import json
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import inf
from typing import NamedTuple

JSON = b"application/json"

V1 = "/v1/"  # paths of OpenAI's API, and of others that follow it

DEADLINE = "deadline_ms"

UTF_8 = (b"utf-8", b"utf8", b"us-ascii")  # values of charset; ASCII is part of UTF-8

ANY = "*"  # every host, or every origin

GZIP = b"gzip"

PIECE = 1 << 16  # bytes at most that are decompressed at once

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/\[\]@]+)(?::\d*)?", re.IGNORECASE)
"""A Host header: a name or an address, IPv6 in brackets, and an optional port."""


class HTTPError(Exception):
    """Ends a request with a status and a reason. headers: further ones of the response."""

    def __init__(self, status: int, reason: str, *headers: tuple[bytes, bytes]):
        super().__init__(reason)
        self.status, self.headers = status, headers


def head(status: int, kind: bytes, length: int | None = None, *headers: tuple[bytes, bytes]) -> dict:
    """The message that starts a response. length: of the body in bytes; None: unknown. headers: further ones."""
    known = [(b"content-type", kind)]
    if length is not None:
        known.append((b"content-length", str(length).encode()))
    if status == 503:
        known.append((b"retry-after", b"1"))
    return {"type": "http.response.start", "status": status, "headers": [*known, *headers]}


def line(fields: dict | list, more: bool = False) -> dict:
    """The message with a line of JSON. more: further messages follow."""
    return {"type": "http.response.body", "body": json.dumps(fields).encode() + b"\n", "more_body": more}


def error_of(path: str, status: int, reason: str) -> dict:
    """The body of an error: an object on the paths of OpenAI's API, else a line."""
    if not path.startswith(V1):
        return {"error": reason}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}}


def deadline_of(fields: dict) -> float:
    """Seconds until the deadline of a request; inf if it has none. Raises ValueError for a wrong value."""
    deadline = fields.get(DEADLINE, inf)
    if type(deadline) not in (int, float) or not deadline > 0:
        raise ValueError(f"expected deadline_ms as a number above 0, found {str(deadline)[:40]!r}")
    return min(deadline, 1e9) / 1e3 if deadline != inf else inf


def check_kind(headers: dict[bytes, bytes]) -> None:
    """Raises HTTPError for a body that is not JSON in UTF-8, or compressed otherwise than by gzip.

    A web page of another site cannot send JSON unless this server allows it.
    """
    given = headers.get(b"content-type", b"no Content-Type")
    kind, *parameters = [part.strip().lower() for part in given.split(b";")]
    if not (kind == JSON or kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise HTTPError(415, f"expected Content-Type: application/json, found {_shown(given)}")
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name == b"charset" and value.strip(b'"') not in UTF_8:
            raise HTTPError(415, f"expected JSON in UTF-8, found {_shown(parameter)}; send it in UTF-8")
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.strip().lower() not in (b"identity", GZIP):
        reason = f"expected a body without Content-Encoding, or gzip, found {_shown(encoding)}; send it uncompressed"
        raise HTTPError(415, reason, (b"accept-encoding", b"gzip, identity"))


def check_key(headers: dict[bytes, bytes], key: str | None) -> None:
    """Raises HTTPError unless the request has the key, in a time that does not depend on the one it has."""
    if key is None:
        return
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
        actual = "no Authorization" if b"authorization" not in headers else "another"
        reason = f"expected the header Authorization: Bearer KEY with the key of this server, found {actual}"
        raise HTTPError(401, reason, (b"www-authenticate", b"Bearer"))


class Inflating:
    """Takes the parts of a body in turn; a body in gzip is decompressed, in pieces, so that its size can be limited."""

    def __init__(self, headers: dict[bytes, bytes]):
        compressed = headers.get(b"content-encoding", b"").strip().lower() == GZIP
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16) if compressed else None

    def pieces(self, part: bytes, last: bool) -> Iterator[bytes]:
        """The content of the next part. Raises HTTPError for what is not one whole stream of gzip."""
        if self._stream is None:
            yield part
            return
        try:
            while part and not self._stream.eof:
                yield self._stream.decompress(part, PIECE)
                part = self._stream.unconsumed_tail
        except zlib.error as error:
            raise HTTPError(400, f"expected a body in gzip, found {error}") from None
        if self._stream.unused_data or last and not self._stream.eof:
            actual = "bytes after its end" if self._stream.unused_data else "its beginning alone"
            raise HTTPError(400, f"expected one whole body in gzip, found {actual}")


def _shown(value: bytes) -> str:
    return value[:80].decode("latin-1")


class Request(NamedTuple):
    """What a request by POST says."""

    path: str
    fields: dict  # its JSON object
    due: float  # its deadline, as a time of perf_counter
    size: int  # bytes of its body


def with_cors(respond: Callable, origins: Sequence[str]) -> Callable:
    """The same application of ASGI, whose answers scripts of pages of these origins may read."""
    if not origins:
        return respond
    from starlette.middleware.cors import CORSMiddleware

    allowed = {"allow_methods": ("GET", "POST"), "allow_headers": ("authorization", "content-type")}
    return CORSMiddleware(respond, origins, **allowed, expose_headers=("x-model-id",))


def one_line(error: Exception) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split())


class Hosts:
    """The hosts that requests may name in their Host header, with any port, because a port may be forwarded.

    The owner of another site can let its name resolve to this machine (DNS rebinding). The browser then takes this
    server for that site, and lets the site's page read the answers. Such a request names that site.

    bound: the address that the server listens on, which is allowed. With a loopback address, localhost and all loopback
    addresses are allowed too. With 0.0.0.0 or ::, every address is allowed, because a site's name is never an address,
    and so are localhost and the name of the machine. more: further names, such as that of a proxy; "*": all.
    """

    def __init__(self, bound: str, more: Sequence[str] = ()):
        """Raises ValueError for a string that is not the name of a host, or has a port."""
        for name in more:
            host = HOST.fullmatch(name)
            if name != ANY and not _address(name) and (host is None or host[1] != name):
                raise ValueError(f"expected the name of a host, without scheme and port, found {name!r}")
        address, self.names = _address(bound), {_plain(name) for name in (bound, *more)}
        self._everywhere = address is not None and address.is_unspecified
        self._local = self._everywhere or bound == "localhost" or address is not None and address.is_loopback
        if self._local:
            self.names |= {"localhost"}
        if self._everywhere:
            self.names |= {_plain(socket.gethostname()), _plain(socket.getfqdn())}

    def allow(self, header: bytes) -> bool:
        """Whether a Host header names this server."""
        host = HOST.fullmatch(header.decode("latin-1"))
        if ANY in self.names or host is None:
            return ANY in self.names
        name = _plain(host[1])
        address = _address(name)
        is_ours = address is not None and (self._everywhere or self._local and address.is_loopback)
        return name in self.names or is_ours


class Access(NamedTuple):
    """Who may send requests."""

    hosts: Hosts
    key: str | None = None  # that a request must have, except for /health and /live; None: none
    origins: tuple[str, ...] = ()  # web pages whose scripts may, or ANY (CORS)


def _plain(name: str) -> str:
    """A name for comparison: lower case, without brackets and without a dot at its end."""
    return name.strip("[]").rstrip(".").lower()


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """The address in a string; None if the string is a name."""
    try:
        return ip_address(name.strip("[]"))
    except ValueError:
        return None
