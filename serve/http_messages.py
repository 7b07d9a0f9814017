"""Heads and bodies of requests and responses over HTTP, for app.py and replicas.py. No torch."""

import json
from math import inf

JSON = b"application/json"

V1 = "/v1/"  # paths of OpenAI's API, and of others that follow it

DEADLINE = "deadline_ms"

UTF_8 = (b"utf-8", b"utf8", b"us-ascii")  # values of charset; ASCII is part of UTF-8


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
    """Raises HTTPError for a body that is not JSON in UTF-8, or compressed.

    A web page of another site cannot send JSON unless this server allows it.
    """
    given = headers.get(b"content-type", b"no Content-Type")
    kind, *parameters = [each.strip().lower() for each in given.split(b";")]
    if not (kind == JSON or kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise HTTPError(415, f"expected Content-Type: application/json, found {_shown(given)}")
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name == b"charset" and value.strip(b'"') not in UTF_8:
            raise HTTPError(415, f"expected JSON in UTF-8, found {_shown(parameter)}; send it in UTF-8")
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.strip().lower() != b"identity":
        reason = f"expected a body without Content-Encoding, found {_shown(encoding)}; send it uncompressed"
        raise HTTPError(415, reason, (b"accept-encoding", b"identity"))


def _shown(value: bytes) -> str:
    return value[:80].decode("latin-1")


def one_line(error: Exception) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split())
