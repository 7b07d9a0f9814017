"""Which names of this server a request may have in its Host header. No torch.

A web page of another site can have its own name resolve to this machine (DNS rebinding); the browser then takes the
server for that site, and lets the page read its answers. What gives it away is the Host header, which has that name.
"""

import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/\[\]@]+)(?::\d*)?", re.IGNORECASE)
"""A Host header: a name, or an address, that of IPv6 in brackets; and perhaps a port."""


class Hosts:
    """The hosts that requests may name, whatever the port, which may be forwarded.

    bound: what the server listens on, which is allowed. If that is the loopback, localhost and all addresses of it are.
    If it is 0.0.0.0 or ::, every address is allowed, because no site can take one as its name, and so are localhost
    and the name of the machine. more: other names, as of a proxy or of a service; "*": all.
    """

    def __init__(self, bound: str, more: Sequence[str] = ()):
        """Raises ValueError for what is no name of a host, or has a port."""
        wrong = next((name for name in more if name != ANY and not _is_host(name)), None)
        if wrong is not None:
            raise ValueError(f"expected the name of a host, without scheme and port, found {wrong!r}")
        self.any, self._bound = ANY in more, _address(bound)
        self.names = {_plain(name) for name in (bound, *more)}
        if self._is_everywhere or _is_loopback(self._bound) or bound == "localhost":
            self.names |= {"localhost"}
        if self._is_everywhere:
            self.names |= {_plain(socket.gethostname()), _plain(socket.getfqdn())}

    def allow(self, header: bytes) -> bool:
        """Whether the server is what a Host header names."""
        found = HOST.fullmatch(header.decode("latin-1"))
        if self.any or found is None:
            return self.any
        name = _plain(found[1])
        address = _address(name)
        if address is None or name in self.names:
            return name in self.names
        return self._is_everywhere or "localhost" in self.names and _is_loopback(address)

    @property
    def _is_everywhere(self) -> bool:
        return self._bound is not None and self._bound.is_unspecified


def _plain(name: str) -> str:
    """A name as it is compared: no brackets, small letters, no dot at its end."""
    return name.strip("[]").rstrip(".").lower()


def _is_host(name: str) -> bool:
    found = HOST.fullmatch(name)
    return _address(name) is not None or found is not None and found[1] == name


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """The address that is written so; None where a name is."""
    try:
        return ip_address(name.strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: IPv4Address | IPv6Address | None) -> bool:
    return address is not None and address.is_loopback
